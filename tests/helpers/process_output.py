"""The output of a process, read line by line while it runs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable

READY_S = 90.0  # for a line to come on a busy machine; a few seconds on an idle one
END_S = 30.0


class ProcessOutput:
    """A thread that reads lines until the stream ends."""

    def __init__(self, stream: Iterable[str]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def says(self, pattern: str, times: int = 1, within_s: float = READY_S) -> re.Match[str]:
        """The last of so many lines that match, once they are there."""
        deadline = time.monotonic() + within_s
        with self._news:
            while True:
                found = [match for line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= times:
                    return found[times - 1]
                left_s = deadline - time.monotonic()
                assert left_s > 0 and self._reader.is_alive(), f"no {pattern!r} in:\n" + "\n".join(self.lines)
                self._news.wait(min(left_s, 1.0))

    def all_lines(self) -> list[str]:
        """All lines, once there will be no more."""
        self._reader.join(END_S)
        return self.lines

    def _read(self, stream: Iterable[str]) -> None:
        for line in stream:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
