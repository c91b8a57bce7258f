"""Profiling: what nodes compute and links carry, measured, as a cluster file (see docs/profiling.md)."""
