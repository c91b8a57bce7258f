"""An iteration in the Chrome trace event format: open the file in ui.perfetto.dev or chrome://tracing.

One thread a node, one slice a task, and an arrow for every hop of a microbatch. Times there are in microseconds.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from skippipe.cost_model import seconds
from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.report.gantt import Gantt, GanttBar
from skippipe.timeline import BarKind, Timeline

PROCESS_ID = 1


def write_trace(plan: Plan, timeline: Timeline, path: Path, process: str = "plan") -> None:
    write_text(path, json.dumps(trace_events(plan, timeline, process), ensure_ascii=False) + "\n")


def trace_events(plan: Plan, timeline: Timeline, process: str = "plan") -> dict[str, Any]:
    """`process` names the track, to tell one plan from another when both are open."""
    picture = Gantt(plan, timeline)
    slices = [bar for bar in picture.bars if bar.kind is not BarKind.WAITING]
    waiting = {_which(bar): bar for bar in picture.bars if bar.kind is BarKind.WAITING}
    return {
        "traceEvents": [
            *_names(picture, process),
            *(_slice(bar, waiting.get(_which(bar))) for bar in slices),
            *_hops(slices),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"cluster": plan.cluster.name, "strategy": plan.strategy, "timing": str(timeline.timing)},
    }


def merged(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Several traces as the processes of one."""
    events = [
        {**event, "pid": number} for number, trace in enumerate(traces, PROCESS_ID) for event in trace["traceEvents"]
    ]
    for event in events:
        if "id" in event:
            event["id"] += event["pid"] * len(events)  # arrows of one process must not end in another
    return {**traces[0], "traceEvents": events}


def _names(picture: Gantt, process: str) -> list[dict[str, Any]]:
    events = [_event("M", 0, name="process_name", args={"name": process})]
    for index, row in enumerate(picture.rows):
        events.append(_event("M", index, name="thread_name", args={"name": row.label}))
        events.append(_event("M", index, name="thread_sort_index", args={"sort_index": index}))
    return events


def _which(bar: GanttBar) -> tuple[int | None, int | None, int | None]:
    return bar.lane, bar.microbatch, bar.step


def _slice(bar: GanttBar, waiting: GanttBar | None) -> dict[str, Any]:
    times = {"ts": bar.start_ns / 1000, "dur": (bar.end_ns - bar.start_ns) / 1000}
    if bar.lane is None:
        return _event("X", bar.row, name=str(bar.kind), cat=str(bar.kind), **times)
    waited_ns = waiting.end_ns - waiting.start_ns if waiting else 0
    args = {"lane": bar.lane, "microbatch": bar.microbatch, "step": bar.step, "waited_s": seconds(waited_ns)}
    return _event(
        "X", bar.row, name=f"{bar.kind} lane {bar.lane} #{bar.microbatch}", cat=str(bar.kind), **times, args=args
    )


def _hops(slices: list[GanttBar]) -> list[dict[str, Any]]:
    """Arrows from every task of a microbatch to its next; weight gradients are not on its way."""
    tasks = sorted((bar for bar in slices if bar.lane is not None and bar.kind is not BarKind.WEIGHTS), key=_which)
    events = []
    for number, (a, b) in enumerate(pairwise(tasks)):
        if (a.lane, a.microbatch) != (b.lane, b.microbatch):
            continue
        hop = {"name": "hop", "cat": "hop", "id": number}
        # viewers tie an arrow to the slice that is open at its time, so it must leave before that slice ends
        events.append(_event("s", a.row, ts=(a.end_ns - 1) / 1000, **hop))
        events.append(_event("f", b.row, ts=b.start_ns / 1000, bp="e", **hop))
    return events


def _event(phase: str, thread: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": PROCESS_ID, "tid": thread, **fields}
