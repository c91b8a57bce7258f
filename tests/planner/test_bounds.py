"""The bound: never above what any valid plan takes, and close to the best plan where that can be found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest

from skippipe.cluster import Cluster
from skippipe.collectives.rings import ring_order
from skippipe.collectives.schedule import Averaging
from skippipe.collectives.topology import exchange
from skippipe.collectives.transfers import averaged_ns, free_links, takes_ns
from skippipe.constraints import cc2_broken_at
from skippipe.cost_model import NEVER_NS
from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible, UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.bounds.load_relaxation import averaging_by_size_ns, loaded_by_size_ns
from skippipe.planner.bounds.lower_bound import lower_bound
from skippipe.planner.bounds.node_classes import NodeClasses, all_tours, shortest_rounds_ns
from skippipe.planner.problem import (
    DecisionVariables,
    Placement,
    PlanRequest,
    Problem,
    Strategy,
    iteration_ns,
    lane_unit,
)
from skippipe.planner.published import published20, published_plan
from skippipe.planner.strategies import make_plan
from skippipe.presets import GIB, datacentre, random_cluster, regions
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.quick import others_slow

BUDGET_S = 0.15


def unequal(nodes: int, seed: int, missing: float, memory_gib: float) -> Cluster:
    """Random machines of which some cannot reach each other, with little memory; with odd seeds, of several devices."""
    draw = np.random.default_rng(seed)
    cluster = random_cluster(nodes, seed)
    bandwidth = cluster.bandwidth_bytes_per_s * (draw.random((nodes, nodes)) >= missing)
    machines = tuple(
        replace(
            node,
            memory_bytes=int(memory_gib * GIB * 2 ** draw.uniform(-0.5, 1.5)),
            devices=int(draw.integers(1, 5)) if seed % 2 else 1,
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=machines, bandwidth_bytes_per_s=bandwidth)


def some_problem(seed: int) -> Problem | None:
    draw = np.random.default_rng([1, seed])
    nodes = int(draw.integers(3, 13))
    stages = int(draw.integers(2, min(nodes, 5) + 1))
    visited = int(draw.integers(2, stages + 1))
    work = Workload(
        MODELS["llama-30m"],
        sequence_tokens=int(draw.choice([256, 2048])),
        samples_per_microbatch=int(draw.integers(1, 5)),
        microbatches=lane_unit(stages, visited) * int(draw.integers(1, 7)),
        max_slots=int(draw.integers(1, 5)),
        head_ratio=float(draw.uniform(0, 0.5)),
        weight_share=float(draw.uniform(0.2, 0.8)),
    )
    cluster = unequal(nodes, seed, float(draw.choice([0, 0.1])), float(draw.choice([1, 4, 40])))
    try:
        return Problem(
            cluster,
            work,
            stages,
            visited,
            timing=Timing.FULL if draw.random() < 0.5 else Timing.CONTENTION_ONLY,
            split_backward=bool(draw.random() < 0.5),
        )
    except UserError:
        return None


def plan_of(problem: Problem, placement: Placement, lanes: list[tuple[tuple[int, ...], int]]) -> Plan:
    rings = [ring_order(problem.costs, stage, nodes) for stage, nodes in enumerate(placement)]
    free_ns = free_links(len(problem.cluster))
    everybody = [node for nodes in placement for node in nodes]
    ways = [
        exchange(problem.costs, stage, ring, free_ns, everybody) if len(ring) > 1 else Averaging(ring)
        for stage, ring in enumerate(rings)
    ]
    return Plan(
        problem.cluster,
        problem.workload,
        tuple(map(Stage.of, problem.layers, ways)),
        tuple(Lane(path, count) for path, count in lanes),
        problem.dispatch,
        problem.split_backward,
    )


def random_plans(problem: Problem, seed: int, attempts: int) -> Iterator[Plan]:
    """Valid ones, of any sizes, with uneven lanes."""
    draw = np.random.default_rng([2, seed])
    stages, visited = problem.stages, problem.visited
    pieces = [sorted((start + step) % (stages - 1) + 1 for step in range(visited - 1)) for start in range(stages - 1)]
    pieces = pieces[:: (stages - 1) // problem.lane_unit] if visited < stages else pieces[:1]
    for _ in range(attempts):
        held = draw.integers(-1, stages, len(problem.cluster))
        placement = tuple(tuple(np.flatnonzero(held == stage).tolist()) for stage in range(stages))
        if not all(placement):
            continue
        lanes = []
        each = problem.workload.microbatches // len(pieces)
        for piece in pieces:
            left = each
            while left:
                count = int(draw.integers(1, left + 1))
                visits = draw.permutation(piece).tolist() if draw.random() < 0.5 else piece
                visits = piece if cc2_broken_at([0, *visits]) is not None else visits
                lanes.append((tuple(int(draw.choice(placement[stage])) for stage in [0, *visits]), count))
                left -= count
        dispatch = Dispatch(draw.choice(list(Dispatch)))
        plan = plan_of(replace(problem, dispatch=dispatch), placement, lanes)
        if not validate(plan):
            yield plan


def test_no_random_plan_beats_it() -> None:
    compared = 0
    for seed in range(12):
        problem = some_problem(seed)
        plans = list(random_plans(problem, seed, 40)) if problem else []
        if problem and plans:
            least_ns = min(simulate(plan, problem.timing).iteration_ns for plan in plans)
            assert lower_bound([problem], BUDGET_S).ns <= least_ns, seed
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("seed", others_slow([0], range(1, 6)))
def test_no_strategy_beats_it(seed: int) -> None:
    problem = some_problem(1000 + seed)
    assert problem is not None, "take another seed"
    taken_ns = []
    for strategy in (Strategy.SKIPPIPE, Strategy.DTFM_SKIP):
        with suppress(Infeasible):
            request = PlanRequest(seed, budget_s=0.5, clock=time.process_time)  # whatever else the machine does
            taken_ns.append(iteration_ns(make_plan(problem, strategy, request)))
    assert taken_ns, "take another seed"
    assert lower_bound([problem], BUDGET_S).ns <= min(taken_ns)


def published_problem(timing: Timing, split: bool) -> tuple[Problem, int]:
    """And what the fastest of the published plans takes."""
    example = published20()
    problem = Problem(example.cluster, example.workload, 6, 4, timing=timing, split_backward=split)
    plans = [published_plan(example, name) for name in ("skippipe", "skippipe_no_tc2", "dtfm_skip")]
    return problem, min(simulate(replace(plan, split_backward=split), timing).iteration_ns for plan in plans)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("timing", list(Timing))
def test_published_plans_do_not_beat_it(timing: Timing, split: bool) -> None:
    problem, taken_ns = published_problem(timing, split)
    assert lower_bound([problem], 0.5).ns <= taken_ns


@pytest.mark.slow
@pytest.mark.parametrize(("split", "known_s"), [(False, 25.4), (True, 22.6)])
def test_within_a_tenth_of_the_best_plan_known(split: bool, known_s: float) -> None:
    problem, _ = published_problem(Timing.CONTENTION_ONLY, split)
    bound = lower_bound([problem], 3.0, time.process_time)  # whatever else the machine does
    assert known_s / 1.1 <= bound.ns / 1e9 <= known_s


def every_plan(problem: Problem) -> Iterator[Plan]:
    """All plans with paths of two stages, but for the numbering of lanes where that says nothing."""
    stages, nodes = problem.stages, range(len(problem.cluster))
    share = problem.workload.microbatches // (stages - 1)
    for held in product(range(-1, stages), repeat=len(nodes)):
        placement = tuple(tuple(node for node in nodes if held[node] == stage) for stage in range(stages))
        if not all(placement):
            continue
        choices = []
        for stage in range(1, stages):
            paths = list(product(placement[0], placement[stage]))
            choices.append(
                [
                    tuple(zip(chosen, parts, strict=True))
                    for parts in partitions(share)
                    for chosen in product(paths, repeat=len(parts))
                ]
            )
        for lanes in product(*choices):
            found = [lane for each in lanes for lane in each]
            for dispatch in Dispatch:
                orders = permutations(found) if dispatch is Dispatch.LANES_IN_ORDER else [found]
                for order in orders:
                    plan = plan_of(replace(problem, dispatch=dispatch), placement, list(order))
                    if not validate(plan):
                        yield plan


def partitions(total: int) -> list[tuple[int, ...]]:
    parts = range(1, total + 1)
    every = (chosen for count in parts for chosen in combinations_with_replacement(parts, count))
    return [chosen for chosen in every if sum(chosen) == total]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "split", "timing"), [(0, True, Timing.FULL), (1, False, Timing.CONTENTION_ONLY)])
def test_bound_and_search_meet_at_the_optimum_of_tiny_problems(seed: int, split: bool, timing: Timing) -> None:
    work = Workload(MODELS["llama-30m"], microbatches=4, max_slots=2)
    problem = Problem(random_cluster(4, seed), work, 3, 2, timing=timing, split_backward=split)
    optimum_ns = min(simulate(plan, timing).iteration_ns for plan in every_plan(problem))
    bound = lower_bound([problem], 20.0)  # takes half a second
    assert 0.9 * optimum_ns <= bound.ns <= optimum_ns
    fixed = replace(problem, decision_variables=DecisionVariables(layers=False, split_backward=False))
    found_ns = iteration_ns(make_plan(fixed, Strategy.BEST, PlanRequest(changes=30_000)))
    assert bound.ns <= found_ns <= optimum_ns  # other rings than those tried here may be better still


def test_valid_whether_or_not_the_backward_is_split() -> None:
    problem, taken_ns = published_problem(Timing.CONTENTION_ONLY, split=False)
    _, taken_split_ns = published_problem(Timing.CONTENTION_ONLY, split=True)
    bound = lower_bound([replace(problem, split_backward=split) for split in (True, False)], 1.0)
    assert 19e9 <= bound.ns <= min(taken_ns, taken_split_ns)


def test_one_room_is_limited_by_work() -> None:
    work = Workload(MODELS["llama-1.5b"], microbatches=64, max_slots=8)
    problem = Problem(datacentre(8), work, 4, 4, timing=Timing.CONTENTION_ONLY)
    bound = lower_bound([problem], 1.0)
    work_ns = int((problem.costs.forward_ns + problem.costs.backward_ns)[:, 0].sum() + problem.costs.head_ns[0])
    assert bound.ns > 64 * work_ns // 8
    assert bound.reason == "node load"


def test_a_stage_of_one_node_is_done_when_the_best_node_could_be() -> None:
    cluster = random_cluster(6, 3)
    nodes = tuple(replace(node, devices=3 if at == 2 else 1) for at, node in enumerate(cluster.nodes))
    work = Workload(MODELS["llama-30m"], microbatches=10)
    problem = Problem(replace(cluster, nodes=nodes), work, 2, 2, timing=Timing.CONTENTION_ONLY)
    each_ns = (problem.costs.forward_ns + problem.costs.backward_ns)[0] + problem.costs.head_ns
    together_ns = -(-10 * each_ns // problem.costs.workers[0])
    assert len(set(together_ns.tolist())) == 6
    assert loaded_by_size_ns(problem, NodeClasses.of(problem), 0, 1) == [int(together_ns.min())]


def test_a_data_node_waits_while_all_its_slots_are_under_way() -> None:
    """Nine microbatches in three slots: it is idle until the first is back, and after the last has set out."""
    cluster = uniform_cluster(4, latency_s=0.05, flops_per_s=1e8)
    problem = Problem(cluster, Workload(TINY, 16, 1, 9, max_slots=3), 2, 2, (1, 3), timing=Timing.CONTENTION_ONLY)
    classes, costs = NodeClasses.of(problem), problem.costs
    round_ns = all_tours(classes, 2).least_ns(classes)  # type: ignore[union-attr]
    forward_ns, backward_ns, head_ns = int(costs.forward_ns[0, 0]), int(costs.backward_ns[0, 0]), int(costs.head_ns[0])
    first_ns = int(round_ns[0]) - backward_ns - 3 * (forward_ns + head_ns)
    last_ns = int(round_ns[0]) - forward_ns - 3 * (head_ns + backward_ns)
    assert min(first_ns, last_ns) > 0
    (work_ns,) = loaded_by_size_ns(problem, classes, 0, 1)
    (bound_ns,) = loaded_by_size_ns(problem, classes, 0, 1, round_ns)
    assert bound_ns == work_ns + first_ns + last_ns
    plan = plan_of(problem, ((0,), (1, 2, 3)), [((0, other), 3) for other in (1, 2, 3)])
    assert bound_ns <= simulate(plan, Timing.CONTENTION_ONLY).iteration_ns < 1.5 * bound_ns


def test_tours_of_kinds_are_tours_of_nodes() -> None:
    problem = Problem(regions(14), Workload(MODELS["llama-1.5b"]), 4, 3)
    classes = NodeClasses.of(problem)
    assert sorted(classes.count.tolist()) == [1] * 10 + [2] * 2
    tours = all_tours(classes, 3)
    assert tours is not None
    costs = problem.costs
    pair_ns = costs.hop_ns + costs.hop_ns.T
    turn_ns = int(costs.forward_ns[0, 0] + costs.backward_ns[0, 0])
    shortest = min(
        int(pair_ns[a, b] + pair_ns[b, c] + pair_ns[c, a]) for a in range(14) for b in range(a) for c in range(b)
    )
    assert tours.round_ns.min() == shortest + 3 * turn_ns + int(costs.head_ns[0])
    assert (shortest_rounds_ns(classes, 3) <= tours.least_ns(classes)).all()


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("collective", ["ring", "auto"])
def test_no_averaging_beats_its_bound(size: int, collective: str) -> None:
    problem = Problem(random_cluster(9, 5), Workload(MODELS["llama-30m"], collective=collective), 3, 2)
    draw = np.random.default_rng(size)
    for _ in range(20):
        nodes = draw.permutation(9)[:size].tolist()
        averaging = Averaging(tuple(nodes))
        if collective == "auto" and size > 1:
            averaging = exchange(problem.costs, 1, nodes, free_links(9), range(9))
        done_ns = draw.integers(0, takes_ns(problem.costs, 1, averaging) + 1, 9)
        late_ns = averaged_ns(problem.costs, 1, averaging, done_ns) - done_ns[nodes].max()
        assert averaging_by_size_ns(problem, 1, size)[-1] <= late_ns


def test_where_there_is_no_way_there_is_no_plan() -> None:
    cluster = random_cluster(4, 0)
    cluster = replace(cluster, bandwidth_bytes_per_s=np.zeros((4, 4)))
    problem = Problem(cluster, Workload(MODELS["llama-30m"], microbatches=2), 2, 2)
    assert lower_bound([problem], BUDGET_S).ns == NEVER_NS


def test_a_budget_cuts_it_short() -> None:
    example = published20()
    problem = Problem(example.cluster, example.workload, 6, 4, timing=example.timing)
    assert 1 <= lower_bound([problem], 0.0).ns <= lower_bound([problem], 1.0).ns
