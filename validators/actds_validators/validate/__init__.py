"""Checks: what of a dataset keeps the spec and what does not. No check has an opinion."""
