"""The census: the scheduler-side account of every position."""
