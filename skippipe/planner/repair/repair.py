"""Repair of a plan between two iterations: nodes were lost, came back, are new, or have changed their speed.

Stages keep their layers and an iteration keeps its microbatches. Lanes of the old plan that are still valid are where
the search begins; what a loss took away is distributed again so that stages stay evenly exposed (`exposure_milp`). Then
the annealing of `search/` improves the lanes, with stages, rings and dispatch kept, for as long as there is time. A
valid plan is there at once, whatever the budget.

Repair had an annealer of its own, over lanes alone, until the two were measured side by side, on the same plans, losses
and CPU seconds (20 nodes and 0.5 s, 42 and 1 s; and a tenth of that): iterations after a repair with `search/` were
between 5% shorter and 2% longer, 1% shorter on average, and repairs took no longer. Its kernels are those of `best`,
compiled already where a plan was made; on a machine where none was, `compile_repair` takes about twice as long as with
the smaller ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, count
from statistics import median

import numpy as np

from skippipe import constraints
from skippipe.cluster import Cluster
from skippipe.constraints import NodePath
from skippipe.cost_model import NEVER_NS, CostModel, cost_model_of
from skippipe.dispatch import Dispatch
from skippipe.errors import UserError
from skippipe.jit import Flags, Ints
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.astar import INFINITE_NS, NEVER_BUSY, best_path
from skippipe.planner.averaging import averaging_fastest
from skippipe.planner.repair.exposure_milp import LaneGroup, StageSet, even_exposure, visit_sets
from skippipe.planner.search.annealing import Chain, search
from skippipe.planner.search.moves import PLACEMENT_MOVES, Move, cumulative_move_weights
from skippipe.planner.search.state import Tables, costs_by_layers, lanes_of, state_of, tables_of
from skippipe.presets import datacentre
from skippipe.simulator import PlacementCosts, simulate
from skippipe.skip_schedule import PathLength, deal_lengths, parts_of
from skippipe.timeline import Timing
from skippipe.workload import Workload

CHANGES = 65_536  # of the search, if the seconds last: then the same question has the same answer
FIRST_ROUND = 2_048  # changes: a repair has little time, so its first round of annealing is short, …
TEMPERATURE_FACTOR = 0.3  # … and colder: old lanes are near a good plan
KEPT = {  # not changed
    Move.REORDER_RING,
    Move.SWAP_ROLES,
    Move.CHANGE_ROLE,
    Move.MOVE_LAYER,
    Move.CHANGE_DISPATCH,
    *PLACEMENT_MOVES,
}
SLOW = 3.0  # times the median of its stage: a node that lanes may do better without
REPAIRED = ", repaired"


def repaired(
    plan: Plan,
    members: Sequence[Collection[int]],
    able: Collection[int],
    *,
    cluster: Cluster | None = None,
    budget_s: float = 0.5,
    changes: int = CHANGES,
    visited: PathLength | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan | None:
    """The plan for these nodes; None if no lane is possible.

    `members` hold each stage from now on, `able` are those of them that lanes may use (the others still fetch their
    weights). `cluster` has new figures for the same nodes. Lanes visit as many stages as those of the plan do, or
    `visited`: a plan that was repaired when stages were missing may visit fewer than is wanted again.
    """
    deadline = clock() + budget_s
    bare = plan.edited(cluster=cluster or plan.cluster)
    costs = bare.costs  # worked out once
    averagings = [costs.averaging(stage, sorted(nodes)) for stage, nodes in enumerate(members)]
    usable = [
        [node for node in sorted(nodes) if node in able and costs.slots[stage, node] > 0]
        for stage, nodes in enumerate(members)
    ]
    if not usable[0]:
        return None
    placement_costs = PlacementCosts.of(costs, averagings, plan.dispatch, Timing.FULL, plan.split_backward)
    as_planned = tuple(len(lane.path) for lane in plan.lanes for _ in range(lane.microbatches))
    dealt = deal_lengths(parts_of(visited or as_planned), plan.workload.microbatches)
    for longest in range(min(max(dealt), 1 + sum(map(bool, usable[1:]))), 1, -1):
        lengths = Counter(max(2, min(length, longest)) for length in dealt)
        problem = _lane_problem(plan, placement_costs, costs, usable, lengths)
        starts = [
            lanes for nodes in _node_choices(costs, usable) for lanes in _Construction(plan, problem, nodes).starts()
        ]
        if starts:
            break
    else:
        return None
    spread = min(map(problem.spread, starts))
    stages = tuple(map(Stage.of, plan.layers, averagings))
    strategy = plan.strategy if plan.strategy.endswith(REPAIRED) else plan.strategy + REPAIRED
    found = [
        replace(bare, stages=stages, lanes=tuple(lanes), strategy=strategy)
        for lanes in starts
        if problem.spread(lanes) == spread
    ]
    tables = _tables(bare, problem, spread)
    kept = KEPT if plan.dispatch is Dispatch.LANES_IN_ORDER else KEPT | {Move.SWAP_LANE_ORDER}
    weights = cumulative_move_weights(set(Move) - kept)
    most_lanes = min(sum(int(placement_costs.slots[node]) for node in usable[0]), plan.workload.microbatches)
    chains = [
        Chain(state_of(each, most_lanes), tables, weights, [0], temperature_factor=TEMPERATURE_FACTOR) for each in found
    ]
    best = min(chains, key=lambda each: int(each.scores[0]))
    search([best], changes, lambda: clock() >= deadline, first_round=FIRST_ROUND)
    result = averaging_fastest(replace(found[0], lanes=lanes_of(best.best)))
    try:
        return result.promising(simulate(result, Timing.FULL))
    except UserError:  # a ring that no link closes takes for ever; `validate` names it
        return result


@cache
def compile_repair() -> None:
    """Compile what a repair needs, before the first one: most of a minute on a new machine, a second later."""
    work = Workload(MODELS["llama-30m"], microbatches=2)
    cost_model_of(datacentre(9), work, (6, 6)).averaging(1, range(9))  # small rings come below
    stages = (Stage(6, (0, 1), (0, 1)), Stage(6, (2, 3), (2, 3)))
    plan = Plan(datacentre(4), work, stages, (Lane((0, 2), 1), Lane((1, 3), 1)))
    repaired(plan, [{0}, {2, 3}], {0, 2, 3}, budget_s=4, clock=count().__next__)


def task_ns(costs: CostModel, stage: int, node: int) -> int:
    """What one microbatch takes of the node's time, which as many pass at once as it has workers."""
    head_ns = int(costs.head_ns[node]) if stage == 0 else 0
    alone_ns = int(costs.forward_ns[stage, node] + costs.backward_ns[stage, node]) + head_ns
    return -(-alone_ns // int(costs.workers[stage, node]))


@dataclass(frozen=True)
class LaneProblem:
    """The nodes that lanes may use, and what their paths must obey."""

    placement_costs: PlacementCosts
    stage_of: Ints
    """[node]: its stage; −1: no lane may use it."""
    visitable: Flags
    """[stage]: it has a node that lanes may use."""
    linked: Flags
    """[node, node]: messages get through both ways."""
    swaps: int
    """Swaps of neighbouring stages that a path may have (CC2)."""
    lengths: Mapping[int, int]
    """Stages on a path → how many microbatches visit so many."""

    def spread(self, lanes: Iterable[Lane]) -> int:
        """The largest difference between the exposures of two stages that lanes can visit."""
        counts = np.zeros(len(self.visitable), np.int64)
        for lane in lanes:
            counts[self.stage_of[list(lane.path)]] += lane.microbatches
        return int(np.ptp(counts[1:][self.visitable[1:]]))


def _lane_problem(
    plan: Plan,
    placement_costs: PlacementCosts,
    costs: CostModel,
    usable: Sequence[Sequence[int]],
    lengths: Mapping[int, int],
) -> LaneProblem:
    stage_of = np.full(costs.nodes, -1, np.int64)
    for stage, nodes in enumerate(usable):
        stage_of[list(nodes)] = stage
    # a full pipeline in the order of the model stays one
    in_order = tuple(index for index, stage in enumerate(plan.stages) if stage.nodes)
    full = all(plan.visits(lane) == in_order for lane in plan.lanes)
    return LaneProblem(
        placement_costs=placement_costs,
        stage_of=stage_of,
        visitable=np.array([bool(nodes) for nodes in usable]),
        linked=costs.linked,
        swaps=0 if full or plan.workload.bridge_parameters else constraints.MAX_SWAPS,
        lengths=lengths,
    )


def _tables(plan: Plan, problem: LaneProblem, spread: int) -> Tables:
    """Tables for the annealing; a node that lanes may not use still averages, and has no slot for them."""
    costs = costs_by_layers(plan.cluster, plan.workload, max(plan.layers))
    tables = tables_of(costs, problem.visitable, Timing.FULL, plan.split_backward, problem.swaps, spread)
    return tables._replace(slots=np.where(problem.stage_of >= 0, tables.slots, 0))


def _node_choices(costs: CostModel, usable: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Nodes to construct lanes over: all; and if some are much slower than others of their stage, all but these."""
    fast = []
    for stage, nodes in enumerate(usable):
        taken_ns = {node: task_ns(costs, stage, node) for node in nodes}
        median_ns = median(taken_ns.values()) if nodes else 0
        fast.append([node for node in nodes if taken_ns[node] <= SLOW * median_ns])
    every = [list(nodes) for nodes in usable]
    return [every] if fast == every else [every, fast]


class _Construction:
    """Lanes over given nodes, from which the search begins."""

    def __init__(self, plan: Plan, problem: LaneProblem, usable: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.costs = problem.placement_costs
        self.microbatches = {length - 1: count for length, count in problem.lengths.items()}
        """Stages that a microbatch visits beside stage 0 → number of these microbatches."""
        self.old = plan.lanes
        self.old_stage = plan.stage_of
        self.usable = usable
        self.stages = [stage for stage, nodes in enumerate(usable) if stage and nodes]
        self.slots = {node: int(self.costs.slots[node]) for node in chain(*usable)}
        self.capacity = {stage: sum(self.slots[node] for node in nodes) for stage, nodes in enumerate(usable)}
        self.hop_ns = self.costs.flight_ns + np.where(problem.linked, self.costs.transmit_ns.min(axis=0), NEVER_NS)

    def starts(self) -> list[list[Lane]]:
        """Old lanes, valid or mended; the same and new ones, evenly exposed; all new."""
        mended = self._mended(self._still_valid())
        found = [self._rebalanced(mended, allow_uneven=False)] if mended else []
        for existing in (mended, []):
            if self.sets:
                counts = Counter(self._visits(lane.path) for lane in existing)
                groups = even_exposure(self.sets, self.stages, self.microbatches, self.capacity, counts)
                found.append(self._filled(existing, groups))
        carrying = ([lane for lane in lanes if lane.microbatches] for lanes in found)
        return [lanes for lanes in carrying if lanes]

    @cached_property
    def sets(self) -> list[StageSet]:
        """Sets of stages that a path can visit."""
        return [visits for length in self.problem.lengths for visits in self._sets_of(length)]

    def _sets_of(self, length: int) -> list[StageSet]:
        sets = visit_sets(self.stages, length - 1)
        nodes = list(chain(*self.usable))
        if self.problem.linked[np.ix_(nodes, nodes)].all():
            return sets
        linked = [visits for visits in sets if self._cheapest_path(length, visits, {})]
        path = None if linked else self._cheapest_path(length, (), {})
        return [self._visits(path)] if path else linked

    def _visits(self, path: NodePath) -> StageSet:
        return tuple(sorted(int(self.problem.stage_of[node]) for node in path[1:]))

    # old lanes

    def _still_valid(self) -> dict[int, Lane]:
        """Old lanes that still obey every constraint, by their number."""
        kept: dict[int, Lane] = {}
        through: Counter[int] = Counter()
        for number, lane in enumerate(self.old):
            if self._is_valid(lane.path) and all(through[node] < self.slots[node] for node in lane.path):
                kept[number] = lane
                through.update(lane.path)
        return kept

    def _is_valid(self, path: NodePath) -> bool:
        if len(path) not in self.problem.lengths or any(node not in self.slots for node in path):
            return False
        visits = [int(self.problem.stage_of[node]) for node in path]
        if constraints.cc1_broken_at(visits) is not None or constraints.cc2_broken_at(visits) is not None:
            return False
        return self._is_linked(path)

    def _is_linked(self, path: NodePath) -> bool:
        return all(self.problem.linked[a, b] for a, b in constraints.circle(path))

    def _mended(self, valid: dict[int, Lane]) -> list[Lane]:
        """All old lanes that can go on, with other nodes in place of lost ones."""
        mended = dict(valid)
        through = Counter(chain.from_iterable(lane.path for lane in valid.values()))
        for number, lane in enumerate(self.old):
            if number in valid:
                continue
            stages = {self.old_stage[node] for node in lane.path}
            visits = tuple(stage for stage in self.stages if stage in stages)
            length = len(visits) + 1
            if length not in self.problem.lengths:
                continue
            stage_of = self.problem.stage_of
            fixed = {stage: node for node in lane.path if (stage := self.old_stage[node]) == stage_of[node]}
            path = self._cheapest_path(length, visits, through, fixed) or self._cheapest_path(length, visits, through)
            if path:
                mended[number] = Lane(path, lane.microbatches)
                through.update(path)
        return [mended[number] for number in sorted(mended)]

    # new lanes

    def _cheapest_path(
        self, length: int, visits: StageSet, through: Mapping[int, int], fixed: Mapping[int, int] | None = None
    ) -> NodePath | None:
        """The cheapest path of this length over these stages (none given: any) and nodes with a slot left; busy nodes
        cost more.

        `fixed` are the only nodes to use on their stages.
        """
        problem, costs = self.problem, self.costs
        allowed = np.zeros(len(problem.stage_of), np.bool_)
        crowd = np.ones(len(problem.stage_of), np.int64)
        for stage in (0, *(visits or self.stages)):
            for node in self.usable[stage]:
                only = fixed.get(stage, node) if fixed else node
                allowed[node] = node == only and through.get(node, 0) < self.slots[node]
                crowd[node] += through.get(node, 0)
        required = np.zeros(len(self.usable), np.bool_)
        required[list(visits)] = True
        path = np.empty(length, np.int64)
        best_ns, best = INFINITE_NS, None
        for data_node in self.usable[0]:
            if not allowed[data_node]:
                continue
            back_ns = best_path(
                data_node,
                length,
                problem.swaps,
                problem.stage_of,
                allowed,
                required,
                costs.forward_ns * crowd,
                costs.backward_ns * crowd,
                int(costs.head_ns[data_node]),
                self.hop_ns,
                0,
                NEVER_BUSY,
                path,
            )
            found = tuple(path.tolist())
            if 0 <= back_ns < best_ns and self._is_linked(found):
                best_ns, best = back_ns, found
        return best

    def _rebalanced(self, lanes: list[Lane], allow_uneven: bool) -> list[Lane]:
        """These lanes and no others, with as many microbatches as it takes to expose stages evenly."""
        carried: Counter[int] = Counter()
        for lane in lanes:
            carried[len(lane.path) - 1] += lane.microbatches
        complete = carried == self.microbatches
        visits = sum(size * count for size, count in self.microbatches.items())
        least = 1 if visits % len(self.stages) else 0
        if complete and self.problem.spread(lanes) <= least:
            return lanes
        existing = Counter(self._visits(lane.path) for lane in lanes)
        groups = even_exposure(
            *(list(existing), self.stages, self.microbatches, self.capacity, existing),
            only_existing=True,
            allow_uneven=allow_uneven,
        )
        return self._distributed(lanes, groups)

    def _filled(self, lanes: list[Lane], groups: Sequence[LaneGroup]) -> list[Lane]:
        """The lanes of all groups: of those given, and new ones where there are too few."""
        missing = {group.visits: group.lanes for group in groups}
        chosen: list[Lane] = []
        for lane in lanes:
            visits = self._visits(lane.path)
            if missing.get(visits, 0):
                missing[visits] -= 1
                chosen.append(lane)
        through = Counter(chain.from_iterable(lane.path for lane in chosen))
        complete = True
        for visits in chain.from_iterable([visits] * number for visits, number in missing.items()):
            path = self._cheapest_path(len(visits) + 1, visits, through)
            if path:
                chosen.append(Lane(path, 0))
                through.update(path)
            complete = complete and path is not None
        if not complete:  # links that are not there: the integer programme does not know of them
            return self._rebalanced(chosen, allow_uneven=True) if chosen else []
        return self._distributed(chosen, groups)

    def _distributed(self, lanes: list[Lane], groups: Iterable[LaneGroup]) -> list[Lane]:
        """The microbatches of every group over its lanes: as they were, or evenly."""
        counts: dict[int, int] = {}
        for group in groups:
            own = [number for number, lane in enumerate(lanes) if self._visits(lane.path) == group.visits]
            own = own[: group.lanes]
            before = [lanes[number].microbatches for number in own]
            if sum(before) != group.microbatches or not all(before):
                each, extra = divmod(group.microbatches, len(own))
                before = [each + (nth < extra) for nth in range(len(own))]
            counts |= dict(zip(own, before, strict=True))
        return [Lane(lane.path, counts[number]) for number, lane in enumerate(lanes) if number in counts]
