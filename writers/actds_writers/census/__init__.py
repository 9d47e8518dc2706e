"""The census: the scheduler side of the account."""
