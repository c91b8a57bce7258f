"""Bottlenecks: the critical path of an iteration added up by what it is spent on, and what else limits a plan.

Bottlenecks are the path added up by node, access line (a node's upload or download), link and stage. Links are named as
narrowly as the path allows: one direction, if the other has little to do with it; both directions between two nodes; or
all links of a node, if each of them costs clearly more than every other on the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from skippipe.collectives.transfers import merged, transfer_times
from skippipe.critical_path import Cause, CauseKind, Link, PathSegment
from skippipe.dispatch import steps
from skippipe.plan import Plan
from skippipe.simulator import simulate
from skippipe.timeline import Timeline, Timing
from skippipe.whole_paths import hop_messages, planned_teacher_paths

ONE_WAY = 0.7  # of what both directions cost: then it is this direction
CLEARLY = 1.5  # times as much


class CauseGroup(StrEnum):
    """Groups of causes, as they are shown."""

    COMPUTING = "computing"
    COLLISIONS = "collisions"
    MEMORY = "memory"
    TRANSFERS = "transfers"
    AVERAGING = "averaging"
    OPTIMIZER = "optimizer"


UPLOADS = (CauseKind.UPLOAD, CauseKind.AVERAGING_UPLOAD)
DOWNLOADS = (CauseKind.DOWNLOAD, CauseKind.AVERAGING_DOWNLOAD)
GROUP_OF_KIND = {
    CauseKind.COMPUTING: CauseGroup.COMPUTING,
    CauseKind.BUSY: CauseGroup.COLLISIONS,
    CauseKind.SLOT: CauseGroup.MEMORY,
    CauseKind.LATENCY: CauseGroup.TRANSFERS,
    CauseKind.BANDWIDTH: CauseGroup.TRANSFERS,
    CauseKind.QUEUE: CauseGroup.TRANSFERS,
    CauseKind.UPLOAD: CauseGroup.TRANSFERS,
    CauseKind.DOWNLOAD: CauseGroup.TRANSFERS,
    CauseKind.AVERAGING_LATENCY: CauseGroup.AVERAGING,
    CauseKind.AVERAGING_BANDWIDTH: CauseGroup.AVERAGING,
    CauseKind.AVERAGING_UPLOAD: CauseGroup.AVERAGING,
    CauseKind.AVERAGING_DOWNLOAD: CauseGroup.AVERAGING,
    CauseKind.OPTIMIZER: CauseGroup.OPTIMIZER,
}


@dataclass(frozen=True)
class Bottleneck:
    """A part of the critical path that one node, link or stage accounts for."""

    group: CauseGroup
    causes: dict[Cause, int]
    """Nanoseconds of every cause, the largest first."""
    node: int | None = None
    """The node; of transfers, the one that has all the links, or, if there are none, the access line."""
    stage: int | None = None
    """The stage that averages."""

    @property
    def ns(self) -> int:
        return sum(self.causes.values())

    @property
    def links(self) -> list[Link]:
        """The links involved, the costliest first."""
        return [*dict.fromkeys((cause.node, cause.to) for cause in self.causes if cause.to is not None)]

    def at(self, *kinds: CauseKind) -> list[int]:
        """Nodes that have causes of these kinds, the costliest first."""
        return [*dict.fromkeys(cause.node for cause in self.causes if cause.kind in kinds)]

    def of(self, *kinds: CauseKind) -> int:
        """Nanoseconds of causes of these kinds."""
        return sum(ns for cause, ns in self.causes.items() if cause.kind in kinds)


def time_by_cause(path: Iterable[PathSegment]) -> dict[Cause, int]:
    """Nanoseconds of every cause; they add up to the iteration."""
    causes: Counter[Cause] = Counter()
    for piece in path:
        causes[piece.cause] += piece.took_ns
    return dict(causes.most_common())


def time_by_group(causes: dict[Cause, int]) -> dict[CauseGroup, int]:
    """Nanoseconds of every group of causes."""
    found: Counter[CauseGroup] = Counter()
    for cause, ns in causes.items():
        found[GROUP_OF_KIND[cause.kind]] += ns
    return dict(found.most_common())


def bottlenecks(causes: dict[Cause, int]) -> list[Bottleneck]:
    """The bottlenecks, the largest first; every cause is in one of them."""
    at_nodes: dict[tuple[CauseGroup, int, bool], dict[Cause, int]] = {}  # downloads are apart from uploads
    averaged: dict[int, dict[Cause, int]] = {}
    over_links: dict[Link, dict[Cause, int]] = {}
    for cause, ns in causes.items():
        if cause.stage is not None:
            averaged.setdefault(cause.stage, {})[cause] = ns
        elif cause.to is not None:
            over_links.setdefault((cause.node, cause.to), {})[cause] = ns
        else:
            group = GROUP_OF_KIND[cause.kind]
            at_nodes.setdefault((group, cause.node, cause.kind is CauseKind.DOWNLOAD), {})[cause] = ns
    found = [Bottleneck(what, each, node=node) for (what, node, _), each in at_nodes.items()]
    found += [Bottleneck(CauseGroup.AVERAGING, each, stage=stage) for stage, each in averaged.items()]
    found += _transfers(over_links)
    return sorted(found, key=lambda limit: -limit.ns)


def _transfers(over_links: dict[Link, dict[Cause, int]]) -> list[Bottleneck]:
    """Bottlenecks of links, merged where that says more."""
    cost = {link: sum(causes.values()) for link, causes in over_links.items()}
    found = []
    far = _distant_node(cost)
    if far is not None:
        its = [link for link in over_links if far in link]
        found.append(Bottleneck(CauseGroup.TRANSFERS, _merged(over_links[link] for link in its), node=far))
        cost = {link: ns for link, ns in cost.items() if link not in its}
    for pair, ns in _pairs(cost).items():
        ways = [link for link in (pair, pair[::-1]) if link in cost]
        apart = any(cost[link] >= ONE_WAY * ns for link in ways)
        for group in [[link] for link in ways] if apart else [ways]:
            found.append(Bottleneck(CauseGroup.TRANSFERS, _merged(over_links[link] for link in group)))
    return found


def _pairs(cost: dict[Link, int]) -> dict[Link, int]:
    """The cost of both directions together."""
    found: Counter[Link] = Counter()
    for (a, b), ns in cost.items():
        found[min(a, b), max(a, b)] += ns
    return dict(found)


def _distant_node(cost: dict[Link, int]) -> int | None:
    """The node that has several links on the path, each of which costs clearly more than every other link."""
    pairs = _pairs(cost)
    for node in sorted({end for pair in pairs for end in pair}):
        own = [ns for pair, ns in pairs.items() if node in pair]
        others = [ns for pair, ns in pairs.items() if node not in pair]
        if len(own) > 1 and others and min(own) > CLEARLY * max(others):
            return node
    return None


def _merged(groups: Iterable[dict[Cause, int]]) -> dict[Cause, int]:
    every = {cause: ns for causes in groups for cause, ns in causes.items()}
    return dict(sorted(every.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class SlowestLane:
    """The lane whose last microbatch is back last."""

    lane: int
    back_ns: int
    alone_ns: int
    """Nanoseconds of all its microbatches if there were no other lanes."""


def slowest_lane(plan: Plan, timeline: Timeline) -> SlowestLane:
    back_ns = _back_ns(plan, timeline)
    number = back_ns.index(max(back_ns))
    alone = replace(plan, lanes=(plan.lanes[number],), workload=replace(plan.workload, teacher=""))
    return SlowestLane(number, back_ns[number], max(_back_ns(alone, simulate(alone, timeline.timing))))


def _back_ns(plan: Plan, timeline: Timeline) -> list[int]:
    """When each lane's last microbatch is back."""
    back_ns = [0] * len(plan.lanes)
    for task in timeline.tasks:
        if task.step < steps(len(plan.lanes[task.lane].path)):
            back_ns[task.lane] = max(back_ns[task.lane], task.end_ns)
    return back_ns


def busiest_node(timeline: Timeline) -> tuple[int, int]:
    """The node that works longest, and for how many nanoseconds, of several workers on average."""
    use = max(timeline.nodes, key=lambda each: each.worker_busy_ns)
    return use.node, use.worker_busy_ns


def busiest_link(plan: Plan, timeline: Timeline) -> tuple[Link, int]:
    """The link that sends longest, and for how many nanoseconds, all its messages one after another."""
    sends: Counter[Link] = Counter()
    for message, count in hop_messages(plan, planned_teacher_paths(plan)).items():
        sends[message[1:]] += count * int(plan.costs.transmit_ns[message])
    if timeline.timing is Timing.FULL:
        averagings = [stage.averaging for stage in plan.stages]
        schedule = merged(plan.costs, averagings)
        times = transfer_times(plan.costs, averagings, range(len(averagings)))
        took_ns = times.transmit_ns.tolist()
        for sender, receiver, taken_ns in zip(schedule.senders, schedule.receivers, took_ns, strict=True):
            sends[int(sender), int(receiver)] += taken_ns
    return max(sorted(sends.items()), key=lambda entry: entry[1])
