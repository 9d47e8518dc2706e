"""Steering: what a vector does to the next token, at each depth of an answer."""
