"""A recorded iteration, planned and measured, from the Chrome trace that the run wrote of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from skippipe.report.picture import Kind

KINDS = tuple(kind for kind in Kind if kind is not Kind.WAITING)
"""A bar's kind is a place in here."""
LABEL = re.compile(r"stage (\d{1,6}) · (.*)", re.DOTALL)


class Bar(NamedTuple):
    row: int
    kind: int
    start_s: float
    end_s: float
    lane: int
    """−1 for averaging and optimizer, which belong to no microbatch."""
    microbatch: int
    step: int


@dataclass(frozen=True)
class Chart:
    iteration: int
    rows: tuple[tuple[int, str], ...]
    """Stage and name of every node, in the order of the stages."""
    planned: tuple[Bar, ...]
    measured: tuple[Bar, ...]

    @property
    def starts(self) -> dict[int, int]:
        """Lane → the row of its data node."""
        return {bar.lane: bar.row for bar in (*self.measured, *self.planned) if bar.lane >= 0 and bar.step == 0}


def chart_of(trace: Any, iteration: int) -> Chart:
    """ValueError if this is no trace of ours."""
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
        bars: dict[str, list[Bar]] = {"planned": [], "measured": []}
        for event in events:
            if event["ph"] == "X" and 0 <= event["tid"] < len(rows):
                bars[tracks[event["pid"]]].append(_bar(event))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no trace of an iteration: {error!r}") from None
    return Chart(iteration, rows, tuple(bars["planned"]), tuple(bars["measured"]))


def _row(label: str) -> tuple[int, str]:
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} is no row of ours")
    return int(match[1]), match[2]


def _bar(event: dict[str, Any]) -> Bar:
    start_s, took_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    which = event.get("args", {})
    places = (int(which.get(key, -1)) for key in ("lane", "microbatch", "step"))
    return Bar(int(event["tid"]), KINDS.index(Kind(event["cat"])), start_s, start_s + took_s, *places)
