"""Parsing the files of a run: lines of metrics, events and journal, and traces of recorded iterations.

A line that cannot be parsed is None, and readers pass over it. A recorded iteration, planned and measured, is read from
the Chrome trace that the run wrote of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.runs.tail import belongs_to, parse_object
from skippipe.runs.wal import HEADER, checked_json
from skippipe.timeline import HUES, TASK_KINDS, BarKind

LONGEST_TEXT = 400
COUNTED = {"version": 2}
"""In every line of metrics and events: iterations count from 1, as on the screen; without it, from 0, as they did."""
CHECKPOINTED = "checkpointed"  # an event that is in no file: a complete checkpoint stands for it

LinkBytes = list[tuple[str, str, int]]
"""Sender, receiver and bytes of every link."""
COPY_ROWS = 10**6  # the first row of copies between host and device in a trace: behind those of all nodes
KINDS = tuple(kind for kind in BarKind if kind is not BarKind.WAITING)
"""The kinds of bars; `TraceBar.kind` is an index into it."""
TASKS = frozenset(map(KINDS.index, TASK_KINDS))
LARGEST_BYTES = 2**28  # larger files are not read
LABEL = re.compile(r"stage (\d{1,6}) · (.*)", re.DOTALL)
DEVICE = re.compile(r" #\d{1,2}$")  # after the name of a node, if several of its devices have rows


class MetricsRow(NamedTuple):
    """An iteration in metrics.jsonl; None for what is missing or not finite."""

    iteration: int
    """From 0, whatever the file counts from."""
    loss: float | None
    seconds: float | None
    promised_s: float | None
    tokens_per_s: float | None
    sent_bytes: float | None
    time: float | None
    tokens: float | None
    """Tokens trained on so far."""
    total_iterations: int | None = None
    """Iterations of the whole run."""
    learning_rate: float | None = None
    elapsed_s: float | None = None
    """Seconds of all iterations and evaluations so far."""
    left_s: float | None = None
    """Seconds to the end of the run, as far as can be told."""
    validation_loss: float | None = None
    """The held-out loss after the iteration, if it was evaluated."""

    @property
    def is_last(self) -> bool:
        return self.total_iterations is not None and self.iteration + 1 >= self.total_iterations


FIGURES = ("loss", "seconds", "promised_s", "tokens_per_s", "bytes_sent", "time", "tokens")
"""Fields of a line of metrics.jsonl that are numbers, in the order of those of `MetricsRow`."""
MORE_FIGURES = ("learning_rate", "elapsed_s", "left_s", "validation_loss")
"""Fields of a line that are numbers too, and come last in `MetricsRow`."""


class MetricsLine(NamedTuple):
    """A line of metrics.jsonl."""

    row: MetricsRow
    links: LinkBytes
    stage_microbatches: list[int]
    """Microbatches in the gradient of each stage."""
    run: str = ""
    """The id of the run."""


class EventRecord(NamedTuple):
    """A line of events.jsonl."""

    kind: str
    iteration: int
    text: str
    node: str
    time: float


def metrics_of(line: bytes) -> MetricsLine | None:
    found = parse_object(line)
    iteration = _iteration_of(found) if found else None
    if found is None or iteration is None:
        return None
    figures, more = ([_as_number(found.get(name)) for name in names] for names in (FIGURES, MORE_FIGURES))
    row = MetricsRow._make((iteration, *figures, as_count(found.get("iterations")), *more))
    stage_microbatches = [as_count(each) or 0 for each in as_list(found.get("visits"))]
    return MetricsLine(row, _links(found.get("links")), stage_microbatches, _as_text(found.get("run")))


def event_of(line: bytes) -> tuple[EventRecord, str] | None:
    """The event, and the id of the run that it happened in."""
    found = parse_object(line)
    if found is None or not isinstance(found.get("kind"), str):
        return None
    kind, text, node, run = (_as_text(found.get(key)) for key in ("kind", "text", "node", "run"))
    return EventRecord(kind, _iteration_of(found) or 0, text, node, _as_number(found.get("time")) or 0.0), run


def _iteration_of(line: dict[str, Any]) -> int | None:
    """The iteration of a line, from 0."""
    count = as_count(line.get("iteration"))
    return count if count is None or "version" not in line else as_count(count - 1)


def checkpoint_event(iterations: int, made: float) -> EventRecord:
    """The event that a checkpoint after so many iterations was complete, at this Unix time."""
    return EventRecord(CHECKPOINTED, iterations - 1, "state of all stages on disk", "", made)


class WalSummary:
    """The state of a run by its journal: which plan is in use, and whether the run has ended."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        """The record of the plan in use."""
        self.done: bool | None = None
        """The run has ended in order, or was stopped on request and waits for another coordinator; None: the journal is
        empty."""
        self.run: str = ""
        """The id of the run."""
        self._newest: dict[str, dict[str, Any]] = {}
        """Length of paths → the newest record of a plan for it."""

    def add_line(self, line: bytes) -> bool:
        """Take in the next line; False if it cannot be parsed."""
        if line + b"\n" == HEADER:
            return True
        content = checked_json(line)
        record = parse_object(content) if content is not None else None
        if record is None:
            return False
        if "run" in record:  # the first one, which decides nothing
            self.run = _as_text(record["run"])
            return True
        self.done = "done" in record or "stopped" in record
        if "plan" in record:
            self.last = self._newest[str(record.get("visited"))] = record
        elif "turn" in record:
            self.last = self._newest.get(str(record["turn"]), self.last)
        return True


def as_count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _as_text(value: Any) -> str:
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _links(value: Any) -> LinkBytes:
    found = []
    for entry in as_list(value):
        match entry:
            case [str() as sender, str() as receiver, sent] if (sent_bytes := as_count(sent)) is not None:
                found.append((sender, receiver, sent_bytes))
    return found


MEANS = (*range(1, 6), MetricsRow._fields.index("validation_loss"))  # fields of a row: loss to sent_bytes, and this


def downsample(rows: Sequence[MetricsRow], most: int) -> tuple[int, list[MetricsRow]]:
    """How many neighbours are merged so that `most` rows are left at most, and their means; the rest is the last's."""
    size = max(1, -(-len(rows) // most))
    if size == 1:
        return size, list(rows)
    return size, [_average(rows[at : at + size]) for at in range(0, len(rows), size)]


def _average(rows: Sequence[MetricsRow]) -> MetricsRow:
    last = rows[-1]
    return MetricsRow(*(_mean([row[at] for row in rows]) if at in MEANS else last[at] for at in range(len(last))))  # type: ignore[arg-type]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    mean = math.fsum(found) / len(found) if found else math.nan
    return mean if math.isfinite(mean) else None


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
    """The recorded iteration in a Chrome trace; ValueError if it is not one of ours."""
    try:
        events = trace["traceEvents"]
        names = [event for event in events if event["ph"] == "M"]
        tracks = {event["pid"]: event["args"]["name"] for event in names if event["name"] == "process_name"}
        threads = [event for event in names if event["name"] == "thread_name" and event["tid"] < COPY_ROWS]
        labels = {event["tid"]: event["args"]["name"] for event in threads}
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
