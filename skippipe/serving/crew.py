"""Nodes on the gateway's own machine: they are started, and started again when they end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.training.nursery import Nursery, how_ended, log_file
from skippipe.training.run import birth

FIRST_S, LONGEST_S = 1.0, 60.0  # from an end to the next start; twice as long with every one that follows soon
SOON_S = 60.0
MOST_STILLBORN = 3  # times that a node may end before it has ever served


class Crew:
    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        """Forks at once: make it before threads are started. Afterwards it is for one thread."""
        self._logs = logs
        self._say = say
        self._nursery = Nursery(birth, logs)
        self._told: Mapping[str, dict[str, Any]] = {}
        self._began: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """Nodes that are no more, and when to start them again."""
        self._ends: Counter[str] = Counter()
        """One soon after the other."""
        self._served: set[str] = set()

    def begin(self, told: Mapping[str, dict[str, Any]]) -> None:
        """Name → invitation."""
        self._told = told
        for name in told:
            self._start(name)

    def process(self, name: str) -> int | None:
        return self._nursery.pids.get(name)

    def serves(self, name: str) -> None:
        self._served.add(name)

    def gone(self) -> Iterator[tuple[str, str]]:
        """Nodes that ended since it was last asked, and how; those whose time has come are started again."""
        self._nursery.look()
        ended = dict(self._nursery.ended)
        self._nursery.ended.clear()
        now = time.monotonic()
        for name, status in ended.items():
            how = how_ended(status)
            self._ends[name] = self._ends[name] + 1 if now - self._began[name] < SOON_S else 1
            if name not in self._served and self._ends[name] >= MOST_STILLBORN:
                raise UserError(f"node '{name}' does not get to serve ({how}): {self._last_words(name)}")
            wait_s = min(LONGEST_S, FIRST_S * 2 ** (self._ends[name] - 1))
            self._due[name] = now + wait_s
            self._say(f"'{name}' has ended ({how}) and is started again in {wait_s:g} s")
            yield name, how
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._start(name)

    def close(self) -> None:
        """End every node; returns when all are gone."""
        self._nursery.close()

    def _start(self, name: str) -> None:
        self._began[name] = time.monotonic()
        self._nursery.start(name, self._told[name])

    def _last_words(self, name: str) -> str:
        try:
            lines = log_file(self._logs, name).read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line for line in reversed(lines) if line.strip()), "it left no word")
