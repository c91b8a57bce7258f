"""A recorded iteration, planned and measured, from the Chrome trace that the run wrote of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.runs.tail import belongs_to
from skippipe.timeline import HUES, TASK_KINDS, BarKind

KINDS = tuple(kind for kind in BarKind if kind is not BarKind.WAITING)
"""The kinds of bars; `TraceBar.kind` is an index into it."""
TASKS = frozenset(map(KINDS.index, TASK_KINDS))
LARGEST_BYTES = 2**28  # larger files are not read
LABEL = re.compile(r"stage (\d{1,6}) · (.*)", re.DOTALL)


class TraceBar(NamedTuple):
    """A task, or averaging or the optimizer step of a node."""

    row: int
    kind: int
    start_s: float
    end_s: float
    lane: int
    """−1 for averaging and optimizer, which belong to no microbatch."""
    microbatch: int
    step: int
    waited_s: float
    """Seconds that it was ready and waited for its node."""


@dataclass(frozen=True)
class RecordedIteration:
    """An iteration as it was planned and as it was measured."""

    iteration: int
    rows: tuple[tuple[int, str], ...]
    """Stage and name of every node, ordered by stage."""
    planned: tuple[TraceBar, ...]
    measured: tuple[TraceBar, ...]

    @property
    def starts(self) -> dict[int, int]:
        """Lane → the row of its data node."""
        return {bar.lane: bar.row for bar in (*self.measured, *self.planned) if bar.lane >= 0 and bar.step == 0}

    @property
    def hues(self) -> dict[int, str]:
        """Lane → the colour of its data node, given out as in all our pictures."""
        starts = dict(sorted(self.starts.items()))
        data_rows = list(dict.fromkeys(starts.values()))
        return {lane: HUES[data_rows.index(row) % len(HUES)] for lane, row in starts.items()}


def read_recorded(path: Path, iteration: int, run_id: str | None = None) -> RecordedIteration:
    """Read a trace; ValueError if this is no trace of ours, or not of the run with this id."""
    if path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"{path}: is too large")
    try:
        trace = json.loads(path.read_bytes())
        if not belongs_to(run_id, _run_of(trace)):
            raise ValueError("it is of another run")
        return recorded_of(trace, iteration)
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply") from None


def _run_of(trace: Any) -> str | None:
    about = trace.get("otherData", {}) if isinstance(trace, dict) else None
    return str(about.get("run", "")) if isinstance(about, dict) else None


def recorded_of(trace: Any, iteration: int) -> RecordedIteration:
    """From a Chrome trace; ValueError if it is not one of ours."""
    try:
        events = trace["traceEvents"]
        tracks = {
            event["pid"]: event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        labels = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        rows = tuple(_row(labels[number]) for number in range(len(labels)))
        bars: dict[str, list[TraceBar]] = {"planned": [], "measured": []}
        for event in events:
            if event["ph"] == "X" and 0 <= event["tid"] < len(rows):
                bars[tracks[event["pid"]]].append(_bar(event))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no trace of an iteration: {error!r}") from None
    return RecordedIteration(iteration, rows, tuple(bars["planned"]), tuple(bars["measured"]))


def _row(label: str) -> tuple[int, str]:
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} is no row of ours")
    return int(match[1]), match[2]


def _bar(event: dict[str, Any]) -> TraceBar:
    start_s, took_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    args = event.get("args", {})
    lane, microbatch, step = (int(args.get(key, -1)) for key in ("lane", "microbatch", "step"))
    waited_s = float(args.get("waited_s", 0.0))
    kind = KINDS.index(BarKind(event["cat"]))
    return TraceBar(int(event["tid"]), kind, start_s, start_s + took_s, lane, microbatch, step, waited_s)
