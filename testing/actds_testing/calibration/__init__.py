"""Calibration: audits of runs whose truth is known, simulated and recorded."""
