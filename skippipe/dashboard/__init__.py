"""A page in the browser that shows how a run goes, or went.

It reads what the run writes into its output folder, and nothing else: it cannot slow training down or stop it, and a
coordinator that is started again finds the page where it was. Nothing can be changed from there.

following   all files of a run, as one state that is kept up to date (how they are read: `skippipe.runs`)
page        that state as JSON, a panel at a time
endpoints   the page, the panels, and a stream of panels that have changed, over HTTP
hosting     where it listens, who may look, and how it begins and ends
beside      the same as a process beside `skippipe train`
"""
