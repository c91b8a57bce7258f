"""Every strategy, on anything: a plan that holds, or one line that says why there is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import constraints
from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.astar import INFINITE_NS, best_path
from skippipe.planner.cbs import AgentPath, LaneAgent, PathConstraints, PathSearch
from skippipe.planner.codec_prices import DEFAULT_PRICES, CodecBudget
from skippipe.planner.genetic_allocation import allocate, best_tour
from skippipe.planner.problem import (
    Budget,
    PlanRequest,
    Problem,
    Strategy,
    check_feasible,
    lane_unit,
    stage_sizes,
)
from skippipe.planner.published import published20
from skippipe.planner.strategies import (
    detours_share,
    has_lengths,
    make_plan,
    make_plan_for,
    make_sandwich,
    missing_links,
    turns_s,
    with_detours,
    with_paths_of,
)
from skippipe.planner.strategies import sandwich as strategies_sandwich
from skippipe.planner.two_phase import round_robin_paths
from skippipe.presets import random_cluster
from skippipe.skip_schedule import PathLength
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import TINY, may_skip, problems, uniform_cluster
from tests.helpers.quick import others_slow


def published_problem(timing: Timing = Timing.CONTENTION_ONLY) -> Problem:
    example = published20()
    return Problem(example.cluster, example.workload, example.stages, example.visited, example.sizes, timing=timing)


class Ticks:
    """A clock that moves on by a second at every look: budgets become counts, on any machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def quick(seed: int = 0, looks: int = 160) -> PlanRequest:
    return PlanRequest(seed=seed, budget_s=looks, clock=Ticks())


def counted(strategy: Strategy, seed: int = 0, changes: int = 2_000) -> PlanRequest:
    """`best` searches on several threads, and who looks at a clock when is not for us to say."""
    return PlanRequest(seed=seed, changes=changes) if strategy is Strategy.BEST else quick(seed)


@pytest.mark.slow
@may_skip(Infeasible)
@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(list(Strategy)), st.integers(0, 3))
def test_every_plan_of_every_strategy_holds(problem: Problem, strategy: Strategy, seed: int) -> None:
    plan = make_plan(problem, strategy, counted(strategy, seed))
    assert validate(plan) == []
    assert plan.promise.timing is problem.timing
    assert strategy is Strategy.BEST or plan.split_backward == problem.split_backward
    visited = problem.stages if strategy is Strategy.DTFM else problem.visited
    assert {len(lane.path) for lane in plan.lanes} == {visited}
    if strategy is Strategy.DTFM:
        assert all(plan.visits(lane) == tuple(range(problem.stages)) for lane in plan.lanes)


@may_skip(Infeasible)
@settings(max_examples=3, deadline=None)
@given(problems(), st.sampled_from(list(Strategy)))
def test_same_seed_same_plan(problem: Problem, strategy: Strategy) -> None:
    first = make_plan(problem, strategy, counted(strategy, 5))
    assert make_plan(problem, strategy, counted(strategy, 5)) == first


@pytest.mark.parametrize("length", others_slow([(4, 4, 2)], [((4, 3),), ((3, 3, 2),)]))
def test_plans_with_paths_of_several_lengths(length: tuple[int, ...]) -> None:
    work = Workload(TINY, sequence_tokens=16, microbatches=2 * lane_unit(4, length), max_slots=4)
    problem = Problem(random_cluster(10, seed=1), work, 4, 4)
    request = counted(Strategy.BEST, changes=3_000)
    plan = make_sandwich(problem, length, request)
    assert validate(plan) == []
    assert has_lengths(plan, length)
    assert plan == make_sandwich(problem, length, request)
    on_its_stages = with_paths_of(plan, length, Strategy.BEST, request)
    assert on_its_stages.placement == plan.placement
    assert has_lengths(on_its_stages, length)
    kept = make_sandwich(problem, length, replace(request, placement=plan.placement))
    assert all(set(nodes) <= set(given) for nodes, given in zip(kept.placement, plan.placement, strict=True))


