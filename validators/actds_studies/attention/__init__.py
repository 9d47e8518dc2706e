"""How generated text attends, from stored queries and keys alone."""
