"""A plan put right between two iterations: nodes were lost, came back, are new, or have changed their speed.

Stages keep their layers and an iteration keeps its microbatches. Old lanes that still hold are where the search
begins; what a loss took away is dealt out anew so that stages stay evenly visited (`shares`), and the lanes are then
improved for as long as there is time (`rerouting`). A plan that holds is there at once, whatever the budget.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain, count
from statistics import median

import numpy as np

from skippipe import rules
from skippipe.averaging import best_ring
from skippipe.cluster import Cluster
from skippipe.costs import NEVER_NS, Costs, costs_of
from skippipe.errors import UserError
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.effort import Effort
from skippipe.planner.rerouting import Ground, Lanes
from skippipe.planner.shares import Share, Visits, even_shares, visit_sets
from skippipe.planner.tours import NO_WAY, best_path
from skippipe.presets import datacentre
from skippipe.simulate import Course, simulate
from skippipe.timeline import Timing
from skippipe.workload import MODELS, Workload

STEPS = 4_000  # of the search, if the seconds last: then the same question has the same answer
SLOW = 3.0  # times the median of its stage: a node that lanes may do better without
REPAIRED = ", repaired"
NEVER_BUSY = np.empty(0, np.int64)

Path = tuple[int, ...]


def repaired(
    plan: Plan,
    members: Sequence[Collection[int]],
    able: Collection[int],
    *,
    cluster: Cluster | None = None,
    budget_s: float = 0.5,
    steps: int = STEPS,
    visited: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan | None:
    """The plan for these nodes; None if no lane is possible.

    `members` hold each stage from now on, `able` are those of them that lanes may use (the others still learn their
    weights). `cluster` has new figures for the same nodes. Lanes visit as many stages as those of the plan do, or
    `visited`: a plan that was repaired when stages were missing may visit fewer than one wants again.
    """
    effort = Effort(steps, budget_s, clock)
    if cluster is None:
        cluster = plan.cluster
    bare = replace(plan, cluster=cluster, expected=None, lower_bound_ns=None)  # the new costs are worked out once
    costs = bare.costs
    rings = [best_ring(costs, stage, sorted(nodes)) for stage, nodes in enumerate(members)]
    usable = [
        [node for node in sorted(nodes) if node in able and costs.slots[stage, node] > 0]
        for stage, nodes in enumerate(members)
    ]
    if not usable[0]:
        return None
    course = Course.of(costs, rings, plan.dispatch, Timing.FULL, plan.split_backward)
    held = sum(map(bool, usable[1:]))
    longest = min(visited or _usual_length(plan), 1 + held)
    for length in range(longest, 1, -1):
        ground = _ground(plan, course, costs, usable, length)
        starts = [lanes for each in _choices(costs, usable) for lanes in _Building(plan, ground, each).starts()]
        if starts:
            break
    else:
        return None
    start = min(starts, key=lambda lanes: (ground.spread(lanes), ground.score(lanes)))
    lanes = ground.rerouted(start, effort)
    strategy = plan.strategy if plan.strategy.endswith(REPAIRED) else plan.strategy + REPAIRED
    stages = zip(plan.layers, members, rings, strict=True)
    found = replace(
        bare,
        stages=tuple(Stage(layers, tuple(sorted(nodes)), ring) for layers, nodes, ring in stages),
        lanes=tuple(Lane(path, microbatches) for path, microbatches in lanes),
        strategy=strategy,
    )
    try:
        return found.promising(simulate(found, Timing.FULL))
    except UserError:  # a ring that no link closes takes for ever; `check` names it
        return found


@cache
def compile_repair() -> None:
    """Some twenty seconds on a new machine, a second later: to be called before the first repair is needed."""
    work = Workload(MODELS["llama-30m"], microbatches=2)
    best_ring(costs_of(datacentre(9), work, (6, 6)), 1, range(9))  # small rings come below
    stages = (Stage(6, (0, 1), (0, 1)), Stage(6, (2, 3), (2, 3)))
    plan = Plan(datacentre(4), work, stages, (Lane((0, 2), 1), Lane((1, 3), 1)))
    repaired(plan, [{0}, {2, 3}], {0, 2, 3}, budget_s=2, clock=count().__next__)


def task_ns(costs: Costs, stage: int, node: int) -> int:
    """What one microbatch takes of the node's time."""
    head_ns = int(costs.head_ns[node]) if stage == 0 else 0
    return int(costs.forward_ns[stage, node] + costs.backward_ns[stage, node]) + head_ns


