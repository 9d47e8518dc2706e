"""The commands of studies, ``view`` among them."""

SUMMARIES = {
    "alerts": "Say which requests left the regime of a profile, and where.",
    "attention": "Say where generated text looks, and whether certainty changes where it jumps.",
    "profile": "Fit what readouts are like in one regime, with a threshold for alerts.",
    "regimes": "Say whether the way it was served changes what is measured.",
    "stability": "Say whether the harvest changes a dictionary more than another seed does.",
    "steer": "Say whether a steering vector still works later in an answer.",
    "view": "Write a page to look at a dataset: hooks, norms, coverage, losses, text.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
