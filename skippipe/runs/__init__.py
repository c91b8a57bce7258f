"""What a run has left in its output folder, for whoever shows it: the page beside a run and the report after it.

`records` says what a line means, `lines` and `chart` how a file that grows and a recorded iteration are read. `history`
is the whole of it, with `uses` (how busy nodes were) and `losses` (what became of lost nodes); `curves` makes long ones
short.
"""
