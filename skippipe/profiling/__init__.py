"""Profiling: what nodes compute and links carry, measured, as a cluster file (see docs/profiling.md).

coordinator    the state machine that has nodes measure themselves and each other, in rounds; its server
node           a node that is measured: configuration, role, state machine
compute_bench  the passes that a node measures itself by
estimators     how a link is probed; the speed of nodes and links from samples
results        what was found, the file that keeps it, several results merged into a cluster
"""
