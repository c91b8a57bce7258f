"""Checkpoints of a run and models for transformers: how they are written, read and kept."""
