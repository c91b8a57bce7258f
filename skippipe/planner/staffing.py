"""Who should hold which stage when nodes come and go: where a newcomer helps most, and who should change places.

The load of a stage is the time in which its nodes together get through an iteration's microbatches. Stage 0 sees all
of them, every other stage that somebody holds an even share of the visits (CC3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from skippipe.averaging import best_ring, ring_ns
from skippipe.costs import Costs
from skippipe.errors import Infeasible
from skippipe.plan import Plan

SHORT = 1.8  # a stage ran short if one more node would divide its load by this much: about twice
GAIN = 0.2  # by which the largest load must fall, or nobody moves: whoever does has weights to fetch
RELIEF = 0.5  # of the time of the slowest stage is left if a node with bad links leaves its ring, or it stays


def task_ns(costs: Costs, stage: int, node: int) -> int:
    """What one microbatch takes of the node's time."""
    head_ns = int(costs.head_ns[node]) if stage == 0 else 0
    return int(costs.forward_ns[stage, node] + costs.backward_ns[stage, node]) + head_ns


def stage_for(plan: Plan, members: Sequence[Collection[int]], node: int) -> int:
    """The stage where a newcomer helps most: one that nobody holds, or else the one with the largest load.

    A stage whose averaging would lose more by the newcomer's links than its passes win comes after all others.
    """
    fits = [stage for stage in range(len(members)) if plan.costs.slots[stage, node] > 0]
    if not fits:
        name = plan.cluster.nodes[node].name
        raise Infeasible(f"'{name}' has too little memory for any stage and one microbatch: leave it out")
    loads = _loads(plan, members)

    def rank(stage: int) -> tuple[bool, bool, float, int]:
        if not members[stage]:
            return True, True, 0, -stage
        after = _moved(members, node, stage)
        saved_ns = loads[stage] - _loads(plan, after)[stage]
        lost_ns = _averaging_ns(plan, stage, after[stage]) - _averaging_ns(plan, stage, members[stage])
        return False, saved_ns > lost_ns, loads[stage], -stage

    return max(fits, key=rank)


def move_for(
    plan: Plan, members: Sequence[Collection[int]], able: Collection[int], staying: Collection[int] = ()
) -> tuple[int, int] | None:
    """A node that should leave its stage, and the stage that ran short of nodes; None if all should stay, as those in
    `staying` do.

    A stage that nobody holds takes a node from where it is missed least; one with too few only if the largest load of
    all falls clearly. No stage gives its last able node, but for stage 0, without which nothing runs.
    """
    empty = [stage for stage, nodes in enumerate(members) if not nodes]
    if empty:
        for stage in empty:
            offers = [offer for offer in _offers(plan, members, able, stage) if offer[-1] not in staying]
            found = min(offers, default=None)
            if found:
                return found[-1], stage
        return None
    loads = _loads(plan, members)
    moves = []
    for stage in range(len(members)):
        for loads_after, node in _others(plan, members, able, stage):
            short = loads[stage] >= SHORT * loads_after[stage]
            if short and max(loads_after) <= (1 - GAIN) * max(loads):
                giver = _holding(members, node)
                moves.append((max(loads_after), loads_after[giver], node, stage))
    before_ns = _longest_ns(plan, members)
    for *_, node, stage in sorted(moves):
        if _longest_ns(plan, _moved(members, node, stage)) < before_ns:  # a ring can lose more than the passes win
            return node, stage
    return _relief(plan, members, able)


def _relief(plan: Plan, members: Sequence[Collection[int]], able: Collection[int]) -> tuple[int, int] | None:
    """A node whose links make averaging in its stage so slow that it had better be on another, and which.

    A ring is as slow as its slowest link, and when a node is lost the others may be left with a bad one.
    """
    loads = _loads(plan, members)
    rings = [_averaging_ns(plan, stage, nodes) for stage, nodes in enumerate(members)]
    spans = [load + ring for load, ring in zip(loads, rings, strict=True)]
    worst = max(range(len(spans)), key=lambda stage: spans[stage])
    if rings[worst] <= loads[worst]:
        return None
    found = []
    for node in sorted(members[worst]):
        if not _able_beside(members[worst], able, node):
            continue
        for stage in range(len(members)):
            if stage == worst or plan.costs.slots[stage, node] < 1:
                continue
            after = _moved(members, node, stage)
            loads_after = _loads(plan, after)
            changed = {at: loads_after[at] + _averaging_ns(plan, at, after[at]) for at in (worst, stage)}
            longest = max(changed.get(at, span) for at, span in enumerate(spans))
            found.append((longest, node, stage))
    longest, node, stage = min(found, default=(spans[worst], -1, -1))
    return (node, stage) if longest <= RELIEF * spans[worst] else None


def _moved(members: Sequence[Collection[int]], node: int, stage: int) -> list[set[int]]:
    after = [set(nodes) - {node} for nodes in members]
    after[stage].add(node)
    return after


def _longest_ns(plan: Plan, members: Sequence[Collection[int]]) -> float:
    """Of all stages, with averaging after the passes."""
    loads = _loads(plan, members)
    return max(load + _averaging_ns(plan, stage, members[stage]) for stage, load in enumerate(loads))


def _averaging_ns(plan: Plan, stage: int, nodes: Collection[int]) -> int:
    return ring_ns(plan.costs, stage, best_ring(plan.costs, stage, sorted(nodes)))


def _offers(
    plan: Plan, members: Sequence[Collection[int]], able: Collection[int], stage: int
) -> Iterator[tuple[bool, float, float, int]]:
    """Nodes for a stage without any, the best the smallest: is it the last, the time its stage then takes, its load."""
    for loads_after, node in _others(plan, members, able, stage, last=stage == 0):
        giver = _holding(members, node)
        last = not _able_beside(members[giver], able, node)
        left = [other for other in members[giver] if other != node]
        yield last, loads_after[giver] + _averaging_ns(plan, giver, left), loads_after[stage], node


def _others(
    plan: Plan, members: Sequence[Collection[int]], able: Collection[int], stage: int, last: bool = False
) -> Iterator[tuple[list[float], int]]:
    """Nodes of other stages that could come to this one, with the loads of all stages then.

    With `last`, a stage other than 0 may give its last able node if it is not the last of all of them.
    """
    beyond_0 = {node for nodes in members[1:] for node in nodes if node in able}
    for giver, nodes in enumerate(members):
        for node in sorted(nodes):
            spared = _able_beside(nodes, able, node) or (last and len(beyond_0 - {node}) > 0)
            if giver == stage or not spared or plan.costs.slots[stage, node] < 1:
                continue
            yield _loads(plan, _moved(members, node, stage)), node


def _able_beside(nodes: Collection[int], able: Collection[int], node: int) -> bool:
    """Are there able nodes beside this one?"""
    return any(other in able and other != node for other in nodes)


def _holding(members: Sequence[Collection[int]], node: int) -> int:
    return next(stage for stage, nodes in enumerate(members) if node in nodes)


def _loads(plan: Plan, members: Sequence[Collection[int]]) -> list[float]:
    """Of every stage, in nanoseconds; 0 where nobody is."""
    held = sum(bool(nodes) for nodes in members[1:])
    share = sum(plan.exposure[1:]) / max(1, held)
    loads = []
    for stage, nodes in enumerate(members):
        rate = sum(1 / task_ns(plan.costs, stage, node) for node in nodes)
        demand = plan.microbatches if stage == 0 else share
        loads.append(demand / rate if nodes else 0.0)
    return loads
