"""Paths through every stage, for passes that are forward only: of held-out samples, and of the teacher.

A microbatch that leaves stages out may learn from the whole model (distillation): it also passes all stages, from its
data node and back to it, and its head waits for what comes back. These passes keep nothing on the nodes. A lane has one
for the microbatch that is on its way; when that is back, the next microbatch's begins. `event_loop` has their rules of
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from skippipe.constraints import NodePath, circle
from skippipe.errors import UserError
from skippipe.jit import Ints
from skippipe.plan import Plan

NO_WAY = 2**60  # ns
SLOWEST_NS = 2**46  # as which hops count that take longer, some 20 hours: so that sums stay whole numbers of 64 bits
CROWDED = 32  # microbatches beside which a way counts twice: on `published20` from 16 to 64 it hardly matters


class Start(NamedTuple):
    """Where a path begins and ends."""

    data_node: int
    microbatches: int = 1
    """Number of microbatches that take this path."""
    through: Mapping[int, int] = MappingProxyType({})
    """Stage → the node that the path takes there."""


def whole_paths(plan: Plan, starts: Sequence[Start], nodes: Sequence[Collection[int]]) -> list[NodePath | None]:
    """Paths through every stage in its order and back, over these `nodes` of each stage; None: there is no way.

    One path after another takes the way that is shortest beside those before it: with u microbatches on them already, a
    node or link counts 1 + u / `CROWDED` times what it takes for one.
    """
    costs, reachable = plan.costs, plan.cluster.bandwidth_bytes_per_s > 0
    activation_ns = costs.flight_ns + costs.transmit_ns[0]
    hop_ns = np.where(reachable, np.minimum(activation_ns, SLOWEST_NS), NO_WAY)
    stages = [np.array(sorted(each), dtype=np.int64) for each in nodes]
    on_node, on_link = np.zeros(costs.nodes, np.int64), np.zeros(hop_ns.shape, np.int64)

    def way_ns(senders: Ints, receivers: Ints) -> Ints:
        pairs = np.ix_(senders, receivers)
        return np.where(hop_ns[pairs] < NO_WAY, hop_ns[pairs] * (CROWDED + on_link[pairs]) // CROWDED, NO_WAY)

    def path_from(start: Start) -> NodePath | None:
        home = np.array([start.data_node])
        here, taken_ns, before = home, np.zeros(1, np.int64), []
        taken = [np.array([start.through[at]]) if at in start.through else each for at, each in enumerate(stages)]
        for stage, there in enumerate(taken[1:], 1):
            if not len(there):
                return None
            arrival_ns = np.minimum(taken_ns[:, None] + way_ns(here, there), NO_WAY)
            own_ns = np.minimum(costs.forward_ns[stage, there], SLOWEST_NS) * (CROWDED + on_node[there]) // CROWDED
            before.append(here[arrival_ns.argmin(0)])
            here, taken_ns = there, np.minimum(arrival_ns.min(0) + own_ns, NO_WAY)
        back_ns = taken_ns + way_ns(here, home)[:, 0]
        if back_ns.min() >= NO_WAY:
            return None
        path = [int(here[back_ns.argmin()])]
        for there, came_from in zip(reversed(taken[1:]), reversed(before), strict=True):
            path.append(int(came_from[np.searchsorted(there, path[-1])]))
        return tuple(reversed(path))

    found = []
    for start in starts:
        path = path_from(start)
        found.append(path)
        for pair in circle(path or ()):
            on_node[pair[0]] += start.microbatches
            on_link[pair] += start.microbatches
    return found


def teacher_paths(plan: Plan, paths: Sequence[NodePath], there: Collection[int]) -> dict[int, NodePath] | None:
    """Lane → the path by which its microbatches pass the whole model, for lanes that leave stages out, and whose data
    node is `there`; over nodes that are. `paths` are those of all lanes, which may have changed since they were
    planned. None: for one of them there is none.

    Where hidden states teach, the teacher's path takes the nodes of the lane: they compare their own with them."""
    if not plan.workload.teacher:
        return {}
    nodes = [[node for node in stage.nodes if node in there] for stage in plan.stages]
    lanes = [lane for lane, path in enumerate(paths) if len(path) < len(plan.stages) and path[0] in there]
    starts = []
    for lane in lanes:
        same = [node for node in paths[lane] if node in there] if plan.workload.teacher == "hidden" else []
        through = {plan.stage_of[node]: node for node in same}
        starts.append(Start(paths[lane][0], plan.lanes[lane].microbatches, through))
    found = dict(zip(lanes, whole_paths(plan, starts, nodes), strict=True))
    known = {lane: path for lane, path in found.items() if path is not None}
    return known if len(known) == len(found) else None


def find_teacher_paths(plan: Plan) -> dict[int, NodePath] | None:
    """`teacher_paths` as planned, with all nodes there."""
    return teacher_paths(plan, [lane.path for lane in plan.lanes], {node for lane in plan.lanes for node in lane.path})


def planned_teacher_paths(plan: Plan) -> dict[int, NodePath]:
    """`find_teacher_paths` of a plan that has them; UserError if there are none."""
    paths = find_teacher_paths(plan)
    if paths is None:
        raise UserError(
            "workload.teacher: no path leads through every stage from each data node and back; training without "
            "recipe.distill needs none"
        )
    return paths


def hop_messages(plan: Plan, teacher: Mapping[int, NodePath]) -> Counter[tuple[int, int, int]]:
    """(pass, sender, receiver) → messages of an iteration on hops: activations are of pass 0, their gradients, on the
    way back, of pass 1. `teacher`: as `planned_teacher_paths` gives them, which have no gradients."""
    found: Counter[tuple[int, int, int]] = Counter()
    for lane in plan.lanes:
        for a, b in circle(lane.path):
            found[0, a, b] += lane.microbatches
            found[1, b, a] += lane.microbatches
    for number, path in teacher.items():
        for a, b in circle(path):
            found[0, a, b] += plan.lanes[number].microbatches
    return found


def links_in_use(plan: Plan, teacher: Mapping[int, NodePath]) -> frozenset[tuple[int, int]]:
    """Sender and receiver of all that nodes send each other in an iteration: on hops, and to average. `teacher`: as for
    `hop_messages`."""
    hops = {(sender, receiver) for _, sender, receiver in hop_messages(plan, teacher)}
    return frozenset(hops.union(*(stage.averaging.links for stage in plan.stages)))
