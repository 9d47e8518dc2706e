"""Commands: ``actds attention``, ``regimes``, ``stability`` and ``view``."""

SUMMARIES = {
    "attention": "Say where generated text looks, and whether certainty changes where it jumps.",
    "regimes": "Say whether the way it was served changes what is measured.",
    "stability": "Say whether the harvest changes a dictionary more than another seed does.",
    "view": "Write a page to look at a dataset: hooks, norms, coverage, losses, text.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
