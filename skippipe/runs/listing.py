"""What lies in the folders of a run: traces of recorded iterations, and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

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
    """Iterations that were done → when it was complete (Unix). Nobody writes an event then: its manifest says so."""
    found = {}
    for path in _listed(folder / "checkpoints"):
        made = modified(path / "manifest.json")
        if path.name.isdigit() and made is not None and made >= since:
            found[int(path.name)] = made
    return found


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
