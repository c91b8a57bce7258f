"""What the search decides beside places and paths: activation checkpointing; what it says of its choices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from skippipe.cluster import Cluster
from skippipe.cost_model import seconds
from skippipe.errors import Infeasible, UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import DecisionVariables, PlanRequest, Problem, Strategy, iteration_ns
from skippipe.planner.problem_spec import PlanSpec, problem_of
from skippipe.planner.strategies import make_plan
from skippipe.planner.sweep import choose_batch_size
from skippipe.planner.whatif.advisor import choices
from skippipe.presets import datacentre, regions
from skippipe.simulator import simulate
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.processes import Command

WORK = Workload(MODELS["llama-500m"], microbatches=12)
OPEN = DecisionVariables(checkpointing=True)
CHANGES = 3_000


def with_room_for(slots: float) -> Cluster:
    """Nodes that keep so many microbatches of a stage, and links on which each is long under way."""
    cluster = datacentre(6)
    layers = WORK.layer_split(3)
    memory = int(max(WORK.fixed_bytes(stage, k) + slots * WORK.held_bytes(k) for stage, k in enumerate(layers)))
    nodes = [replace(node, memory_bytes=memory) for node in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes), latency_s=np.full((6, 6), 2.0))


@cache
def planned(slots: float, variables: DecisionVariables) -> Plan:
    problem = Problem(with_room_for(slots), WORK, 3, 2, decision_variables=variables)
    return make_plan(problem, Strategy.BEST, PlanRequest(changes=CHANGES, budget_s=600))


@pytest.mark.parametrize("slots", [1.5, 4.5])
def test_where_memory_is_short_activations_are_recomputed_if_that_is_faster(slots: float) -> None:
    """With 4 slots all nodes together hold as many lanes as there can be, but no placement does."""
    kept, chosen = planned(slots, DecisionVariables()), planned(slots, OPEN)
    assert not kept.workload.activation_checkpointing
    assert chosen.workload.activation_checkpointing
    assert validate(chosen) == []
    assert iteration_ns(chosen) < 0.8 * iteration_ns(kept)


def test_a_search_begins_with_a_plan_that_recomputes_activations() -> None:
    chosen = planned(1.5, OPEN)
    request = PlanRequest(changes=1, budget_s=600, start=chosen)
    problem = Problem(with_room_for(1.5), WORK, 3, 2, decision_variables=OPEN)
    assert iteration_ns(make_plan(problem, Strategy.BEST, request)) <= iteration_ns(chosen)
    found, _ = choose_batch_size(problem, 12, PlanRequest(changes=CHANGES, budget_s=600))
    assert found.workload.activation_checkpointing
    with pytest.raises(UserError, match="does not hold here: TC1"):
        make_plan(replace(problem, decision_variables=DecisionVariables()), Strategy.BEST, request)


def test_where_memory_is_plenty_they_are_kept() -> None:
    assert planned(30, OPEN) == planned(30, DecisionVariables())


def test_what_fits_only_with_checkpointing_is_planned_with_it_unless_that_is_forbidden() -> None:
    cluster = with_room_for(0.5)
    with pytest.raises(Infeasible, match="activation checkpointing"):
        problem_of(cluster, WORK, PlanSpec(stages=3, visit=2, microbatches=12, checkpointing=False))
    problem = problem_of(cluster, WORK, PlanSpec(stages=3, visit=2, microbatches=12, checkpointing=None))
    assert problem.workload.activation_checkpointing
    assert validate(make_plan(problem, Strategy.SKIPPIPE, PlanRequest(budget_s=0.3))) == []


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (37, "it fits with 8-bit optimizer state (optimizer adamw8bit); or use"),
        (29, "it fits with 8-bit optimizer state (optimizer adamw8bit) and sums of gradients in host memory (offl"),
        (25, "it fits with optimizer state in host memory (offload optimizer); or use"),
        (24, "sums of gradients in host memory (offload averaging) and activation checkpointing; or use"),
        (22, "it fits with optimizer state in host memory (offload optimizer) and activation checkpointing; or use"),
        (12, "GiB): use"),
    ],
)
def test_what_makes_a_large_model_fit_is_said(gib: int, said: str) -> None:
    """llama-8b in 6 stages, on nodes with the memory of a card."""
    cluster = datacentre(12)
    cluster = replace(cluster, nodes=tuple(replace(node, memory_bytes=gib * 2**30) for node in cluster.nodes))
    work = Workload(MODELS["llama-8b"], samples_per_microbatch=1)
    spec = PlanSpec(stages=6, visit=6, checkpointing=False)
    with pytest.raises(Infeasible) as error:
        problem_of(cluster, work, spec)
    assert said in str(error.value)
    if "offload optimizer)" in said:
        again = replace(work, offload="optimizer", activation_checkpointing="checkpointing" in said)
        assert validate(make_plan(problem_of(cluster, again, spec), Strategy.DTFM_SKIP, PlanRequest(budget_s=0))) == []


@pytest.mark.parametrize("variables", [OPEN, DecisionVariables()])
def test_stages_that_fit_only_without_checkpointing_are_planned(variables: DecisionVariables) -> None:
    """A stage of one layer keeps little less by it, and needs room for what it recomputes."""
    work = replace(WORK, model=replace(WORK.model, layers=3, vocab=1000))
    memory = max(work.fixed_bytes(stage, 1) for stage in range(3)) + work.held_bytes(1)
    cluster = datacentre(6)
    cluster = replace(cluster, nodes=tuple(replace(node, memory_bytes=memory) for node in cluster.nodes))
    problem = Problem(cluster, work, 3, 2, decision_variables=variables)
    with pytest.raises(Infeasible):
        replace(problem, workload=replace(work, activation_checkpointing=True))
    plan = make_plan(problem, Strategy.BEST, PlanRequest(changes=100, budget_s=600))
    assert not plan.workload.activation_checkpointing


def test_one_large_node_may_hold_more_layers_than_others_could() -> None:
    """Stages are not asked to have as many nodes as they had before layers moved: no other node has room for 15."""
    work = replace(WORK, model=MODELS["llama-300m"], sequence_tokens=1024, samples_per_microbatch=1)
    cluster = datacentre(7)
    small = [replace(node, memory_bytes=4 * 10**9, flops_per_s=1e13) for node in cluster.nodes[1:]]
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], flops_per_s=2e14), *small))
    fixed = DecisionVariables(sizes=False, layers=False)
    moved = Problem(cluster, work, 3, 3, sizes=(5, 1, 1), layers=(8, 1, 15), decision_variables=fixed)
    start = make_plan(moved, Strategy.BEST, PlanRequest(changes=100, budget_s=600))
    assert start.placement[2] == (0,)
    problem = Problem(cluster, work, 3, 3)
    plan = make_plan(problem, Strategy.BEST, PlanRequest(changes=100, budget_s=600, start=start, bound_s=1))
    assert plan.layers == start.layers
    assert 0 < (plan.lower_bound_ns or 0) <= iteration_ns(plan) <= iteration_ns(start)


def test_recomputing_is_paid_for() -> None:
    kept, again = WORK, replace(WORK, activation_checkpointing=True)
    assert again.backward_flops(4) == kept.backward_flops(4) + kept.forward_flops(4)
    costs = [Problem(datacentre(6), each, 3, 2).costs for each in (kept, again)]
    assert (costs[1].backward_ns > 1.4 * costs[0].backward_ns).all()
    assert (costs[1].weight_ns == costs[0].weight_ns).all()


def test_choices_say_what_the_next_best_would_take() -> None:
    work = Workload(MODELS["llama-500m"], microbatches=12)
    problem = Problem(regions(9), work, 3, 2, decision_variables=OPEN)
    plan = make_plan(problem, Strategy.BEST, PlanRequest(changes=CHANGES, budget_s=600))
    found = {each.variable: each for each in choices(problem, plan)}
    assert {"backward", "dispatch", "checkpointing"} <= set(found)
    other = replace(plan, split_backward=not plan.split_backward, expected=None)
    assert found["backward"].iteration_ns == simulate(other, plan.promise.timing).iteration_ns
    assert {found["backward"].chosen, found["backward"].instead} == {"split", "whole"}
    fixed = replace(problem, decision_variables=DecisionVariables(dispatch=False, split_backward=False))
    assert {"backward", "dispatch", "checkpointing"}.isdisjoint(each.variable for each in choices(fixed, plan))


def test_the_search_says_what_is_proven_while_it_goes_on() -> None:
    said: list[str] = []
    problem = Problem(datacentre(6), WORK, 3, 2)
    request = PlanRequest(changes=CHANGES, budget_s=600, bound_s=20, progress=lambda what, *_: said.append(what))
    plan = make_plan(problem, Strategy.BEST, request)
    (searching,) = {what for what in said if what.startswith("searching")}
    proven_s = float(searching.removeprefix("searching, no plan is under ").removesuffix(" s"))
    assert 0 < proven_s <= seconds(iteration_ns(plan)) + 0.05


def test_command(skippipe: Command) -> None:
    asked = ("plan", "datacentre:6", "--stages", "3", "--search-steps", "500", "--budget", "1")
    chosen = {each["variable"]: each for each in skippipe(*asked, "--json").json["choices"]}
    assert chosen["checkpointing"]["chosen"] == "no"
    shown = skippipe(*asked, "--no-checkpointing").out
    assert "chosen, and what the next best would cost on the same paths: backward" in shown
    assert "checkpointing" not in shown