def test_microbatches_for_paths_of_several_lengths_are_said_at_once() -> None:
    """Or whoever follows the advice for the first is sent on by the second."""
    lengths: tuple[PathLength, ...] = (4, (6, 6, 3), (6, 6, 6, 6, 6, 3))
    assert [lane_unit(6, each) for each in lengths] == [5, 15, 30]
    problem = Problem(uniform_cluster(12), Workload(TINY, sequence_tokens=16, microbatches=18), 6, 6)
    for length, of_its_own in zip(lengths, ("5, such as 15 or 20", "15", "30"), strict=True):
        with pytest.raises(Infeasible) as caught:
            check_feasible(problem, length, lengths)
        for_all = "" if of_its_own == "30" else "; for all paths of the run a multiple of 30"
        assert str(caught.value).endswith(f"use a multiple of {of_its_own}{for_all}")
    with pytest.raises(Infeasible, match=r"use a multiple of 15$"):
        check_feasible(problem, lengths[1])


def test_a_sandwich_that_finds_no_room_says_what_would_help() -> None:
    """Six stages on as many nodes: five short paths and a long one need six slots of the node with stage 0."""
    work, length = Workload(TINY, sequence_tokens=16, microbatches=15, max_slots=3), (6, 6, 3)
    problem = Problem(uniform_cluster(6), work, 6, 6)
    advice = r"keep every rule; let nodes hold more microbatches \(max_slots is 3\), or add nodes$"
    with pytest.raises(Infeasible, match=advice):
        make_sandwich(problem, length, counted(Strategy.BEST))
    roomy = make_sandwich(replace(problem, workload=replace(work, max_slots=6)), length, counted(Strategy.BEST))
    assert has_lengths(roomy, length)


@pytest.mark.slow
def test_nodes_are_placed_for_several_lengths_by_best_with_given_codecs() -> None:
    """Else for one, on whose stages the others find theirs."""
    length = (4, 4, 2)
    work = Workload(TINY, sequence_tokens=16, microbatches=2 * lane_unit(4, length), max_slots=4)
    problem = Problem(random_cluster(10, seed=1), work, 4, 4)
    chosen = replace(problem, codec_budget=CodecBudget.of(1.0, DEFAULT_PRICES))
    cases = [(problem, Strategy.BEST), (problem, Strategy.DTFM_SKIP), (chosen, Strategy.BEST)]
    found = [make_plan_for(each, length, strategy, counted(strategy, changes=300)) for each, strategy in cases]
    assert [{len(lane.path) for lane in plan.lanes} for plan in found] == [{4, 2}, {4}, {4}]


def test_seconds_by_turns_are_the_mean_of_iterations_of_each_length() -> None:
    work = Workload(TINY, sequence_tokens=16, microbatches=6, max_slots=4)
    plan = make_plan(Problem(random_cluster(10, seed=1), work, 4, 4), Strategy.DTFM_SKIP, quick())
    mixes = (4, 4, 2), (4, 2), (4, 2, 2)
    more, half, less = (turns_s(plan, each, Strategy.DTFM_SKIP, quick()) for each in mixes)
    assert less < half < more
    assert more + less == pytest.approx(2 * half)
    with pytest.raises(Infeasible):
        turns_s(plan.edited(workload=replace(work, microbatches=4)), (4, 2), Strategy.DTFM_SKIP, quick())


