"""How training begins: when all nodes are there, or without some of them, or after a coordinator that was killed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import Deadlines
from skippipe.runtime.messages import (
    Begin,
    Commit,
    GatherState,
    Heartbeat,
    Hello,
    Ready,
    Recover,
    Stepped,
    Stop,
)
from skippipe.runtime.node.interfaces import NodePhase
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
)
from tests.helpers.single_node import AT_ONCE, LEARNING

# Nodes that do not come


def test_training_begins_without_nodes_that_do_not_join_and_takes_them_in_later() -> None:
    env = RecordingEnv()
    deadlines = Deadlines(join=timedelta(seconds=30))
    coordinator = new_coordinator(env, 5, even_plan(), deadlines=deadlines, recovery=AT_ONCE)
    harness = CoordinatorHarness(coordinator, env)
    for node in (1, 2):
        harness.send(node, HELLO)
    harness.wait(40)
    assert is_now(coordinator, CoordinatorState.JOINING), "there are fewer nodes than stages"
    harness.send(4, HELLO)
    harness.wait(4.9)
    assert is_now(coordinator, CoordinatorState.JOINING), "others may follow"
    harness.wait(0.1)
    assert is_now(coordinator, CoordinatorState.PREPARING)
    assert [(event.kind, event.node, event.text) for event in env.events] == [
        ("lost", f"n{node}", "waited 45 s for it to join: training begins without it") for node in (0, 3, 5)
    ]
    for node in (1, 2, 4):
        harness.send(node, Ready())
    assert_goes_on(harness, 0, 3, 5)
    harness.send(3, HELLO)
    assert 3 in coordinator.membership


def test_a_stage_that_no_node_has_joined_for_gets_another() -> None:
    env = RecordingEnv()
    coordinator = new_coordinator(env, 5, even_plan(), deadlines=Deadlines(join=timedelta(0)), recovery=AT_ONCE)
    harness = CoordinatorHarness(coordinator, env)
    for node in (0, 1, 2):
        harness.send(node, HELLO)
    harness.wait(5)
    assert [coordinator.membership[node].stage for node in (0, 1, 2)] == [2, 0, 1]
    for node in (0, 1, 2):
        harness.send(node, Ready())
    assert_goes_on(harness, 3, 4, 5)


def test_in_a_run_that_is_resumed_such_a_stage_is_that_of_the_checkpoint() -> None:
    env = RecordingEnv(checkpoint_store=RecordingStore(made=4))
    at_once = Deadlines(join=timedelta(0))
    coordinator = new_coordinator(env, 9, even_plan(), deadlines=at_once, recovery=AT_ONCE, resumed_from=4)
    harness = CoordinatorHarness(coordinator, env)
    for node in (0, 1, 2):
        harness.send(node, HELLO)
    harness.wait(5)
    welcomes = {node: (stage, origin) for node, stage, origin in env.logged("welcome")}
    assert {node: (stage, origin.kind, origin.stages, origin.steps) for node, (stage, origin) in welcomes.items()} == {
        node: (stage, "checkpoint", (stage,), 7 + stage) for node, stage in ((0, 2), (1, 0), (2, 1))
    }


def test_fewer_nodes_than_stages_are_named_in_the_end() -> None:
    env = RecordingEnv()
    coordinator = new_coordinator(env, 5, even_plan(), deadlines=Deadlines(timedelta(0), timedelta(seconds=50)))
    harness = CoordinatorHarness(coordinator, env)
    harness.send(0, HELLO)
    harness.wait(50)
    assert coordinator.failure == "waited 50 s for n1, n2, n3, n4, n5 to join"


# A coordinator that is started again


def at(iteration: int, phase: NodePhase, epoch: int = 1) -> Hello:
    return structs.replace(HELLO, epoch=epoch, iteration=iteration, phase=phase.name)


def started_again(iterations: int = 5, done: int = 2, **others: Any) -> CoordinatorHarness:
    """With the notes of one that had done so many iterations."""
    before = coordinating(iterations, even_plan())
    before.iterate(done)
    return coordinating(iterations, wal=before.env.wal, **others)


def test_a_restarted_coordinator_waits_for_all_nodes_and_begins_with_a_higher_epoch() -> None:
    harness = started_again()
    assert is_now(harness.coordinator, CoordinatorState.REJOINING)
    assert harness.coordinator.iteration == 2
    harness.send(2, harness.averaged(2), Heartbeat("a step"))
    assert not harness.env.sent, "they have to say hello first, but are not sent away for it"
    for node in range(5):
        harness.send(node, at(2, NodePhase.RUNNING, epoch=3))
    assert not harness.env.sent
    harness.send(5, at(2, NodePhase.WAITING))
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    begins = {node: controls[-1] for node, controls in harness.env.new_messages().items()}
    assert list(begins) == list(range(6))
    epochs = {begin.epoch for begin in begins.values() if isinstance(begin, Begin)}
    assert len(epochs) == 1
    assert min(epochs) > 3
    assert "coordinator-restarted" in harness.env.event_kinds()
    harness.iterate()
    assert harness.coordinator.iteration == 3
    assert harness.env.wal[-1]["commit"] == 2
    assert harness.env.wal[-1]["steps"] == [3, 3, 3]


@pytest.mark.parametrize("unanswered", [None, "192.168.1.7:5556"])
def test_a_restarted_coordinator_goes_on_as_soon_as_it_knows_how_to_reach_the_last_node(unanswered: str | None) -> None:
    """All have said hello, and it is still being found out whether one of them can be called."""
    harness = started_again()
    harness.env.called.add(3)
    for node in range(6):
        harness.send(node, at(2, NodePhase.RUNNING))
    assert is_now(harness.coordinator, CoordinatorState.REJOINING)
    harness.env.called.clear()
    harness.coordinator.on_reach(3, unanswered)
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)


def test_nodes_that_have_not_received_the_last_commit_get_it_again() -> None:
    harness = started_again()
    for node in range(6):
        harness.send(node, at(1, NodePhase.AVERAGED) if node == 4 else at(2, NodePhase.RUNNING))
    messages = harness.env.new_messages()
    proceed, begin = messages[4]
    assert proceed == Commit(1, LEARNING.rate_at(1), LEARNING.clipping([4.0] * 3)[1], True, False, False)
    assert isinstance(begin, Begin)
    assert [type(each) for each in messages[3]] == [Begin]


def test_a_node_that_does_not_rejoin_is_not_waited_for() -> None:
    harness = started_again()
    for node in (0, 1, 2, 3, 4):
        harness.send(node, at(2, NodePhase.RUNNING))
    harness.wait(19.9)
    assert is_now(harness.coordinator, CoordinatorState.REJOINING)
    harness.wait(0.1)
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    assert harness.coordinator.nodes == [0, 1, 2, 3, 4]


def test_a_node_that_is_lost_again_before_all_have_rejoined_does_not_count() -> None:
    harness = started_again()
    for node in (0, 1, 2, 3, 4):
        harness.send(node, at(2, NodePhase.RUNNING))
    harness.coordinator.node_lost(3, "its process ended")
    harness.send(5, at(2, NodePhase.RUNNING))
    harness.wait(20)
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    assert harness.coordinator.nodes == [0, 1, 2, 4, 5]


def test_new_nodes_get_a_stage_and_misplaced_ones_are_evicted() -> None:
    harness = started_again()
    for node in (0, 1, 2, 3):
        harness.send(node, at(2, NodePhase.RUNNING))
    harness.send(4, HELLO)
    harness.send(5, at(0, NodePhase.RUNNING))
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    assert harness.coordinator.nodes == [0, 1, 2, 3]
    assert harness.env.logged("welcome")[-1][0] == 4
    (stop,) = harness.env.new_messages()[5]
    assert isinstance(stop, Stop)
    assert stop.again
    harness.send(5, HELLO)
    assert harness.env.logged("welcome")[-1][0] == 5


def test_a_coordinator_restarted_after_the_last_iteration_gathers_the_weights() -> None:
    harness = started_again(2, 2)
    for node in range(6):
        harness.send(node, at(1, NodePhase.AVERAGED) if node == 4 else at(2, NodePhase.WAITING))
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    assert [type(each) for each in harness.env.new_messages()[4]] == [Commit]
    harness.send(4, Stepped(1))
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert harness.env.new_messages() == {0: [GatherState(0, False, ANY_ID)]}


def test_a_node_that_was_recovering_is_still_recovering() -> None:
    before, _ = recovering_late()
    harness = coordinating(5, wal=before.env.wal)
    for node in range(7):
        harness.send(node, at(1, NodePhase.RUNNING))
    assert [type(each) for each in harness.env.new_messages()[6]] == [Begin, Recover]
    assert all(6 not in lane.path for lane in harness.coordinator.plan.lanes)
