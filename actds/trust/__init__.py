"""Trust that travels: what a seal pins as a list, who signed it, and what a consumer pinned."""
