"""What lies in the folder of a run: its identity, traces of recorded iterations, and checkpoints.

Every file of a run repeats the id that is in `run.json`. What has another one is of another run, however it came
there, and is passed over. A folder without `run.json` may be of a run from before there were ids: then all counts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from skippipe.model_files import INDEX

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
