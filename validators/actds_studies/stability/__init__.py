"""Stability of dictionaries: what the harvest changes in them, beside what chance does."""
