"""What a harvest needs, and what a machine gives."""
