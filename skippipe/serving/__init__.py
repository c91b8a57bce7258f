"""Serving: stages on nodes, sequences on routes through them, answers that survive lost nodes (docs/serving.md)."""
