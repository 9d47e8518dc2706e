"""The audit: what a dataset lost, and whether it matters."""
