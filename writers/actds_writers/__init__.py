"""Writers: from an engine hook to committed shards that account for every token."""
