"""Trained models at work: loaded from disk, whole or in parts."""
