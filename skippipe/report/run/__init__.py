"""How people see a run that is over: in words (`words`), as a page (`html`) and as images for papers (`png`).

`marks` and `recorded` work out what is drawn where. What a run has left on disk is read in `skippipe.runs`.
"""
