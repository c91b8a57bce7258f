"""What stands out of the curves of a run: where nodes were lost, came back, and what was done about it."""

from __future__ import annotations

from typing import NamedTuple

from skippipe.report.picture import HUES
from skippipe.runs.history import History


class Sort(NamedTuple):
    name: str
    kinds: tuple[str, ...]
    colour: str
    plotly: str
    """Its symbol there …"""
    matplotlib: str
    """… and there."""


SORTS = (
    Sort("lost: a node or a link", ("gone", "cut"), HUES[2], "x", "X"),
    Sort("begun again, or paused", ("restarted", "paused", "recovered"), HUES[1], "triangle-up", "^"),
    Sort("repaired: another way or plan", ("rerouted", "replanned"), HUES[5], "diamond", "D"),
    Sort("back at work", ("able",), HUES[3], "circle", "o"),
    Sort("slow, or not finite", ("slow", "not-finite"), HUES[4], "square", "s"),
)


class Mark(NamedTuple):
    iteration: int
    height: int
    """Of marks in the same iteration, how many stand below it."""
    told: str


def marks_of(history: History) -> list[tuple[Sort, list[Mark]]]:
    """One mark for all events of a sort in an iteration; sorts that occur."""
    heights: dict[int, int] = {}
    found = []
    for sort in SORTS:
        told: dict[int, list[str]] = {}
        for event in history.events:
            if event.kind in sort.kinds:
                who = f"'{event.node}' " if event.node else ""
                told.setdefault(event.iteration, []).append(f"{event.kind}: {who}{event.text}")
        marks = []
        for iteration, lines in sorted(told.items()):
            marks.append(Mark(iteration, heights.get(iteration, 0), "\n".join(lines)))
            heights[iteration] = heights.get(iteration, 0) + 1
        if marks:
            found.append((sort, marks))
    return found
