"""Paths that change their length over a run: as in one process, whoever is lost, and whoever is started again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from skippipe.constraints import cc3_uneven
from skippipe.errors import Infeasible
from skippipe.model.stage_step import StageStep
from skippipe.model.stand_ins import is_bridge
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan
from skippipe.planner.problem import PlanRequest, Strategy
from skippipe.planner.repair import repair
from skippipe.planner.strategies import has_lengths, with_paths_of
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.wal_records import plan_records
from skippipe.runtime.simulation.fault_injection import Fault, kill, kill_coordinator
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.skip_schedule import PathLength, SkipSchedule, parts_of
from skippipe.training.reference import ReferenceTrainer
from skippipe.validate import validate
from tests.helpers.exact_training import (
    FULL,
    assert_exact,
    assert_replicas_alike,
    plan_of,
    sampler_of,
    tensors_of,
    trained,
    weights_of,
)
from tests.helpers.fault_scenarios import Scenario, scenario, wide
from tests.helpers.quick import others_slow
from tests.helpers.single_coordinator import (
    HELLO,
    CoordinatorHarness,
    RecordingEnv,
    RecordingStore,
    coordinating,
    new_coordinator,
)
from tests.helpers.single_node import AT_ONCE, LEARNING
from tests.helpers.virtual_chaos import plans_of, play, staged

pytestmark = pytest.mark.usefixtures("quiet_nodes")
SHORT = (Lane((0, 2, 6), 1), Lane((1, 5, 7), 2), Lane((0, 5, 4), 1))  # as many microbatches as FULL, a stage less
IN_ORDER = (Lane((0, 2, 6), 1), Lane((1, 5, 7), 2), Lane((0, 4, 5), 1))
MIX = (4, 3, 3, 3)
MIXED = (Lane((0, 2, 5, 6), 1), Lane((1, 3, 7), 1), Lane((0, 4, 5), 1), Lane((1, 5, 6), 1))  # whole, and 3 x shorter
BY_TURNS = SkipSchedule("1/4 + 0")
SANDWICH = SkipSchedule("1/4 until 20%, 0 & 3 x 1/4")
COARSE = OptimConfig(rate=3e-3, warmup=2, iterations=5, clip=1.0, epsilon=1e-3)
"""With a smaller epsilon Adam would not see what gradients are divided by."""


@pytest.fixture
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_options: object) -> Plan:
        raise AssertionError("a plan is made that is there already")

    monkeypatch.setattr(repair, "repaired", refused)


# As in one process


@pytest.mark.usefixtures("no_planning")
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(SkipSchedule("1/4 + 0", residual="scaled", early_exit=0.3), {}, marks=pytest.mark.slow),
        pytest.param(SkipSchedule("1/4 until 60%, 0", gradients="all"), {}, marks=pytest.mark.slow),
        (
            SkipSchedule("0 + 1/4", residual="scaled", gradients="all", early_exit=1.0),
            {"family": "llama-tied", "split": True, "activation_checkpointing": True},
        ),
    ],
    ids=["scaled with an early exit", "gradients over all", "everything"],
)
def test_many_nodes_are_one_process_whatever_the_recipe(recipe: SkipSchedule, options: dict[str, Any]) -> None:
    short, spec = plan_of(SHORT, **options)
    whole, _ = plan_of(FULL, **options)
    cluster = assert_exact(short, spec, COARSE, recipe, whole)
    planned: dict[PathLength, Any] = {3: tuple(short.exposure), 4: tuple(whole.exposure)}
    lengths = [recipe.visited(number, 5, 4, 0) for number in range(5)]
    assert [report.stage_microbatches for report in cluster.reports] == [planned[length] for length in lengths]
    plain = ReferenceTrainer(
        short, spec, COARSE, sampler_of(short), recipe=SkipSchedule(recipe.skip), plans={4: whole}, iterations=5
    )
    *_, last = (plain.iteration(number).loss for number in range(5))
    assert last != pytest.approx(cluster.reports[-1].loss, rel=1e-5), "it makes a difference"


@pytest.mark.usefixtures("no_planning")
def test_many_nodes_are_one_process_with_paths_of_several_lengths_in_an_iteration() -> None:
    recipe = replace(SANDWICH, residual="scaled", early_exit=0.3)
    short, spec = plan_of(SHORT)
    mixed = replace(short, lanes=MIXED)
    cluster = assert_exact(short, spec, COARSE, recipe, plans={(4, 3, 3, 3): mixed})
    assert [report.stage_microbatches for report in cluster.reports] == [tuple(short.exposure)] + 4 * [
        tuple(mixed.exposure)
    ]
    cluster = assert_exact(mixed, spec, COARSE, SkipSchedule("0 & 3 x 1/4"), plans={(4, 3, 3, 3): mixed})
    assert [record["visited"] for record in plan_records(cluster.wal)] == [(4, 3, 3, 3)]


@pytest.mark.usefixtures("no_planning")
@pytest.mark.parametrize(
    "options", others_slow([{}], [{"family": "llama-tied", "split": True, "activation_checkpointing": True}])
)
def test_many_nodes_are_one_process_with_bridges(options: dict[str, Any]) -> None:
    """Stage 2 of four is skipped by one lane, stage 1 by another, and one goes from stage 2 to the head."""
    recipe = replace(SANDWICH, bridges=3, early_exit=0.3)
    short, spec = plan_of(IN_ORDER, bridges=3, **options)
    cluster, computers, oracle, losses = trained(short, spec, COARSE, recipe, plans={MIX: replace(short, lanes=MIXED)})
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
    assert_replicas_alike(short, computers)
    found, expected = weights_of(short, computers), oracle.weights()
    names = {name for name in expected if is_bridge(name)}
    assert names == {f"bridges.{stage}.{part}" for stage in range(3) for part in ("down", "up", "gain")} <= found.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6, msg=name)
    learned = {int(name.split(".")[1]): expected[name].view(-1, 32) for name in names if name.endswith("gain")}
    used = {stage: [bool(row.abs().max() > 0) for row in gains] for stage, gains in learned.items()}
    assert used == {0: [True, False, False], 1: [True, False], 2: [True]}, "to the stages after next, then the head"
    without = ReferenceTrainer(
        short,
        plan_of(IN_ORDER, **options)[1],
        COARSE,
        sampler_of(short),
        recipe=recipe,
        plans={MIX: replace(short, lanes=MIXED)},
        iterations=5,
    )
    *_, last = (without.iteration(number).loss for number in range(5))
    assert last != pytest.approx(losses[-1], rel=1e-5), "they make a difference"


def test_a_recipe_that_says_what_is_usual_changes_nothing() -> None:
    runs = [
        VirtualCluster(wide(split=False), CoordinatorSettings(LEARNING, 3, skip_schedule=recipe))
        for recipe in (SkipSchedule(), SkipSchedule("1/4"))
    ]
    for cluster in runs:
        cluster.run()
    silent, said = runs
    assert silent.reports == said.reports
    assert silent.wal == said.wal
    assert silent.finished_ns == said.finished_ns
    kinds = ("plan", "commit", "done")
    told = [next(kind for kind in kinds if kind in record) for record in said.wal]
    assert told == ["plan", "commit", "commit", "commit", "done"]


# What the coordinator tells and notes


def plans_by_turns() -> tuple[Plan, Plan]:
    """Two nodes on each of four stages; paths of three and of four."""
    stages = ((0, 1), (2, 3), (4, 5), (6, 7))
    short = (Lane((0, 2, 4), 1), Lane((1, 5, 6), 1), Lane((0, 3, 7), 1))
    whole = (Lane((0, 2, 4, 6), 2), Lane((1, 3, 5, 7), 1))
    first, _ = plan_of(short, stages=stages)
    return first, replace(first, lanes=whole)


def lengths_told(harness: CoordinatorHarness) -> list[int]:
    """Of the plans that node 3 was told since it was last asked."""
    found = [plan.visited for node, plan in harness.env.logged("plan") if node == 3]
    harness.env.log.clear()
    return found


@pytest.mark.usefixtures("no_planning")
def test_a_plan_is_noted_in_full_once_and_then_by_its_length() -> None:
    short, whole = plans_by_turns()
    harness = coordinating(6, short, skip_schedule=SkipSchedule("2 x 1/4 + 0"), plans={4: whole})
    told = []
    for _ in range(6):
        harness.iterate()
        told.append(lengths_told(harness))
    assert told == [[], [4], [3], [], [4], []], "nothing is told for an iteration that never comes"
    found = [
        f"plan {note['visited']}" if "plan" in note else f"turn {note['turn']}" if "turn" in note else note["commit"]
        for note in harness.env.wal
    ]
    assert found == ["plan 3", 0, 1, "plan 4", 2, "turn 3", 3, 4, "turn 4", 5]
    assert [record["visited"] for record in plan_records(harness.env.wal)] == [3, 4, 3, 4]
    assert [report.plan.visited for report in harness.env.reports if report.plan] == [3, 3, 4, 3, 3, 4]


@pytest.mark.parametrize(("first", "length"), [(0, 3), (1, 4), (6, 3), (7, 4), (8, 4)])
def test_a_run_begins_with_the_length_of_its_first_iteration(first: int, length: int) -> None:
    short, _ = plans_by_turns()
    harness = coordinating(
        9, short, RecordingStore(made=first), resumed_from=first, skip_schedule=SkipSchedule("1/4 + 0 until 70%, 0")
    )
    assert harness.coordinator.plan.visited == length


@pytest.mark.parametrize("notes", [9, 8, 7, 6])
def test_a_coordinator_that_is_started_again_goes_on_with_the_right_length(notes: int) -> None:
    """Also if it was killed between the end of an iteration and the plan for the next."""
    short, whole = plans_by_turns()
    recipe = SkipSchedule("1/4 + 0")
    before = coordinating(9, short, skip_schedule=recipe, plans={4: whole})
    before.iterate(5)
    wal = before.env.wal[:notes]
    done = sum("commit" in note for note in wal)
    env = RecordingEnv()
    coordinator = new_coordinator(env, 9, short, wal=wal, skip_schedule=recipe, plans={4: whole}, recovery=AT_ONCE)
    harness = CoordinatorHarness(coordinator, env)
    for node in range(8):
        harness.send(node, structs.replace(HELLO, epoch=1, iteration=done, phase="RUNNING"))
    assert coordinator.iteration == done
    assert coordinator.plan.visited == recipe.visited(done, 9, 4, 0)
    harness.iterate(2)
    lengths = [report.plan.visited for report in env.reports if report.plan]
    assert lengths == [recipe.visited(number, 9, 4, 0) for number in (done, done + 1)]


def test_when_a_node_is_lost_all_plans_are_made_anew_once() -> None:
    short, whole = plans_by_turns()
    harness = coordinating(9, short, skip_schedule=BY_TURNS, plans={4: whole})
    harness.iterate(2)
    harness.coordinator.node_lost(3, "its process ended")
    harness.return_microbatches()
    for answer in (harness.contributed, harness.averaged):
        for node in list(harness.coordinator.nodes):
            harness.send(node, answer(node))
    harness.iterate(4)
    plans = [report.plan for report in harness.env.reports if report.plan]
    assert [plan.visited for plan in plans] == [3, 4, 3, 4, 3, 4, 3]
    assert all(3 not in plan.stage_of for plan in plans[3:])
    assert plans[3] is plans[5]
    assert plans[4] is plans[6]
    assert {plan.microbatches for plan in plans} == {3}


# Faults


def plans_played(recipe: SkipSchedule, *faults: Fault) -> list[Plan]:
    """The plans, iteration by iteration; `play` looks into every sum of gradients."""
    what = Scenario(0, wide(split=False), 6, faults, "checkpoint", 2, uneven=False, drift=0.0, recipe=recipe)
    return plans_of(play(staged(what)).cluster.wal)


def played(recipe: SkipSchedule, *faults: Fault) -> list[int]:
    """Lengths of the paths, iteration by iteration."""
    return [plan.visited for plan in plans_played(recipe, *faults)]


@pytest.mark.parametrize("during", others_slow(["forward", "averaging"], ["backward", "step"]))
def test_a_node_that_is_lost_where_the_length_changes(during: Any) -> None:
    fault = kill(node=5).at(iteration=2, during=during)
    assert played(BY_TURNS, fault) == [3, 4, 3, 4, 3, 4]
    assert played(SkipSchedule("1/4 until 50%, 0"), fault.back_after(0.5)) == [3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    "faults",
    [
        [kill(node=5).at(iteration=2, during="backward"), kill_coordinator().at(iteration=4, during="averaging")],
        [kill(node=5).at(iteration=1, during="forward").back_after(0.5), kill(node=0).at(iteration=3, during="head")],
        [kill(node=node).at(iteration=1, during="step").back_after(0.1) for node in (7, 8)],
    ],
    ids=["a node and the coordinator", "a data node", "a whole stage"],
)
def test_a_mix_of_lengths_is_kept_whoever_is_lost(faults: list[Fault]) -> None:
    plans = plans_played(SANDWICH, *faults)
    assert has_lengths(plans[0], 3)
    for plan in plans[2:]:
        missing = 0 in plan.exposure
        assert has_lengths(plan, 3 if missing else (4, 3, 3, 3))
        assert missing or not cc3_uneven(plan.exposure)
    assert not missing
    assert len({plan.lanes for plan in plans}) > 2, "it was renewed on the way"


@pytest.mark.parametrize("during", ["head", "averaging", "step"])
def test_a_coordinator_that_is_lost_where_the_length_changes(during: Any) -> None:
    faults = [kill_coordinator().at(iteration=iteration, during=during) for iteration in (2, 4)]
    assert played(BY_TURNS, *faults) == [3, 4, 3, 4, 3, 4]
    assert played(SkipSchedule("1/4 until 50%, 0"), *faults) == [3, 3, 3, 4, 4, 4]


def test_an_heir_that_runs_the_head_before_its_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """An early exit then looks at what stage 0 has made when that is there."""
    unprepared, head = [], StageStep.head

    def watched(tasks: StageStep, key: tuple[int, int], *given: Any, **options: Any) -> Any:
        unprepared.extend([key] if key not in tasks.held else [])
        return head(tasks, key, *given, **options)

    monkeypatch.setattr(StageStep, "head", watched)
    recipe = SkipSchedule("1/4 + 0", early_exit=0.3)
    plan, spec = plan_of(SHORT)
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(LEARNING, 3, skip_schedule=recipe, plans={4: plan_of(FULL)[0]}, recovery=AT_ONCE),
        tensors_of(plan, spec, LEARNING, recipe),
        faults=[kill(node=1).at(iteration=1, during="backward")],
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert unprepared
    assert [event.kind for _, event in cluster.events] == ["lost", "rerouted", "replanned"]


@pytest.mark.slow
def test_any_few_faults_are_survived_by_turns() -> None:
    recipes = (
        "1/4 + 0",
        "1/4 until 50%, 0",
        "1/3 until 30%, 1/4 + 0",
        "0 + 1/3",
        "0 & 2 x 1/3",
        "1/3 until 30%, 2 x 0 & 1/3",
    )
    for seed in range(1000, 1030):
        what = replace(scenario(seed), recipe=SkipSchedule(recipes[seed % len(recipes)]))
        found = play(staged(what))
        for number, plan in enumerate(plans_of(found.cluster.wal)):
            wanted = what.recipe.visited(number, what.iterations, len(plan.stages), 0)
            assert plan.visited <= max(parts_of(wanted)), found.timeline()
            assert has_lengths(plan, wanted) or found.cluster.events, "shorter only while a stage is missing"


# Plans for other lengths


def test_paths_of_another_length_on_the_same_stages() -> None:
    plan = wide(split=False)
    plan = replace(plan, workload=replace(plan.workload, activation_checkpointing=True), expected=None)
    lengths: list[PathLength] = [2, 4, (4, 2)]
    for length in lengths:
        found = with_paths_of(plan, length, Strategy.SKIPPIPE, PlanRequest(budget_s=0.05))
        assert found.stages == plan.stages
        assert found.microbatches == plan.microbatches
        assert has_lengths(found, length)
        assert found.expected is not None
        assert validate(found) == []
    uneven = replace(plan, workload=replace(plan.workload, microbatches=11))
    with pytest.raises(Infeasible, match="11 microbatches over 1 of 3 stages"):
        with_paths_of(uneven, 2, Strategy.SKIPPIPE, PlanRequest(budget_s=0.05))
    with pytest.raises(Infeasible, match="multiple of 6 microbatches"):
        with_paths_of(uneven, (4, 2), Strategy.SKIPPIPE, PlanRequest(budget_s=0.05))
