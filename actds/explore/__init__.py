"""Look into a dataset: arrays, requests, text and statistics, in Python and in a notebook."""
