"""Accounting: every position exactly once, and how often its row was served."""