def _usual_length(plan: Plan) -> int:
    """Stages that most microbatches visit."""
    lengths: Counter[int] = Counter()
    for lane in plan.lanes:
        lengths[len(lane.path)] += lane.microbatches
    return max(lengths, key=lambda length: (lengths[length], length))


def _ground(plan: Plan, course: Course, costs: Costs, usable: Sequence[Sequence[int]], length: int) -> Ground:
    stage_of = np.full(costs.nodes, -1, np.int64)
    for stage, nodes in enumerate(usable):
        stage_of[list(nodes)] = stage
    through = np.maximum(costs.transmit_ns, costs.transmit_ns.T) < NEVER_NS
    # a full pipeline in the order of the model stays one
    in_order = tuple(index for index, stage in enumerate(plan.stages) if stage.nodes)
    full = all(plan.visits(lane) == in_order for lane in plan.lanes)
    slots = sum(int(course.slots[node]) for node in usable[0])
    return Ground(
        course=course,
        stage_of=stage_of,
        nodes=np.array(list(chain(*usable)), dtype=np.int64),
        first=np.cumsum([0, *map(len, usable)], dtype=np.int64),
        linked=through,
        swaps=0 if full else rules.MAX_SWAPS,
        length=length,
        room=min(slots, plan.workload.microbatches),
    )


