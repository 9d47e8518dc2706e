"""Drift: whether two selections, or two datasets, hold the same values."""
