"""The command that shows a run in the browser: dashboard."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from skippipe.errors import UserError
from skippipe.value_ranges import PORT

FILES = ("plan.json", "metrics.jsonl", "events.jsonl", "journal")


def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run that goes on, or is over.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than loopback: with SKIPPIPE_DASHBOARD_TOKEN set only.")
    ] = "127.0.0.1",
    port: Annotated[int, PORT, typer.Option(help="0: any.")] = 8090,
) -> None:
    """Show a run in the browser: nodes, links, paths, Gantt chart, loss, events.

    It follows the files in the run's output folder, so it can be started and ended at any time, also on another machine
    that has the folder. Nothing can be changed from there. Ctrl-C ends it. 'skippipe train --dashboard 8090' starts the
    same beside a run.

    Example: skippipe dashboard run
    """
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # nothing is simulated here: no compiler needed
    from skippipe.dashboard import server as dashboard_server

    if not run.is_dir():
        raise UserError(f"{run}: is no folder; name the output folder of a run")
    dashboard_server.check_installed()
    settings = dashboard_server.access_settings(host)
    with dashboard_server.listen(host, port, "--port") as listener:
        if not any((run / file).exists() for file in FILES):
            print(f"{run}: there is nothing of a run yet; the page fills when there is", file=sys.stderr)
        print(f"{run} is shown at {dashboard_server.url_of(listener)}; Ctrl-C ends it", flush=True)
        dashboard_server.run(run, listener, settings)
