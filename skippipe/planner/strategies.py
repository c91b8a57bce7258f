"""The strategies side by side: from a problem to a plan.

best        all freedoms at once, better with every second (the default)
skippipe    the study's method: genetic allocation, then conflict-based search that avoids collisions (TC2)
no-tc2      the same without TC2: every lane takes the shortest path that the other rules leave
dtfm-skip   skips as many stages and keeps the rules, but is blind to the network
dtfm        the full pipeline: all stages in order, one path a data node, for the same number of microbatches


Paths that keep every rule and know nothing of the network: the study's DT-FM-skip, and everybody's first answer.

Lane after lane takes the next L−1 stages of a circle over stages 1 … S−1. Lanes come in multiples of the unit, so the
circle closes and every stage is visited equally often; inside a stage, lanes are dealt out over the free slots.


The same nodes on the same stages, with paths of another length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import numpy as np

from skippipe.constraints import circle
from skippipe.cost_model import NEVER_NS, cost_model_of, seconds
from skippipe.errors import Infeasible, UserError
from skippipe.jit import beside
from skippipe.jitter import Jitter
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.astar import NO_WAY
from skippipe.planner.bounds.lower_bound import lower_bound, lower_bound_of_both
from skippipe.planner.cbs import LaneAgent, PathSearch
from skippipe.planner.genetic_allocation import allocate
from skippipe.planner.problem import NOTHING_FREE, Budget, Placement, Problem, rings
from skippipe.planner.repair.repair import repaired
from skippipe.planner.search.annealing import SearchLimits, compile_moves, improved
from skippipe.presets import datacentre
from skippipe.simulator import Course, as_arrays, simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import MODELS, Workload

TRIALS = 8_000  # of the genetic search, as in the study
SHORTLIST = 200  # placements that get a first look: the whole population, if time allows
FIRST_LOOK = 200  # branches for each of them
BRANCHES = 10_000  # for the best of them, and for each way to group its lanes
ALLOCATION_SHARE = 0.4  # of the seconds
MANY = 500  # nodes times lanes: from here on `best` begins with what the study's method finds
STUDIED_SHARE = 0.3  # of the seconds, for that
STUDIED_FROM_S = 10.0  # in fewer seconds it finds little
FIRST_SHARE = 0.05  # of the seconds, for each of the plans that `best` can begin with
FIRST_TRIALS = 400  # divided by the number of nodes, for the same where changes are counted
CHOOSING_DRAWS = 400  # iterations with jitter, to tell plans apart by their 95th percentile
CHOOSING_SEED = 2**31  # draws other than those by which people judge the plan
ROUND_ROBIN_ATTEMPTS = 50  # to deal out paths without a missing link


class Strategy(StrEnum):
    BEST = "best"
    SKIPPIPE = "skippipe"
    NO_TC2 = "no-tc2"
    DTFM_SKIP = "dtfm-skip"
    DTFM = "dtfm"


PlanProgress = Callable[[str, float, float | None], None]
"""What is being done, which share of it is done, and the best iteration so far, in seconds."""


@dataclass(frozen=True)
class PlanRequest:
    """How hard to try. Steps are counted, so the same seed gives the same plan; seconds only cut the search short."""

    seed: int = 0
    budget_s: float = 60.0
    placement: Placement | None = None
    """Keep these nodes on these stages, and search paths only."""
    progress: PlanProgress = lambda what, share, best_s: None
    clock: Callable[[], float] = time.monotonic
    stopped: Callable[[], bool] = lambda: False
    """Asked between steps; once it says yes, the best plan so far is the answer."""
    changes: float = math.inf
    """That `best` may try: as good an end as seconds, and one that can be repeated exactly."""
    bound_s: float = 0.0
    """Seconds to spend, once there is a plan, on how good any could be; 0: nobody wants to know."""
    start: Plan | None = None
    """What `best` begins with; None: a plan that it makes in a moment."""
    robust: float = 0.0
    """Jitter under which `best` chooses its plan, by the 95th percentile; 0: by what is promised."""


@dataclass
class _Best:
    """The best paths so far, and for which placement."""

    value_ns: int
    placement: Placement
    lanes: list[tuple[int, int]]
    paths: tuple[tuple[int, ...], ...]


def make_plan(problem: Problem, strategy: Strategy, request: PlanRequest) -> Plan:
    """A plan that passes `check`, with its promised timeline; Infeasible if there is none."""
    if strategy is Strategy.DTFM:
        problem = full_pipeline(problem)
    request.progress("compiling (once on a machine)", 0, None)
    if strategy is Strategy.BEST:
        compile_search()
        if _is_studied(problem, request):
            compile_kernels()
        plan = _best(problem, request)
    else:
        compile_kernels()
        plan = _Planning(problem, strategy, request).plan()
    return _bounded(problem, plan, request) if request.bound_s else plan


def _bounded(problem: Problem, plan: Plan, request: PlanRequest) -> Plan:
    """For plans with the same layers; with any backward and dispatch that `best` could have chosen."""
    request.progress("proving what no plan can beat", 1.0, seconds(iteration_ns(plan)))
    same = replace(problem, layers=plan.layers)
    bound = lower_bound_of_both if problem.freedoms.split_backward else lower_bound
    found = bound(same, request.bound_s, stopped=request.stopped)
    return replace(plan, lower_bound_ns=found.ns)


@cache
def compile_kernels() -> None:
    """Some ten seconds on a new machine, a fraction of one later; so that a budget is spent on the search alone."""
    work = Workload(MODELS["llama-30m"], microbatches=2)
    problem = Problem(datacentre(3), work, 3, 2)
    cost_model_of(datacentre(9), work, (6, 6)).averaging_order(1, range(9))  # small rings come below
    allocate(problem, Budget(1, math.inf, time.monotonic), seed=0)
    once = PlanRequest(budget_s=math.inf, placement=((0,), (1,), (2,)))
    _Planning(problem, Strategy.SKIPPIPE, once).plan()


@cache
def compile_search() -> None:
    """The same for `best`, which needs fewer of them, and others. Half of them by a process of its own."""
    with beside(f"from {__name__} import compile_first_plan; compile_first_plan()"):
        compile_moves(_small_problem())
        _best(_small_problem(), PlanRequest(budget_s=math.inf, changes=1, placement=((0,), (1,), (2, 3))))
    compile_first_plan()


@cache
def compile_first_plan() -> None:
    """Without the moves: simulation and score, then the allocation."""
    _best(_small_problem(), PlanRequest(budget_s=math.inf, changes=0, placement=((0,), (1,), (2, 3))))
    allocate(_small_problem(), Budget(1, math.inf, time.monotonic), seed=0)


def _small_problem() -> Problem:
    return Problem(datacentre(4), Workload(MODELS["llama-30m"], microbatches=2), 3, 2)


def _best(problem: Problem, request: PlanRequest) -> Plan:
    until = request.clock() + request.budget_s
    began = request.clock()
    starts = [_started(problem, request.start)] if request.start else _first_plans(problem, request, until)

    def over() -> bool:
        return request.stopped() or request.clock() >= until

    def on_round(done: float, best_ns: float | None) -> None:
        spent = (request.clock() - began) / request.budget_s if request.budget_s else 1.0
        share = min(1.0, max(spent, done / request.changes))
        request.progress("searching", share, None if best_ns is None else best_ns / 1e9)

    jitter = Jitter(request.robust, CHOOSING_DRAWS, CHOOSING_SEED) if request.robust else None
    limits = SearchLimits(
        request.seed, request.changes, over, on_round, keep_stages=request.placement is not None, jitter=jitter
    )
    return improved(problem, starts, limits)


def _is_studied(problem: Problem, request: PlanRequest) -> bool:
    """Whether `best` begins with what the study's method finds."""
    slots = int(problem.costs.slots.max(axis=0).sum())
    lanes = min(problem.workload.microbatches, slots // problem.visited)  # for which there is memory
    in_time = STUDIED_FROM_S <= request.budget_s < math.inf and request.changes == math.inf
    return in_time and len(problem.cluster) * lanes > MANY


def _first_plans(problem: Problem, request: PlanRequest, until: float) -> list[Plan]:
    """Plans that `best` can begin with, the best of them first.

    On the stages of a full pipeline, too: these are fewer nodes, which averages sooner. And by the study's method, if
    lanes are many, so that a search is slow.
    """
    trials = 1 + FIRST_TRIALS // len(problem.cluster) if request.changes < math.inf else TRIALS
    quick = replace(request, budget_s=FIRST_SHARE * request.budget_s)
    found = [_Planning(problem, Strategy.DTFM_SKIP, quick, trials).plan()]
    if request.placement is None and problem.freedoms.sizes and request.clock() < until:
        with suppress(Infeasible):
            full = _Planning(full_pipeline(problem), Strategy.DTFM_SKIP, quick, trials).plan()
            placement = tuple(stage.nodes for stage in full.stages)
            found.append(_Planning(problem, Strategy.DTFM_SKIP, replace(quick, placement=placement)).plan())
    if _is_studied(problem, request):
        studied = replace(request, budget_s=STUDIED_SHARE * request.budget_s)
        found.append(_Planning(problem, Strategy.SKIPPIPE, studied).plan())
    return sorted(found, key=iteration_ns)


def _started(problem: Problem, plan: Plan) -> Plan:
    """The plan on the problem's cluster, if it is one for this problem."""
    names = [[node.name for node in each.nodes] for each in (problem.cluster, plan.cluster)]
    if names[0] != names[1]:
        raise UserError("the plan to begin with is for other nodes; plan without it")
    has = len(plan.stages), plan.visited, plan.microbatches
    asked = problem.stages, problem.visited, problem.workload.microbatches
    for what, found, wanted in zip(("stages", "stages on a path", "microbatches"), has, asked, strict=True):
        if found != wanted:
            raise UserError(f"the plan to begin with has {found} {what}, and {wanted} are asked for; plan without it")
    plan = replace(plan, cluster=problem.cluster, workload=problem.workload, expected=None, lower_bound_ns=None)
    broken = validate(plan)
    if broken:
        raise UserError(f"the plan to begin with does not hold here: {broken[0]}")
    return plan


def full_pipeline(problem: Problem) -> Problem:
    """The same work without skips and swaps, on stages of equal size; nodes that make no whole pipeline stay idle."""
    size = len(problem.cluster) // problem.stages
    return replace(problem, visited=problem.stages, swaps=0, sizes=(size,) * problem.stages)


class _Planning:
    def __init__(self, problem: Problem, strategy: Strategy, request: PlanRequest, trials: int = TRIALS) -> None:
        self.problem = problem
        self.trials = trials
        self.strategy = strategy
        self.request = request
        self.until = request.clock() + request.budget_s
        self.best: _Best | None = None

    def plan(self) -> Plan:
        placements = self._placements()
        self._try_blind(placements[0])
        if self.strategy is not Strategy.DTFM_SKIP:
            self._search(placements)
        assert self.best is not None
        return self._finished(self.best)

    def _placements(self) -> list[Placement]:
        if self.request.placement:
            return [tuple(tuple(nodes) for nodes in self.request.placement)]
        share = 1.0 if self.strategy is Strategy.DTFM_SKIP else ALLOCATION_SHARE
        effort = self._effort("placing nodes on stages", self.trials, share * self.request.budget_s)
        return allocate(self.problem, effort, self.request.seed, SHORTLIST)

    def _effort(self, what: str, steps: int, budget_s: float) -> Budget:
        def on_step(spent: int, steps: int) -> None:
            self.request.progress(what, spent / steps, seconds(self.best.value_ns) if self.best else None)

        return Budget(steps, budget_s, self.request.clock, self.request.stopped, on_step)

    def _try_blind(self, placement: Placement) -> None:
        """A valid answer at once, whatever the search brings.

        Its simulated time also bounds the search without TC2: paths that take longer even alone are no better.
        """
        problem = self.problem
        lanes = problem.lanes_of(placement)
        for attempt in range(ROUND_ROBIN_ATTEMPTS):
            paths = round_robin_paths(problem, placement, lanes, [self.request.seed, attempt])
            if all_reachable(problem, paths):
                break
        else:
            self._offer(placement, lanes, paths, NO_WAY)  # anything that the search finds is better
            return
        ringed = rings(problem, placement)
        course = Course.of(problem.costs, ringed, problem.dispatch, problem.timing, problem.split_backward)
        rows, lengths = as_arrays(paths)
        microbatches = np.array([count for _, count in lanes], dtype=np.int64)
        self._offer(placement, lanes, paths, course.run(rows, lengths, microbatches).iteration_ns)

    def _offer(
        self, placement: Placement, lanes: list[tuple[int, int]], paths: tuple[tuple[int, ...], ...], value_ns: int
    ) -> None:
        if self.best is None or value_ns < self.best.value_ns:
            self.best = _Best(value_ns, placement, lanes, paths)

    def _search(self, placements: list[Placement]) -> None:
        """A first look at every placement, then the rest of the effort for the best of them."""
        if len(placements) > 1:
            half_time = (self.request.clock() + self.until) / 2
            for number, placement in enumerate(placements):
                if self.request.clock() >= half_time or self.request.stopped():
                    break
                what = f"first look at placement {number + 1} of {len(placements)}"
                self._search_paths(placement, self._groupings(placement)[:1], FIRST_LOOK, what)
        assert self.best is not None
        placement = self.best.placement
        self._search_paths(placement, self._groupings(placement), BRANCHES, "searching paths")

    def _search_paths(self, placement: Placement, groupings: list[list[LaneAgent]], branches: int, what: str) -> None:
        for groups in groupings:
            lanes = [(group.data_node, count) for group in groups for count in group.lanes]

            def better(paths: tuple[tuple[int, ...], ...], value_ns: int, lanes: list[tuple[int, int]] = lanes) -> None:
                self._offer(placement, lanes, paths, value_ns)

            effort = self._effort(what, branches, self.until - self.request.clock())
            assert self.best is not None
            search = PathSearch(self.problem, placement, groups)
            search.run(effort, better, self.best.value_ns, avoid_collisions=self.strategy is not Strategy.NO_TC2)

    def _groupings(self, placement: Placement) -> list[list[LaneAgent]]:
        """All lanes of a data node on one path, which makes a small search; then every lane by itself.

        Without TC2 the study gives every lane its own path from the start; a full pipeline has one path by definition.
        """
        try:
            lanes = self.problem.lanes_of(placement)
        except Infeasible:
            return []
        by_node: dict[int, list[int]] = {}
        for node, microbatches in lanes:
            by_node.setdefault(node, []).append(microbatches)
        together = [LaneAgent(node, tuple(each), 0) for node, each in by_node.items()]
        forward_ns = self.problem.costs.forward_ns[0]
        apart = [
            LaneAgent(node, (microbatches,), nth * int(forward_ns[node]))
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

    def _finished(self, best: _Best) -> Plan:
        problem = self.problem
        used = {node for path in best.paths for node in path}
        at_work = tuple(tuple(node for node in nodes if node in used) for nodes in best.placement)
        plan = self._as_plan(best, best.placement)
        broken = validate(plan)
        if broken:
            raise Infeasible(f"no plan was found that keeps every rule; the best one breaks {broken[0]}")
        candidates = [plan] if at_work == best.placement else [plan, self._as_plan(best, at_work)]
        promised = [each.promising(simulate(each, problem.timing)) for each in candidates if not validate(each)]
        return min(promised, key=lambda each: (iteration_ns(each), len(each.stage_of)))

    def _as_plan(self, best: _Best, members: Placement) -> Plan:
        problem = self.problem
        stages = zip(problem.layers, members, rings(problem, members), strict=True)
        return Plan(
            cluster=problem.cluster,
            workload=problem.workload,
            stages=tuple(Stage(layers, nodes, ring) for layers, nodes, ring in stages),
            lanes=tuple(Lane(path, count) for path, (_, count) in zip(best.paths, best.lanes, strict=True)),
            dispatch=problem.dispatch,
            split_backward=problem.split_backward,
            strategy=str(self.strategy),
        )


def iteration_ns(plan: Plan) -> int:
    assert plan.expected is not None
    return plan.expected.iteration_ns


def all_reachable(problem: Problem, paths: Sequence[Sequence[int]]) -> bool:
    """Does every hop of every path have a link there and back?"""
    transmit_ns = problem.costs.transmit_ns
    hops = [hop for path in paths for hop in circle(path)]
    return all(max(transmit_ns[a, b], transmit_ns[b, a]) < NEVER_NS for a, b in hops)


Path = tuple[int, ...]


def round_robin_paths(
    problem: Problem, placement: Placement, lanes: list[tuple[int, int]], seed: list[int]
) -> tuple[Path, ...]:
    """One path for each (data node, microbatches)."""
    draw = np.random.default_rng(seed)
    others, visits = problem.stages - 1, problem.visited - 1
    slots = np.minimum(problem.costs.slots, len(lanes))
    free = [
        draw.permutation(np.repeat(nodes, slots[stage, list(nodes)])).tolist() for stage, nodes in enumerate(placement)
    ]
    paths: dict[int, Path] = {}
    # lanes that carry one microbatch more are a multiple of the unit too: each kind goes around the circle by itself
    order = sorted(range(len(lanes)), key=lambda lane: lanes[lane][1])
    start = 0
    for lane in order:
        stages = sorted((start + offset) % others + 1 for offset in range(visits))
        start = (start + visits) % others
        paths[lane] = (lanes[lane][0], *(free[stage].pop() for stage in stages))
    return tuple(paths[lane] for lane in range(len(lanes)))


def with_paths_of(plan: Plan, length: int, strategy: Strategy, request: PlanRequest) -> Plan:
    """The faster of two: one that is made as plans are, and one that is made as plans are repaired.

    Infeasible if neither keeps every rule.
    """
    members = tuple(stage.nodes for stage in plan.stages)
    problem = Problem(
        plan.cluster,
        plan.workload,
        len(plan.stages),
        length,
        sizes=tuple(map(len, members)),
        dispatch=plan.dispatch,
        split_backward=plan.split_backward,
        layers=plan.layers,
        freedoms=NOTHING_FREE,
    )
    other = repaired(plan, members, plan.stage_of, budget_s=request.budget_s, visited=length, clock=request.clock)
    rivals = [other] if other is not None and {len(lane.path) for lane in other.lanes} == {length} else []
    reason = None
    try:
        rivals.append(make_plan(problem, strategy, replace(request, placement=members)))
    except Infeasible as error:
        reason = error
    same = [
        replace(each, stages=plan.stages, expected=None, lower_bound_ns=None) for each in rivals
    ]  # also nodes that no lane uses
    promised = [each.promising(simulate(each, Timing.FULL)) for each in same if not validate(each)]
    if not promised:
        raise reason or Infeasible(f"no paths of {length} stages were found that keep every rule")
    return min(promised, key=iteration_ns)
