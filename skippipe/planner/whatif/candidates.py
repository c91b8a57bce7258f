"""Candidate edits of a plan: those that its critical path gives reason to try, each with that reason.

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
from skippipe.bottlenecks import DOWNLOADS, UPLOADS, Bottleneck, CauseGroup, bottlenecks, slowest_lane, time_by_cause
from skippipe.codecs import smaller_than
from skippipe.collectives.schedule import Averaging
from skippipe.critical_path import CauseKind, Link, critical_path
from skippipe.dispatch import Dispatch
from skippipe.plan import Plan
from skippipe.planner.codec_prices import DEFAULT_PRICES
from skippipe.planner.whatif import edits
from skippipe.timeline import Timeline
from skippipe.value_ranges import DEVICES

BOTTLENECKS = 12  # of the critical path, the largest: what they blame is tried
NODES_TO_DROP = 3  # likewise, where paths are searched anew
SLOTS_TO_ADD = 2
BOTTLENECKS_TO_REPLAN = 3
ORDERS_UP_TO = 6  # nodes of a ring: 5! orders are tried one by one

ACTIVITY = {
    CauseGroup.COMPUTING: "computing there",
    CauseGroup.COLLISIONS: "waiting for it",
    CauseGroup.OPTIMIZER: "its optimizer step",
}


class EditKind(StrEnum):
    """Kinds of edits, from the smallest to the largest: of two that gain the same, the first is the better advice."""

    MICROBATCHES = "microbatches"
    AVERAGING = "averaging"
    DISPATCH = "dispatch"
    SPLIT_BACKWARD = "split-backward"
    BANDWIDTH = "bandwidth"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    LATENCY = "latency"
    SLOT = "slot"
    DEVICE = "device"
    SPEED = "speed"
    LESS = "node-less"
    MORE = "node-more"
    WIRE = "wire"
    OVERHEAD = "overhead"
    SEARCH = "search"
    """Other paths and no edit."""


@dataclass(frozen=True)
class Candidate:
    kind: EditKind
    what: str
    because: str
    variants: Callable[[], Iterable[Callable[[], Plan]]]
    """Variants of the edited plan, the best of which counts; a variant raises Infeasible where there is none."""


class CandidateEdits:
    """Candidate edits for the bottlenecks of a plan."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.bottlenecks = bottlenecks(time_by_cause(critical_path(plan, timeline)))
        self.lanes_through = {
            node: len(lanes) for node, lanes in constraints.lanes_through(lane.path for lane in plan.lanes).items()
        }

    def _name(self, node: int) -> str:
        return f"'{self.plan.cluster.nodes[node].name}'"

    def _share(self, ns: int) -> str:
        return f"{ns / self.timeline.iteration_ns:.0%}"

    def _time_ns(self, *groups: CauseGroup) -> int:
        return sum(bottleneck.ns for bottleneck in self.bottlenecks if bottleneck.group in groups)

    # with the paths of the plan

    def keeping_paths(self) -> Iterator[Candidate]:
        for bottleneck in self.bottlenecks[:BOTTLENECKS]:
            yield from self._edits_for(bottleneck)
        yield from self._other_averagings()
        yield from self._other_orders()
        yield from self._moved_microbatches()

    def _edits_for(self, bottleneck: Bottleneck) -> Iterator[Candidate]:
        """Edits that relieve a bottleneck."""
        node = bottleneck.node
        if bottleneck.group in (CauseGroup.TRANSFERS, CauseGroup.AVERAGING):
            yield from self._better_access(bottleneck)
            if bottleneck.links:
                yield from self._better_links(bottleneck)
        elif node is not None and bottleneck.group is CauseGroup.MEMORY:
            yield self._candidate(EditKind.SLOT, *self._slot(node), partial(edits.one_more_slot, self.plan, node))
        elif node is not None:
            what = f"{self._name(node)} twice as fast"
            because = f"{ACTIVITY[bottleneck.group]}: {self._share(bottleneck.ns)} of the time"
            yield self._candidate(EditKind.SPEED, what, because, partial(edits.faster_node, self.plan, node))
            if DEVICES.least < self.plan.cluster.nodes[node].devices < DEVICES.most:
                what = f"one more device in {self._name(node)}"
                yield self._candidate(EditKind.DEVICE, what, because, partial(edits.one_more_device, self.plan, node))

    def _candidate(self, kind: EditKind, what: str, because: str, changed: Callable[[], Plan]) -> Candidate:
        return Candidate(kind, what, because, lambda: [changed])

    def _slot(self, node: int) -> tuple[str, str]:
        slots = self.plan.slots[node]
        each = "each device of " if self.plan.workers[node] > 1 else ""
        what = f"one more memory slot on {each}{self._name(node)}"
        return what, f"{self.lanes_through.get(node, 0)} lanes through {slots} slots"

    def _better_links(self, bottleneck: Bottleneck) -> Iterator[Candidate]:
        links = bottleneck.links if bottleneck.group is CauseGroup.TRANSFERS else bottleneck.links[:1]
        where = self._where(links, bottleneck.node)
        sending = bottleneck.of(CauseKind.BANDWIDTH, CauseKind.QUEUE, CauseKind.AVERAGING_BANDWIDTH)
        flying = bottleneck.of(CauseKind.LATENCY, CauseKind.AVERAGING_LATENCY)
        there = "while averaging" if bottleneck.group is CauseGroup.AVERAGING else "there"
        if sending:
            yield self._candidate(
                EditKind.BANDWIDTH,
                f"twice the bandwidth {where}",
                f"sending {there}: {self._share(sending)} of the time",
                partial(edits.wider_links, self.plan, links),
            )
        if flying and any(self.plan.cluster.latency_s[link] for link in links):
            yield self._candidate(
                EditKind.LATENCY,
                f"half the latency {where}",
                f"latency {there}: {self._share(flying)} of the time",
                partial(edits.shorter_links, self.plan, links),
            )

    def _better_access(self, bottleneck: Bottleneck) -> Iterator[Candidate]:
        """Twice the upload and the download that cost most."""
        there = "while averaging" if bottleneck.group is CauseGroup.AVERAGING else "there"
        for kind, causes, changed in (
            (EditKind.UPLOAD, UPLOADS, edits.faster_upload),
            (EditKind.DOWNLOAD, DOWNLOADS, edits.faster_download),
        ):
            for node in bottleneck.at(*causes)[:1]:
                what = f"twice the {kind} of {self._name(node)}"
                because = f"sending through {kind}s {there}: {self._share(bottleneck.of(*causes))} of the time"
                yield self._candidate(kind, what, because, partial(changed, self.plan, node))

    def _where(self, links: list[Link], node: int | None) -> str:
        (a, b), *others = links
        if node is not None:
            return f"of all links of {self._name(node)} in use"
        return f"between {self._name(a)} and {self._name(b)}" if others else f"from {self._name(a)} to {self._name(b)}"

    def _other_averagings(self) -> Iterator[Candidate]:
        for bottleneck in self.bottlenecks:
            stage = bottleneck.stage
            if stage is None or len(self.plan.stages[stage].ring) < 3:
                continue
            because = f"averaging: {self._share(bottleneck.ns)} of the time"
            what = f"another way to average on stage {stage}"
            yield Candidate(EditKind.AVERAGING, what, because, partial(self._averaged_otherwise, stage))

    def _averaged_otherwise(self, stage: int) -> list[Callable[[], Plan]]:
        ring = self.plan.stages[stage].ring
        ways = [self.plan.costs.averaging(stage, ring)]
        if len(ring) <= ORDERS_UP_TO:
            ways += [Averaging((ring[0], *rest)) for rest in permutations(ring[1:])]
        return [partial(edits.other_averaging, self.plan, stage, way) for way in ways]

    def _other_orders(self) -> Iterator[Candidate]:
        """Edits of dispatch, of when weight gradients are computed, and of what every message costs."""
        plan = self.plan
        waiting, working = (
            self._time_ns(CauseGroup.COLLISIONS, CauseGroup.MEMORY),
            self._time_ns(CauseGroup.COMPUTING),
        )
        if waiting:
            because = f"waiting on nodes: {self._share(waiting)} of the time"
            for other in Dispatch:
                if other is not plan.dispatch:
                    changed = partial(edits.other_dispatch, plan, other)
                    yield self._candidate(EditKind.DISPATCH, f"dispatch {other}", because, changed)
        if waiting + working:
            what = "the backward whole" if plan.split_backward else "the backward split"
            because = f"computing and waiting: {self._share(waiting + working)} of the time"
            yield self._candidate(EditKind.SPLIT_BACKWARD, what, because, partial(edits.other_backward, plan))
        hops = (CauseKind.BANDWIDTH, CauseKind.QUEUE, CauseKind.UPLOAD, CauseKind.DOWNLOAD)
        sending = sum(bottleneck.of(*hops) for bottleneck in self.bottlenecks)
        measured = [codec for codec, price in DEFAULT_PRICES.items() if price.activations is not None]
        smaller = smaller_than(plan.workload.wire_dtype, measured)
        if sending and smaller is not None:
            what = f"{smaller} instead of {plan.workload.wire_dtype} on the wire"
            what += ", on links that have that" if plan.workload.wire_dtypes else ""
            because = f"sending: {self._share(sending)} of the time"
            yield self._candidate(EditKind.WIRE, what, because, partial(edits.smaller_messages, plan, smaller))
        flying = sum(bottleneck.of(CauseKind.LATENCY, CauseKind.AVERAGING_LATENCY) for bottleneck in self.bottlenecks)
        if flying and plan.cluster.hop_overhead_s:
            because = f"latency and overhead: {self._share(flying)} of the time"
            overhead_s = plan.cluster.hop_overhead_s
            what = f"half the overhead of every hop, {overhead_s / 2:.3g} s"
            yield self._candidate(EditKind.OVERHEAD, what, because, partial(edits.half_overhead, plan))

    def _moved_microbatches(self) -> Iterator[Candidate]:
        plan, slowest = self.plan, slowest_lane(self.plan, self.timeline).lane
        if len({len(lane.path) for lane in plan.lanes}) > 1:
            return
        for other in range(len(plan.lanes)):
            if other != slowest:
                what = f"a microbatch of lane {slowest} on lane {other}"
                because = f"lane {slowest} is back last"
                yield self._candidate(
                    EditKind.MICROBATCHES, what, because, partial(edits.moved_microbatch, plan, slowest, other)
                )

    # with other paths

    def replanning_paths(self) -> Iterator[Candidate]:
        what = "other paths over the same nodes, searched a little longer"
        yield self._candidate(EditKind.SEARCH, what, "", lambda: self.plan)
        at_node = self._at_node()
        for bottleneck in self.bottlenecks[:BOTTLENECKS_TO_REPLAN]:
            yield from self._edits_for(bottleneck)
        for node in [node for node, _ in at_node.most_common() if self._spared(node)][:NODES_TO_DROP]:
            because = f"it and its links: {self._share(at_node[node])} of the time"
            yield self._candidate(
                EditKind.LESS, f"without {self._name(node)}", because, partial(edits.without_node, self.plan, node)
            )
        yield from self._more_nodes()
        waiting = {bottleneck.node for bottleneck in self.bottlenecks if bottleneck.group is CauseGroup.MEMORY}
        full = [node for node, _ in at_node.most_common() if self._full(node) and node not in waiting]
        for node in full[:SLOTS_TO_ADD]:
            yield self._candidate(EditKind.SLOT, *self._slot(node), partial(edits.one_more_slot, self.plan, node))

    def _at_node(self) -> Counter[int]:
        """Nanoseconds of the critical path by the nodes involved, over their links too."""
        found: Counter[int] = Counter()
        for bottleneck in self.bottlenecks:
            for cause, ns in bottleneck.causes.items():
                for node in {cause.node, cause.node if cause.to is None else cause.to}:
                    found[node] += ns
        return found

    def _spared(self, node: int) -> bool:
        return len(self.plan.stages[self.plan.stage_of[node]].nodes) > 1

    def _full(self, node: int) -> bool:
        return self.lanes_through.get(node, 0) >= self.plan.slots[node]

    def _more_nodes(self) -> Iterator[Candidate]:
        """One more node for the stage with most time on the path, and for the one with fewest slots left."""
        plan = self.plan
        blame: Counter[int] = Counter()
        for bottleneck in self.bottlenecks:
            if (
                bottleneck.group in (CauseGroup.COMPUTING, CauseGroup.COLLISIONS, CauseGroup.MEMORY)
                and bottleneck.node is not None
            ):
                blame[plan.stage_of[bottleneck.node]] += bottleneck.ns
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
            yield self._candidate(EditKind.MORE, what, because, partial(edits.with_twin, plan, best))

    def _merit(self, node: int) -> tuple[float, int]:
        """Sort key for the node to copy: fast, then near to the others."""
        others = list(self.plan.stage_of)
        hops = self.plan.costs.hop_ns
        speed = self.plan.cluster.nodes[node].flops_per_s * self.plan.workers[node]
        return speed, -int(hops[node, others].sum() + hops[others, node].sum())
