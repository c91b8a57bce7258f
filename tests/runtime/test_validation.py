"""Held-out samples through the pipeline: the loss is that of one process, and training does not notice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, ValidationSettings
from skippipe.runtime.coordinator.validation import evaluation_paths
from skippipe.runtime.messages import Validate, Validated
from skippipe.runtime.node.ops import EvaluateSamples
from skippipe.runtime.simulation.fault_injection import Fault, cut, freeze, kill, kill_coordinator
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.training.reference import ReferenceTrainer
from tests.helpers.exact_training import (
    HELD_OUT,
    ITERATIONS,
    LEARNING,
    SKIPPED,
    held_out_sampler,
    plan_of,
    sampler_of,
    tensors_of,
    weights_of,
)
from tests.helpers.fault_scenarios import scenario, thin, wide
from tests.helpers.single_coordinator import coordinating
from tests.helpers.virtual_chaos import Played, play, staged

EVERY_ONE = ValidationSettings(every=1, microbatches=HELD_OUT)


def trained_with(validation: ValidationSettings) -> tuple[VirtualCluster, dict[str, Any]]:
    plan, spec = plan_of(SKIPPED)
    computers = tensors_of(plan, spec)
    cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, ITERATIONS, validation=validation), computers)
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    return cluster, weights_of(plan, computers)


def test_the_loss_is_that_of_one_process_and_training_is_as_without() -> None:
    """The plan skips stages; held-out samples visit all of them."""
    cluster, weights = trained_with(EVERY_ONE)
    plan, spec = plan_of(SKIPPED)
    one = ReferenceTrainer(plan, spec, LEARNING, sampler_of(plan))
    expected = []
    for number in range(ITERATIONS):
        one.iteration(number)
        expected.append(one.held_out_loss(held_out_sampler(HELD_OUT)))
    assert [report.iteration for report in cluster.validations] == list(range(ITERATIONS))
    assert [report.loss for report in cluster.validations] == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 4) for loss in expected}) == ITERATIONS, "every step has changed it"
    without, same = trained_with(ValidationSettings())
    assert not without.validations
    assert all((weights[name] == each).all() for name, each in same.items())
    pairs = zip(cluster.reports, without.reports, strict=True)
    assert all(each.seconds <= other.seconds for each, other in pairs), "evaluations are not counted"


def test_the_run_ends_when_patience_is_out() -> None:
    """From a checkpoint whose loss was below all that follow."""
    best = replace(EVERY_ONE, patience=2, best=(0, 0.5))
    cluster, _ = trained_with(best)
    assert [report.iteration for report in cluster.reports] == [0, 1]
    assert not any(report.is_best for report in cluster.validations)
    assert [event.text for _, event in cluster.events if event.kind == "ending"] == [
        "the held-out loss has not become lower in 2 evaluations"
    ]


@pytest.mark.parametrize("losses", [(math.inf, -math.inf), (1.7e308, 1.7e308), (math.nan, 1.0)])
def test_losses_that_have_no_mean_end_nothing(losses: tuple[float, float]) -> None:
    harness = coordinating(4, validation=ValidationSettings(every=1, microbatches=2))
    harness.iterate()
    order = harness.coordinator._validation.order
    assert order is not None
    for microbatch, loss in enumerate(losses):
        done = Validated(order.iteration, order.epoch, microbatch, loss, tokens=5)
        harness.send(order.paths[microbatch % len(order.paths)][0], done)
    assert harness.coordinator.state is CoordinatorState.TRAINING
    assert harness.coordinator.iteration == 1


def test_paths_visit_every_stage_once_and_use_every_node() -> None:
    for plan in (wide(False), thin(False)):
        paths = evaluation_paths(plan, list(plan.stage_of))
        assert [[plan.stage_of[node] for node in path] for path in paths] == [[0, 1, 2, 3]] * len(paths)
        assert {node for path in paths for node in path} == set(plan.stage_of)
    assert evaluation_paths(thin(False), [0, 1, 3, 4, 5]) == [], "stage 1 is lost"


class Watched:
    """Which nodes ran a step of held-out samples, by iteration."""

    def __init__(self, played: Played) -> None:
        self.seen: dict[int, set[int]] = {}
        begin = played.cluster.start_op

        def start(number: int, op: Any) -> None:
            if isinstance(op, EvaluateSamples):
                self.seen.setdefault(op.iteration, set()).add(number)
            begin(number, op)

        played.cluster.start_op = start  # type: ignore[method-assign]


def play_with(faults: Sequence[Fault], plan: Plan | None = None, **others: Any) -> tuple[Played, Watched]:
    quiet = replace(scenario(0), plan=plan or wide(False), iterations=4, uneven=False, drift=0.0, kept_every=2)
    played = staged(replace(quiet, faults=tuple(faults), validated_every=2, **others))
    watched = Watched(played)
    return play(played), watched


@pytest.mark.parametrize(
    "fault",
    [
        kill(4).at(1, "validation").back_after(0.5),
        kill(0).at(1, "validation"),
        freeze(5).at(1, "validation").back_after(40.0),
        cut(0, 3).at(1, "validation").back_after(12.0),
        cut(0, 3, silent=True).at(1, "validation").back_after(0.5),
    ],
    ids=str,
)
def test_what_is_lost_during_an_evaluation_costs_the_evaluation_and_nothing_else(fault: Fault) -> None:
    """All that `play` checks holds: every iteration once, every microbatch once, replicas alike, checkpoints whole."""
    played, watched = play_with([fault])
    assert watched.seen[1], "it was under way"
    done = [report.iteration for report in played.cluster.validations]
    assert done[-1] == 3
    assert all(report.loss == 2.0 for report in played.cluster.validations), "the mean of 0 to 4"
    if fault.kind == "kill":
        assert 1 not in done and 2 in done, "it is made up for after the next iteration"
        (event,) = [each for _, each in played.cluster.events if each.kind == "validation"]
        assert event.text.startswith("given up: ")


def test_a_coordinator_that_is_killed_during_an_evaluation_goes_on() -> None:
    played, _ = play_with([kill_coordinator().at(1, "validation")])
    assert [report.iteration for report in played.cluster.validations] == [3]


def test_a_stop_during_an_evaluation_keeps_what_was_trained() -> None:
    for requests, kept in ((1, [1]), (2, [])):
        played = staged(replace(scenario(0), plan=wide(False), iterations=9, faults=(), validated_every=2))
        cluster = played.cluster
        cluster.stop_requests = lambda asked=requests, of=cluster: (  # type: ignore[misc]
            asked if of.coordinator.state is CoordinatorState.VALIDATING else 0
        )
        cluster.run()
        assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
        assert [report.iteration for report in cluster.reports] == [0, 1]
        assert [report.iteration for report in cluster.validations] == kept
        assert all(len(pieces[0]) == 2 for pieces in cluster.stored.values()), "both steps are in the weights"


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 33))])
def test_any_few_faults_are_survived_with_evaluations(block: int) -> None:
    failed = []
    for seed in range(3 * block, 3 * block + 3):
        what = scenario(seed)
        faults = [replace(each, during="validation") if at % 2 else each for at, each in enumerate(what.faults)]
        played = staged(replace(what, faults=tuple(faults), validated_every=1 + seed % 2))
        try:
            play(played)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}\n{played.timeline()}")
    assert not failed, f"{len(failed)}, the first:\n{failed[0]}"


def test_an_order_is_a_message() -> None:
    from skippipe.runtime.message_json import from_json, to_json

    order = Validate(3, 1, 5, [[0, 2, 4], [1, 3, 5]])
    assert from_json(to_json(order)) == order
