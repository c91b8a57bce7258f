"""A new plan within milliseconds, when nodes come and go."""
