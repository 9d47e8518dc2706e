"""Messages and transport between the processes of a harvest: engine, writer, census, command."""
