"""The thread that computes, so that receiving and sending go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from skippipe.runtime.work import Computer, Work
from skippipe.transport.message import Message


class Worker:
    """Runs one work after another on its own thread. It wakes the owner, who finds what is `done`, or the `failure`.

    `least_ns` says how long a work takes at least: an emulated node is no faster than the plan says.
    """

    def __init__(self, computer: Computer, wake: Callable[[], None], least_ns: Callable[[Work], int] | None) -> None:
        self.done: deque[tuple[Work, Any]] = deque()
        self.failure: Exception | None = None
        self._computer = computer
        self._wake = wake
        self._least_ns = least_ns
        self._queue: SimpleQueue[tuple[Work, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        self._queue.put((work, time.monotonic_ns()))

    def fits(self, message: Message, at: int, size: int) -> bool:
        return self._computer.fits(message, at, size)

    def stop(self) -> None:
        """After what runs now."""
        self._queue.put(None)

    def join(self, within_s: float) -> None:
        """A thread that is inside torch when the interpreter ends takes the process down with SIGABRT."""
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                work, started_ns = job
                result = self._computer.run(work)
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
