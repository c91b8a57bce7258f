"""The planning strategies: from a problem to a plan.

best        all decision variables at once by annealing, better with every second (the default)
skippipe    the paper's method: genetic allocation, then conflict-based search that avoids collisions (TC2)
no-tc2      the same without TC2: every lane takes the shortest path that the other rules leave
dtfm-skip   the round-robin baseline: skips as many stages and keeps the rules, but ignores the network
dtfm        the full pipeline: all stages in order, one path a data node, for the same number of microbatches
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np

from skippipe.cluster import Cluster
from skippipe.cost_model import cost_model_of, seconds
from skippipe.errors import Infeasible
from skippipe.jit import Flags, compile_beside
from skippipe.jitter import Jitter
from skippipe.model_shape import MODELS
from skippipe.plan import Plan, Stage
from skippipe.planner.averaging import averaging_fastest
from skippipe.planner.bounds.lower_bound import Bound, lower_bound
from skippipe.planner.codec_choice import choose_codecs
from skippipe.planner.codec_prices import CodecBudget
from skippipe.planner.genetic_allocation import allocate
from skippipe.planner.problem import (
    Budget,
    PlanRequest,
    Problem,
    Strategy,
    full_pipeline,
    iteration_ns,
    lane_unit,
    problem_on_stages,
)
from skippipe.planner.repair.repair import CHANGES, compile_repair, repaired
from skippipe.planner.search.annealing import (
    PLACEMENT_SHARE,
    checked_start,
    compile_moves,
    improve,
    may_move_layers,
    variants,
)
from skippipe.planner.search.decomposition import part_count, planned_in_parts
from skippipe.planner.two_phase import TRIALS, TwoPhaseSearch
from skippipe.presets import datacentre
from skippipe.simulator import simulate
from skippipe.skip_schedule import PathLength, deal_lengths, parts_of
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload

CBS_SHARE = 0.3  # of the seconds, for the paper's method, with which `best` begins if there are many lanes
CBS_FROM_SIZE = 500  # nodes times lanes: fewer are searched as well without it
CBS_FROM_S = 10.0  # in fewer seconds it finds little
PARTS_SHARE = 0.3  # of the seconds or changes, for a large cluster in parts
PART_FROM_S = 0.2  # in fewer seconds for a part, …
PART_FROM_CHANGES = 2_000  # … or with fewer changes, its plan is worth little
FIRST_SHARE = 0.05  # of the seconds, for each of the plans that `best` can begin with
FIRST_TRIALS = 400  # divided by the number of nodes, for the same where changes are counted
EARLY_BOUND_SHARE = 0.25  # of the seconds for a bound: before the search, for people who watch it
DETOURS = (1.0, 3.0, 10.0)  # times what a message takes by way of a third node
MOST_DETOURS = 0.5  # of the seconds or changes, for plans over detours
LEAST_DETOURS = 0.02
TURNS_SHARE = 0.1  # of the seconds or changes of a sandwich, for turns to compare it with
CHOOSING_DRAWS = 400  # iterations with jitter, to tell plans apart by their 95th percentile
CHOOSING_SEED = 2**31  # draws other than those by which people judge the plan


def make_plan(problem: Problem, strategy: Strategy, request: PlanRequest) -> Plan:
    """A valid plan with its promised timeline; Infeasible if there is none."""
    if problem.codec_budget is None:
        return _make_plan(problem, strategy, request)
    return _with_codecs(problem, problem.codec_budget, strategy, request)


def _with_codecs(problem: Problem, budget: CodecBudget, strategy: Strategy, request: PlanRequest) -> Plan:
    """A plan whose codecs are chosen, too: the search knows the smallest, or those that can be had everywhere."""
    works = budget.workloads(problem.workload, problem.visited, problem.sizes, problem.layers)
    usual = replace(works[0], gradient_dtype=budget.usual[1])
    searched: list[Problem] = []
    for work in works:
        with suppress(Infeasible):  # the error feedback of small codecs takes memory
            searched.append(replace(problem, workload=work, codec_budget=None))
    all_fit = len(searched) == len(works)
    searched = searched or [replace(problem, workload=usual, codec_budget=None)]
    count = len(searched)
    each = replace(request, budget_s=request.budget_s / count, changes=request.changes / count, bound_s=0.0)
    plans: list[Plan] = []
    for number, one in enumerate(searched):
        if not plans or not request.stopped():
            share = number / count

            def on_progress(what: str, done: float, best_s: float | None, share: float = share) -> None:
                request.progress(f"{what}, codecs not yet chosen", share + done / count, best_s)

            found = _make_plan(one, strategy, replace(each, progress=on_progress))
            plans.append(choose_codecs(found, budget, problem.timing))
            chosen_s = seconds(iteration_ns(min(plans, key=iteration_ns)))
            request.progress("choosing codecs", (number + 1) / count, chosen_s)
    best = min(plans, key=iteration_ns)
    same_memory = all_fit and (replace(searched[0], workload=usual).costs.slots == searched[0].costs.slots).all()
    return _bounded(searched[0], best, request) if request.bound_s and same_memory else best


def _make_plan(problem: Problem, strategy: Strategy, request: PlanRequest) -> Plan:
    if strategy is Strategy.DTFM:
        problem = full_pipeline(problem)
    if not request.start and not _begins_in_parts(problem, request):  # parts may have stages of other sizes
        problem.check_slots(request.placement)  # before kernels are compiled, which takes a minute
    request.progress("compiling (once on a machine)", 0, None)
    if strategy is Strategy.BEST:
        compile_search()
        if _begins_with_cbs(problem, request):
            compile_kernels()
        plan = _best(problem, request)
    else:
        compile_kernels()
        plan = TwoPhaseSearch(problem, strategy, request).plan()
    plan = _with_averaging(problem, plan, request)
    return _bounded(problem, plan, request) if request.bound_s else plan


def _with_averaging(problem: Problem, plan: Plan, request: PlanRequest) -> Plan:
    """The plan that was searched, with averaging that is looked for thoroughly, and what it promises then."""
    plan = averaging_fastest(plan, thorough=True)
    plan = plan.promising(simulate(plan, problem.timing))
    request.progress("searched", 1.0, seconds(iteration_ns(plan)))
    return plan


def _bounded(problem: Problem, plan: Plan, request: PlanRequest) -> Plan:
    """The plan with a lower bound for plans with its layers, and with any backward and dispatch that `best` could have
    chosen."""
    request.progress("proving what no plan can beat", 1.0, seconds(iteration_ns(plan)))
    bound = lower_bound(variants(problem, plan.layers), request.bound_s, stopped=request.stopped)
    return replace(plan, lower_bound_ns=bound.ns) if bound.reason else plan


@cache
def compile_kernels() -> None:
    """Compile the kernels of the paper's method, so that a budget is spent on the search alone: some ten seconds on a
    new machine, a fraction of one later."""
    work = Workload(MODELS["llama-30m"], microbatches=2)
    problem = Problem(datacentre(3), work, 3, 2)
    _compile_averaging()
    allocate(problem, Budget(1, math.inf, time.monotonic), seed=0)
    once = PlanRequest(budget_s=math.inf, placement=((0,), (1,), (2,)))
    TwoPhaseSearch(problem, Strategy.SKIPPIPE, once).plan()


@cache
def compile_search() -> None:
    """Compile the kernels of `best`, those of the objective in a process of their own."""
    with compile_beside(f"from {__name__} import compile_objective; compile_objective()"):
        compile_moves(_small_problem())
        _compile_averaging()
        allocate(_small_problem(), Budget(1, math.inf, time.monotonic), seed=0)
    _best(_small_problem(), PlanRequest(budget_s=math.inf, changes=1, placement=((0,), (1,), (2, 3))))


def compile_objective() -> None:
    """Compile what `best` needs without the moves: simulation and objective."""
    _best(_small_problem(), PlanRequest(budget_s=math.inf, changes=0, placement=((0,), (1,), (2, 3))))


def _compile_averaging() -> None:
    """Of many nodes: what few need is compiled for small problems."""
    cost_model_of(datacentre(9), Workload(MODELS["llama-30m"]), (6, 6)).averaging(1, range(9))


def _small_problem() -> Problem:
    return Problem(datacentre(4), Workload(MODELS["llama-30m"], microbatches=2), 3, 2)


def _best(problem: Problem, request: PlanRequest) -> Plan:
    began = request.clock()
    until = began + request.budget_s
    changes = request.changes
    if request.start:
        starts = [checked_start(problem, request.start, request.placement)]
    elif _begins_in_parts(problem, request) and (in_parts := _in_parts(problem, request)):
        starts = [in_parts]
        changes *= 1 - PARTS_SHARE
    elif missing_links(problem.cluster).any() and request.budget_s > 0:
        starts, share = _around_missing_links(problem, request, until)
        changes *= 1 - share
    else:
        starts = _initial_plans(problem, request, until)
    bound = Bound(0, "")
    if request.bound_s and not may_move_layers(problem):  # a bound is for given layers
        request.progress("proving what no plan can beat", 0, None)
        same = variants(problem, starts[0].layers)
        bound = lower_bound(same, EARLY_BOUND_SHARE * request.bound_s, request.clock, request.stopped)
    what = f"searching, no plan is under {seconds(bound.ns):.1f} s" if bound.reason else "searching"
    return _improved(problem, starts, replace(request, changes=changes), began, what)


def _improved(
    problem: Problem, starts: list[Plan], request: PlanRequest, began: float, what: str = "searching"
) -> Plan:
    """The best plan found from these on, with what is left of the seconds that the request has had since it `began`."""
    until, changes = began + request.budget_s, request.changes

    def stopped() -> bool:
        return request.stopped() or request.clock() >= until

    def on_progress(done: float, best_ns: int) -> None:
        spent = (request.clock() - began) / request.budget_s if request.budget_s else 1.0
        share = min(1.0, max(spent, done / changes))
        request.progress(what, share, seconds(best_ns))

    jitter = Jitter(request.robust, CHOOSING_DRAWS, CHOOSING_SEED) if request.robust else None
    keep_stages = request.placement is not None
    placed_at = request.clock() + PLACEMENT_SHARE * (until - request.clock())
    return improve(
        problem,
        starts,
        request.seed,
        changes,
        stopped,
        on_progress,
        keep_stages,
        jitter,
        placed=lambda: request.clock() >= placed_at,
    )


def _begins_with_cbs(problem: Problem, request: PlanRequest) -> bool:
    """Whether `best` begins with what conflict-based search finds; where averaging counts, it finds little in time."""
    if problem.timing is Timing.FULL:
        return False
    in_time = CBS_FROM_S <= request.budget_s < math.inf and request.changes == math.inf
    return in_time and len(problem.cluster) * problem.lanes_in_memory > CBS_FROM_SIZE


def _begins_in_parts(problem: Problem, request: PlanRequest) -> bool:
    """Whether `best` begins with plans of parts of the cluster: with time for each, and the nodes of stages open."""
    parts = part_count(problem)
    if parts < 2 or request.placement is not None or not problem.decision_variables.sizes:
        return False
    if problem.timing is not Timing.FULL:
        return False
    each_s, each = PARTS_SHARE * request.budget_s / parts, PARTS_SHARE * request.changes / parts
    return each_s >= PART_FROM_S and each >= PART_FROM_CHANGES


def _in_parts(problem: Problem, request: PlanRequest) -> Plan | None:
    """A plan for each part of the cluster, put together; None if parts do not keep the rules."""
    began, each = request.clock(), PARTS_SHARE / part_count(problem)

    def plan_part(number: int, part: Problem) -> Plan:
        request.progress("planning parts of the cluster", each * number, None)
        left_s = each * (number + 1) * request.budget_s - (request.clock() - began)
        limits = replace(request, budget_s=max(0.0, left_s), changes=each * request.changes, bound_s=0.0, robust=0.0)
        return _best(part, replace(limits, progress=PlanRequest.progress))

    with suppress(Infeasible):
        plan = planned_in_parts(problem, plan_part)
        if not validate(plan):
            return plan.promising(simulate(plan, problem.timing))
    return None


def _around_missing_links(problem: Problem, request: PlanRequest, until: float) -> tuple[list[Plan], float]:
    """Plans that `best` can begin with where links are missing, the best of them first, and the share of the budget
    that went into detours."""
    found: list[Plan] = []
    reason, share = None, detours_share(problem.cluster)
    try:
        found += _initial_plans(problem, request, until)
    except Infeasible as error:
        reason, share = error, MOST_DETOURS
    with suppress(Infeasible):
        found += _over_detours(problem, request, share)
    if reason and not found:
        raise reason
    return sorted(found, key=iteration_ns), share


def _over_detours(problem: Problem, request: PlanRequest, share: float) -> list[Plan]:
    """Plans over links that are there, found by way of detours for this share of the budget; none if the search did not
    get rid of them.

    A search whose paths have to keep to the links that are there gets stuck where slots are scarce: nearly every change
    of one path leads over a link that is missing. So it begins on a cluster that has a detour in the place of every
    such link, by way of a third node. Detours take longer and longer, until the paths do without.
    """
    found: list[Plan] = []
    began, start = request.clock(), None
    for number, times in enumerate(DETOURS, 1):
        cluster = with_detours(problem.cluster, problem.workload.activation_bytes, times)
        if missing_links(cluster).any():
            break
        done = share * number / len(DETOURS)
        request.progress("planning around missing links", done, None)
        limits = replace(
            request,
            budget_s=max(0.0, done * request.budget_s - (request.clock() - began)),
            changes=share / len(DETOURS) * request.changes,
            bound_s=0.0,
            robust=0.0,
            start=start,
            progress=PlanRequest.progress,
        )
        start = _best(replace(problem, cluster=cluster), limits)
        plan = _over_links(problem, start)
        if not validate(plan):
            found.append(plan.promising(simulate(plan, problem.timing)))
    return found


def _over_links(problem: Problem, plan: Plan) -> Plan:
    """The plan on the cluster as it is."""
    plan = plan.edited(cluster=problem.cluster)
    ways = [plan.costs.averaging(stage, nodes) for stage, nodes in enumerate(plan.placement)]
    return replace(plan, stages=tuple(map(Stage.of, plan.layers, ways)))


def missing_links(cluster: Cluster) -> Flags:
    found: Flags = cluster.bandwidth_bytes_per_s == 0
    np.fill_diagonal(found, val=False)
    return found


def detours_share(cluster: Cluster) -> float:
    """Share of the seconds or changes for plans over detours: that of the links that are missing. Half of them for any
    made plans 1% to 5% slower on published20, and took up to three times as long for as many changes
    (docs/results-planning.md)."""
    missing = missing_links(cluster)
    return min(MOST_DETOURS, max(LEAST_DETOURS, float(missing.sum()) / max(1, missing.size - len(missing))))


def with_detours(cluster: Cluster, message_bytes: float, times: float) -> Cluster:
    """The cluster with a way over a third node in the place of every missing link, the fastest for a message of this
    size, and so many times as slow. Links that no third node makes up for stay missing."""
    latency_s, bandwidth = cluster.latency_s, cluster.bandwidth_bytes_per_s.copy()
    np.fill_diagonal(bandwidth, val=0.0)  # no node is on the way to itself
    with_latency_s, with_bandwidth = latency_s.copy(), cluster.bandwidth_bytes_per_s.copy()
    for a, b in np.argwhere(missing_links(cluster)):
        carried = np.minimum(bandwidth[a], bandwidth[:, b])
        ways = np.flatnonzero(carried)
        if len(ways):
            takes_s = latency_s[a, ways] + latency_s[ways, b] + message_bytes / carried[ways]
            third = ways[takes_s.argmin()]
            with_latency_s[a, b] = times * (latency_s[a, third] + latency_s[third, b])
            with_bandwidth[a, b] = carried[third] / times
    return replace(cluster, latency_s=with_latency_s, bandwidth_bytes_per_s=with_bandwidth)


def _initial_plans(problem: Problem, request: PlanRequest, until: float) -> list[Plan]:
    """Plans that `best` can begin with, the best of them first.

    On the stages of a full pipeline, too: these are fewer nodes, which averages sooner. And by the paper's method, if
    lanes are many, so that a search is slow.
    """
    trials = 1 + FIRST_TRIALS // len(problem.cluster) if request.changes < math.inf else TRIALS
    quick = replace(request, budget_s=FIRST_SHARE * request.budget_s)
    found = [TwoPhaseSearch(problem, Strategy.DTFM_SKIP, quick, trials).plan()]
    if request.placement is None and problem.decision_variables.sizes and request.clock() < until:
        with suppress(Infeasible):
            full = TwoPhaseSearch(full_pipeline(problem), Strategy.DTFM_SKIP, quick, trials).plan()
            on_its_stages = replace(quick, placement=full.placement)
            found.append(TwoPhaseSearch(problem, Strategy.DTFM_SKIP, on_its_stages).plan())
    if _begins_with_cbs(problem, request):
        cbs_request = replace(request, budget_s=CBS_SHARE * request.budget_s)
        found.append(TwoPhaseSearch(problem, Strategy.SKIPPIPE, cbs_request).plan())
    return sorted(found, key=iteration_ns)


def with_paths_of(plan: Plan, length: PathLength, strategy: Strategy, request: PlanRequest) -> Plan:
    """The same nodes on the same stages with paths of another length: the faster of a newly made and a repaired plan;
    with paths of several lengths, a `sandwich`.

    Infeasible if neither keeps every rule.
    """
    nodes, budget_s = plan.placement, request.budget_s
    reason, rivals = None, []
    if isinstance(length, tuple):
        rivals.append(sandwich(plan, length, request))
    else:
        other = repaired(plan, nodes, plan.stage_of, budget_s=budget_s, visited=length, clock=request.clock)
        rivals += [other] if other is not None and has_lengths(other, length) else []
        try:
            on_its_stages = replace(request, placement=nodes)
            rivals.append(make_plan(problem_on_stages(plan, length), strategy, on_its_stages))
        except Infeasible as error:
            reason = error
    same = [each.edited(stages=plan.stages) for each in rivals]  # also nodes that no lane uses
    promised = [each.promising(simulate(each, Timing.FULL)) for each in same if not validate(each)]
    if not promised:
        raise reason or _no_paths(plan, length)
    return min(promised, key=iteration_ns)


def _no_paths(plan: Plan, length: PathLength) -> Infeasible:
    unit, slots = lane_unit(len(plan.stages), length), plan.workload.max_slots
    advice = f"let nodes hold more microbatches (max_slots is {slots})" if slots else "use smaller microbatches"
    if plan.workload.microbatches % unit:
        advice = f"use a multiple of {unit} microbatches"
    return Infeasible(f"no paths were found that keep every rule; {advice}, or add nodes")


def make_plan_for(problem: Problem, length: PathLength, strategy: Strategy, request: PlanRequest) -> Plan:
    """A valid plan with nodes placed for paths of this length.

    For several lengths that is a sandwich, if `best` searches and codecs are given. Otherwise it has paths of the
    problem's one length, and `with_paths_of` finds those of several on its stages.
    """
    if isinstance(length, tuple) and plans_lengths(problem, length, strategy):
        return make_sandwich(problem, length, request)
    return make_plan(problem, strategy, request)


def plans_lengths(problem: Problem, length: PathLength, strategy: Strategy) -> bool:
    """Whether the plan that `make_plan_for` makes has paths of several lengths, if they are asked for."""
    return isinstance(length, tuple) and strategy is Strategy.BEST and problem.codec_budget is None


def make_sandwich(problem: Problem, length: tuple[int, ...], request: PlanRequest) -> Plan:
    """A valid plan with paths of these lengths, each for an equal part of the microbatches.

    One half of the budget goes into a plan with paths of their mean length, whose placement suits theirs: where all
    paths are long, data nodes have too few slots for some that are short. If there is none, or no way on from it, into
    one with longer paths.
    """
    reached = 0.0

    def show(what: str, share: float, best_s: float | None) -> None:
        nonlocal reached
        reached = max(reached, share)  # it does not go back for one more first plan
        request.progress(what, reached, best_s)

    half = replace(request, budget_s=request.budget_s / 2, changes=request.changes / 2, bound_s=0.0)
    first = replace(half, progress=lambda what, share, best_s: show(what, share / 2, None))  # seconds of other paths
    second = replace(half, progress=lambda what, share, best_s: show(what, (1 + share) / 2, best_s))
    sizes, reason = () if problem.decision_variables.sizes else problem.sizes, Infeasible()
    for visited in sorted({sum(length) // len(length), max(length), problem.stages}):
        try:
            usual = replace(problem, visited=visited, sizes=sizes)
            return sandwich(make_plan(usual, Strategy.BEST, first), length, second, usual)
        except Infeasible as error:
            reason = error
    raise reason


def sandwich(plan: Plan, length: tuple[int, ...], request: PlanRequest, problem: Problem | None = None) -> Plan:
    """The plan with paths of these lengths instead, on its stages; with a `problem` that leaves them open, on any.

    The search begins with paths that repair finds on these stages; Infeasible if there are none.
    """
    compile_repair()
    began = request.clock()
    budget_s, changes = FIRST_SHARE * request.budget_s, int(min(CHANGES, request.changes))
    first = repaired(
        plan, plan.placement, plan.stage_of, budget_s=budget_s, changes=changes, visited=length, clock=request.clock
    )
    if first is None or not has_lengths(first, length) or validate(first):
        raise _no_paths(plan, length)
    longest = len(plan.stages)  # of any path: how many there are of each length is as in the first plan
    if problem is None:
        searched, request = problem_on_stages(plan, longest), replace(request, placement=plan.placement)
    else:
        sizes = tuple(map(len, plan.placement))
        searched = replace(problem, visited=longest, workload=plan.workload, layers=plan.layers, sizes=sizes)
    return _with_averaging(searched, _improved(searched, [first], request, began), request)


def turns_s(plan: Plan, length: tuple[int, ...], strategy: Strategy, request: PlanRequest) -> float:
    """Seconds of an iteration on average, if all paths of an iteration have one of these lengths, by turns, on the
    stages of the plan; Infeasible if there are no such plans.

    A small share of the budget is enough, as nodes stay where they are.
    """
    share = TURNS_SHARE / (2 * len(set(length)))  # a new plan and a repaired one of each length
    quick = replace(request, budget_s=share * request.budget_s, changes=share * request.changes)
    plans = {each: with_paths_of(plan, each, strategy, quick) for each in set(length)}
    return fmean(plans[each].promise.iteration_s for each in length)


def has_lengths(plan: Plan, length: PathLength) -> bool:
    """Whether the paths of the plan are of this length, or so many of each."""
    carried: Counter[int] = Counter()
    for lane in plan.lanes:
        carried[len(lane.path)] += lane.microbatches
    return carried == Counter(deal_lengths(parts_of(length), plan.microbatches))
