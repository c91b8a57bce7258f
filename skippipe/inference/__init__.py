"""Inference with a trained model in one process: whole, or with a subset of its stages."""
