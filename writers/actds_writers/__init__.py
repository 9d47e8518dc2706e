"""Writers: from an engine hook to committed shards that account for every token."""

SUMMARIES = {
    "attest": "Serve a random share of DATASET again, and say whether its rows are of this model.",
    "plan": "Size a harvest: bytes per second at every stage, disk, rings, memory.",
    "recover": "Recover a dataset whose harvest was killed or lost its power.",
    "replay": "Serve the token sequences of SOURCE again under other settings, into OUT.",
    "write": "Harvest activations from a real engine into OUT.",
}
"""First lines of the commands' help, which ``actds --help`` lists without importing ``cli``."""
