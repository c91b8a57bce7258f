"""Tests over several workers of pytest-xdist, all forked from one process that has imported and collected every test.

    python -m tests.forked_workers 3 -m "not slow"

Importing all that tests import takes ten seconds of computing, more than most test files. Workers that are started each
do it for themselves, and so does the fork server of each (`helpers.processes`): with three workers, a minute in all.

The first process waits at a socket. xdist starts a small client in place of a worker's interpreter: it hands over its
input and output, and what is forked then is the worker. Before it runs anything, it forks its own fork server.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.processes import END_S, wait_for

CLIENT = (
    "import os, socket, sys; wire = socket.socket(socket.AF_UNIX); wire.connect(sys.argv[1]); "
    "socket.send_fds(wire, [b'!'], [0, 1, 2]); os.close(0); os.close(1); wire.recv(1)"
)
"""Ends with the worker, which holds the other end of the wire. What xdist tells an interpreter follows, and is not
read."""


def main(workers: int, words: list[str]) -> int:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        pytest.main(["--collect-only", "-qq", *words])  # what is wrong is said when it is collected again
    import tests.helpers.preloaded  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := str(Path(folder) / "socket"))
        listener.listen()
        ended, lifeline = os.pipe()  # which closes with the controller
        client = f"{sys.executable} -S -c {shlex.quote(CLIENT)} {address}"
        spread = [f"--tx={workers}*popen//python={client}", "--dist", "loadfile", "--no-loadscope-reorder"]
        controller = _forked(lambda: int(pytest.main([*spread, *words])))
        os.close(lifeline)
        forked = []
        while ended not in select.select([listener.fileno(), ended], [], [])[0]:
            with listener.accept()[0] as wire:
                _, handles, _, _ = socket.recv_fds(wire, 1, 3)
                forked.append(_forked(partial(_work, handles)))
                for handle in handles:
                    os.close(handle)
        _, status = os.waitpid(controller, 0)
        for worker in forked:  # they end when there is nothing more to read
            wait_for(partial(_has_ended, worker), END_S)
    return os.waitstatus_to_exitcode(status)


def _has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def _work(handles: list[int]) -> int:
    """What xdist has an interpreter do, with the input and output of the client."""
    _start_fork_server()
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: PTH123, SIM115
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    return 0


def _start_fork_server() -> None:
    """Fork it from this process, as long as nothing has happened here, where `multiprocessing` would start Python."""

    def start(_path: bytes, words: Sequence[str], handles: Sequence[int]) -> int:
        return _forked(partial(_serve, words[-1], handles))

    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", start):
        forkserver.ensure_running()


def _serve(program: str, handles: Sequence[int]) -> int:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    for low, high in pairwise([2, *sorted(handles), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    with contextlib.suppress(SystemExit):  # when the worker has ended
        exec(program, {})
    return 0


def _forked(work: Callable[[], int]) -> int:
    """A process that does this and no more, however it ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status: Any = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            util._exit_function()  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
