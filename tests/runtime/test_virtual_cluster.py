"""Nodes and coordinator under virtual time: as fast as promised, complete however time runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skippipe.constraints import deadlock_cycle, exposure
from skippipe.dispatch import Dispatch
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20, published_plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import Averaged, Stop
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.simulator import Deadlock, simulate
from skippipe.timeline import Task, Timeline, Timing
from skippipe.training.metrics import recorded_timeline
from skippipe.workload import Workload
from tests.helpers.plans import TINY, plans, uniform_cluster, without_ties

LEARNING = OptimConfig(warmup=2, iterations=10)


def promised(plan: Plan) -> Timeline:
    try:
        return simulate(plan, Timing.FULL)
    except Deadlock:
        assume(False)
        raise


def disturbance(seed: int, most: float = 3.0) -> Callable[[int], int]:
    """Whatever the plan says takes between nothing and `most` times as long."""
    random = np.random.default_rng(seed)
    return lambda duration_ns: int(duration_ns * random.uniform(0, most))


def visits_by_stage(plan: Plan) -> list[int]:
    lanes = plan.lanes
    return list(
        exposure([plan.visits(each) for each in lanes], [each.microbatches for each in lanes], len(plan.stages))
    )


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from(list(Dispatch)), st.booleans(), st.integers(0, 2**32 - 1))
def test_an_iteration_takes_what_the_simulator_promises(plan: Plan, dispatch: Dispatch, split: bool, seed: int) -> None:
    """Which of two messages goes first that come to a download at the same time is up to the network."""
    if any(node.download_bytes_per_s for node in plan.cluster.nodes):
        plan = replace(plan, cluster=without_ties(plan.cluster, seed))
    plan = replace(plan, dispatch=dispatch, split_backward=split)
    timeline = promised(plan)
    cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, 1, recorded=frozenset({0})))
    cluster.run()
    assert cluster.finished_ns == timeline.iteration_ns
    assert cluster.coordinator.state is CoordinatorState.DONE
    (report,) = cluster.reports
    found = sorted(
        Task(lane, microbatch, step, node, *rest)
        for node, rows in report.tasks.items()
        for lane, microbatch, step, *rest in rows
    )
    assert found == sorted(timeline.tasks)


def test_the_published_plans_take_what_they_promise() -> None:
    for paths in ("skippipe", "dtfm_skip", "full_pipeline"):
        plan = published_plan(published20(), paths, None)
        cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, 2, recorded=frozenset({1})))
        cluster.run()
        timeline = simulate(plan, Timing.FULL)
        assert cluster.finished_ns == 2 * timeline.iteration_ns
        assert not cluster.reports[0].closing
        recorded = recorded_timeline(plan, cluster.reports[1])  # averaging and the step of every node among it
        assert recorded.nodes == timeline.nodes
        took, planned = ([end - begun for begun, end in each.averaging_ns] for each in (recorded, timeline))
        assert took == planned  # when it began is by the clock of a node, which starts when its own step is done


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_every_iteration_completes_however_long_things_take(plan: Plan, seed: int, iterations: int) -> None:
    assume(deadlock_cycle([lane.path for lane in plan.lanes], plan.slots) is None)
    runs = [
        VirtualCluster(
            plan,
            CoordinatorSettings(LEARNING, iterations, recorded=frozenset({iterations - 1})),
            disturb=disturbance(seed),
        )
        for _ in range(2)
    ]
    for cluster in runs:
        cluster.run()
    cluster, again = runs
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert [report.iteration for report in cluster.reports] == list(range(iterations))
    assert cluster.reports == again.reports
    assert cluster.finished_ns == again.finished_ns
    assert cluster.executor_of
    expected = visits_by_stage(plan)
    for node, executor in cluster.executor_of.items():  # Symbols also watch slots, order and what is handed over
        assert isinstance(executor, SymbolicExecutor)
        assert executor.history == [expected[plan.stage_of[node]]] * iterations
    assert sorted(cluster.stored) == list(range(len(plan.stages)))
    for report in cluster.reports[:-1]:
        assert not report.tasks
    rows = [row for rows in cluster.reports[-1].tasks.values() for row in rows]
    assert len(rows) == len(simulate(plan).tasks)
    for _, _, _, ready, start, end, *_ in rows:
        assert 0 <= ready <= start <= end
    for report in cluster.reports:  # also what was ready before the iteration began can be told
        for node, rows in report.tasks.items():
            said = Averaged(report.iteration, 0, 1.0, [], rows, [], [], [])
            assert from_json(to_json(said)) == said, node


def plan_that_locks_up() -> Plan:
    """Two lanes, each of which holds the only slot that the other waits for."""
    cluster = uniform_cluster(3)
    workload = Workload(TINY, 16, 1, 2, max_slots=1)
    stages = (Stage(4, (0,), (0,)), Stage(2, (1,), (1,)), Stage(2, (2,), (2,)))
    plan = Plan(cluster, workload, stages, (Lane((1, 2), 1), Lane((2, 1), 1)))
    with pytest.raises(Deadlock):
        simulate(plan)
    return plan


def test_a_plan_that_locks_up_is_put_right_when_patience_ends() -> None:
    run = VirtualCluster(plan_that_locks_up(), CoordinatorSettings(LEARNING, 2))
    run.run()
    (at_ns, restarted) = next((at_ns, event) for at_ns, event in run.events if event.kind == "restarted")
    assert restarted.text == "waited 600 s for n1, n2 to average gradients"
    assert 600e9 <= at_ns < 601e9
    assert run.coordinator.state is CoordinatorState.DONE
    assert [report.iteration for report in run.reports] == [0, 1]
    found = run.coordinator.plan
    assert deadlock_cycle([lane.path for lane in found.lanes], found.slots) is None
    assert run.finished_ns - at_ns == 2 * simulate(found, Timing.FULL).iteration_ns
    for node, stage in found.stage_of.items():  # of the first attempt nothing is left
        assert isinstance(executor := run.executor_of[node], SymbolicExecutor)
        assert executor.history == [visits_by_stage(found)[stage]] * 2


def test_a_plan_that_locks_up_ends_a_run_that_is_not_to_survive_with_the_names_of_those_waited_for() -> None:
    run = VirtualCluster(
        plan_that_locks_up(), CoordinatorSettings(LEARNING, 1, recovery=RecoverySettings(fault_tolerant=False))
    )
    run.run()
    assert run.coordinator.state is CoordinatorState.FAILED
    assert run.coordinator.failure == "waited 600 s for n1, n2 to average gradients"
    assert all(node.stopped == Stop(run.coordinator.failure) for node in run.nodes.values())
