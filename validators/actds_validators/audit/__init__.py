"""Audits: estimates with uncertainty of what a dataset lost, and whether it matters."""
