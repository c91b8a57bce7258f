"""Where microbatches go in an iteration: the lanes of the plan, and what becomes of them when nodes are lost.

A lost node's place on a path goes to a replica, or is skipped. A path keeps its length, so the steps of microbatches
on their way keep their numbers (see `dispatch`); the steps of a skipped place are left out.

A replica that takes a place over gets what it needs from the neighbours on the path, who keep what they sent last:
whatever comes a second time is dropped, wherever that is noticed. Where a place is skipped, microbatches on their way
beyond it begin again at the place before it, for what came out of the lost node no longer counts: from then on, what
was sent beyond that place before the change (an earlier epoch) is stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skippipe import constraints, dispatch
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.messages import Reroute

steps, place = python_version(dispatch.steps), python_version(dispatch.place)


@dataclass
class Route:
    """Of one lane."""

    path: tuple[int, ...]
    microbatches: int
    data: int
    """The place of its first microbatch among all of the iteration."""
    skipped: frozenset[int] = frozenset()
    """Places of the path that are left out."""
    stale: dict[int, int] = field(default_factory=dict)
    """Skipped place → the epoch from which on what is sent beyond it counts."""

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
    found, data = [], 0
    for lane in plan.lanes:
        found.append(Route(lane.path, lane.microbatches, data))
        data += lane.microbatches
    return found


def rerouted(
    plan: Plan,
    routes: Sequence[Route],
    able: Iterable[int],
    returned: Mapping[int, int],
    *,
    iteration: int,
    epoch: int,
    gone: Sequence[int],
) -> Reroute | None:
    """How to go on without the nodes that are gone (of those that were not gone before); None: there is no way.

    `returned` says how many microbatches of each lane are back. Of the replicas, the one with the most room in memory
    takes over, as long as lanes cannot lock each other up; where there is none, the place is skipped.
    """
    lost, able = set(gone), set(able) - set(gone)
    paths = [tuple(route.path) for route in routes]
    skipped = [set(route.skipped) for route in routes]
    changed: list[int] = []
    for lane, route in enumerate(routes):
        if returned.get(lane, 0) >= route.microbatches:
            continue
        for at, node in enumerate(route.path):
            if node not in lost or at in skipped[lane]:
                continue
            if lane not in changed:
                changed.append(lane)
            heir = _heir(plan, paths, skipped, lane, at, able)
            if heir is not None:
                paths[lane] = (*paths[lane][:at], heir, *paths[lane][at + 1 :])
            elif at == 0 or len(route.path) - len(skipped[lane]) <= 2:
                return None
            else:
                skipped[lane].add(at)
    reachable = plan.cluster.bandwidth_bytes_per_s > 0
    for lane in changed:  # who was apart before may be neighbours now
        taken = [node for at, node in enumerate(paths[lane]) if at not in skipped[lane]]
        if not all(reachable[a, b] and reachable[b, a] for a, b in constraints.circle(taken)):
            return None
    return Reroute(
        iteration,
        epoch,
        gone=sorted(lost),
        lanes=[[lane, returned.get(lane, 0), *paths[lane]] for lane in changed],
        skipped=[[lane, at] for lane in changed for at in sorted(skipped[lane] - routes[lane].skipped)],
    )


def _heir(
    plan: Plan,
    paths: list[tuple[int, ...]],
    skipped: list[set[int]],
    lane: int,
    at: int,
    able: set[int],
) -> int | None:
    stage = plan.stage_of[paths[lane][at]]
    lanes = constraints.lanes_through(_taken(paths, skipped))

    def room(node: int) -> int:
        return plan.slots[node] - len(lanes.get(node, ()))

    reachable = plan.cluster.bandwidth_bytes_per_s > 0
    near = [
        paths[lane][other]
        for other in range(len(paths[lane]))
        if other != at and other not in skipped[lane] and paths[lane][other] in able
    ]
    for heir in sorted(able & set(plan.stages[stage].nodes), key=lambda node: (-room(node), node)):
        if heir in paths[lane] or not all(reachable[heir, node] and reachable[node, heir] for node in near):
            continue
        tried = [*paths[:lane], (*paths[lane][:at], heir, *paths[lane][at + 1 :]), *paths[lane + 1 :]]
        if constraints.deadlock_cycle(_taken(tried, skipped), plan.slots) is None:
            return heir
    return None


def _taken(paths: Sequence[tuple[int, ...]], skipped: Sequence[set[int]]) -> list[tuple[int, ...]]:
    return [
        tuple(node for at, node in enumerate(path) if at not in left_out)
        for path, left_out in zip(paths, skipped, strict=True)
    ]


def apply(routes: Sequence[Route], change: Reroute) -> None:
    for lane, _, *path in change.lanes:
        routes[lane].path = tuple(path)
    for lane, at in change.skipped:
        routes[lane].skipped |= {at}
        routes[lane].stale[at] = change.epoch
