"""A file that grows by lines while somebody else writes it.

A line counts once its end is there. A run that is resumed writes its metrics anew, a journal is replaced by another
file, a run that starts over begins with nothing: then all that was read before is void.


What lies in the folder of a run: its identity, traces of recorded iterations, and checkpoints.

Every file of a run repeats the id that is in `run.json`. What has another one is of another run, however it came
there, and is passed over. A folder without `run.json` may be of a run from before there were ids: then all counts.

"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from skippipe.model.model_files import INDEX

MOST_BYTES = 2**22  # at a look: a run of many days is taken in piece by piece
COMPARED_BYTES = 4096  # of what was read last: every line of ours has its own time or checksum at least


@dataclass(frozen=True)
class NewLines:
    lines: tuple[bytes, ...] = ()
    """That are new."""
    anew: bool = False
    """All earlier ones are void."""
    more: bool = False
    """There is more to read at once."""


class FileTail:
    def __init__(self, path: Path, since: float = 0.0) -> None:
        """Before somebody has written to it after `since` (Unix), the file counts as empty."""
        self._path = path
        self._since = since
        self._at = 0
        self._tail = b""  # of what was read
        self._stamp: tuple[int, ...] = ()

    def look(self) -> NewLines:
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:
            return self._void()

    def _read(self, file: BinaryIO) -> NewLines:
        status = os.fstat(file.fileno())
        if status.st_mtime < self._since:
            return self._void()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if stamp == self._stamp and self._at == status.st_size:
            return NewLines()
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
        return NewLines(tuple(whole.split(b"\n")[:-1]), anew, more=bool(whole) and self._at < status.st_size)

    def _goes_on(self, file: BinaryIO, stamp: tuple[int, ...]) -> bool:
        """Is what was read still there, in front of what is new?"""
        if stamp[0] != self._stamp[0] or stamp[1] < self._at:
            return False
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _void(self) -> NewLines:
        anew = bool(self._at)
        self._at, self._tail, self._stamp = 0, b"", ()
        return NewLines(anew=anew)


RUN_FILE = "run.json"
TRACE = re.compile(r"iteration-(\d{1,12})\.json")


class TraceFile(NamedTuple):
    made: float
    """Unix; the newest is the greatest."""
    iteration: int
    path: Path


def traces_in(folder: Path, since: float = 0.0) -> list[TraceFile]:
    """Written after `since` (Unix)."""
    found = []
    for path in _listed(folder / "traces"):
        match, made = TRACE.fullmatch(path.name), modified(path)
        if match and made is not None and made >= since:
            found.append(TraceFile(made, int(match[1]), path))
    return found


def checkpoints_in(folder: Path, since: float = 0.0) -> dict[int, float]:
    """Of the run whose folder this is: iterations that were done → when it was complete (Unix). Nobody writes an event
    then: its manifest says so."""
    run_id = run_id_of(folder)
    found = {}
    for path in _listed(folder / "checkpoints"):
        made = modified(path / "manifest.json")
        if made is None or made < since or not path.name.isdigit():
            continue
        if is_of(run_id, checkpoint_run_id(path)):
            found[int(path.name)] = made
    return found


def run_id_of(folder: Path) -> str | None:
    """The id of the run whose output folder this is; None: nothing says so."""
    found = _object(folder / RUN_FILE).get("id")
    return found if isinstance(found, str) and found else None


def checkpoint_run_id(place: Path) -> str | None:
    """The id of the run that made a checkpoint, empty for one without; None: its manifest cannot be read."""
    manifest = _object(place / "manifest.json", None)
    found = None if manifest is None else manifest.get("run", "")
    return found if isinstance(found, str) else None


def model_run_id(folder: Path) -> str:
    """The id of the run that wrote a Hugging Face folder; empty: nothing says so."""
    metadata = _object(folder / INDEX).get("metadata")
    found = metadata.get("run", "") if isinstance(metadata, dict) else ""
    return found if isinstance(found, str) else ""


def is_of(run_id: str | None, found: str | None) -> bool:
    """Does what carries the id `found` count for a run? What cannot be read does, so that somebody complains about it;
    and if it is not known which run this is, all does."""
    return run_id is None or found is None or found == run_id


def modified(path: Path) -> float | None:
    """Unix; None: it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _object(path: Path, otherwise: Any = MappingProxyType({})) -> Any:
    """The JSON object in a file; `otherwise` if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return otherwise
    return found if isinstance(found, dict) else otherwise
