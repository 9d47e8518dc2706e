"""Activation datasets that say how they were harvested."""
