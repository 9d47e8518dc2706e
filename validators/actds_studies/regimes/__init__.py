"""Regimes: whether the way a dataset was served changes what is measured on it."""
