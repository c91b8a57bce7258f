"""What a coordinator makes of nodes that come, report, and are lost; and control on the wire."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.interfaces import CoordinatorState, Event
from skippipe.runtime.coordinator.settings import RecordedIterations, RecoverySettings
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    BackupStored,
    Begin,
    Commit,
    Drain,
    Failed,
    GatherState,
    Hello,
    LinkDown,
    MicrobatchDone,
    Ready,
    Recover,
    Recovered,
    Reroute,
    StateRequest,
    Stop,
)
from skippipe.runtime.state_source import StateSource
from tests.helpers.single_coordinator import (
    ANY_ID,
    HELLO,
    CoordinatorHarness,
    RecordingEnv,
    RecordingStore,
    assert_goes_on,
    coordinating,
    even_plan,
    is_now,
    new_coordinator,
    recovering_late,
    with_a_quick_one,
)
from tests.helpers.single_node import LEARNING, plan_of


def test_nodes_join_build_and_begin_together() -> None:
    env = RecordingEnv()
    coordinator = new_coordinator(env, 2, recorded=frozenset({0}))
    for node in (3, 1, 2, 5, 0):
        coordinator.on_message(node, HELLO)
    assert is_now(coordinator, CoordinatorState.JOINING)
    assert [each[0] for each in env.log] == ["connect"] * 5
    coordinator.on_message(4, HELLO)
    assert is_now(coordinator, CoordinatorState.PREPARING)
    assert [each[0] for each in env.log[6:]] == ["wal", *["welcome"] * 6], "logged before any node is told"
    assert sorted(env.logged("welcome")) == [(node, coordinator.plan.stage_of[node], None) for node in range(6)]
    harness = CoordinatorHarness(coordinator, env)
    for node in (3, 1, 2, 5, 0):
        harness.send(node, Ready())
    assert not env.sent
    harness.send(4, Ready())
    assert env.new_messages() == {node: [Begin(0, 1, True)] for node in range(6)}
    assert is_now(coordinator, CoordinatorState.TRAINING)


@pytest.mark.parametrize("built", [0, 3, 6])
def test_all_nodes_are_lost_before_the_first_step_and_begin_anew(built: int) -> None:
    """On a busy machine nodes that import and build may be silent for longer than a heartbeat."""
    env = RecordingEnv()
    coordinator = new_coordinator(env, 2)
    harness = CoordinatorHarness(coordinator, env)
    for node in range(6):
        harness.send(node, HELLO)
    for node in range(built):
        harness.send(node, Ready())
    for node in range(6):
        coordinator.node_lost(node, "no heartbeat for 5 s")
    assert is_now(coordinator, CoordinatorState.PAUSED)
    for node in range(6):
        harness.send(node, HELLO)
    for node in range(6):
        harness.send(node, Ready(coordinator.membership[node].assignment))
    harness.wait(7)
    assert is_now(coordinator, CoordinatorState.TRAINING), coordinator.failure
    assert {coordinator.membership[node].stage for node in coordinator.nodes} == {0, 1, 2}
    recoveries = [each for messages in env.new_messages().values() for each in messages if isinstance(each, Recover)]
    assert {each.origin.kind for each in recoveries} <= {"replica"}, "of those who came when others had begun"


def test_one_version_for_all() -> None:
    env = RecordingEnv()
    coordinator = new_coordinator(env, 1)
    coordinator.on_message(2, HELLO)
    coordinator.on_message(4, Hello("127.0.0.1:1", "0.0.0"))
    assert is_now(coordinator, CoordinatorState.FAILED)
    assert "node 'n4' runs skippipe 0.0.0" in coordinator.failure
    assert env.new_messages() == {2: [Stop(coordinator.failure)]}
    harness = coordinating()
    harness.send(6, Hello("127.0.0.1:1", "0.0.0"))
    assert is_now(harness.coordinator, CoordinatorState.TRAINING), "later it is told to leave, and that is all"
    (stop,) = harness.env.new_messages()[6]
    assert isinstance(stop, Stop)
    assert not stop.again
    assert harness.env.event_kinds() == ["refused"]


def test_a_decision_is_logged_before_any_node_is_told() -> None:
    harness = coordinating()
    harness.env.log.clear()
    harness.iterate()
    (note,) = harness.env.wal[1:]
    assert (note["commit"], note["visits"], note["steps"]) == (0, [4, 4, 4], [1, 1, 1])
    assert [each[0] for each in harness.env.log] == ["wal", *["send"] * 6]
    rate, scale = LEARNING.rate_at(0), LEARNING.clipping([4.0] * 3)[1]
    assert harness.env.new_messages() == {node: [Commit(0, rate, scale)] for node in range(6)}
    (report,) = harness.env.reports
    assert (report.iteration, report.loss, report.norm) == (0, 2.0, math.sqrt(12))
    harness.iterate()
    assert harness.env.new_messages()[3] == [Commit(1, LEARNING.rate_at(1), scale, wait=True)], "the last waits"
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)


@pytest.mark.parametrize(
    ("contribution", "flaw"),
    [
        ([[0, 0], [0, 0]], "counts a microbatch twice"),
        ([[1, 0]], "counts a microbatch that node 'n4' counts too"),
        ([[0, 0], [0]], "not in the plan"),
        ([[0, 2]], "not in the plan"),
        ([[9, 0]], "not in the plan"),
    ],
)
def test_a_node_whose_contribution_cannot_be_true_is_evicted(contribution: list[list[int]], flaw: str) -> None:
    harness = coordinating()
    harness.send(4, harness.averaged(4))
    harness.send(3, harness.averaged(3, contribution=contribution))
    assert harness.env.logged("disconnect") == [(3,)]
    assert flaw in harness.env.events[0].text
    assert_goes_on(harness, 3)


def test_norms_that_differ_a_little_are_the_same_gradient() -> None:
    harness = coordinating()
    harness.average(n4=4.0001)
    assert harness.coordinator.iteration == 1


@pytest.mark.parametrize(("norms", "leaves"), [({"n3": 5.0}, 3), ({"n5": 5.0}, 5), ({"n1": 5.0}, 1), ({"n0": 5.0}, 1)])
def test_of_norms_that_disagree_the_most_are_right_or_the_first(norms: dict[str, float], leaves: int) -> None:
    harness = coordinating()
    harness.average(**norms)
    messages = harness.env.new_messages()
    assert isinstance(stop := messages[leaves][0], Stop)
    assert stop.again
    assert "its gradient is not that of" in harness.env.events[0].text
    assert harness.env.logged("disconnect") == [(leaves,)]
    assert all(isinstance(messages[node][0], Reroute) for node in harness.coordinator.nodes)
    assert_goes_on(harness, leaves)


def test_a_gradient_that_is_not_finite_is_inspected_once() -> None:
    harness = coordinating()
    harness.return_microbatches()
    harness.average(n2=math.nan)
    assert harness.env.new_messages() == harness.to_all(Drain(0, 2, True))
    for node in range(6):
        harness.send(node, harness.contributed(node, [] if node == 2 else None))
    assert harness.env.new_messages() == harness.to_all(Average(0, 2, [4, 0, 4]))
    for node in range(6):
        harness.send(node, harness.averaged(node, **{"contribution": []} if node == 2 else {}))
    (proceed,) = harness.env.new_messages()[0]
    assert isinstance(proceed, Commit)
    assert proceed.scale > 0
    assert harness.env.wal[-1]["steps"] == [1, 0, 1], "a stage without a gradient takes no step"


def test_no_step_is_taken_with_a_gradient_that_stays_not_finite() -> None:
    harness = coordinating()
    harness.return_microbatches()
    harness.average(n2=math.inf)
    for node in range(6):
        harness.send(node, harness.contributed(node))
    harness.env.new_messages()
    harness.average(n2=math.nan)
    assert harness.env.new_messages() == harness.to_all(Commit(0, LEARNING.rate_at(0), 0.0))
    assert harness.env.wal[-1]["steps"] == [0, 0, 0]
    assert harness.env.event_kinds() == ["not-finite"] * 2
    assert math.isnan(harness.env.reports[0].norm)


def test_replicas_that_disagree_whether_it_is_finite_are_asked() -> None:
    harness = coordinating()
    harness.return_microbatches()
    harness.average(n4=math.nan)
    assert harness.env.new_messages() == harness.to_all(Drain(0, 2, True))


def test_a_lost_node_and_how_the_iteration_ends_without_it() -> None:
    harness = coordinating()
    coordinator, env = harness.coordinator, harness.env
    harness.return_microbatches(1)
    harness.send(0, MicrobatchDone(0, 1, 0, 0, 1.0))
    for node in (3, 4):
        harness.send(node, harness.averaged(node))
    coordinator.node_lost(3, "its process ended")
    change = Reroute(0, 2, [3], [[0, 1, 0, 2, 5]], [])
    assert env.new_messages() == {node: [change] for node in (0, 1, 2, 4, 5)}, "all others, and not itself"
    assert env.logged("disconnect") == [(3,)]
    assert env.event_kinds() == ["lost", "rerouted"]
    harness.send(4, harness.averaged(4), harness.contributed(4))
    assert not env.sent, "averages of before are of no use, and no drain was requested"
    harness.send(0, MicrobatchDone(0, 1, 0, 1, 3.0))
    assert env.new_messages() == harness.to_all(Drain(0, 2, False))
    accounts = {0: None, 1: None, 2: None, 4: None, 5: [[0, 1]]}
    for node, contribution in accounts.items():
        assert not env.sent
        harness.send(node, harness.contributed(node, contribution))
    assert env.new_messages() == harness.to_all(Average(0, 2, [4, 4, 3])), "what the lost node had added up is lost"
    env.log.clear()
    for node, contribution in accounts.items():
        harness.send(node, harness.averaged(node, contribution=contribution or harness.contribution(node)))
    messages = env.new_messages()
    assert all([type(each) for each in messages[node]] == [Commit] for node in accounts)
    assert [each[0] for each in env.log] == ["wal", "wal", *["plan", "send"] * 5]
    assert coordinator.iteration == 1
    assert 3 not in coordinator.plan.stage_of
    assert env.reports[0].stage_microbatches == (4, 4, 3)
    assert env.reports[0].loss == (2 + 2 + 1 + 3) / 4


def test_a_lost_data_node_is_replaced_by_a_replica_that_gets_what_is_on_its_way() -> None:
    harness = coordinating()
    harness.send(0, MicrobatchDone(0, 1, 0, 0, 1.0))
    harness.coordinator.node_lost(0, "its process ended")
    assert harness.env.new_messages() == harness.to_all(Reroute(0, 2, [0], [[0, 1, 1, 2, 3]], []))
    harness.send(0, MicrobatchDone(0, 1, 0, 1, 1.0))
    assert [type(each) for each in harness.env.new_messages()[0]] == [Stop], "it is not heard any more"
    harness.return_microbatches(1)
    harness.send(1, MicrobatchDone(0, 1, 0, 1, 1.0))
    assert harness.env.new_messages() == harness.to_all(Drain(0, 2, False))


def test_a_lost_stage_is_skipped() -> None:
    harness = coordinating()
    harness.return_microbatches(1)
    harness.coordinator.node_lost(2, "its process ended")
    assert harness.env.new_messages() == harness.to_all(Reroute(0, 2, [2], [[0, 0, 0, 2, 3]], [[0, 1]]))
    assert "1 times a stage is left out" in harness.env.events[-1].text
    assert_goes_on(harness, 2)


def test_a_lane_of_two_has_no_place_to_skip() -> None:
    harness = coordinating(plan=plan_of(4, ((0, 1), (2,), (3,)), ((0, 2), (1, 3))))
    harness.coordinator.node_lost(2, "its process ended")
    messages = harness.env.new_messages()
    assert sorted(messages) == harness.coordinator.nodes
    assert all(controls == [Begin(0, 2, False)] for controls in messages.values())
    assert "there is no way around 'n2'" in [event.text for event in harness.env.events]
    assert all(2 not in lane.path for lane in harness.coordinator.plan.lanes)
    harness.iterate()
    assert harness.coordinator.iteration == 1


def test_no_node_averages_or_drains_before_it_is_asked() -> None:
    harness = coordinating()
    harness.coordinator.node_lost(3, "its process ended")
    harness.env.new_messages()
    for answer in (harness.contributed, harness.averaged):
        for node in harness.coordinator.nodes:
            harness.send(node, answer(node))
    assert not harness.env.sent
    harness.return_microbatches()
    assert harness.env.new_messages() == harness.to_all(Drain(0, 2, False))
    for node in harness.coordinator.nodes:
        harness.send(node, harness.averaged(node))
    assert not harness.env.sent


def test_two_lost_one_after_the_other() -> None:
    harness = coordinating()
    harness.coordinator.node_lost(3, "its process ended")
    harness.coordinator.node_lost(5, "its process ended")
    changes = [control for control in harness.env.new_messages()[4] if isinstance(control, Reroute)]
    assert [change.epoch for change in changes] == [2, 3]
    assert changes[1].gone == [5]
    assert changes[1].lanes == [[0, 0, 0, 2, 4]]


def test_all_microbatches_were_back_when_a_node_was_lost() -> None:
    harness = coordinating()
    harness.return_microbatches()
    harness.coordinator.node_lost(5, "its process ended")
    assert harness.env.new_messages()[0] == [Reroute(0, 2, [5], [], []), Drain(0, 2, False)]


def test_a_node_lost_while_the_others_drain_starts_the_drain_over() -> None:
    harness = coordinating()
    harness.return_microbatches()
    harness.coordinator.node_lost(5, "its process ended")
    for node in (0, 1, 2, 3):
        harness.send(node, harness.contributed(node))
    harness.env.new_messages()
    harness.coordinator.node_lost(4, "its process ended")
    assert harness.env.new_messages()[0] == [Reroute(0, 3, [4], [], []), Drain(0, 3, False)]
    for node in range(4):
        harness.send(node, harness.contributed(node))
    assert harness.env.new_messages() == harness.to_all(Average(0, 3, [4, 4, 2]))


def test_without_fault_tolerance_a_lost_node_ends_the_run() -> None:
    harness = coordinating(recovery=RecoverySettings(fault_tolerant=False))
    harness.coordinator.node_lost(3, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.FAILED)
    assert "node 'n3' is gone (its process ended)" in harness.coordinator.failure
    assert harness.env.new_messages() == {node: [Stop(harness.coordinator.failure)] for node in range(6)}


def test_a_node_that_cannot_go_on_says_why_and_is_lost() -> None:
    harness = coordinating()
    harness.send(3, Failed("out of memory"))
    assert harness.env.events[0] == Event("lost", 0, "out of memory", "n3")
    assert_goes_on(harness, 3)
    env = RecordingEnv()
    coordinator = new_coordinator(env, 1)
    for node in range(6):
        coordinator.on_message(node, HELLO)
    coordinator.on_message(3, Failed("no such folder"))
    assert coordinator.failure == "node 'n3': no such folder", "before training starts, the user has to see to it"


def test_training_pauses_when_no_data_node_is_left() -> None:
    harness = coordinating()
    harness.coordinator.node_lost(0, "its process ended")
    harness.coordinator.node_lost(1, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    assert harness.env.event_kinds()[-1] == "paused"
    harness.env.new_messages()
    harness.wait(599)
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    harness.wait(1)
    assert is_now(harness.coordinator, CoordinatorState.FAILED)
    assert "lost ones: no node holds stage 0" in harness.coordinator.failure


def test_a_pause_in_which_no_stage_is_lost_has_its_own_reason() -> None:
    harness = coordinating(2, plan_of(2, ((0,), (1,)), ((0, 1),)))
    harness.iterate()
    harness.send(0, LinkDown(1, 1))
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    assert "those that are there ('n0' cannot reach 'n1')" in harness.coordinator._commits.lacking
    harness.env.new_messages()
    harness.coordinator.on_stop_requests(1)
    assert harness.env.new_messages() == {0: [GatherState(0, False, ANY_ID)]}


# Coming late


def test_a_node_that_joins_averages_and_steps_and_recovers_and_then_gets_microbatches() -> None:
    harness, _ = recovering_late()
    harness.iterate()
    assert harness.coordinator.iteration == 2
    assert any(isinstance(each, Commit) for each in harness.env.new_messages()[6])
    harness.send(6, Recovered(2, 0))
    assert harness.env.event_kinds()[-1] == "recovered"
    assert [note["recovering"] for note in harness.env.wal if "plan" in note][-1] == [6]
    harness.iterate()
    assert [note["recovering"] for note in harness.env.wal if "plan" in note][-1] == []


def test_an_iteration_waits_for_a_recovering_node_and_not_for_a_lost_one() -> None:
    harness, _ = recovering_late()
    harness.return_microbatches()
    for node in range(6):
        harness.send(node, harness.averaged(node))
    assert harness.coordinator.iteration == 1
    harness.env.new_messages()
    harness.coordinator.node_lost(6, "its process ended")
    assert harness.env.new_messages() == harness.to_all(Reroute(1, 2, [6], [], [])) | {
        node: [Reroute(1, 2, [6], [], []), Drain(1, 2, False)] for node in range(6)
    }
    for answer in (harness.contributed, harness.averaged):
        for node in range(6):
            harness.send(node, answer(node))
    assert harness.coordinator.iteration == 2


def test_a_recovering_node_that_loses_its_source_gets_another() -> None:
    harness, source = recovering_late()
    harness.coordinator.node_lost(source, "its process ended")
    reroute, recover = harness.env.new_messages()[6]
    assert isinstance(reroute, Reroute)
    assert isinstance(recover, Recover)
    (other,) = recover.origin.sources
    stage = even_plan().stage_of[source]
    assert recover.origin.kind == "replica"
    assert {source, other} == set(even_plan().stages[stage].nodes)
    harness.coordinator.node_lost(other, "its process ended")
    *_, recover = harness.env.new_messages()[6]
    assert isinstance(recover, Recover)
    assert recover.origin.kind == "neighbours", "no node is left that holds the stage"
    assert stage not in recover.origin.stages
    assert sum(recover.origin.shares) == pytest.approx(1)


def test_a_stage_that_no_node_holds_comes_from_a_checkpoint_if_there_is_one() -> None:
    harness, source = recovering_late()
    harness.env.checkpoint_store = RecordingStore(made=1)
    stage = even_plan().stage_of[source]
    for node in even_plan().stages[stage].nodes:
        harness.coordinator.node_lost(node, "its process ended")
    *_, recover = harness.env.new_messages()[6]
    assert isinstance(recover, Recover)
    assert recover.origin == StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), 7 + stage, iterations=1)
    harness.send(6, StateRequest(0, 5, 10, recover.assignment - 1), StateRequest(0, 5, 10, recover.assignment))
    assert harness.env.logged("state") == [(6, stage, 5, 10)]


def test_a_recovering_node_that_loses_the_last_replica_gets_another_source() -> None:
    """Of two stages with one node each, one is lost, while a newcomer is learning it."""
    plan = replace(plan_of(3, ((0,), (1,)), ((0, 1),)), cluster=with_a_quick_one(3))
    harness = coordinating(5, plan)
    harness.send(2, HELLO)
    harness.send(2, Ready())
    harness.iterate()
    (_, stage, _) = harness.env.logged("welcome")[2]
    source = stage  # nodes 0 and 1 hold stages 0 and 1
    harness.env.new_messages()
    harness.send(1 - source, BackupStored(1))  # of what only stage 0 holds, if that is lost
    harness.coordinator.node_lost(source, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    recoveries = [control for control in harness.env.new_messages()[2] if isinstance(control, Recover)]
    assert [each.origin.kind for each in recoveries] == ["neighbours"]
    harness.send(2, Recovered(1, 0))
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)


def test_a_source_that_is_lost_in_a_pause_is_replaced() -> None:
    """Stage 0 is lost, so all wait for one that moves there and learns it from its neighbours; one of them is lost."""
    harness = coordinating(5, plan_of(5, ((0,), (1, 2), (3, 4)), ((0, 1, 3),)))
    harness.iterate()
    harness.send(3, BackupStored(1)).send(4, BackupStored(1))
    harness.coordinator.node_lost(0, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    moved, stage, _ = harness.env.logged("welcome")[-1]
    assert stage == 0
    harness.send(moved, Ready())
    (recover,) = (control for control in harness.env.new_messages()[moved] if isinstance(control, Recover))
    harness.coordinator.node_lost(recover.origin.sources[0], "its process ended")
    harness.wait(7)
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    (again,) = (control for control in harness.env.new_messages()[moved] if isinstance(control, Recover))
    assert again.origin.sources != recover.origin.sources


def test_a_node_that_is_restarted_is_lost_and_new() -> None:
    harness = coordinating()
    harness.send(3, HELLO)
    assert harness.env.event_kinds() == ["lost", "rerouted", "joined", "replanned"]
    assert harness.env.events[-1].node == "n3" and harness.env.events[-1].text.startswith("takes stage ")
    assert harness.env.logged("welcome")[-1][0] == 3
    assert 3 not in harness.coordinator.nodes


# The end


def test_a_checkpoint_of_the_end_is_not_trained_past() -> None:
    harness = coordinating(2)
    harness.iterate(2)
    again = coordinating(2, store=RecordingStore(made=2), wal=list(harness.env.wal))
    for control in (HELLO, Ready()):
        for node in range(6):
            again.send(node, control)
    assert again.coordinator.state is CoordinatorState.GATHERING
    assert again.coordinator.iteration == 2


def test_a_run_that_failed_while_nodes_rejoined_stays_failed() -> None:
    harness = coordinating(3)
    harness.iterate(1)
    again = coordinating(3, wal=list(harness.env.wal), recovery=RecoverySettings(fault_tolerant=False))
    for node in range(6):
        again.send(node, structs.replace(HELLO, epoch=1, iteration=1 if node else 7, phase="RUNNING"))
    assert again.coordinator.state is CoordinatorState.FAILED
    assert again.coordinator.failure


def test_early_and_last_iterations_are_recorded() -> None:
    def recorded(every: int, iterations: int) -> list[int]:
        return [number for number in range(iterations) if number in RecordedIterations(every, iterations)]

    assert recorded(50, 120) == [1, 49, 99, 119]
    assert recorded(50, 20) == [1, 19]
    assert recorded(50, 1) == [0]
    assert recorded(0, 20) == []
