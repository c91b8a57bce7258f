"""What every HTTP server of the project shares: the server, who may ask, how errors read."""
