"""Following the output folder of a run while another process writes it.

A line of a file counts once its end is there. A resumed run cuts its metrics, a journal is replaced by another file, a
run that starts over begins with empty files: then all that was read before is void.

Every file of a run repeats the id that is in `run.json`. What has another one is of another run, however it came
there, and is passed over. A folder without `run.json` may be of a run from before there were ids: then all counts.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from skippipe.model.model_files import INDEX

MOST_BYTES = 2**22  # read at once: a run of many days is taken in piece by piece
COMPARED_BYTES = 4096  # of what was read last: every line of ours has its own time or checksum at least


@dataclass(frozen=True)
class NewLines:
    """What a file has gained since it was last read."""

    lines: tuple[bytes, ...] = ()
    reset: bool = False
    """All earlier lines are void."""
    more: bool = False
    """There is more to read right away."""


class FileTail:
    """Reads the lines that another process appends to a file."""

    def __init__(self, path: Path, since: float = 0.0) -> None:
        """The file counts as empty until it is written to after `since` (Unix)."""
        self._path = path
        self._since = since
        self._at = 0
        self._tail = b""  # of what was read
        self._stamp: tuple[int, ...] = ()

    def poll(self) -> NewLines:
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
        reset = bool(self._at) and not self._continues(file, stamp)
        if reset:
            self._at, self._tail = 0, b""
        self._stamp = stamp
        file.seek(self._at)
        block = file.read(MOST_BYTES)
        if len(block) == MOST_BYTES:
            block += file.readline()
        whole = block[: block.rfind(b"\n") + 1]
        self._at += len(whole)
        self._tail = (self._tail + whole)[-COMPARED_BYTES:]
        return NewLines(tuple(whole.split(b"\n")[:-1]), reset, more=bool(whole) and self._at < status.st_size)

    def _continues(self, file: BinaryIO, stamp: tuple[int, ...]) -> bool:
        """Is what was read still there, in front of what is new?"""
        if stamp[0] != self._stamp[0] or stamp[1] < self._at:
            return False
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _void(self) -> NewLines:
        reset = bool(self._at)
        self._at, self._tail, self._stamp = 0, b"", ()
        return NewLines(reset=reset)


RUN_FILE = "run.json"


def trace_name(iteration: int) -> str:
    """The name of the trace of an iteration, which counts from 0 here and from 1 in the name, as on the screen."""
    return f"{iteration + 1:06d}.json"


TRACE = re.compile(r"(iteration-)?(\d{1,12})\.json")
"""The name of a trace: `000050.json` of iteration 50, or as earlier versions count, from 0, `iteration-000049.json`."""


class TraceFile(NamedTuple):
    """The trace of a recorded iteration; the newest is the greatest."""

    made: float
    """Unix time of writing."""
    iteration: int
    """The iteration, from 0."""
    path: Path


def traces_in(folder: Path, since: float = 0.0) -> list[TraceFile]:
    """Traces in the output folder that were written after `since` (Unix)."""
    found = []
    for path in _listed(folder / "traces"):
        match, made = TRACE.fullmatch(path.name), modification_time(path)
        if match and made is not None and made >= since:
            found.append(TraceFile(made, int(match[2]) - (match[1] is None), path))
    return found


def checkpoints_in(folder: Path, since: float = 0.0) -> dict[int, float]:
    """Complete checkpoints of the run whose folder this is: iterations that were done → when it was complete (Unix)."""
    run_id = run_id_of(folder)
    found = {}
    for path in _listed(folder / "checkpoints"):
        made = modification_time(path / "manifest.json")
        if made is None or made < since or not path.name.isdigit():
            continue
        if belongs_to(run_id, checkpoint_run_id(path)):
            found[int(path.name)] = made
    return found


def run_id_of(folder: Path) -> str | None:
    """The id of the run whose output folder this is; None: nothing says so."""
    found = (read_object(folder / RUN_FILE) or {}).get("id")
    return found if isinstance(found, str) and found else None


def checkpoint_run_id(place: Path) -> str | None:
    """The id of the run that made a checkpoint, empty for one without; None: its manifest cannot be read."""
    manifest = read_object(place / "manifest.json")
    found = None if manifest is None else manifest.get("run", "")
    return found if isinstance(found, str) else None


def model_run_id(folder: Path) -> str:
    """The id of the run that wrote a Hugging Face folder; empty: nothing says so."""
    metadata = (read_object(folder / INDEX) or {}).get("metadata")
    found = metadata.get("run", "") if isinstance(metadata, dict) else ""
    return found if isinstance(found, str) else ""


def belongs_to(run_id: str | None, found: str | None) -> bool:
    """Does what carries the id `found` belong to a run? What cannot be read does, so that it is reported as unreadable;
    and if it is not known which run this is, all does."""
    return run_id is None or found is None or found == run_id


def modification_time(path: Path) -> float | None:
    """The Unix time at which a file was last written; None: there is no such file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none that can be read."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
