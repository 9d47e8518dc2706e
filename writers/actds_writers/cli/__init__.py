"""The commands ``actds write``, ``actds replay``, ``actds recover`` and ``actds plan``."""

SUMMARIES = {
    "plan": "Size a harvest: bytes per second at every stage, disk, rings, memory.",
    "recover": "Recover a dataset whose harvest was killed or lost its power.",
    "replay": "Serve the token sequences of SOURCE again under other settings, into OUT.",
    "write": "Harvest activations from a real engine into OUT.",
}
"""First lines of their help, which ``actds --help`` lists without importing the commands."""
