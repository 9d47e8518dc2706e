"""Prompts: sources, records, tokens."""
