"""The teacher's passes under virtual time: as fast as promised, and a head never runs without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skippipe.constraints import deadlock_cycle
from skippipe.dispatch import Dispatch
from skippipe.plan import Lane, Plan
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node.ops import StageTask, TeacherForward
from skippipe.runtime.simulation.fault_injection import Fault, cut, freeze, kill, kill_coordinator, slow_link
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.simulator import simulate
from skippipe.timeline import Task, Timing
from skippipe.whole_paths import planned_teacher_paths
from skippipe.workload import TEACHERS
from tests.helpers.exact_training import LEARNING
from tests.helpers.fault_scenarios import scenario, thin, wide
from tests.helpers.plans import can_be_taught, plans, without_ties
from tests.helpers.quick import others_slow
from tests.helpers.virtual_chaos import Played, play, staged

KINDS = TEACHERS[1:]


def taught(plan: Plan, teacher: str = "logits") -> Plan:
    plan = plan.edited(workload=replace(plan.workload, teacher=teacher))
    return plan.promising(simulate(plan, Timing.FULL))


def lanes_from_stage_0(plan: Plan) -> tuple[Lane, ...]:
    """Lanes as the plan has them, but with a data node first and every stage once."""
    found = []
    for number, lane in enumerate(plan.lanes):
        others = {stage: node for node in lane.path if (stage := plan.stage_of[node])}
        first = plan.stages[0].nodes
        found.append(Lane((first[number % len(first)], *others.values()), lane.microbatches))
    return tuple(found)


@settings(max_examples=20, deadline=None)
@given(plans(), st.sampled_from(list(Dispatch)), st.booleans(), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_an_iteration_takes_what_the_simulator_promises(
    plan: Plan, dispatch: Dispatch, split: bool, teacher: str, seed: int
) -> None:
    """On nodes with several devices, too. Which of two messages goes first that come to a download at the same time is
    up to the network."""
    if any(node.download_bytes_per_s for node in plan.cluster.nodes):
        plan = replace(plan, cluster=without_ties(plan.cluster, seed))
    workload = replace(plan.workload, teacher=teacher)
    lanes = lanes_from_stage_0(plan)
    plan = replace(plan, workload=workload, lanes=lanes, dispatch=dispatch, split_backward=split, expected=None)
    assume(can_be_taught(plan) and deadlock_cycle([lane.path for lane in lanes], plan.slots) is None)
    timeline = simulate(plan, Timing.FULL)
    cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, 1, recorded=frozenset({0})))
    cluster.run()
    assert cluster.finished_ns == timeline.iteration_ns
    (report,) = cluster.reports
    rows = [(node, row) for node, all_rows in report.tasks.items() for row in all_rows]
    found = [Task(lane, microbatch, step, node, *rest) for node, (lane, microbatch, step, *rest) in rows]
    assert sorted(found) == sorted(timeline.tasks)
    assert sum(report.sent_bytes.values()) == 0, "symbols have no bytes"


class Watched:
    """The nodes that ran the teacher's steps, and those steps, by iteration."""

    def __init__(self, played: Played) -> None:
        self.seen: dict[int, set[int]] = {}
        self.steps: dict[tuple[int, int, int, int], int] = {}
        begin = played.cluster.start_op

        def start(number: int, op: Any) -> None:
            if isinstance(op, TeacherForward):
                self.seen.setdefault(op.iteration, set()).add(number)
                key = op.iteration, op.lane, op.microbatch, op.step
                self.steps[key] = self.steps.get(key, 0) + 1
            is_taught_head = isinstance(op, StageTask) and op.length < 4 and op.step == op.length
            assert not is_taught_head or op.teacher_hidden is not None
            begin(number, op)

        played.cluster.start_op = start  # type: ignore[method-assign]


def play_with(faults: Sequence[Fault], plan: Plan, **others: Any) -> tuple[Played, Watched]:
    quiet = replace(scenario(0), plan=plan, iterations=4, uneven=False, drift=0.0, kept_every=2)
    played = staged(replace(quiet, faults=tuple(faults), **others))
    watched = Watched(played)
    return play(played), watched


def test_without_faults_every_step_is_taken_once() -> None:
    plan = taught(thin(False))
    played, watched = play_with([], plan)
    for node in played.cluster.nodes.values():
        assert all(len(kept) == 1 for kept in node._teacher._sent.values()), "no more can be on their way"
    count = sum(plan.lanes[lane].microbatches for lane in planned_teacher_paths(plan))
    assert set(watched.steps.values()) == {1} and len(watched.steps) == 4 * count * len(plan.stages)


@pytest.mark.parametrize("teacher", others_slow(["hidden"], [each for each in KINDS if each != "hidden"]))
@pytest.mark.parametrize(
    "fault",
    [
        kill(4).at(1, "teaching").back_after(0.5),
        kill(0).at(1, "teaching"),
        kill(3).at(1, "head").back_after(3.0),
        kill(1).at(1, "backward").back_after(0.5),
        freeze(5).at(1, "teaching").back_after(40.0),
        cut(0, 3).at(1, "teaching").back_after(12.0),
        cut(3, 6, silent=True).at(1, "teaching").back_after(0.5),
        slow_link(3, 5).at(1, "teaching").back_after(3.0),
    ],
    ids=str,
)
def test_passes_find_another_way_when_a_node_or_a_link_is_lost(fault: Fault, teacher: str) -> None:
    """All that `play` checks holds, and no head runs untaught."""
    _, watched = play_with([fault], taught(wide(False), teacher))
    assert set(watched.seen) == {0, 1, 2, 3}


@pytest.mark.parametrize("teacher", KINDS)
def test_a_stage_that_is_lost_is_waited_for(teacher: str) -> None:
    """Its microbatches could go on without it; what teaches them could not."""
    played, _ = play_with([kill(2).at(1, "teaching").back_after(3.0)], taught(thin(False), teacher))
    kinds = {event.kind for _, event in played.cluster.events}
    assert "paused" in kinds and "rerouted" not in kinds


def test_a_coordinator_that_is_killed_meanwhile_goes_on() -> None:
    play_with([kill_coordinator().at(1, "teaching")], taught(wide(False)))
