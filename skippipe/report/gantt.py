"""The Gantt chart of an iteration: the bars of every node in the page, the image and the trace, and their colours.

Pure geometry, without a drawing library. All microbatches of a data node have its hue everywhere: light in forward
passes, dark in backward passes, darker still for the weight gradients of a split backward. Time that a task
waited for its node (a collision) is a thin strip under the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from skippipe.cost_model import seconds
from skippipe.dispatch import is_weights
from skippipe.plan import Plan
from skippipe.timeline import HUES, BarKind, Task, Timeline

NEUTRAL = {BarKind.WAITING: "#9A9A9A", BarKind.AVERAGING: "#D9D9D9", BarKind.OPTIMIZER: "#4D4D4D"}
STAGE_GAP = 0.5  # rows of space between stages
BRIEF = 1.35  # an iteration this many times as long as its passes is shown whole


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
    """The row of a node."""

    node: int
    stage: int
    name: str
    y: float
    """Vertical position; grows downwards, with a gap between stages."""

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
        held = [(stage, node) for stage, held_by in enumerate(self.plan.stages) for node in held_by.nodes]
        return tuple(
            GanttRow(node, stage, self.plan.cluster.nodes[node].name, index + STAGE_GAP * stage)
            for index, (stage, node) in enumerate(held)
        )

    @cached_property
    def bars(self) -> tuple[GanttBar, ...]:
        return (*self._task_bars(), *self._closing_bars())

    @cached_property
    def data_nodes(self) -> tuple[int, ...]:
        """Data nodes, in the order in which they get their hues."""
        return tuple(dict.fromkeys(lane.path[0] for lane in self.plan.lanes))

    def hue(self, lane: int) -> str:
        return self.hue_of(self.plan.lanes[lane].path[0])

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
        row_of = {row.node: index for index, row in enumerate(self.rows)}
        for task in self.timeline.tasks:
            kind = kind_of(task.step, len(self.plan.lanes[task.lane].path))
            colour = shade(self.hue(task.lane), kind)
            hover = self._hover_text(task, kind)
            which = (task.lane, task.microbatch, task.step)
            if task.start_ns > task.ready_ns and kind is not BarKind.WEIGHTS:  # no microbatch waits for these
                waiting = (row_of[task.node], BarKind.WAITING, task.ready_ns, task.start_ns)
                yield GanttBar(*waiting, *which, NEUTRAL[BarKind.WAITING], f"waiting for the node: {hover}")
            yield GanttBar(row_of[task.node], kind, task.start_ns, task.end_ns, *which, colour, hover)

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
        """Averaging on every node of its stage, then the optimizer step once all stages are averaged."""
        if not self.timeline.averaging_ns:
            return
        averaged_ns = max(end for _, end in self.timeline.averaging_ns)
        step_ns = {use.node: use.optimizer_ns for use in self.timeline.nodes}
        for index, row in enumerate(self.rows):
            start, end = self.timeline.averaging_ns[row.stage]
            if end > start:  # a stage on one node does not average
                yield self._closing_bar(index, BarKind.AVERAGING, start, end)
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
    """Lighter for forward passes, darker for backward passes."""
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
