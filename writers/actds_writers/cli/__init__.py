"""The commands ``actds write``, ``actds recover`` and ``actds plan``."""

SUMMARIES = {
    "plan": "Size a harvest: bytes per second at every stage, disk, rings, memory.",
    "recover": "Recover a dataset whose harvest was killed or lost its power.",
    "write": "Harvest activations from a real engine into OUT.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
