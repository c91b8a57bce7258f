"""Profiling: what nodes compute and links carry, measured, as a cluster file (see docs/profiling.md).

coordinator    the state machine that has nodes measure themselves and each other, in rounds
server         the same over a mailbox, with the nodes of a launcher
state_machine  a node that is measured; `link_probe` and `compute_bench` measure, `estimators` make figures of samples
results        what was found, and the file that keeps it
merge          several results as one cluster, and what is doubtful about it
"""
