"""Annealing over whole plans: the objective is what the simulator says, and what is fixed stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import jit
from skippipe.cluster import Cluster, Node
from skippipe.constraints import cc3_uneven
from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible, UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Plan, Stage
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.problem import ALL_FIXED, DecisionVariables, PlanRequest, Problem, Strategy
from skippipe.planner.search.annealing import Chain, improve
from skippipe.planner.search.moves import DRAWS, PLACEMENT_MOVES, Move, cumulative_move_weights, propose
from skippipe.planner.search.objective import objective
from skippipe.planner.search.reinsertion import recreate
from skippipe.planner.search.state import State, assign, copy_state, costs_by_layers, lanes_of, state_of, tables_of
from skippipe.planner.strategies import make_plan
from skippipe.planner.whatif.advisor import left_out
from skippipe.presets import regions
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import TINY, may_skip, problems, uniform_cluster, without_rates

FEW = PlanRequest(changes=6_000)


def plan_as_is(problem: Problem, state: State) -> Plan:
    """With every member and the rings that the state has."""
    rings = [tuple(row[:size].tolist()) for row, size in zip(state.ring, state.size, strict=True)]
    return Plan(
        problem.cluster,
        problem.workload,
        tuple(Stage(int(layers), tuple(sorted(ring)), ring) for layers, ring in zip(state.layers, rings, strict=True)),
        lanes_of(state),
        dispatch=list(Dispatch)[state.dispatch[0]],
        split_backward=problem.split_backward,
    )


@may_skip(Infeasible)
@settings(max_examples=12, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_the_score_is_what_the_simulator_says(problem: Problem, seed: int) -> None:
    """Under full timing for rings, and where no rates are shared: otherwise averaging is estimated."""
    if problem.timing is Timing.FULL:
        workload = replace(problem.workload, collective="ring")
        problem = replace(problem, cluster=without_rates(problem.cluster), workload=workload)
    first = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    costs = costs_by_layers(problem.cluster, problem.workload, problem.workload.model.layers - problem.stages + 1)
    visitable = np.ones(problem.stages, np.bool_)
    tables = tables_of(costs, visitable, problem.timing, problem.split_backward, problem.swaps)
    state = state_of(first, 12)
    weights = cumulative_move_weights(Move)
    draw = np.random.default_rng(seed)
    compared = 0
    for _ in range(60):
        trial, row = copy_state(state), draw.integers(0, 2**31, DRAWS)
        if not propose(row, trial, tables, weights) or not recreate(row, trial, tables):
            continue
        assert trial.counts.min() >= 0
        assert trial.counts.sum() == first.microbatches
        scored, spread, iteration_ns = objective(trial, INFINITE_NS, tables)
        if iteration_ns == INFINITE_NS:
            continue
        assert objective(trial, iteration_ns, tables) == (scored, spread, iteration_ns)
        assert objective(trial, iteration_ns - 1, tables)[2] in (iteration_ns, INFINITE_NS)
        plan = plan_as_is(problem, trial)
        assert {violation.rule for violation in validate(plan)} <= {"CC3", "link"}
        assert (spread > 0) == bool(cc3_uneven(plan.exposure))
        assert simulate(plan, problem.timing).iteration_ns == iteration_ns
        assign(state, trial)
        compared += 1
    assert compared, "of 60 proposals some are plans"


@may_skip(Infeasible)
@settings(max_examples=15, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_lanes_that_are_laid_for_a_placement_visit_all_stages_equally_often(problem: Problem, seed: int) -> None:
    first = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    costs = costs_by_layers(problem.cluster, problem.workload, max(problem.layers))
    visitable = np.ones(problem.stages, np.bool_)
    tables = tables_of(costs, visitable, problem.timing, problem.split_backward, problem.swaps)
    state = state_of(first, 12)
    draw = np.random.default_rng(seed)
    for _ in range(40):
        trial, row = copy_state(state), draw.integers(0, 2**31, DRAWS)
        if not propose(row, trial, tables, cumulative_move_weights(PLACEMENT_MOVES)):
            continue
        assert sum(trial.size) == sum(trial.stage_of >= 0)
        if recreate(row, trial, tables):
            assert not cc3_uneven(plan_as_is(problem, trial).exposure)
            assign(state, trial)


def test_replicas_come_to_be_near_each_other() -> None:
    """Three places with two machines each: gradients are large, so no stage should be spread over places."""
    bandwidth = np.kron(np.where(np.eye(3), 1e9, 1e6), np.ones((2, 2))).astype(np.float64)
    cluster = replace(uniform_cluster(6), bandwidth_bytes_per_s=bandwidth)
    work = Workload(TINY, sequence_tokens=16, microbatches=12, max_slots=2)
    problem = Problem(cluster, work, 3, 3)
    plan = make_plan(problem, Strategy.BEST, FEW)
    assert all(len({node // 2 for node in stage.nodes}) == 1 for stage in plan.stages)


def unequal(nodes: int, speeds: list[float]) -> Cluster:
    machines = tuple(Node(f"n{index}", "here", speeds[index % len(speeds)], 2**30) for index in range(nodes))
    return replace(uniform_cluster(nodes), nodes=machines)


ALL_OPEN = DecisionVariables()


def problem_on(cluster: Cluster, decision_variables: DecisionVariables = ALL_OPEN, **other: object) -> Problem:
    work = Workload(TINY, sequence_tokens=16, microbatches=12, max_slots=4)
    return replace(Problem(cluster, work, 4, 3, decision_variables=decision_variables), **other)  # type: ignore[arg-type]


def test_what_is_not_free_stays() -> None:
    problem = problem_on(unequal(9, [1e9, 4e9]), ALL_FIXED, sizes=(3, 2, 2, 2))
    plan = make_plan(problem, Strategy.BEST, FEW)
    assert [len(stage.nodes) for stage in plan.stages] <= [3, 2, 2, 2]
    assert plan.layers == problem.layers
    assert (plan.dispatch, plan.split_backward) == (problem.dispatch, problem.split_backward)
    kept = make_plan(problem, Strategy.BEST, replace(FEW, placement=plan.placement))
    assert kept.stage_of.items() <= plan.stage_of.items()


def test_layers_follow_unequal_compute() -> None:
    """One node for each stage, one of them slow: its stage gets fewer layers than the others."""
    slow = 3
    cluster = unequal(4, [4e6, 4e6, 4e6, 1e6])
    fixed, free = (
        make_plan(problem_on(cluster, replace(ALL_FIXED, layers=layers)), Strategy.BEST, FEW)
        for layers in (False, True)
    )
    assert fixed.layers == (2, 2, 2, 2)
    assert free.layers[0] == 2  # or a larger share would be skipped
    assert free.layers[free.stage_of[slow]] == 1
    assert free.promise.iteration_ns < 0.8 * fixed.promise.iteration_ns


def test_nodes_that_do_not_help_are_left_out_with_a_reason() -> None:
    cluster = uniform_cluster(9)
    far, small = 7, 8
    latency_s = cluster.latency_s.copy()
    latency_s[far, :] = latency_s[:, far] = 30.0
    nodes = tuple(
        replace(node, memory_bytes=1000) if index == small else node for index, node in enumerate(cluster.nodes)
    )
    plan = make_plan(problem_on(replace(cluster, latency_s=latency_s, nodes=nodes)), Strategy.BEST, FEW)
    reasons = {node: reason for reason, nodes in left_out(plan).items() for node in nodes}
    assert "too far or too slow" in reasons[far]
    assert "too little memory" in reasons[small]


def test_begins_with_a_plan() -> None:
    problem = problem_on(uniform_cluster(8), timing=Timing.FULL)
    first = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    better = make_plan(problem, Strategy.BEST, replace(FEW, start=first))
    assert better.promise.iteration_ns <= first.promise.iteration_ns
    again = make_plan(problem, Strategy.BEST, PlanRequest(changes=1, start=better))
    assert again.promise.iteration_ns <= better.promise.iteration_ns
    with pytest.raises(UserError, match="other nodes"):
        make_plan(problem_on(uniform_cluster(9)), Strategy.BEST, replace(FEW, start=first))
    with pytest.raises(UserError, match="12 microbatches, and 24"):
        work = replace(problem.workload, microbatches=24)
        make_plan(replace(problem, workload=work), Strategy.BEST, replace(FEW, start=first))


def test_what_is_fixed_is_not_taken_from_the_plan_to_begin_with() -> None:
    problem = problem_on(uniform_cluster(8), timing=Timing.FULL)
    first = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    first = first.edited(split_backward=True, dispatch=Dispatch.LANES_IN_ORDER)
    request = PlanRequest(changes=1, start=first)
    fixed = replace(problem, decision_variables=ALL_FIXED)
    plan = make_plan(fixed, Strategy.BEST, request)
    assert (plan.split_backward, plan.dispatch) == (False, Dispatch.FIRST_COME)
    layers = (problem.layers[0] + 1, problem.layers[1] - 1, *problem.layers[2:])
    with pytest.raises(UserError, match="as layers of stages, and"):
        make_plan(replace(fixed, layers=layers), Strategy.BEST, request)
    with pytest.raises(UserError, match="as sizes of stages, and"):
        make_plan(replace(fixed, sizes=(1,) * problem.stages), Strategy.BEST, request)
    turned = (*first.placement[1:], first.placement[0])
    with pytest.raises(UserError, match="other nodes on its stages"):
        make_plan(problem, Strategy.BEST, replace(request, placement=turned))


def test_is_no_worse_than_any_plan_to_begin_with() -> None:
    problem = problem_on(unequal(9, [1e9, 4e9]), ALL_FIXED)
    starts = [make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(seed=seed, budget_s=0)) for seed in range(3)]
    promised = [plan.expected.iteration_ns for plan in starts if plan.expected]
    assert len(set(promised)) > 1
    for order in (starts, starts[::-1]):
        found = improve(problem, order, seed=0, changes=1, stopped=lambda: True).expected
        assert found is not None
        assert found.iteration_ns == min(promised)


def test_is_no_worse_than_what_it_has_reported() -> None:
    """Chains estimate averaging: what they come to take for better may have a longer promise, as with this seed."""
    work = Workload(MODELS["llama-1.5b"], microbatches=8, max_slots=9)
    problem = Problem(regions(8), work, 4, 4)
    start = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    reported: list[int] = []
    found = improve(problem, [start], 4, 20_000, lambda: False, lambda _, best_ns: reported.append(best_ns))
    assert found.promise.iteration_ns <= min(reported) < start.promise.iteration_ns


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_does_not_stay_where_stages_are_visited_unequally_often(seed: int) -> None:
    """With few microbatches and slots that is much faster, and all changes would go into plans that break CC3."""
    work = Workload(MODELS["llama-1.5b"], microbatches=15, max_slots=5)
    problem = Problem(regions(12), work, 6, 4, split_backward=True)
    start = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0))
    costs = costs_by_layers(problem.cluster, work, max(problem.layers))
    tables = tables_of(costs, np.ones(6, np.bool_), Timing.FULL, True, problem.swaps)
    weights = cumulative_move_weights(set(Move) - {Move.MOVE_LAYER})
    chain = Chain(state_of(start, 8), tables, weights, [seed])
    chain.round(8_192, lambda: False)
    assert objective(chain.state, INFINITE_NS, tables)[1] == 0


def test_a_plan_says_how_good_any_could_be() -> None:
    plan = make_plan(problem_on(uniform_cluster(8)), Strategy.BEST, replace(FEW, bound_s=1.0))
    assert plan.gap is not None
    assert 0 <= plan.gap < 1
    assert Plan.from_json(plan.to_json()) == plan
    boasting = replace(plan, lower_bound_ns=plan.promise.iteration_ns + 1)
    assert [(each.rule, each.where) for each in validate(boasting)] == [("promise", "lower_bound_s")]


def test_a_search_that_was_stopped_does_not_claim_what_it_has_not_proved() -> None:
    stopped = replace(FEW, bound_s=1.0, stopped=lambda: True)
    plain = make_plan(problem_on(uniform_cluster(8), timing=Timing.CONTENTION_ONLY), Strategy.BEST, stopped)
    assert plain.gap is None
    full = make_plan(problem_on(uniform_cluster(8)), Strategy.BEST, stopped)
    assert full.gap is not None, "what nodes compute and average takes no search"
    assert full.gap < 10


def test_another_process_compiles_only_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_cache_dir", tmp_path)
    for name in ("first", "second"):
        with jit.compile_beside(f"open({str(tmp_path / name)!r}, 'w')"):
            pass
        (tmp_path / "kernel.nbi").touch()
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "second").exists()