@pytest.mark.parametrize("in_vain", [0, 1])
def test_progress_of_a_sandwich_runs_once_and_has_its_seconds_alone(
    in_vain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is no way on from so many first plans."""
    outcomes = iter([Infeasible()] * in_vain)

    def sandwich(*given: Any) -> Plan:
        if failure := next(outcomes, None):
            raise failure
        return strategies_sandwich(*given)

    monkeypatch.setattr("skippipe.planner.strategies.sandwich", sandwich)
    shown: list[tuple[float, float | None]] = []
    work = Workload(TINY, sequence_tokens=16, microbatches=2 * lane_unit(4, (4, 4, 2)), max_slots=4)
    request = replace(counted(Strategy.BEST), progress=lambda what, share, best_s: shown.append((share, best_s)))
    plan = make_sandwich(Problem(random_cluster(10, seed=1), work, 4, 4), (4, 4, 2), request)
    shares = [share for share, _ in shown]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert {best_s for share, best_s in shown if share < 0.5} == {None}
    found = [best_s for _, best_s in shown if best_s]
    assert found == sorted(found, reverse=True)
    assert found[-1] == plan.promise.iteration_s


@pytest.mark.slow
def test_plenty_of_memory_is_always_feasible() -> None:
    """The property above would also hold for a planner that always gives up."""
    for nodes, stages in product((6, 20), (2, 3, 5)):
        for visited in {2, stages}:
            work = Workload(TINY, sequence_tokens=16, microbatches=2 * lane_unit(stages, visited), max_slots=8)
            problem = Problem(uniform_cluster(nodes), work, stages, visited)
            for strategy in Strategy:
                assert validate(make_plan(problem, strategy, counted(strategy))) == []


@pytest.mark.slow
def test_published_stages_reach_the_published_time() -> None:
    example = published20()
    request = PlanRequest(seed=0, budget_s=30, placement=example.placement)
    plan = make_plan(published_problem(), Strategy.SKIPPIPE, request)
    assert plan.promise.iteration_s <= 32.8
    assert {frozenset(stage.nodes) for stage in plan.stages} == {frozenset(nodes) for nodes in example.placement or ()}


@pytest.mark.slow
def test_strategies_rank_as_published() -> None:
    seconds = {}
    for strategy in Strategy:
        plan = make_plan(published_problem(), strategy, quick(looks=600))
        seconds[strategy] = plan.promise.iteration_s
    assert seconds[Strategy.SKIPPIPE] <= 34.5
    assert seconds[Strategy.SKIPPIPE] <= seconds[Strategy.NO_TC2] < seconds[Strategy.DTFM_SKIP] < seconds[Strategy.DTFM]


@may_skip(Infeasible)
@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_no_iteration_is_shorter_than_its_bound(problem: Problem, seed: int) -> None:
    (placement,) = allocate(problem, Budget(1, 1e9, Ticks()), seed, keep=1)
    lanes = problem.lanes_of(placement)
    paths = round_robin_paths(problem, placement, lanes, [seed])
    search = PathSearch(problem, placement, [LaneAgent(node, (count,), 0) for node, count in lanes])
    alone = [search.costs.alone_ns(path) for path in paths]
    solution = tuple(AgentPath(PathConstraints(), path, each, each) for path, each in zip(paths, alone, strict=True))
    bound_ns = search._branch(solution).bound_ns
    assert bound_ns <= search._simulated(paths)
    assert bound_ns <= search._estimated(solution)


def test_no_budget_still_gives_a_plan() -> None:
    for strategy in Strategy:
        assert validate(make_plan(published_problem(Timing.FULL), strategy, PlanRequest(budget_s=0))) == []


def test_stopping_keeps_the_best_so_far() -> None:
    looks = []

    def stopped() -> bool:
        looks.append(1)
        return len(looks) > 5

    plan = make_plan(published_problem(), Strategy.SKIPPIPE, PlanRequest(budget_s=600, stopped=stopped))
    assert validate(plan) == []
    assert len(looks) < 1000


def test_unequal_memory_gives_unequal_lanes() -> None:
    problem = Problem(random_cluster(16, 3), Workload(MODELS["llama-1.5b"], samples_per_microbatch=1), 4, 3)
    plan = make_plan(problem, Strategy.SKIPPIPE, quick(looks=40))
    assert validate(plan) == []
    lanes = [sum(lane.path[0] == node for lane in plan.lanes) for node in plan.stages[0].nodes]
    assert len(set(lanes)) > 1


def test_missing_links_are_avoided() -> None:
    """A tenth of all directed links is not there."""
    whole = random_cluster(16, 5)
    bandwidth = whole.bandwidth_bytes_per_s.copy()
    bandwidth[np.random.default_rng(1).random(bandwidth.shape) < 0.1] = 0
    cluster = replace(whole, bandwidth_bytes_per_s=bandwidth)
    problem = Problem(cluster, Workload(TINY, sequence_tokens=16, microbatches=12, max_slots=3), 4, 3)
    assert validate(make_plan(problem, Strategy.SKIPPIPE, quick(looks=60))) == []


@pytest.mark.parametrize("strategy", others_slow([Strategy.BEST], [Strategy.DTFM_SKIP]))
@pytest.mark.parametrize(("stages", "visited"), others_slow([(4, 3)], [(6, 4)]))
def test_no_two_nodes_that_only_call_out_meet(strategy: Strategy, stages: int, visited: int) -> None:
    """Half of all nodes are such, and all slots would be taken if every lane were used."""
    whole = random_cluster(20, 5)
    bandwidth = whole.bandwidth_bytes_per_s.copy()
    bandwidth[1::2, 1::2] = 0
    cluster = replace(whole, bandwidth_bytes_per_s=bandwidth)
    problem = Problem(cluster, Workload(TINY, sequence_tokens=16, microbatches=30, max_slots=3), stages, visited)
    plan = make_plan(problem, strategy, counted(strategy, changes=300))
    assert validate(plan) == []


@pytest.mark.parametrize(
    ("missing", "share"),
    others_slow([((3, 7), 0.02)], [(np.s_[1::2, 1::2], 90 / 380)]),
    ids=["one", "half out only"],
)
def test_as_much_of_a_search_goes_into_detours_as_links_are_missing(missing: Any, share: float) -> None:
    whole = random_cluster(20, 5)
    bandwidth = whole.bandwidth_bytes_per_s.copy()
    bandwidth[missing] = 0
    cluster = replace(whole, bandwidth_bytes_per_s=bandwidth)
    assert missing_links(cluster).any() and detours_share(cluster) == pytest.approx(share)
    problem = Problem(cluster, Workload(TINY, sequence_tokens=16, microbatches=30, max_slots=3), 4, 3)
    done: dict[str, list[float]] = {}
    request = PlanRequest(changes=100, progress=lambda what, share, _best: done.setdefault(what, []).append(share))
    assert validate(make_plan(problem, Strategy.BEST, request)) == []
    assert max(done["planning around missing links"]) == pytest.approx(share)


def test_detours_lead_over_the_third_node_where_they_are_shortest() -> None:
    cluster = uniform_cluster(5)
    latency_s, bandwidth = cluster.latency_s.copy(), cluster.bandwidth_bytes_per_s.copy()
    bandwidth[0, 1] = bandwidth[1, 0] = 0  # 2 is far away, 3 is slow, 4 cannot reach 1
    latency_s[[0, 2], [2, 1]] = 0.2
    bandwidth[0, 3], bandwidth[4, 1] = 2e5, 0
    cluster = replace(cluster, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    large, small = with_detours(cluster, 1e6, 1.0), with_detours(cluster, 1e3, 2.0)
    assert (large.latency_s[0, 1], large.bandwidth_bytes_per_s[0, 1]) == (0.4, 1e6)
    assert (small.latency_s[0, 1], small.bandwidth_bytes_per_s[0, 1]) == (0.04, 1e5), "twice as slow"
    assert not missing_links(large).any() and missing_links(cluster).sum() == 3
    bandwidth[:, 1] = 0
    assert missing_links(with_detours(replace(cluster, bandwidth_bytes_per_s=bandwidth), 1.0, 1.0)).sum() == 4


def test_sizes_and_layers_stay_where_they_were_asked_for() -> None:
    work = Workload(replace(TINY, layers=12), sequence_tokens=16, microbatches=30, max_slots=4)
    problem = Problem(uniform_cluster(14), work, 4, 4, sizes=(5, 2, 4, 3), layers=(2, 3, 6, 1))
    plan = make_plan(problem, Strategy.SKIPPIPE, quick(looks=40))
    assert [stage.layers for stage in plan.stages] == [2, 3, 6, 1]
    assert all(len(stage.nodes) <= size for stage, size in zip(plan.stages, problem.sizes, strict=True))
    placements = allocate(problem, Budget(50, 1e9, Ticks()), seed=0)
    assert {tuple(map(len, placement)) for placement in placements} == {problem.sizes}


@pytest.mark.slow
def test_the_search_does_not_look_at_the_same_paths_twice() -> None:
    problem = Problem(random_cluster(12, 3), Workload(MODELS["llama-1.5b"], microbatches=24, max_slots=3), 4, 3)
    collided = make_plan(problem, Strategy.SKIPPIPE, quick(looks=2000)).expected
    baseline = make_plan(problem, Strategy.DTFM_SKIP, quick(looks=2000)).expected
    assert collided is not None and baseline is not None
    assert collided.iteration_ns < baseline.iteration_ns


def test_data_nodes_are_those_that_can_hold_stage_0() -> None:
    small = random_cluster(12, 0)
    work = Workload(MODELS["llama-1.5b"], samples_per_microbatch=1, microbatches=30)
    need = work.fixed_bytes(0, 4) + work.held_bytes(4)
    nodes = tuple(replace(node, memory_bytes=need if index < 3 else need - 1) for index, node in enumerate(small.nodes))
    assert Problem(replace(small, nodes=nodes), work, 6, 2).sizes[0] == 3


# infeasible demands


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 25, "sizes": ()}, "25 stages need at least 25 nodes and 'published20' has 20: use at most 20"),
        ({"visited": 1}, "with 6 stages at most 67% can be skipped"),
        ({"visited": 7}, "at most all"),
        ({"stages": 1, "sizes": ()}, "use 2 or more"),
        ({"sizes": (5, 3)}, "6 stages need 6 sizes"),
        ({"sizes": (10, 3, 3, 3, 3, 3)}, "add up to at most 20 nodes; for example 5,3,3,3,3,3"),
        ({"layers": (4, 4, 4, 4, 4, 5)}, "add up to the 24 layers"),
    ],
)
def test_infeasible_demands_name_the_nearest_feasible_one(change: dict[str, object], message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        replace(published_problem(), **change)  # type: ignore[arg-type]


def test_microbatches_that_cannot_visit_stages_equally() -> None:
    problem = published_problem()
    with pytest.raises(Infeasible, match="use a multiple of 5, such as 30 or 35"):
        replace(problem, workload=replace(problem.workload, microbatches=31))
    with pytest.raises(Infeasible, match=r"such as 5$"):
        replace(problem, workload=replace(problem.workload, microbatches=3))


# parts


@pytest.mark.parametrize(
    ("nodes", "stages", "visited", "sizes"),
    [
        (20, 6, 4, (5, 3, 3, 3, 3, 3)),
        (18, 4, 3, (6, 4, 4, 4)),
        (42, 8, 6, (7, 5, 5, 5, 5, 5, 5, 5)),
        (4, 4, 3, (1, 1, 1, 1)),
        (2, 2, 2, (1, 1)),
    ],
)
def test_stage_sizes_match_the_demand(nodes: int, stages: int, visited: int, sizes: tuple[int, ...]) -> None:
    assert stage_sizes(nodes, stages, visited) == sizes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
def test_the_best_path_is_the_best_of_all_paths(seed: int, visited: int, busy: bool) -> None:
    """Against every allowed path, one by one, with banned nodes, required stages and forbidden intervals."""
    draw = np.random.default_rng(seed)
    nodes, stages = 9, 5
    stage_of = np.array([0, *range(1, stages), *draw.integers(1, stages, nodes - stages)])
    allowed = draw.random(nodes) < 0.8
    required = draw.random(stages) < 0.2
    required[0] = False
    forward, backward = draw.integers(1, 50, nodes), draw.integers(1, 50, nodes)
    head = int(draw.integers(1, 20))
    hop = draw.integers(0, 100, (nodes, nodes))
    intervals = draw.integers(0, 400, (3, 8 if busy else 0))
    intervals[0] %= nodes
    intervals[2] = intervals[1] + intervals[2] // 4

    def start(node: int, ready: int, length: int) -> int:
        while True:
            hits = [u for n, f, u in intervals.T if n == node and ready < u and ready + length > f]
            if not hits:
                return ready
            ready = int(hits[0])

    def back_at(path: tuple[int, ...]) -> int:
        time, at = 0, path[0]
        for node, length in [
            *((node, int(forward[node])) for node in path),
            (path[0], head),
            *((node, int(backward[node])) for node in reversed(path)),
        ]:
            time = start(node, time + int(hop[at, node] if at != node else 0), length) + length
            at = node
        return time

    np.fill_diagonal(hop, 0)
    candidates = []
    for order in permutations(range(1, stages), visited - 1):
        if constraints.cc2_broken_at((0, *order)) is None and all(s in order for s in np.flatnonzero(required)):
            choices = [[n for n in range(nodes) if stage_of[n] == s and allowed[n]] for s in order]
            candidates += [(0, *rest) for rest in product(*choices)]
    best = min(map(back_at, candidates), default=INFINITE_NS)
    path = np.empty(visited, np.int64)
    found = best_path(
        0,
        visited,
        constraints.MAX_SWAPS,
        stage_of,
        allowed,
        required,
        forward,
        backward,
        head,
        hop,
        0,
        np.ascontiguousarray(intervals.T),
        path,
    )
    assert found == best
    if best < INFINITE_NS:
        assert back_at(tuple(path.tolist())) == best


@given(st.integers(0, 2**32), st.integers(2, 7))
@settings(max_examples=40, deadline=None)
def test_the_best_tour_is_the_best_of_all_tours(seed: int, stops: int) -> None:
    weights = np.random.default_rng(seed).random((stops, stops))
    weights = weights + weights.T
    order = np.zeros(stops, np.int64)

    def length(tour: tuple[int, ...]) -> float:
        return float(sum(weights[a, b] for a, b in zip(tour, (*tour[1:], tour[0]), strict=True)))

    found = best_tour(weights, order)
    assert found == pytest.approx(min(length((0, *rest)) for rest in permutations(range(1, stops))))
    assert length(tuple(order.tolist())) == pytest.approx(found)


def test_long_tours_visit_everything() -> None:
    weights = np.random.default_rng(0).random((20, 20))
    weights = weights + weights.T
    order = np.zeros(20, np.int64)
    found = best_tour(weights, order)
    assert sorted(order) == list(range(20))
    assert found < sum(weights[i, (i + 1) % 20] for i in range(20))


def test_breeding_beats_chance() -> None:
    """The widest edge inside a stage and the tour, as the paper scores them, against random placements."""
    problem = published_problem()

    def widest(placement: tuple[tuple[int, ...], ...]) -> float:
        hop = problem.costs.hop_ns / 1e9
        return max(float(hop[a, b]) for nodes in placement for a, b in combinations(nodes, 2))

    bred = allocate(problem, Budget(500, 1e9, Ticks()), seed=0)
    assert len(bred) == len(set(bred))
    draw = np.random.default_rng(0)
    chance = []
    for _ in range(200):
        order = iter(draw.permutation(20).tolist())
        chance.append(widest(tuple(tuple(next(order) for _ in range(size)) for size in problem.sizes)))
    assert widest(bred[0]) <= np.median(chance)
    assert widest(bred[0]) < 100  # NL and London, 132 s apart, share no stage
