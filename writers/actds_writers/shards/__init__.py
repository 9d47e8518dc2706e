"""From slices of steps to committed shards: the worker side of the account."""
