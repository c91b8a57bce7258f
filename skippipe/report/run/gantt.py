"""What pages and images draw of a run: a recorded iteration as bars, for every node as planned above and as measured
below; and marks on the curves, where nodes were lost or came back. Pure geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from skippipe.cost_model import ns
from skippipe.report import gantt
from skippipe.report.gantt import BRIEF, NEUTRAL, STAGE_GAP, pale, shade, span
from skippipe.runs.gantt_data import KINDS, TASKS, RecordedIteration, TraceBar
from skippipe.runs.history import RunHistory
from skippipe.timeline import HUES, BarKind

PLANNED_PLACE, MEASURED_PLACE = (-0.23, 0.34), (0.18, 0.44)  # (below the middle of its row, height)
FAINT = "#888888"  # of lanes whose data node is not on record


@dataclass(frozen=True)
class RecordedGantt:
    recorded: RecordedIteration

    @cached_property
    def rows(self) -> list[tuple[str, float]]:
        """Label and middle of every node; y grows downwards."""
        return [
            (f"stage {stage} · {name}", index + STAGE_GAP * stage)
            for index, (stage, name) in enumerate(self.recorded.rows)
        ]

    @cached_property
    def planned(self) -> list[gantt.GanttBar]:
        return [bar._replace(colour=pale(bar.colour)) for bar in self._bars(self.recorded.planned, "planned")]

    @cached_property
    def measured(self) -> list[gantt.GanttBar]:
        return self._bars(self.recorded.measured, "measured")

    def places(self, bars: Sequence[gantt.GanttBar], place: tuple[float, float]) -> list[tuple[float, float]]:
        below, height = place
        return [(self.rows[bar.row][1] + below, height) for bar in bars]

    @property
    def shown_until_s(self) -> float:
        """Where planned averaging takes much longer than the passes, the picture ends with the passes."""
        bars = [*self.recorded.planned, *self.recorded.measured]
        whole_s = max(bar.end_s for bar in bars)
        last_s = max((bar.end_s for bar in bars if bar.kind in TASKS), default=whole_s)
        return whole_s if whole_s <= BRIEF * last_s else 1.05 * last_s

    def _bars(self, bars: Sequence[TraceBar], which: str) -> list[gantt.GanttBar]:
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
            found.append(gantt.GanttBar(bar.row, kind, *times, lane, microbatch, step, colour, hover))
        return found


class MarkKind(NamedTuple):
    """A kind of mark on the curves of a run."""

    name: str
    kinds: tuple[str, ...]
    colour: str
    plotly: str
    """Its symbol in plotly."""
    matplotlib: str
    """Its symbol in matplotlib."""


MARK_KINDS = (
    MarkKind("lost: a node or a link", ("gone", "cut"), HUES[2], "x", "X"),
    MarkKind("begun again, or paused", ("restarted", "paused", "recovered"), HUES[1], "triangle-up", "^"),
    MarkKind("repaired: another way or plan", ("rerouted", "replanned"), HUES[5], "diamond", "D"),
    MarkKind("back at work", ("able",), HUES[3], "circle", "o"),
    MarkKind("slow, or not finite", ("slow", "not-finite"), HUES[4], "square", "s"),
)


class Mark(NamedTuple):
    """Events of one kind in an iteration."""

    iteration: int
    height: int
    """How many marks of the same iteration are below it."""
    text: str


def marks_of(history: RunHistory) -> list[tuple[MarkKind, list[Mark]]]:
    """The kinds of marks that occur, each with one mark for all its events in an iteration."""
    heights: dict[int, int] = {}
    found = []
    for kind in MARK_KINDS:
        text: dict[int, list[str]] = {}
        for event in history.events:
            if event.kind in kind.kinds:
                who = f"'{event.node}' " if event.node else ""
                text.setdefault(event.iteration, []).append(f"{event.kind}: {who}{event.text}")
        marks = []
        for iteration, lines in sorted(text.items()):
            marks.append(Mark(iteration, heights.get(iteration, 0), "\n".join(lines)))
            heights[iteration] = heights.get(iteration, 0) + 1
        if marks:
            found.append((kind, marks))
    return found
