"""Capture: hooks in the model's graph, and stages 1 and 2 of the data path."""
