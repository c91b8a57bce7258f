"""The paper's method: nodes are placed on stages by a genetic search, then paths are found by conflict-based search.

Also the round-robin baseline, with which each search begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from skippipe.constraints import NodePath, circle
from skippipe.cost_model import seconds
from skippipe.errors import Infeasible
from skippipe.jit import Flags
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.cbs import LaneAgent, PathSearch
from skippipe.planner.genetic_allocation import allocate
from skippipe.planner.problem import Budget, Placement, PlanRequest, Problem, Strategy, averagings
from skippipe.simulator import PlacementCosts, path_arrays, simulate, simulated_times
from skippipe.validate import validate

TRIALS = 8_000  # of the genetic search, as in the paper
SHORTLISTED = 200  # placements that get a first look: the whole population, if time allows
FIRST_BRANCHES = 200  # branches for each of them
BRANCHES = 10_000  # for the best of them, and for each way to group its lanes
ALLOCATION_SHARE = 0.4  # of the seconds
ROUND_ROBIN_ATTEMPTS = 50  # to deal out paths without a missing link


@dataclass
class Incumbent:
    """The best paths so far, and the placement that they are for."""

    value_ns: int
    placement: Placement
    lanes: list[tuple[int, int]]
    paths: tuple[NodePath, ...]


class TwoPhaseSearch:
    def __init__(self, problem: Problem, strategy: Strategy, request: PlanRequest, trials: int = TRIALS) -> None:
        self.problem = problem
        self.trials = trials
        self.strategy = strategy
        self.request = request
        self.until = request.clock() + request.budget_s
        self.incumbent: Incumbent | None = None

    def plan(self) -> Plan:
        placements = self._placements()
        for placement in placements:
            self._try_round_robin(placement)
            assert self.incumbent is not None
            if self.incumbent.value_ns < INFINITE_NS or self.request.clock() >= self.until:
                break
        if self.strategy is not Strategy.DTFM_SKIP:
            self._search(placements)
        assert self.incumbent is not None
        return self._finished(self.incumbent)

    def _placements(self) -> list[Placement]:
        if self.request.placement:
            return [tuple(tuple(nodes) for nodes in self.request.placement)]
        share = 1.0 if self.strategy is Strategy.DTFM_SKIP else ALLOCATION_SHARE
        budget = self._budget("placing nodes on stages", self.trials, share * self.request.budget_s)
        return allocate(self.problem, budget, self.request.seed, SHORTLISTED)

    def _budget(self, what: str, steps: int, budget_s: float) -> Budget:
        def on_step(spent: int, steps: int) -> None:
            self.request.progress(what, spent / steps, seconds(self.incumbent.value_ns) if self.incumbent else None)

        return Budget(steps, budget_s, self.request.clock, self.request.stopped, on_step)

    def _try_round_robin(self, placement: Placement) -> None:
        """Begin with the round-robin baseline: a valid incumbent at once, whatever the search brings.

        Its simulated time also bounds the search without TC2: paths that take longer even alone are no better.
        """
        problem = self.problem
        lanes = problem.lanes_of(placement)
        # where links are missing, paths are found sooner if fewer lanes leave slots free
        counts = range(len(lanes), 0, -problem.lane_unit)
        for count, attempt in product(counts, range(ROUND_ROBIN_ATTEMPTS)):
            lanes = problem.lanes_of(placement, count)
            paths = round_robin_paths(problem, placement, lanes, [self.request.seed, attempt])
            if all_reachable(problem, paths):
                break
        else:
            self._update_incumbent(placement, lanes, paths, INFINITE_NS)  # anything that the search finds is better
            return
        placement_costs = PlacementCosts.of(
            problem.costs, averagings(problem, placement), problem.dispatch, problem.timing, problem.split_backward
        )
        rows, lengths = path_arrays(paths)
        microbatches = np.array([count for _, count in lanes], dtype=np.int64)
        self._update_incumbent(
            placement, lanes, paths, placement_costs.run_iteration(rows, lengths, microbatches).iteration_ns
        )

    def _update_incumbent(
        self, placement: Placement, lanes: list[tuple[int, int]], paths: tuple[NodePath, ...], value_ns: int
    ) -> None:
        if self.incumbent is None or value_ns < self.incumbent.value_ns:
            self.incumbent = Incumbent(value_ns, placement, lanes, paths)

    def _search(self, placements: list[Placement]) -> None:
        """A short search of every placement, then the rest of the budget for the best of them."""
        if len(placements) > 1:
            half_time = (self.request.clock() + self.until) / 2
            for number, placement in enumerate(placements):
                if self.request.clock() >= half_time or self.request.stopped():
                    break
                what = f"first look at placement {number + 1} of {len(placements)}"
                self._search_paths(placement, self._agent_groupings(placement)[:1], FIRST_BRANCHES, what)
        assert self.incumbent is not None
        placement = self.incumbent.placement
        self._search_paths(placement, self._agent_groupings(placement), BRANCHES, "searching paths")

    def _search_paths(
        self, placement: Placement, agent_groupings: list[list[LaneAgent]], branches: int, what: str
    ) -> None:
        for groups in agent_groupings:
            lanes = [(group.data_node, count) for group in groups for count in group.lanes]

            def better(paths: tuple[NodePath, ...], value_ns: int, lanes: list[tuple[int, int]] = lanes) -> None:
                self._update_incumbent(placement, lanes, paths, value_ns)

            budget = self._budget(what, branches, self.until - self.request.clock())
            assert self.incumbent is not None
            search = PathSearch(self.problem, placement, groups)
            search.run(budget, better, self.incumbent.value_ns, avoid_collisions=self.strategy is not Strategy.NO_TC2)

    def _agent_groupings(self, placement: Placement) -> list[list[LaneAgent]]:
        """Lanes as agents: all lanes of a data node on one path, which makes a small search; then every lane by itself.

        Without TC2 the paper gives every lane its own path from the start; a full pipeline has one path by definition.
        """
        try:
            lanes = self.problem.lanes_of(placement)
        except Infeasible:
            return []
        by_node: dict[int, list[int]] = {}
        for node, microbatches in lanes:
            by_node.setdefault(node, []).append(microbatches)
        together = [LaneAgent(node, tuple(each), 0) for node, each in by_node.items()]
        forward_ns, workers = self.problem.costs.forward_ns[0], self.problem.costs.workers[0]
        apart = [
            LaneAgent(node, (microbatches,), int(nth // workers[node] * forward_ns[node]))
            for node, each in by_node.items()
            for nth, microbatches in enumerate(each)
        ]
        match self.strategy:
            case Strategy.NO_TC2:
                return [apart]
            case Strategy.DTFM:
                return [together]
            case _:
                return [together, apart]

    def _finished(self, best: Incumbent) -> Plan:
        problem = self.problem
        used = {node for path in best.paths for node in path}
        at_work = tuple(tuple(node for node in nodes if node in used) for nodes in best.placement)
        plan = self._as_plan(best, best.placement)
        broken = validate(plan)
        if broken:
            raise Infeasible(f"no plan was found that keeps every rule; the best one breaks {broken[0]}")
        candidates = [plan] if at_work == best.placement else [plan, self._as_plan(best, at_work)]
        valid = [each for each in candidates if not validate(each)]
        ranks = [(simulated_times(each, problem.timing).iteration_ns, len(each.stage_of)) for each in valid]
        fastest = valid[ranks.index(min(ranks))]
        return fastest.promising(simulate(fastest, problem.timing))

    def _as_plan(self, best: Incumbent, members: Placement) -> Plan:
        problem = self.problem
        return Plan(
            cluster=problem.cluster,
            workload=problem.workload,
            stages=tuple(map(Stage.of, problem.layers, averagings(problem, members))),
            lanes=tuple(Lane(path, count) for path, (_, count) in zip(best.paths, best.lanes, strict=True)),
            dispatch=problem.dispatch,
            split_backward=problem.split_backward,
            strategy=str(self.strategy),
        )


def all_reachable(problem: Problem, paths: Sequence[Sequence[int]]) -> bool:
    """Whether every hop of every path has a link there and back."""
    linked = problem.costs.linked
    return all(linked[a, b] for path in paths for a, b in circle(path))


def round_robin_paths(
    problem: Problem, placement: Placement, lanes: list[tuple[int, int]], seed: list[int]
) -> tuple[NodePath, ...]:
    """The round-robin baseline: one path for each (data node, microbatches), which ignores the network, but for links
    that are missing. The paper calls it DT-FM-skip.

    Lane after lane takes the next L−1 stages of a circle over stages 1 … S−1. Lanes come in multiples of the unit, so
    the circle closes and every stage is visited equally often; inside a stage, lanes are distributed over the free
    slots.
    """
    rng = np.random.default_rng(seed)
    others, visits = problem.stages - 1, problem.visited - 1
    slots = np.minimum(problem.costs.slots, len(lanes))
    free = [
        rng.permutation(np.repeat(nodes, slots[stage, list(nodes)])).tolist() for stage, nodes in enumerate(placement)
    ]
    paths: dict[int, NodePath] = {}
    linked = problem.costs.linked
    # lanes that carry one microbatch more are a multiple of the unit too: each kind goes around the circle by itself
    order = sorted(range(len(lanes)), key=lambda lane: lanes[lane][1])
    start = 0
    for lane in order:
        stages = sorted((start + offset) % others + 1 for offset in range(visits))
        start = (start + visits) % others
        paths[lane] = (lanes[lane][0], *_take(lanes[lane][0], [free[stage] for stage in stages], linked))
    return tuple(paths[lane] for lane in range(len(lanes)))


def _take(data_node: int, pools: list[list[int]], linked: Flags) -> list[int]:
    """A node of each pool, with links from one to the next and back to the data node if there are such nodes; the last
    in a pool if that will do."""
    if linked.all():
        return [pool.pop() for pool in pools]
    ways = [[data_node]]
    for pool in reversed(pools):
        ways.insert(0, [node for node in dict.fromkeys(reversed(pool)) if linked[node, ways[0]].any()])
    path = [data_node]
    for pool, way in zip(pools, ways, strict=False):
        node = next((node for node in way if linked[path[-1], node]), pool[-1])
        del pool[len(pool) - 1 - pool[::-1].index(node)]
        path.append(node)
    return path[1:]
