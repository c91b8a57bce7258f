"""Simulated annealing over all decision variables of a plan at once: the strategy `best`, and repair."""
