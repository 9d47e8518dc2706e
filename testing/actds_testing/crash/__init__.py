"""Sudden ends at random: kills and power cuts, and what they cost."""
