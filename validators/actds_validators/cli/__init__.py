"""The commands ``actds validate`` and ``actds audit``."""

SUMMARIES = {
    "audit": "Estimate what a dataset lost, and whether it matters.",
    "validate": "Check a dataset before training on it.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
