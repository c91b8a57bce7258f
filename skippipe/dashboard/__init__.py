"""A page in the browser that shows how a run goes, or went.

It reads what the run writes into its output folder, and nothing else: it cannot slow training down or stop it, and a
coordinator that is started again finds the page where it was. Nothing can be changed from there.

run_state   all files of a run, as one state that is kept up to date (how they are parsed: `skippipe.runs`), and that
            state as JSON, a panel at a time
routes      the page, the panels, and a stream of panels that have changed, over HTTP
server      where it listens, who has access, and how it starts and stops; also as a process beside `skippipe train`
"""
