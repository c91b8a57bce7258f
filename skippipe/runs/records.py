"""What the lines of a run's files mean. A line that makes no sense is None, and whoever reads on passes over it.

Long runs as short curves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from skippipe.runs.wal import HEADER, sound

LONGEST_TEXT = 400
CHECKPOINTED = "checkpointed"  # an event that nobody writes: the checkpoint says so

Links = list[tuple[str, str, int]]
"""Sender, receiver and bytes."""


class MetricsRow(NamedTuple):
    """An iteration, as the metrics have it; None for what is missing or not finite."""

    iteration: int
    loss: float | None
    seconds: float | None
    promised_s: float | None
    tokens_per_s: float | None
    sent_bytes: float | None
    time: float | None
    tokens: float | None
    """So far."""
    asked: int | None = None
    """Iterations that the run is to do."""

    @property
    def is_last(self) -> bool:
        return self.asked is not None and self.iteration + 1 >= self.asked


class Metrics(NamedTuple):
    """A whole line."""

    row: MetricsRow
    links: Links
    visits: list[int]
    """Microbatches in the gradient of each stage."""
    run: str = ""
    """The id of the run."""


class EventRecord(NamedTuple):
    kind: str
    iteration: int
    text: str
    node: str
    time: float


def metrics_of(line: bytes) -> Metrics | None:
    found = object_of(line)
    iteration = count(found.get("iteration")) if found else None
    if found is None or iteration is None:
        return None
    said = found.get
    row = MetricsRow(
        iteration,
        loss=_number(said("loss")),
        seconds=_number(said("seconds")),
        promised_s=_number(said("promised_s")),
        tokens_per_s=_number(said("tokens_per_s")),
        sent_bytes=_number(said("bytes_sent")),
        time=_number(said("time")),
        tokens=_number(said("tokens")),
        asked=count(said("iterations")),
    )
    return Metrics(
        row,
        _links(found.get("links")),
        [count(each) or 0 for each in items(found.get("visits"))],
        _text(said("run")),
    )


def event_of(line: bytes) -> tuple[EventRecord, str] | None:
    """And the id of the run that it happened to."""
    found = object_of(line)
    if found is None or not isinstance(found.get("kind"), str):
        return None
    kind, text, node, run = (_text(found.get(key)) for key in ("kind", "text", "node", "run"))
    return EventRecord(kind, count(found.get("iteration")) or 0, text, node, _number(found.get("time")) or 0.0), run


def checkpointed(iterations: int, made: float) -> EventRecord:
    """After so many iterations, a checkpoint was complete."""
    return EventRecord(CHECKPOINTED, iterations - 1, "state of all stages on disk", "", made)


class WalSummary:
    """What a journal says, line after line: which plan holds, and whether the run has ended."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        """The record of the plan that holds."""
        self.done: bool | None = None
        """None: nothing is noted."""
        self.run: str = ""
        """The id of the run."""
        self._newest: dict[int, dict[str, Any]] = {}
        """Length of paths → the newest record of a plan for it."""

    def take(self, line: bytes) -> bool:
        """Whether it could be read."""
        if line + b"\n" == HEADER:
            return True
        content = sound(line)
        record = object_of(content) if content is not None else None
        if record is None:
            return False
        if "run" in record:  # the first one, which decides nothing
            self.run = _text(record["run"])
            return True
        self.done = "done" in record
        if "plan" in record:
            self.last = self._newest[count(record.get("visited")) or 0] = record
        elif "turn" in record:
            self.last = self._newest.get(count(record["turn"]) or 0, self.last)
        return True


def object_of(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _text(value: Any) -> str:
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _links(value: Any) -> Links:
    found = []
    for entry in items(value):
        match entry:
            case [str() as sender, str() as receiver, sent] if (sent_bytes := count(sent)) is not None:
                found.append((sender, receiver, sent_bytes))
    return found


MEANS = tuple(
    MetricsRow._fields.index(name) for name in ("loss", "seconds", "promised_s", "tokens_per_s", "sent_bytes")
)


def thinned(rows: Sequence[MetricsRow], most: int) -> tuple[int, list[MetricsRow]]:
    """How many neighbours stand together, and their means; the rest is the last one's."""
    size = max(1, -(-len(rows) // most))
    if size == 1:
        return size, list(rows)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return size, [_together(group) for group in groups]


def _together(rows: Sequence[MetricsRow]) -> MetricsRow:
    last = rows[-1]
    return MetricsRow(*(_mean([row[at] for row in rows]) if at in MEANS else last[at] for at in range(len(last))))  # type: ignore[arg-type]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    mean = math.fsum(found) / len(found) if found else math.nan
    return mean if math.isfinite(mean) else None
