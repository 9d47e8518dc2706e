"""Instruments: what is measured on the rows of two arms, one module each."""
