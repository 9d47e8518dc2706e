"""Messages and transport between the processes of a harvest."""
