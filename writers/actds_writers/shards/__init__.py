"""From step slices to committed shards: the writer-side account."""
