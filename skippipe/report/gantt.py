"""The Gantt chart of an iteration, simulated or recorded: the bars of every node and their colours; also as a trace.

Pure geometry, without a drawing library. All microbatches of a data node have its hue everywhere: light in forward
passes, dark in backward passes, darker still for the weight gradients of a split backward. Time that a task
waited for its node (a collision) is a thin strip under the row.

The Chrome trace event format opens in ui.perfetto.dev or chrome://tracing: one thread a node, one slice a task, and an
arrow for every hop of a microbatch; of a GPU, two more threads with the copies to it and from it. Times there are in
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.cost_model import ns, seconds
from skippipe.dispatch import is_weights
from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.runs.records import COPY_ROWS, KINDS, TASKS, RecordedIteration, TraceBar
from skippipe.timeline import HUES, BarKind, Task, Timeline

NEUTRAL = {BarKind.WAITING: "#9A9A9A", BarKind.AVERAGING: "#D9D9D9", BarKind.OPTIMIZER: "#4D4D4D"}
STAGE_GAP = 0.5  # rows of space between stages
BRIEF = 1.35  # an iteration this many times as long as its passes is shown whole
FAINT = "#888888"  # of lanes whose data node is not on record
PROCESS_ID = 1


class GanttBar(NamedTuple):
    """A bar with its colour and hover text."""

    row: int
    kind: BarKind
    start_ns: int
    end_ns: int
    lane: int | None
    """None for averaging and optimizer, which belong to no microbatch."""
    microbatch: int | None
    step: int | None
    colour: str
    hover: str

    @property
    def start_s(self) -> float:
        return seconds(self.start_ns)

    @property
    def end_s(self) -> float:
        return seconds(self.end_ns)


class GanttRow(NamedTuple):
    """The row of a node, or of one of its devices that work side by side."""

    node: int
    stage: int
    name: str
    y: float
    """Vertical position; grows downwards, with a gap between stages."""
    device: int = 0

    @property
    def label(self) -> str:
        return f"stage {self.stage} · {self.name}"


@dataclass(frozen=True)
class Gantt:
    """The Gantt chart of an iteration, ready to draw."""

    plan: Plan
    timeline: Timeline

    @cached_property
    def rows(self) -> tuple[GanttRow, ...]:
        rows: list[GanttRow] = []
        for stage, held_by in enumerate(self.plan.stages):
            for node in held_by.nodes:
                name, workers = self.plan.cluster.nodes[node].name, self.plan.workers[node]
                for device in range(workers):
                    own = f"{name} #{device}" if workers > 1 else name
                    rows.append(GanttRow(node, stage, own, len(rows) + STAGE_GAP * stage, device))
        return tuple(rows)

    @cached_property
    def bars(self) -> tuple[GanttBar, ...]:
        return (*self._task_bars(), *self._closing_bars())

    @cached_property
    def data_nodes(self) -> tuple[int, ...]:
        """Data nodes, in the order in which they get their hues."""
        return tuple(dict.fromkeys(lane.path[0] for lane in self.plan.lanes))

    def hue_of(self, data_node: int) -> str:
        return HUES[self.data_nodes.index(data_node) % len(HUES)]

    @property
    def shown_until_s(self) -> float:
        """Averaging over slow links can take ten times as long as the passes: the picture then opens on the passes."""
        last_ns, whole_ns = self.timeline.last_backward_ns, self.timeline.iteration_ns
        return seconds(whole_ns) if whole_ns <= BRIEF * last_ns else 1.05 * seconds(last_ns)

    @property
    def beyond(self) -> str:
        """In words, what lies past the end of what is shown at first; empty: nothing."""
        if self.shown_until_s >= self.timeline.iteration_s:
            return ""
        averaged_s = seconds(max(end for _, end in self.timeline.averaging_ns))
        return f"averaging goes on until {averaged_s:.2f} s, the iteration ends at {self.timeline.iteration_s:.2f} s"

    def _task_bars(self) -> Iterator[GanttBar]:
        row_of = {(row.node, row.device): index for index, row in enumerate(self.rows)}
        for task in self.timeline.tasks:
            row = row_of[task.node, min(task.device, self.plan.workers[task.node] - 1)]  # a run may have more devices
            kind = kind_of(task.step, len(self.plan.lanes[task.lane].path))
            colour = shade(self.hue_of(self.plan.lanes[task.lane].path[0]), kind)
            hover = self._hover_text(task, kind)
            which = (task.lane, task.microbatch, task.step)
            if task.start_ns > task.ready_ns and kind is not BarKind.WEIGHTS:  # no microbatch waits for these
                waiting = (row, BarKind.WAITING, task.ready_ns, task.start_ns)
                yield GanttBar(*waiting, *which, NEUTRAL[BarKind.WAITING], f"waiting for the node: {hover}")
            yield GanttBar(row, kind, task.start_ns, task.end_ns, *which, colour, hover)

    def _hover_text(self, task: Task, kind: BarKind) -> str:
        data_node = self.plan.cluster.nodes[self.plan.lanes[task.lane].path[0]].name
        lines = [
            f"{kind} of lane {task.lane}, microbatch {task.microbatch}, of {data_node}",
            f"on {self.plan.cluster.nodes[task.node].name}, stage {self.plan.stage_of[task.node]}",
            span(task.start_ns, task.end_ns),
        ]
        if task.start_ns > task.ready_ns:
            lines.append(
                f"ready at {seconds(task.ready_ns):.3f} s, waited {seconds(task.start_ns - task.ready_ns):.3f} s"
            )
        return "\n".join(lines)

    def _closing_bars(self) -> Iterator[GanttBar]:
        """Averaging on every node of its stage, then the optimizer step of all devices once all stages are averaged."""
        if not self.timeline.averaging_ns:
            return
        averaged_ns = max(end for _, end in self.timeline.averaging_ns)
        step_ns = {use.node: use.optimizer_ns for use in self.timeline.nodes}
        for index, row in enumerate(self.rows):
            start, end = self.timeline.averaging_ns[row.stage]
            if end > start and row.device == 0:  # a stage on one node does not average
                yield self._closing_bar(index, BarKind.AVERAGING, start, end)
            if step_ns[row.node]:  # not known of the first iteration of a run
                yield self._closing_bar(index, BarKind.OPTIMIZER, averaged_ns, averaged_ns + step_ns[row.node])

    def _closing_bar(self, index: int, kind: BarKind, start: int, end: int) -> GanttBar:
        row = self.rows[index]
        hover = f"{kind} of stage {row.stage}\non {row.name}\n{span(start, end)}"
        return GanttBar(index, kind, start, end, None, None, None, NEUTRAL[kind], hover)


def kind_of(step: int, length: int) -> BarKind:
    """The kind of a step on a path of so many nodes."""
    if step < length:
        return BarKind.FORWARD
    if step == length:
        return BarKind.HEAD
    return BarKind.WEIGHTS if is_weights(step, length) else BarKind.BACKWARD


def shade(hue: str, kind: BarKind) -> str:
    """The hue of a task: lighter for forward passes, darker for backward passes."""
    shades = {BarKind.FORWARD: (255, 0.5), BarKind.BACKWARD: (0, 0.15), BarKind.WEIGHTS: (0, 0.5)}
    return mixed(hue, *shades.get(kind, (255, 0.0)))


def pale(hue: str) -> str:
    """The colour of what was planned, beside what was measured."""
    return mixed(hue, 255, 0.5)


def mixed(hue: str, towards: int, share: float) -> str:
    """The hue mixed with a share of black (0) or white (255)."""
    parts = (round((1 - share) * int(hue[at : at + 2], 16) + share * towards) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in parts)


def span(start_ns: int, end_ns: int) -> str:
    return f"{seconds(start_ns):.3f} to {seconds(end_ns):.3f} s ({seconds(end_ns - start_ns):.3f} s)"


def write_trace(plan: Plan, timeline: Timeline, path: Path) -> None:
    write_text(path, json.dumps(trace_events(plan, timeline), ensure_ascii=False) + "\n")


def trace_events(plan: Plan, timeline: Timeline, process: str = "plan") -> dict[str, Any]:
    """A Chrome trace; `process` names the track, to tell one plan from another when both are open."""
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


def copy_events(plan: Plan, copies: Mapping[int, Sequence[Sequence[int]]]) -> list[dict[str, Any]]:
    """Copies between host and device, in two rows for each node that has some: lane, microbatch, step, direction, start
    and end of each."""
    events = []
    for node, rows in copies.items():
        for direction, name in enumerate(("to device", "to host")):
            row = COPY_ROWS + 2 * node + direction
            label = f"{plan.cluster.nodes[node].name}: {name}"
            events.append(_event("M", row, name="thread_name", args={"name": label}))
            events.append(_event("M", row, name="thread_sort_index", args={"sort_index": row}))
            for lane, microbatch, step, way, start_ns, end_ns in rows:
                if way == direction:
                    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
                    args = {"lane": lane, "microbatch": microbatch, "step": step}
                    what = {"name": f"{name} lane {lane} #{microbatch}", "cat": "copy"}
                    events.append(_event("X", row, **what, **times, args=args))
    return events


def merged_traces(traces: list[dict[str, Any]]) -> dict[str, Any]:
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


@dataclass(frozen=True)
class RecordedGantt:
    """The Gantt chart of a recorded iteration: for every node as planned above and as measured below."""

    recorded: RecordedIteration

    @cached_property
    def rows(self) -> list[tuple[str, float]]:
        """Label and middle of every node; y grows downwards."""
        return [
            (f"stage {stage} · {name}", index + STAGE_GAP * stage)
            for index, (stage, name) in enumerate(self.recorded.rows)
        ]

    @cached_property
    def halves(self) -> dict[str, list[tuple[GanttBar, tuple[float, float]]]]:
        """What was planned, pale, and what was measured: the bars, each with its middle and height."""
        planned = [bar._replace(colour=pale(bar.colour)) for bar in self._bars(self.recorded.planned, "planned")]
        measured = self._bars(self.recorded.measured, "measured")
        return {
            "planned": [(bar, (self.rows[bar.row][1] - 0.23, 0.34)) for bar in planned],
            "measured": [(bar, (self.rows[bar.row][1] + 0.18, 0.44)) for bar in measured],
        }

    @property
    def shown_until_s(self) -> float:
        """Where planned averaging takes much longer than the passes, the picture ends with the passes."""
        bars = [*self.recorded.planned, *self.recorded.measured]
        whole_s = max(bar.end_s for bar in bars)
        last_s = max((bar.end_s for bar in bars if bar.kind in TASKS), default=whole_s)
        return whole_s if whole_s <= BRIEF * last_s else 1.05 * last_s

    def _bars(self, bars: Sequence[TraceBar], which: str) -> list[GanttBar]:
        hues = self.recorded.hues
        found = []
        for bar in bars:
            kind, of_task = KINDS[bar.kind], bar.lane >= 0
            colour = shade(hues.get(bar.lane, FAINT), kind) if of_task else NEUTRAL.get(kind, FAINT)
            times = (ns(bar.start_s), ns(bar.end_s))
            whose = f" of lane {bar.lane}, microbatch {bar.microbatch}" if of_task else ""
            stage, name = self.recorded.rows[bar.row]
            hover = f"{which}: {kind}{whose}\non {name}, stage {stage}\n{span(*times)}"
            if bar.waited_s and kind is not BarKind.WEIGHTS:
                hover += f"\nwaited {bar.waited_s:.3f} s"
            lane, microbatch, step = (bar.lane, bar.microbatch, bar.step) if of_task else (None, None, None)
            found.append(GanttBar(bar.row, kind, *times, lane, microbatch, step, colour, hover))
        return found
