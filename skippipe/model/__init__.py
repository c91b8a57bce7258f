"""Real models, a stage at a time."""
