"""A file that grows by lines while somebody else writes it.

A line counts once its end is there. A run that is resumed writes its metrics anew, a journal is replaced by another
file, a run that starts over begins with nothing: then all that was read before is void.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**22  # at a look: a run of many days is taken in piece by piece
COMPARED_BYTES = 4096  # of what was read last: every line of ours has its own time or checksum at least


@dataclass(frozen=True)
class Look:
    lines: tuple[bytes, ...] = ()
    """That are new."""
    anew: bool = False
    """All earlier ones are void."""
    more: bool = False
    """There is more to read at once."""


class Lines:
    def __init__(self, path: Path, since: float = 0.0) -> None:
        """Before somebody has written to it after `since` (Unix), the file counts as empty."""
        self._path = path
        self._since = since
        self._at = 0
        self._tail = b""  # of what was read
        self._stamp: tuple[int, ...] = ()

    def look(self) -> Look:
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:
            return self._void()

    def _read(self, file: BinaryIO) -> Look:
        status = os.fstat(file.fileno())
        if status.st_mtime < self._since:
            return self._void()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if stamp == self._stamp and self._at == status.st_size:
            return Look()
        anew = bool(self._at) and not self._goes_on(file, stamp)
        if anew:
            self._at, self._tail = 0, b""
        self._stamp = stamp
        file.seek(self._at)
        block = file.read(MOST_BYTES)
        if len(block) == MOST_BYTES:
            block += file.readline()
        whole = block[: block.rfind(b"\n") + 1]
        self._at += len(whole)
        self._tail = (self._tail + whole)[-COMPARED_BYTES:]
        return Look(tuple(whole.split(b"\n")[:-1]), anew, more=bool(whole) and self._at < status.st_size)

    def _goes_on(self, file: BinaryIO, stamp: tuple[int, ...]) -> bool:
        """Is what was read still there, in front of what is new?"""
        if stamp[0] != self._stamp[0] or stamp[1] < self._at:
            return False
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _void(self) -> Look:
        anew = bool(self._at)
        self._at, self._tail, self._stamp = 0, b"", ()
        return Look(anew=anew)
