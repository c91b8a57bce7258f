"""Repair of plans in a running job, when nodes come and go."""
