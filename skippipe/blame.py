"""What limits a plan: its critical path added up by node, link and stage, and who works most.

Links are named as narrowly as the path allows: one direction, if the other has little to do with it; both directions
between two nodes; or all links of a node, if each of them costs clearly more than every other on the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from skippipe.averaging import chunk_ns
from skippipe.critical import Cause, Kind, Piece
from skippipe.dispatch import steps
from skippipe.plan import Plan
from skippipe.rules import circle
from skippipe.simulate import simulate
from skippipe.timeline import Timeline, Timing

Link = tuple[int, int]

ONE_WAY = 0.7  # of what both directions cost: then it is this direction
CLEARLY = 1.5  # times as much


class What(StrEnum):
    """In the words of people: what takes the time."""

    COMPUTING = "computing"
    COLLISIONS = "collisions"
    MEMORY = "memory"
    TRANSFERS = "transfers"
    AVERAGING = "averaging"
    OPTIMIZER = "optimizer"


OF_KIND = {
    Kind.COMPUTING: What.COMPUTING,
    Kind.BUSY: What.COLLISIONS,
    Kind.SLOT: What.MEMORY,
    Kind.LATENCY: What.TRANSFERS,
    Kind.BANDWIDTH: What.TRANSFERS,
    Kind.QUEUE: What.TRANSFERS,
    Kind.AVERAGING_LATENCY: What.AVERAGING,
    Kind.AVERAGING_BANDWIDTH: What.AVERAGING,
    Kind.OPTIMIZER: What.OPTIMIZER,
}


@dataclass(frozen=True)
class Limit:
    """A part of the critical path for which one node, link or stage is the reason."""

    what: What
    causes: dict[Cause, int]
    """In nanoseconds, the largest first."""
    node: int | None = None
    """Of transfers: the one that has all the links."""
    stage: int | None = None
    """That is averaged."""

    @property
    def ns(self) -> int:
        return sum(self.causes.values())

    @property
    def links(self) -> list[Link]:
        """The costliest first."""
        return [*dict.fromkeys((cause.node, cause.to) for cause in self.causes if cause.to is not None)]

    def of(self, *kinds: Kind) -> int:
        """Nanoseconds of these kinds."""
        return sum(ns for cause, ns in self.causes.items() if cause.kind in kinds)


def blamed(path: Iterable[Piece]) -> dict[Cause, int]:
    """Nanoseconds of every cause; they add up to the iteration."""
    causes: Counter[Cause] = Counter()
    for piece in path:
        causes[piece.cause] += piece.took_ns
    return dict(causes.most_common())


def shares(causes: dict[Cause, int]) -> dict[What, int]:
    """The same in a few words."""
    found: Counter[What] = Counter()
    for cause, ns in causes.items():
        found[OF_KIND[cause.kind]] += ns
    return dict(found.most_common())


def limits(causes: dict[Cause, int]) -> list[Limit]:
    """Every cause in one of them; the largest first."""
    at_nodes: dict[tuple[What, int], dict[Cause, int]] = {}
    averaged: dict[int, dict[Cause, int]] = {}
    over_links: dict[Link, dict[Cause, int]] = {}
    for cause, ns in causes.items():
        if cause.stage is not None:
            averaged.setdefault(cause.stage, {})[cause] = ns
        elif cause.to is not None:
            over_links.setdefault((cause.node, cause.to), {})[cause] = ns
        else:
            at_nodes.setdefault((OF_KIND[cause.kind], cause.node), {})[cause] = ns
    found = [Limit(what, each, node=node) for (what, node), each in at_nodes.items()]
    found += [Limit(What.AVERAGING, each, stage=stage) for stage, each in averaged.items()]
    found += _transfers(over_links)
    return sorted(found, key=lambda limit: -limit.ns)


def _transfers(over_links: dict[Link, dict[Cause, int]]) -> list[Limit]:
    """Links, put together where that says more."""
    cost = {link: sum(causes.values()) for link, causes in over_links.items()}
    found = []
    far = _far_node(cost)
    if far is not None:
        its = [link for link in over_links if far in link]
        found.append(Limit(What.TRANSFERS, _together(over_links[link] for link in its), node=far))
        cost = {link: ns for link, ns in cost.items() if link not in its}
    for pair, ns in _pairs(cost).items():
        ways = [link for link in (pair, pair[::-1]) if link in cost]
        apart = any(cost[link] >= ONE_WAY * ns for link in ways)
        for group in [[link] for link in ways] if apart else [ways]:
            found.append(Limit(What.TRANSFERS, _together(over_links[link] for link in group)))
    return found


def _pairs(cost: dict[Link, int]) -> dict[Link, int]:
    """Both directions together."""
    found: Counter[Link] = Counter()
    for (a, b), ns in cost.items():
        found[min(a, b), max(a, b)] += ns
    return dict(found)


def _far_node(cost: dict[Link, int]) -> int | None:
    """The node that has several links on the path, each of which costs clearly more than every other link."""
    pairs = _pairs(cost)
    for node in sorted({end for pair in pairs for end in pair}):
        own = [ns for pair, ns in pairs.items() if node in pair]
        others = [ns for pair, ns in pairs.items() if node not in pair]
        if len(own) > 1 and others and min(own) > CLEARLY * max(others):
            return node
    return None


def _together(groups: Iterable[dict[Cause, int]]) -> dict[Cause, int]:
    every = {cause: ns for causes in groups for cause, ns in causes.items()}
    return dict(sorted(every.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class SlowestLane:
    """The one that is back last."""

    lane: int
    back_ns: int
    alone_ns: int
    """What all its microbatches would take if there were no other lanes."""


def slowest_lane(plan: Plan, timeline: Timeline) -> SlowestLane:
    back_ns = _back_ns(plan, timeline)
    number = back_ns.index(max(back_ns))
    alone = replace(plan, lanes=(plan.lanes[number],))
    return SlowestLane(number, back_ns[number], max(_back_ns(alone, simulate(alone, timeline.timing))))


def _back_ns(plan: Plan, timeline: Timeline) -> list[int]:
    """When each lane's last microbatch is back."""
    back_ns = [0] * len(plan.lanes)
    for task in timeline.tasks:
        if task.step < steps(len(plan.lanes[task.lane].path)):
            back_ns[task.lane] = max(back_ns[task.lane], task.end_ns)
    return back_ns


def busiest_node(timeline: Timeline) -> tuple[int, int]:
    """And for how long it is at work, in nanoseconds."""
    use = max(timeline.nodes, key=lambda each: each.busy_ns)
    return use.node, use.busy_ns


def busiest_link(plan: Plan, timeline: Timeline) -> tuple[Link, int]:
    """And for how long it sends, all its messages one after another, in nanoseconds."""
    sends: Counter[Link] = Counter()
    for lane in plan.lanes:
        for a, b in circle(lane.path):
            for link in ((a, b), (b, a)):
                sends[link] += lane.microbatches * int(plan.costs.transmit_ns[link])
    if timeline.timing is Timing.FULL:
        for stage, each in enumerate(plan.stages):
            members = len(each.ring)
            if members > 1:
                took_ns = chunk_ns(plan.costs, stage, members)
                for link in circle(each.ring):
                    sends[link] += 2 * (members - 1) * int(took_ns[link])
    return max(sorted(sends.items()), key=lambda entry: entry[1])
