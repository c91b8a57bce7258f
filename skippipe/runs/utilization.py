"""How busy every node was, as planned and as measured: means over the recorded iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from skippipe.cost_model import seconds
from skippipe.plan import Plan
from skippipe.runs.gantt_data import TASKS, GanttBar, GanttData

if TYPE_CHECKING:
    from skippipe.runs.history import RunHistory


class Utilization(NamedTuple):
    """What a node did in an iteration."""

    iteration_s: float
    busy_s: float
    collision_s: float
    """For how long tasks that were ready waited for the node, summed over the tasks."""

    @property
    def idle_s(self) -> float:
        return self.iteration_s - self.busy_s


class NodeUtilization(NamedTuple):
    name: str
    stage: int | None
    """In the last plan that is known; None: it holds none there."""
    planned: Utilization | None
    measured: Utilization | None
    slowdown: float | None
    """Times what the plan counted on that its tasks took at the end: a running mean, which forgets."""
    waited_for: int
    """How often it was named because an iteration took too long."""
    sent_bytes: int
    received_bytes: int


def node_utilization(history: RunHistory) -> list[NodeUtilization]:
    """By stage; those that hold none come last."""
    plan = history.last_plan or history.plan
    stage_of = {plan.cluster.nodes[node].name: stage for node, stage in plan.stage_of.items()} if plan else {}
    planned, measured = _recorded(history)
    if not planned and history.plan is not None:
        planned = _promised(history.plan)
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for (sender, receiver), count in history.links.items():
        sent[sender] += count
        received[receiver] += count
    waited_for = Counter(event.node for event in history.events if event.kind == "slow" and event.node)
    slowdowns = _slowdowns(history)
    names = dict.fromkeys([*stage_of, *planned, *measured, *sent, *received, *waited_for])
    found = [
        NodeUtilization(
            *(name, stage_of.get(name), planned.get(name), measured.get(name), slowdowns.get(name)),
            *(waited_for[name], sent[name], received[name]),
        )
        for name in names
    ]
    return sorted(found, key=lambda use: (use.stage is None, use.stage or 0))


def _recorded(history: RunHistory) -> tuple[dict[str, Utilization], dict[str, Utilization]]:
    """As planned for recorded iterations, and as measured in them."""
    planned: dict[str, list[Utilization]] = {}
    measured: dict[str, list[Utilization]] = {}
    for chart in history.charts:
        whole_s = history.row[chart.iteration].seconds
        if chart.planned:
            _add(planned, chart, chart.planned, max(bar.end_s for bar in chart.planned))
        if chart.measured and whole_s is not None:
            _add(measured, chart, chart.measured, whole_s)
    return _means(planned), _means(measured)


def _add(uses: dict[str, list[Utilization]], chart: GanttData, bars: Sequence[GanttBar], iteration_s: float) -> None:
    busy_s, collision_s = [0.0] * len(chart.rows), [0.0] * len(chart.rows)
    for bar in bars:
        if bar.kind in TASKS:
            busy_s[bar.row] += bar.end_s - bar.start_s
            collision_s[bar.row] += bar.waited_s
    for (_, name), *times in zip(chart.rows, busy_s, collision_s, strict=True):
        uses.setdefault(name, []).append(Utilization(iteration_s, *times))


def _means(uses: dict[str, list[Utilization]]) -> dict[str, Utilization]:
    return {name: Utilization(*map(fmean, zip(*found, strict=True))) for name, found in uses.items()}


def _promised(plan: Plan) -> dict[str, Utilization]:
    expected = plan.expected
    if expected is None:
        return {}
    return {
        plan.cluster.nodes[use.node].name: Utilization(
            expected.iteration_s, seconds(use.busy_ns), seconds(use.collision_ns)
        )
        for use in expected.nodes
    }


def _slowdowns(history: RunHistory) -> dict[str, float]:
    if history.plan is None or history.measured is None:
        return {}
    measured = {node.name: node.flops_per_s for node in history.measured.nodes}
    held = {history.plan.cluster.nodes[number].name for number in history.plan.stage_of}
    return {
        node.name: node.flops_per_s / measured[node.name]
        for node in history.plan.cluster.nodes
        if node.name in held and measured.get(node.name)
    }
