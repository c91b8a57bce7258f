"""The files in a run's output folder, for the dashboard and for the report.

`records`: what a line of each file means, and a recorded iteration. `tail`: following a file that grows. `history`: a
whole run that is over, with utilization and outages of its nodes. `wal`: the coordinator's journal.
"""
