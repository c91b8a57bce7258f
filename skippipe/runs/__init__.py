"""The files in a run's output folder, for the dashboard and for the report.

`records`: what a line of each file means. `tail`: following a file that grows. `gantt_data`: a recorded iteration.
`history`: a whole run that is over, with utilization and outages of its nodes. `wal`: the coordinator's journal.
"""
