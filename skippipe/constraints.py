"""The constraints of a plan, each defined once: planner, validator and runtime all use these functions.

CC1  stage 0 is visited first and never skipped.
CC2  stages come in the order of the model, except that neighbours may be swapped: whenever two stages are visited
     out of order, they are neighbours. At most `MAX_SWAPS` swaps in a path.
CC3  every stage but 0 is visited by the same number of microbatches of an iteration.
TC1  no node lies on more lanes than it has memory slots. (A lane has one microbatch in flight, so a node never holds
     more microbatches than it has slots.)
TC2  microbatches should not collide on a node. This one is measured, not obeyed: `simulate` reports collisions.

A path is a sequence of nodes; `visits` is the sequence of their stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skippipe.jit import kernel

MAX_SWAPS = 2
RULES = {
    "CC1": "a path begins on stage 0 and does not come back to it",
    "CC2": "stages come in the order of the model, but for swapped neighbours",
    "CC3": "every stage but 0 is visited by the same number of microbatches",
    "TC1": "no node lies on more lanes than it has memory slots",
}
"""Names of the constraints, and what each asks of a plan; TC2 asks for nothing that must hold."""

NodePath = tuple[int, ...]
"""The nodes of a path, from its data node on."""


def circle(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of each node with the next, and of the last with the first: the hops of a path, the edges of a ring."""
    return list(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))


def cc1_broken_at(visits: Sequence[int]) -> int | None:
    """The first hop at which stage 0 is missing or comes again; None: CC1 holds."""
    for hop, stage in enumerate(visits):
        if (hop == 0) != (stage == 0):
            return hop
    return 0 if not visits else None


@kernel
def cc2_step(highest: int, gap: int, swaps: int, stage: int) -> tuple[bool, int, int, int]:
    """One step of the CC2 check along a path: whether `stage` may follow, and the new state. It starts with (−1, 0, 0).

    `highest` is the highest stage so far; `gap` is 1 while the stage below it is unvisited and may still come, right
    now, as the second half of a swap.
    """
    if stage > highest:
        return True, stage, 1 if stage - 1 > highest else 0, swaps
    if gap == 1 and stage == highest - 1 and swaps < MAX_SWAPS:
        return True, highest, 0, swaps + 1
    return False, highest, gap, swaps


def cc2_broken_at(visits: Sequence[int]) -> int | None:
    """The first hop whose stage may not follow what came before it; None: CC2 holds."""
    state = (-1, 0, 0)
    for hop, stage in enumerate(visits):
        allowed, *after = cc2_step(*state, stage)
        if not allowed:
            return hop
        state = (after[0], after[1], after[2])
    return None


def exposure(visits: Iterable[Sequence[int]], microbatches: Iterable[int], stages: int) -> list[int]:
    """Exposure: how many microbatches visit each stage."""
    counts = [0] * stages
    for lane_visits, count in zip(visits, microbatches, strict=True):
        for stage in set(lane_visits):
            counts[stage] += count
    return counts


def cc3_uneven(counts: Sequence[int]) -> dict[int, int]:
    """Stage → its exposure, for the stages whose exposure is not the mean of stages 1 and up."""
    others = counts[1:]
    total = sum(others)
    return {stage: count for stage, count in enumerate(counts) if stage > 0 and count * len(others) != total}


def lanes_through(paths: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """Node → the lanes that it lies on."""
    through: dict[int, list[int]] = {}
    for lane, path in enumerate(paths):
        for node in dict.fromkeys(path):
            through.setdefault(node, []).append(lane)
    return through


def tc1_overfull(paths: Iterable[Sequence[int]], slots: Mapping[int, int]) -> dict[int, list[int]]:
    """Node → its lanes, for the nodes that lie on more lanes than they have slots."""
    return {node: lanes for node, lanes in lanes_through(paths).items() if len(lanes) > slots[node]}


def deadlock_cycle(paths: Sequence[Sequence[int]], slots: Mapping[int, int]) -> list[int] | None:
    """Nodes that lanes may hold and wait for in a circle, or None if no order of events can lock up.

    A forward pass waits only at an overfull node, and while it waits it holds the overfull nodes before it on its
    path. Backward passes need no new slot. So only a circle among overfull nodes can lock up; without one, the lane
    that waits at the last of them always comes free. A node without any slot is a circle by itself.
    """
    overfull = tc1_overfull(paths, slots)
    before: dict[int, set[int]] = {node: set() for node in overfull}
    for path in paths:
        crossed = [node for node in path if node in overfull]
        for position, node in enumerate(crossed):
            before[node].update(crossed[:position])
    for node in overfull:
        if slots[node] < 1:
            return [node, node]
    left = dict(before)
    while True:  # remove nodes that wait for no other, as long as there are any
        free = [node for node, held in left.items() if held.isdisjoint(left)]
        if not free:
            break
        for node in free:
            del left[node]
    if not left:
        return None
    trail = [min(left)]
    while trail[-1] not in trail[:-1]:
        trail.append(min(before[trail[-1]] & left.keys()))
    return list(reversed(trail[trail.index(trail[-1]) :]))
