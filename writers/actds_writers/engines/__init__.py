"""The engines of this distribution."""
