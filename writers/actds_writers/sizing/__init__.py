"""Sizing: what a harvest needs, and the rates of a machine."""
