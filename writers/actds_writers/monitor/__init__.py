"""What a harvest is doing: meters, metrics, dashboard, progress."""
