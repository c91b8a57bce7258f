"""Commands as processes of their own, `skippipe serve` above all, and what they say."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from skippipe.cli import main
from tests.helpers.processes import END_S, FORKED, ProcessOutput


class Command(ProcessOutput):
    """Forked from a process that has torch, since importing it takes longer than all else."""

    def __init__(self, *words: object, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = FORKED.Pipe(duplex=False)
        told = ([str(word) for word in words], theirs, dict(environment or {}))
        self.process: BaseProcess = FORKED.Process(target=_live, args=told, daemon=True)
        self.process.start()
        theirs.close()
        super().__init__(_lines(ours))

    def send(self, number: int) -> None:
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGINT) -> int | None:
        """The exit status."""
        self.send(number)
        self.process.join(END_S)
        self.process.kill()  # if it is still there; its nodes end when it is gone
        self.process.join(END_S)
        self.all_lines()
        return self.process.exitcode


class Server(Command):
    def __init__(self, *words: object, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("serve", *words, environment=environment)

    @property
    def address(self) -> str:
        """Once all stages are there."""
        return self.says(r" is served at (http://\S+)/v1")[1]

    def pids(self) -> dict[str, int]:
        """Node → the last process that it was."""
        with self._news:
            said = [re.match(r"'(.+)' \(process (\d+)\) holds", line) for line in self.lines]
        return {match[1]: int(match[2]) for match in said if match}

    def kill(self, *nodes: str) -> None:
        pids = self.pids()
        for node in nodes:
            os.kill(pids[node], signal.SIGKILL)

    def back(self, node: str, life: int) -> None:
        """Waits for its n-th life."""
        self.says(rf"^'{re.escape(node)}'.* holds stage", life)


def _lines(pipe: Connection) -> Iterator[str]:
    with os.fdopen(os.dup(pipe.fileno()), errors="replace") as lines:
        yield from lines
    pipe.close()


def _live(words: list[str], said: Connection, environment: dict[str, str]) -> None:
    for number in (1, 2):
        os.dup2(said.fileno(), number)
    said.close()
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: PTH123, SIM115
    os.environ |= {"OMP_NUM_THREADS": "1", **environment}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the process we are forked from ignores
    sys.argv = ["skippipe", *words]
    main()
