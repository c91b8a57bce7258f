"""The routes of microbatches in an iteration: the lanes of the plan, and how they change when nodes are lost.

A lost node's place on a path goes to a replica, or is skipped. A path keeps its length, so the steps of microbatches
on their way keep their numbers (see `dispatch`); the steps of a skipped place are left out.

A replica that takes a place over gets what it needs from its neighbours on the path, which keep the last tensor they
sent: a tensor that arrives a second time is dropped, wherever that is noticed. Where a place is skipped, microbatches
on their way beyond it begin again at the place before it, for the output of the lost node no longer counts: from then
on, what was sent beyond that place before the change (an earlier epoch) is stale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skippipe import constraints, dispatch
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.messages import Reroute
from skippipe.whole_paths import teacher_paths

steps, place = python_version(dispatch.steps), python_version(dispatch.place)


@dataclass
class Route:
    """The route of one lane."""

    path: tuple[int, ...]
    microbatches: int
    first_microbatch: int
    """Index of its first microbatch among all of the iteration."""
    skipped: frozenset[int] = frozenset()
    """Places of the path that are left out."""
    stale: dict[int, int] = field(default_factory=dict)
    """Skipped place → the first epoch in which what is sent beyond it counts."""

    @property
    def length(self) -> int:
        return len(self.path)

    def node_at(self, step: int) -> int:
        return self.path[place(step, self.length)]

    def after(self, step: int) -> int | None:
        """The step that follows; None after the last."""
        return next((each for each in range(step + 1, steps(self.length)) if self._taken(each)), None)

    def before(self, step: int) -> int | None:
        return next((each for each in range(step - 1, -1, -1) if self._taken(each)), None)

    def back(self, step: int) -> int:
        """The backward step at the place of a forward step or of the head."""
        return 2 * self.length - place(step, self.length)

    def is_stale(self, step: int, epoch: int) -> bool:
        return any(epoch < since and self.beyond(skipped, step) for skipped, since in self.stale.items())

    def beyond(self, skipped: int, step: int) -> bool:
        """Is a step after the forward and before the backward pass of a place?"""
        return skipped < step < 2 * self.length - skipped

    def _taken(self, step: int) -> bool:
        return step == self.length or place(step, self.length) not in self.skipped


def routes_of(plan: Plan) -> list[Route]:
    found, first = [], 0
    for lane in plan.lanes:
        found.append(Route(lane.path, lane.microbatches, first))
        first += lane.microbatches
    return found


def plan_reroute(
    plan: Plan,
    routes: Sequence[Route],
    active: Iterable[int],
    returned: Mapping[int, int],
    *,
    iteration: int,
    epoch: int,
    lost: int,
) -> Reroute | None:
    """The change of routes without a node that is lost; None: there is no way.

    `returned` says how many microbatches of each lane have returned. Of the replicas, the one with the most free slots
    takes over, as long as lanes cannot deadlock; where there is none, the place is skipped.
    """
    active = set(active) - {lost}
    paths = [tuple(route.path) for route in routes]
    skipped = [set(route.skipped) for route in routes]
    changed: list[int] = []
    for lane, route in enumerate(routes):
        if returned.get(lane, 0) >= route.microbatches:
            continue
        for at, node in enumerate(route.path):
            if node != lost or at in skipped[lane]:
                continue
            if lane not in changed:
                changed.append(lane)
            replica = _replica(plan, paths, skipped, lane, at, active)
            if replica is not None:
                paths[lane] = (*paths[lane][:at], replica, *paths[lane][at + 1 :])
            elif at == 0 or len(route.path) - len(skipped[lane]) <= 2:
                return None
            else:
                skipped[lane].add(at)
    reachable = plan.cluster.bandwidth_bytes_per_s > 0
    for lane in changed:  # nodes that were apart before may be neighbours now
        taken = [node for at, node in enumerate(paths[lane]) if at not in skipped[lane]]
        if not all(reachable[a, b] and reachable[b, a] for a, b in constraints.circle(taken)):
            return None
    return Reroute(
        iteration,
        epoch,
        gone=[lost],
        lanes=[[lane, returned.get(lane, 0), *paths[lane]] for lane in changed],
        skipped=[[lane, at] for lane in changed for at in sorted(skipped[lane] - routes[lane].skipped)],
    )


def _replica(
    plan: Plan,
    paths: list[tuple[int, ...]],
    skipped: list[set[int]],
    lane: int,
    at: int,
    active: set[int],
) -> int | None:
    stage = plan.stage_of[paths[lane][at]]
    lanes = constraints.lanes_through(_taken(paths, skipped))

    def free_slots(node: int) -> int:
        return plan.slots[node] - len(lanes.get(node, ()))

    reachable = plan.cluster.bandwidth_bytes_per_s > 0
    near = [
        paths[lane][other]
        for other in range(len(paths[lane]))
        if other != at and other not in skipped[lane] and paths[lane][other] in active
    ]
    for replica in sorted(active & set(plan.stages[stage].nodes), key=lambda node: (-free_slots(node), node)):
        if replica in paths[lane] or not all(reachable[replica, node] and reachable[node, replica] for node in near):
            continue
        tried = [*paths[:lane], (*paths[lane][:at], replica, *paths[lane][at + 1 :]), *paths[lane + 1 :]]
        if constraints.deadlock_cycle(_taken(tried, skipped), plan.slots) is None:
            return replica
    return None


def _taken(paths: Sequence[tuple[int, ...]], skipped: Sequence[set[int]]) -> list[tuple[int, ...]]:
    return [
        tuple(node for at, node in enumerate(path) if at not in left_out)
        for path, left_out in zip(paths, skipped, strict=True)
    ]


def apply_reroute(routes: Sequence[Route], change: Reroute) -> None:
    for lane, _, *path in change.lanes:
        routes[lane].path = tuple(path)
    for lane, at in change.skipped:
        routes[lane].skipped |= {at}
        routes[lane].stale[at] = change.epoch


def teacher_routes(
    plan: Plan, routes: Sequence[Route], gone: Collection[int] = ()
) -> dict[int, tuple[int, ...]] | None:
    """The teacher's path of each lane that has one (`whole_paths.teacher_paths`), over nodes that are on lanes: so all
    know that they are there. None: there is none from a data node that is not `gone`.

    Nodes and the coordinator each derive them, so nobody has to be told.
    """
    there = {node for route in routes for at, node in enumerate(route.path) if at not in route.skipped}
    return teacher_paths(plan, [route.path for route in routes], there - set(gone))
