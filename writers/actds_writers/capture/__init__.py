"""Capture: hooks in the model's graph, and the way of their rows to the writer."""
