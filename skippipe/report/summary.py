"""Key figures, each with its unit, in the same words on every page and terminal; and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippipe.cost_model import seconds
from skippipe.plan import Plan
from skippipe.timeline import Timeline, Timing, ranges_text

NOTHING = "–"  # in a cell without a figure
TIMING_IN_WORDS = {
    Timing.FULL: "full: queues on links, gradient averaging and the optimizer step are counted",
    Timing.CONTENTION_ONLY: "contention-only: the iteration ends with the last backward pass, averaging is not counted",
}


def plan_figures(plan: Plan) -> list[tuple[str, str]]:
    """Key figures of a plan."""
    return [
        ("cluster", plan.cluster.name),
        ("model", plan.workload.model.name),
        ("strategy", plan.strategy),
        ("nodes", f"{len(plan.stage_of)}"),
        ("stages", f"{len(plan.stages)}"),
        ("lanes", f"{len(plan.lanes)}"),
        ("microbatches", f"{plan.microbatches}"),
        ("skipped", f"{plan.skipped:.0%} of the stages, on average"),
        ("dispatch", str(plan.dispatch)),
        ("backward", "split: weight gradients fill idle time" if plan.split_backward else "whole"),
    ]


def timeline_figures(timeline: Timeline) -> list[tuple[str, str]]:
    """Key figures of an iteration."""
    busy_ns = sum(use.busy_ns for use in timeline.nodes)
    share = busy_ns / max(1, len(timeline.nodes) * timeline.iteration_ns)
    return [
        ("timing", TIMING_IN_WORDS[timeline.timing]),
        ("iteration", f"{timeline.iteration_s:.2f} s"),
        ("last backward ends", f"at {seconds(timeline.last_backward_ns):.2f} s"),
        *_averaging_figure(timeline),
        ("nodes at work", f"{share:.0%} of the iteration, on average"),
        ("collisions", f"{timeline.collision_s:.2f} s of waiting for a busy node or a free slot, over all tasks"),
        ("moved", f"{timeline.bytes_moved / 1e9:.2f} GB"),
    ]


def _averaging_figure(timeline: Timeline) -> list[tuple[str, str]]:
    spans = timeline.averaging_ns
    if not spans:
        return []
    slowest = max(range(len(spans)), key=lambda stage: spans[stage][1] - spans[stage][0])
    start, end = spans[slowest]
    return [
        ("averaging", f"{seconds(end - start):.2f} s in the slowest stage, {slowest}; done at {seconds(end):.2f} s")
    ]


def scaled(count: float, units: Sequence[str]) -> tuple[float, str]:
    """A number in the unit that makes it short; each unit is a thousand times the one before."""
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return count, units[power]


def lanes_named(numbers: list[int]) -> str:
    return f"lane {numbers[0]}" if len(numbers) == 1 else f"lanes {ranges_text(numbers)}"


def equal_lanes(plan: Plan) -> list[list[int]]:
    """Groups of lanes with the same path and microbatches, which are shown as one."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, lane in enumerate(plan.lanes):
        groups.setdefault((lane.path, lane.microbatches), []).append(number)
    return list(groups.values())


@dataclass(frozen=True)
class Table:
    """A table of text and figures, shown by pages, terminals and documents."""

    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n" + "\n".join(cells) + (f"\n\n{self.note}" if self.note else "") + "\n"
