"""Optimizers: one interface, one file for each, and a registry of their names."""
