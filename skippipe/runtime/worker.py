"""The thread that builds a stage and computes, so that receiving, sending and signs of life go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from skippipe.runtime.work import Computer, Work
from skippipe.transport.message import Message

FORMER_S = 300.0  # for one that is told to stop: as long as a stage may take to build


class Worker:
    """Builds its computer and runs one work after another, on its own thread. It wakes the owner, who finds that it is
    `built`, what is `done`, or the `failure`.

    `least_ns` says how long a work takes at least: an emulated node is no faster than the plan says. The `former` one
    ends before this one builds, so that there is no need for memory for both.
    """

    def __init__(
        self,
        build: Callable[[], Computer],
        wake: Callable[[], None],
        least_ns: Callable[[Work], int] | None,
        former: Worker | None = None,
    ) -> None:
        self.built = False
        self.done: deque[tuple[Work, Any]] = deque()
        self.failure: Exception | None = None
        self._build = build
        self._former = former
        self._computer: Computer | None = None
        self._wake = wake
        self._least_ns = least_ns
        self._queue: SimpleQueue[tuple[Work, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        self._queue.put((work, time.monotonic_ns()))

    def fits(self, message: Message, at: int, size: int) -> bool:
        return self._computer is not None and self._computer.fits(message, at, size)

    def stop(self) -> None:
        """After what runs now."""
        self._queue.put(None)

    def join(self, within_s: float) -> None:
        """A thread that is inside torch when the interpreter ends takes the process down with SIGABRT."""
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.join(FORMER_S)
                self._former = None
            computer = self._computer = self._build()
            self.built = True
            self._wake()
            while (job := self._queue.get()) is not None:
                work, started_ns = job
                result = computer.run(work)
                if self._least_ns is not None:
                    left_ns = started_ns + self._least_ns(work) - time.monotonic_ns()
                    if left_ns > 0:
                        time.sleep(left_ns / 1e9)
                self.done.append((work, result))
                del job, work, result  # or the tensors would live on until there is other work
                self._wake()
        except Exception as error:
            self.failure = error
            self._wake()
        finally:
            self._computer = None