def _choices(costs: Costs, usable: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The nodes that lanes begin with: all; and if some are much slower than others of their stage, all but these."""
    brisk = []
    for stage, nodes in enumerate(usable):
        takes_ns = {node: task_ns(costs, stage, node) for node in nodes}
        usual_ns = median(takes_ns.values()) if nodes else 0
        brisk.append([node for node in nodes if takes_ns[node] <= SLOW * usual_ns])
    everybody = [list(nodes) for nodes in usable]
    return [everybody] if brisk == everybody else [everybody, brisk]


class _Building:
    """Lanes over given nodes, from which the search begins."""

    def __init__(self, plan: Plan, ground: Ground, usable: Sequence[Sequence[int]]) -> None:
        self.ground = ground
        self.microbatches = plan.workload.microbatches
        self.old: Lanes = [(lane.path, lane.microbatches) for lane in plan.lanes]
        self.old_stage = plan.stage_of
        self.usable = usable
        self.stages = [stage for stage, nodes in enumerate(usable) if stage and nodes]
        self.slots = {node: int(ground.course.slots[node]) for node in chain(*usable)}
        self.room = {stage: sum(self.slots[node] for node in nodes) for stage, nodes in enumerate(usable)}
        self.hop_ns = ground.course.flight_ns + np.where(ground.linked, ground.course.transmit_ns, NEVER_NS)

    def starts(self) -> list[Lanes]:
        """Old lanes as they are or mended; the same and new ones, evenly dealt; all new."""
        kept = self._kept()
        mended = self._mended(kept)
        found = [self._dealt(mended, or_uneven=False)] if mended else []
        for there in (mended, []):
            sets = self.sets
            if sets:
                counts = Counter(self._visits(path) for path, _ in there)
                found.append(self._filled(there, even_shares(sets, self.stages, self.microbatches, self.room, counts)))
        return [lanes for lanes in found if lanes]

    @cached_property
    def sets(self) -> list[Visits]:
        """Of stages that a path can visit."""
        sets = visit_sets(self.stages, self.ground.length - 1)
        nodes = list(chain(*self.usable))
        if self.ground.linked[np.ix_(nodes, nodes)].all():
            return sets
        linked = [visits for visits in sets if self._placed(visits, {})]
        path = None if linked else self._placed((), {})
        return [self._visits(path)] if path else linked

    def _visits(self, path: Path) -> Visits:
        return tuple(sorted(int(self.ground.stage_of[node]) for node in path[1:]))

    # old lanes

    def _kept(self) -> dict[int, tuple[Path, int]]:
        """Old lanes that still hold, by their number."""
        kept: dict[int, tuple[Path, int]] = {}
        through: Counter[int] = Counter()
        for number, (path, microbatches) in enumerate(self.old):
            if self._holds(path) and all(through[node] < self.slots[node] for node in path):
                kept[number] = (path, microbatches)
                through.update(path)
        return kept

    def _holds(self, path: Path) -> bool:
        if len(path) != self.ground.length or any(node not in self.slots for node in path):
            return False
        visits = [int(self.ground.stage_of[node]) for node in path]
        if rules.cc1_broken_at(visits) is not None or rules.cc2_broken_at(visits) is not None:
            return False
        return all(self.ground.linked[a, b] for a, b in rules.circle(path))

    def _mended(self, kept: dict[int, tuple[Path, int]]) -> Lanes:
        """All old lanes that can go on, with other nodes in place of lost ones."""
        mended = dict(kept)
        through = Counter(chain.from_iterable(path for path, _ in kept.values()))
        for number, (path, microbatches) in enumerate(self.old):
            if number in kept:
                continue
            stages = {self.old_stage[node] for node in path}
            visits = tuple(stage for stage in self.stages if stage in stages)
            if len(visits) + 1 != self.ground.length:
                continue
            staying = {stage: node for node in path if (stage := self.old_stage[node]) == self.ground.stage_of[node]}
            found = self._placed(visits, through, staying) or self._placed(visits, through)
            if found:
                mended[number] = (found, microbatches)
                through.update(found)
        return [mended[number] for number in sorted(mended)]

    # new lanes

    def _placed(
        self, visits: Visits, through: Mapping[int, int], staying: Mapping[int, int] | None = None
    ) -> Path | None:
        """The cheapest path over these stages (none given: any) and nodes with a slot left; busy nodes cost more.

        `staying` are the only nodes to use on their stages.
        """
        ground, course = self.ground, self.ground.course
        allowed = np.zeros(len(ground.stage_of), np.bool_)
        crowd = np.ones(len(ground.stage_of), np.int64)
        for stage in (0, *(visits or self.stages)):
            for node in self.usable[stage]:
                only = staying.get(stage, node) if staying else node
                allowed[node] = node == only and through.get(node, 0) < self.slots[node]
                crowd[node] += through.get(node, 0)
        required = np.zeros(len(self.usable), np.bool_)
        required[list(visits)] = True
        path = np.empty(ground.length, np.int64)
        best_ns, best = NO_WAY, None
        for data_node in self.usable[0]:
            if not allowed[data_node]:
                continue
            back_ns = best_path(
                data_node,
                ground.length,
                ground.swaps,
                ground.stage_of,
                allowed,
                required,
                course.forward_ns * crowd,
                course.backward_ns * crowd,
                int(course.head_ns[data_node]),
                self.hop_ns,
                0,
                NEVER_BUSY,
                NEVER_BUSY,
                NEVER_BUSY,
                path,
            )
            if 0 <= back_ns < best_ns:
                found = tuple(path.tolist())
                if all(ground.linked[a, b] for a, b in rules.circle(found)):
                    best_ns, best = back_ns, found
        return best

    def _dealt(self, lanes: Lanes, or_uneven: bool) -> Lanes:
        """These lanes and no others, with as many microbatches as it takes to visit stages evenly."""
        whole = sum(microbatches for _, microbatches in lanes) == self.microbatches
        least = 1 if self.microbatches * (self.ground.length - 1) % len(self.stages) else 0
        if whole and self.ground.spread(lanes) <= least:
            return lanes
        there = Counter(self._visits(path) for path, _ in lanes)
        sets = list(there)
        shares = even_shares(
            sets, self.stages, self.microbatches, self.room, there, only_there=True, or_uneven=or_uneven
        )
        return self._shared_out(lanes, shares)

    def _filled(self, lanes: Lanes, shares: Sequence[Share]) -> Lanes:
        """The lanes that the shares ask for: of those given, and new ones where there are too few."""
        wanted = {share.visits: share.lanes for share in shares}
        chosen: Lanes = []
        for path, microbatches in lanes:
            visits = self._visits(path)
            if wanted.get(visits, 0):
                wanted[visits] -= 1
                chosen.append((path, microbatches))
        through = Counter(chain.from_iterable(path for path, _ in chosen))
        missing = False
        for visits in chain.from_iterable([visits] * lanes_left for visits, lanes_left in wanted.items()):
            new = self._placed(visits, through)
            if new:
                chosen.append((new, 0))
                through.update(new)
            missing = missing or new is None
        if missing:  # links that are not there: the shares did not know of them
            return self._dealt(chosen, or_uneven=True) if chosen else []
        return self._shared_out(chosen, shares)

    def _shared_out(self, lanes: Lanes, shares: Iterable[Share]) -> Lanes:
        """Every share over its lanes: as it was, or evenly."""
        given: dict[int, int] = {}
        for share in shares:
            own = [number for number, (path, _) in enumerate(lanes) if self._visits(path) == share.visits]
            own = own[: share.lanes]
            if sum(lanes[number][1] for number in own) == share.microbatches and all(lanes[n][1] for n in own):
                given |= {number: lanes[number][1] for number in own}
                continue
            each, extra = divmod(share.microbatches, len(own))
            given |= {number: each + (nth < extra) for nth, number in enumerate(own)}
        return [(path, given[number]) for number, (path, _) in enumerate(lanes) if number in given]
