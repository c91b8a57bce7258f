"""Profiling: what nodes compute and links carry, measured, as a cluster file (see docs/profiling.md).

conductor  the state machine that has nodes measure themselves and each other, in rounds
node       the state machine of a node that is measured
survey     what was found, and the file that keeps it
merging    several surveys as one cluster, and what is doubtful about it
"""
