"""What every HTTP server of the project shares: the server, authentication and limits, errors."""
