"""Commands: ``actds validate``, ``audit``, ``check``, ``regimes``, ``stability`` and ``view``."""

SUMMARIES = {
    "audit": "Estimate what a dataset lost, and whether it matters.",
    "check": "Say whether a dataset is valid, and whether to train on it.",
    "regimes": "Say whether the way it was served changes what is measured.",
    "stability": "Say whether the harvest changes a dictionary more than another seed does.",
    "validate": "Check datasets before training on them.",
    "view": "Write a page to look at a dataset: hooks, norms, coverage, losses, text.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
