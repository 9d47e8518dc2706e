"""Look at a dataset: a page of its hooks, norms, coverage, losses and text."""
