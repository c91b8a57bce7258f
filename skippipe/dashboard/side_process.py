"""The page as a process beside `skippipe train`.

It has a lower priority than training, follows the same files as `skippipe dashboard` would, and ends with its owner.
Whatever becomes of it, training goes on. It hears of its owner's end because the pipe to it closes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skippipe.dashboard import server as dashboard_server

PRIORITY = 10  # nice: as much as training leaves
GOODBYE_S = 5.0
OPTION = "--dashboard"


@contextmanager
def dashboard_process(folder: Path, asked: str, *, resumed: bool) -> Iterator[None]:
    """A page for the run at `[HOST:]PORT`; of a run that begins anew, it shows nothing older."""
    dashboard_server.check_installed()
    host, port = dashboard_server.place(asked, OPTION)
    dashboard_server.who_may_look(host)
    listens = dashboard_server.listening(host, port, OPTION)
    print(f"the dashboard is at {dashboard_server.address(listens)}", file=sys.stderr, flush=True)
    with listens:
        command = [sys.executable, "-m", __name__, str(folder), str(listens.fileno()), host]
        since = 0.0 if resumed else time.time()
        process = subprocess.Popen(
            [*command, repr(since)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listens.fileno()],
            start_new_session=True,  # Ctrl-C is for the owner, which may have minutes to go
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(folder: str, descriptor: str, host: str, since: str) -> None:
    os.nice(PRIORITY)
    with socket.socket(fileno=int(descriptor)) as listens:
        dashboard_server.run(Path(folder), listens, dashboard_server.who_may_look(host), float(since), owned=True)


if __name__ == "__main__":
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # before anything with kernels is imported
    main(*sys.argv[1:])
