"""Reports of a run that is over: figures and tables (`summary`), a page (`html`) and images for papers (`png`).

The files of a run are read in `skippipe.runs`.
"""
