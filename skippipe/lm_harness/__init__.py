"""Scores of a trained model, whole or with stages missing, on tasks of the lm-evaluation-harness.

Nothing here goes to a network. Only `adapter` needs the package lm-eval.
"""
