"""The gate of a team: what it refuses beyond what the spec forbids, and how others are told."""
