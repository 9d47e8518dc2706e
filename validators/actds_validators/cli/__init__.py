"""Commands: ``actds validate``, ``audit`` and ``check``."""

SUMMARIES = {
    "audit": "Estimate what a dataset lost, and whether it matters.",
    "check": "Say whether a dataset is valid, and whether to train on it.",
    "validate": "Check datasets before training on them.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
