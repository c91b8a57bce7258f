"""Changes that the critical path of a plan gives reason to try, each with that reason.

What is not on the path is left alone: had it been better, the iteration would have ended no sooner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import permutations

from skippipe import constraints
from skippipe.codecs import smaller_than
from skippipe.critical_path import (
    Bottleneck,
    CauseGroup,
    CauseKind,
    Link,
    bottlenecks,
    critical_path,
    slowest_lane,
    time_by_cause,
)
from skippipe.dispatch import Dispatch
from skippipe.plan import Plan
from skippipe.planner.whatif.edits import (
    faster_node,
    half_overhead,
    moved_microbatch,
    one_more_slot,
    other_backward,
    other_dispatch,
    other_ring,
    shorter_links,
    smaller_messages,
    wider_links,
    with_twin,
    without_node,
)
from skippipe.timeline import Timeline

LIMITS = 12  # of the critical path, the largest: what they blame is tried
NODES_TO_DROP = 3  # likewise, where paths are searched anew
SLOTS_TO_ADD = 2
LIMITS_TO_PLAN_FOR = 3
ORDERS_UP_TO = 6  # nodes of a ring: 5! orders are tried one by one

DOING = {
    CauseGroup.COMPUTING: "computing there",
    CauseGroup.COLLISIONS: "waiting for it",
    CauseGroup.OPTIMIZER: "its optimizer step",
}


class EditKind(StrEnum):
    """Of changes, from the smallest to the largest: of two that gain the same, the first is the better advice."""

    MICROBATCHES = "microbatches"
    RING = "ring"
    DISPATCH = "dispatch"
    SPLIT_BACKWARD = "split-backward"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    SLOT = "slot"
    SPEED = "speed"
    LESS = "node-less"
    MORE = "node-more"
    WIRE = "wire"
    OVERHEAD = "overhead"
    SEARCH = "search"
    """No change but other paths."""


@dataclass(frozen=True)
class Proposal:
    sort: EditKind
    what: str
    because: str
    variants: Callable[[], Iterable[Callable[[], Plan]]]
    """Of the changed plan, the best of which counts; Infeasible where there is none."""


class CandidateEdits:
    """What the critical path gives reason to try."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.limits = bottlenecks(time_by_cause(critical_path(plan, timeline)))
        self.lanes_through = {
            node: len(lanes) for node, lanes in constraints.lanes_through(lane.path for lane in plan.lanes).items()
        }

    def _name(self, node: int) -> str:
        return f"'{self.plan.cluster.nodes[node].name}'"

    def _share(self, ns: int) -> str:
        return f"{ns / self.timeline.iteration_ns:.0%}"

    def _blamed_ns(self, *whats: CauseGroup) -> int:
        return sum(limit.ns for limit in self.limits if limit.what in whats)

    # with the paths of the plan

    def for_these_paths(self) -> Iterator[Proposal]:
        for limit in self.limits[:LIMITS]:
            yield from self._relief(limit)
        yield from self._other_rings()
        yield from self._other_orders()
        yield from self._moved_microbatches()

    def _relief(self, limit: Bottleneck) -> Iterator[Proposal]:
        """What this limit is about, made better."""
        node = limit.node
        if limit.what in (CauseGroup.TRANSFERS, CauseGroup.AVERAGING):
            yield from self._better_links(limit)
        elif node is not None and limit.what is CauseGroup.MEMORY:
            yield self._proposal(EditKind.SLOT, *self._slot(node), partial(one_more_slot, self.plan, node))
        elif node is not None:
            what = f"{self._name(node)} twice as fast"
            because = f"{DOING[limit.what]}: {self._share(limit.ns)} of the time"
            yield self._proposal(EditKind.SPEED, what, because, partial(faster_node, self.plan, node))

    def _proposal(self, sort: EditKind, what: str, because: str, changed: Callable[[], Plan]) -> Proposal:
        return Proposal(sort, what, because, lambda: [changed])

    def _slot(self, node: int) -> tuple[str, str]:
        slots = self.plan.slots[node]
        what = f"one more memory slot on {self._name(node)}"
        return what, f"{self.lanes_through.get(node, 0)} lanes through {slots} slots"

    def _better_links(self, limit: Bottleneck) -> Iterator[Proposal]:
        links = limit.links if limit.what is CauseGroup.TRANSFERS else limit.links[:1]
        where = self._where(links, limit.node)
        sending = limit.of(CauseKind.BANDWIDTH, CauseKind.QUEUE, CauseKind.AVERAGING_BANDWIDTH)
        flying = limit.of(CauseKind.LATENCY, CauseKind.AVERAGING_LATENCY)
        there = "while averaging" if limit.what is CauseGroup.AVERAGING else "there"
        if sending:
            yield self._proposal(
                EditKind.BANDWIDTH,
                f"twice the bandwidth {where}",
                f"sending {there}: {self._share(sending)} of the time",
                partial(wider_links, self.plan, links),
            )
        if flying and any(self.plan.cluster.latency_s[link] for link in links):
            yield self._proposal(
                EditKind.LATENCY,
                f"half the latency {where}",
                f"latency {there}: {self._share(flying)} of the time",
                partial(shorter_links, self.plan, links),
            )

    def _where(self, links: list[Link], node: int | None) -> str:
        (a, b), *others = links
        if node is not None:
            return f"of all links of {self._name(node)} in use"
        return f"between {self._name(a)} and {self._name(b)}" if others else f"from {self._name(a)} to {self._name(b)}"

    def _other_rings(self) -> Iterator[Proposal]:
        for limit in self.limits:
            stage = limit.stage
            if stage is None or len(self.plan.stages[stage].ring) < 3:
                continue
            because = f"averaging: {self._share(limit.ns)} of the time"
            what = f"another averaging order on stage {stage}"
            yield Proposal(EditKind.RING, what, because, partial(self._in_other_orders, stage))

    def _in_other_orders(self, stage: int) -> list[Callable[[], Plan]]:
        ring = self.plan.stages[stage].ring
        orders = [self.plan.costs.averaging_order(stage, ring)]
        if len(ring) <= ORDERS_UP_TO:
            orders = [(ring[0], *rest) for rest in permutations(ring[1:])]
        return [partial(other_ring, self.plan, stage, order) for order in orders]

    def _other_orders(self) -> Iterator[Proposal]:
        """Who goes next on a node, when weight gradients are computed, and what every message costs."""
        plan = self.plan
        waiting, working = (
            self._blamed_ns(CauseGroup.COLLISIONS, CauseGroup.MEMORY),
            self._blamed_ns(CauseGroup.COMPUTING),
        )
        if waiting:
            because = f"waiting on nodes: {self._share(waiting)} of the time"
            for other in Dispatch:
                if other is not plan.dispatch:
                    changed = partial(other_dispatch, plan, other)
                    yield self._proposal(EditKind.DISPATCH, f"dispatch {other}", because, changed)
        if waiting + working:
            what = "the backward whole" if plan.split_backward else "the backward split"
            because = f"computing and waiting: {self._share(waiting + working)} of the time"
            yield self._proposal(EditKind.SPLIT_BACKWARD, what, because, partial(other_backward, plan))
        sending = sum(limit.of(CauseKind.BANDWIDTH, CauseKind.QUEUE) for limit in self.limits)
        smaller = smaller_than(plan.workload.wire_dtype)
        if sending and smaller is not None:
            what = f"{smaller} instead of {plan.workload.wire_dtype} on the wire"
            because = f"sending: {self._share(sending)} of the time"
            yield self._proposal(EditKind.WIRE, what, because, partial(smaller_messages, plan, smaller))
        flying = sum(limit.of(CauseKind.LATENCY, CauseKind.AVERAGING_LATENCY) for limit in self.limits)
        if flying and plan.cluster.hop_overhead_s:
            because = f"latency and overhead: {self._share(flying)} of the time"
            overhead_s = plan.cluster.hop_overhead_s
            what = f"half the overhead of every hop, {overhead_s / 2:.3g} s"
            yield self._proposal(EditKind.OVERHEAD, what, because, partial(half_overhead, plan))

    def _moved_microbatches(self) -> Iterator[Proposal]:
        plan, slowest = self.plan, slowest_lane(self.plan, self.timeline).lane
        if len({len(lane.path) for lane in plan.lanes}) > 1:
            return
        for other in range(len(plan.lanes)):
            if other != slowest:
                what = f"a microbatch of lane {slowest} on lane {other}"
                because = f"lane {slowest} is back last"
                yield self._proposal(
                    EditKind.MICROBATCHES, what, because, partial(moved_microbatch, plan, slowest, other)
                )

    # with other paths

    def for_other_paths(self) -> Iterator[Proposal]:
        what = "other paths over the same nodes, searched a little longer"
        yield self._proposal(EditKind.SEARCH, what, "", lambda: self.plan)
        at_node = self._at_node()
        for limit in self.limits[:LIMITS_TO_PLAN_FOR]:
            yield from self._relief(limit)
        for node in [node for node, _ in at_node.most_common() if self._spared(node)][:NODES_TO_DROP]:
            because = f"it and its links: {self._share(at_node[node])} of the time"
            yield self._proposal(
                EditKind.LESS, f"without {self._name(node)}", because, partial(without_node, self.plan, node)
            )
        yield from self._more_nodes()
        waiting = {limit.node for limit in self.limits if limit.what is CauseGroup.MEMORY}
        full = [node for node, _ in at_node.most_common() if self._full(node) and node not in waiting]
        for node in full[:SLOTS_TO_ADD]:
            yield self._proposal(EditKind.SLOT, *self._slot(node), partial(one_more_slot, self.plan, node))

    def _at_node(self) -> Counter[int]:
        """What of the critical path a node has to do with, over its links too."""
        found: Counter[int] = Counter()
        for limit in self.limits:
            for cause, ns in limit.causes.items():
                for node in {cause.node, cause.node if cause.to is None else cause.to}:
                    found[node] += ns
        return found

    def _spared(self, node: int) -> bool:
        return len(self.plan.stages[self.plan.stage_of[node]].nodes) > 1

    def _full(self, node: int) -> bool:
        return self.lanes_through.get(node, 0) >= self.plan.slots[node]

    def _more_nodes(self) -> Iterator[Proposal]:
        """In the stage that the path blames most, and in the one that has fewest slots left."""
        plan = self.plan
        blame: Counter[int] = Counter()
        for limit in self.limits:
            if (
                limit.what in (CauseGroup.COMPUTING, CauseGroup.COLLISIONS, CauseGroup.MEMORY)
                and limit.node is not None
            ):
                blame[plan.stage_of[limit.node]] += limit.ns
        left = {
            stage: sum(plan.slots[node] - self.lanes_through.get(node, 0) for node in plan.stages[stage].nodes)
            for stage in blame
        }
        reasons: dict[int, str] = {}
        for stage, ns in blame.most_common(1):
            reasons[stage] = f"computing and waiting there: {self._share(ns)} of the time"
        for stage in sorted(left, key=lambda stage: (left[stage], -blame[stage]))[:1]:
            if left[stage] <= 0:
                reasons.setdefault(stage, "all its memory slots are taken")
        for stage, because in reasons.items():
            best = max(plan.stages[stage].nodes, key=self._merit)
            what = f"one more node like {self._name(best)} on stage {stage}"
            yield self._proposal(EditKind.MORE, what, because, partial(with_twin, plan, best))

    def _merit(self, node: int) -> tuple[float, int]:
        """Fast, then near to the others."""
        others = list(self.plan.stage_of)
        hops = self.plan.costs.hop_ns
        return self.plan.cluster.nodes[node].flops_per_s, -int(hops[node, others].sum() + hops[others, node].sum())
