"""How a coordinator ends a run and makes checkpoints, whichever nodes are lost meanwhile."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.interfaces import CoordinatorState, WriteFailed
from skippipe.runtime.coordinator.settings import Deadlines
from skippipe.runtime.messages import (
    COORDINATOR,
    Begin,
    Commit,
    GatherState,
    Ready,
    Recover,
    StateRequest,
    Stepped,
    Stop,
)
from skippipe.runtime.state_source import MalformedWeights, StateSource
from skippipe.transport.message import Message
from tests.helpers.single_coordinator import (
    ANY_ID,
    HELLO,
    CoordinatorHarness,
    RecordingEnv,
    RecordingStore,
    coordinating,
    gathering,
    is_now,
    new_coordinator,
    piece,
    send_all,
)
from tests.helpers.single_node import AT_ONCE

# The end


def test_weights_come_from_one_node_of_each_stage_in_turn() -> None:
    harness = gathering(deadlines=Deadlines(gather=timedelta(seconds=7)))
    coordinator, env = harness.coordinator, harness.env
    assert [control for control in env.new_messages()[0] if isinstance(control, GatherState)] == [
        GatherState(0, False, ANY_ID)
    ]
    harness.wait(5)
    harness.receive(0, piece(0, "some weights"))
    assert env.new_messages() == {0: [GatherState(1, False, ANY_ID)]}
    harness.wait(6)
    assert not coordinator.over, "every piece gives it time"
    harness.receive(0, piece(1))
    assert env.new_messages() == {2: [GatherState(0, False, ANY_ID)]}
    harness.receive(2, piece(0))
    assert env.new_messages() == {3: [GatherState(0, False, ANY_ID)]}
    harness.receive(3, piece(0))
    assert is_now(coordinator, CoordinatorState.DONE)
    assert env.new_messages() == {node: [Stop("")] for node in range(6)}
    assert env.wal[-1] == {"done": 0}
    assert env.stored == [(0, 0, "some weights"), (0, 1, None), (1, 0, None), (2, 0, None)]


@pytest.mark.parametrize(
    ("node", "message"),
    [(3, piece(0, "x")), (0, piece(1, "x")), (0, piece(0, "x", kept=True)), (6, piece(0, "x"))],
    ids=["of another stage", "of another number", "of a checkpoint", "of a stranger"],
)
def test_weights_that_were_not_requested_are_not_stored(node: int, message: Message) -> None:
    harness = gathering()
    harness.env.new_messages()
    harness.receive(node, message)
    assert (harness.env.stored, harness.env.sent) == ([], [])
    harness = coordinating()
    harness.receive(node, message)
    assert (harness.env.stored, harness.env.sent) == ([], [])


def test_when_the_holder_is_lost_the_stage_comes_from_another_from_its_beginning() -> None:
    harness = gathering()
    harness.receive(0, piece(0, "half of it"))
    harness.env.new_messages()
    harness.coordinator.node_lost(0, "its process ended")
    assert harness.env.new_messages() == {1: [GatherState(0, False, ANY_ID)]}
    harness.receive(0, piece(1, "too late"))
    harness.receive(1, piece(0, "all of it"))
    harness.receive(1, piece(1))
    harness.env.new_messages()
    assert harness.env.stored == [(0, 0, "half of it"), (0, 0, "all of it"), (0, 1, None)]
    for node in (2, 3):
        harness.receive(node, piece(0))
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert sorted(harness.env.new_messages()) == [1, 2, 3, 4, 5]


def test_weights_that_are_none_come_from_another_node() -> None:
    harness = gathering()
    harness.env.unwritten = MalformedWeights("its weights of stage 0 are not 12 numbers")
    harness.receive(0, piece(0, "half of it"))
    harness.env.new_messages()
    harness.receive(0, piece(1))
    harness.env.unwritten = None
    messages = harness.env.new_messages()
    assert messages == {
        0: [Stop("its weights of stage 0 are not 12 numbers", again=True)],
        1: [GatherState(0, False, ANY_ID)],
    }
    for node in (1, 2, 3):
        harness.receive(node, piece(0))
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_when_the_last_holder_is_lost_a_node_that_joins_may_replace_it() -> None:
    harness = gathering()
    harness.receive(0, piece(0))
    harness.env.new_messages()
    harness.coordinator.node_lost(2, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    assert not harness.coordinator.failure
    receivers = {node for node, stage, _ in harness.env.logged("welcome")[6:] if stage == 1}
    if not receivers:
        harness.send(6, HELLO)
        receivers = {6}
    (receiver,) = receivers
    harness.send(receiver, Ready())
    recoveries = [control for control in harness.env.new_messages()[receiver] if isinstance(control, Recover)]
    assert [each.origin.kind for each in recoveries] == ["neighbours"]
    harness.send(receiver, Ready())
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert harness.env.new_messages() == {receiver: [GatherState(0, False, ANY_ID)]}


def test_while_a_lost_stage_is_waited_for_the_plan_is_logged_once() -> None:
    harness = gathering()
    harness.receive(0, piece(0))
    for node in (1, 4, 5, 2):  # nodes 0 and 3 are left, each alone on its stage
        harness.coordinator.node_lost(node, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    planned, noted = harness.env.event_kinds().count("replanned"), len(harness.env.wal)
    harness.wait(120)
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    assert (harness.env.event_kinds().count("replanned"), len(harness.env.wal)) == (planned, noted)


def test_a_node_lost_before_its_last_step_is_not_waited_for() -> None:
    harness = coordinating(1)
    harness.iterate()
    for node in (0, 1, 2, 4, 5):
        harness.send(node, Stepped(0))
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    harness.coordinator.node_lost(3, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)


@pytest.mark.parametrize("state", ["joining", "preparing", "paused", "rejoining"])
def test_to_stop_before_training_gathers_nothing(state: str) -> None:
    env = RecordingEnv()
    wal = coordinating().env.wal if state == "rejoining" else ()
    coordinator = new_coordinator(env, 2, wal=wal, recovery=AT_ONCE)
    harness = CoordinatorHarness(coordinator, env)
    for node in range(5 if state in ("joining", "rejoining") else 6):
        harness.send(node, HELLO)
    if state == "paused":
        for node in range(6):
            harness.send(node, Ready())
        for node in (0, 1):
            coordinator.node_lost(node, "its process ended")
    assert coordinator.state.name.lower() == state
    env.new_messages()
    coordinator.on_stop_requests(2)
    assert is_now(coordinator, CoordinatorState.DONE)
    assert env.new_messages() == {node: [Stop("")] for node in coordinator.membership}
    assert not env.stored


def test_to_stop_in_training_gathers_the_weights_at_once() -> None:
    harness = coordinating(50)
    harness.iterate()
    harness.env.new_messages()
    harness.coordinator.on_stop_requests(2)
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert harness.env.new_messages() == {0: [GatherState(0, False, ANY_ID)]}
    harness.send(0, harness.averaged(0))
    harness.coordinator.on_stop_requests(2)
    assert not harness.env.sent
    harness.wait(3.9)
    assert not harness.coordinator.over
    harness.receive(0, piece(0, "half of it"))
    harness.wait(0.1)
    assert harness.coordinator.failure == "waited 4 s for n0 to send its weights", "no more time for every piece"


def test_asked_twice_it_does_not_wait_for_the_iteration() -> None:
    harness = coordinating(50)
    harness.iterate()
    harness.coordinator.on_stop_requests(1)
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    harness.coordinator.on_stop_requests(2)
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)


def test_to_stop_after_the_last_iteration_is_to_finish() -> None:
    harness = coordinating(1)
    harness.iterate()
    harness.coordinator.on_stop_requests(2)
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        harness.send(node, Stepped(0))
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    harness.coordinator.on_stop_requests(2)
    for node in (0, 2, 3):
        harness.receive(node, piece(0))
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_to_stop_does_not_wait_for_a_checkpoint() -> None:
    harness = gathering(checkpoint_every=1, store=RecordingStore())
    harness.env.new_messages()
    harness.coordinator.on_stop_requests(2)
    assert harness.env.new_messages() == {0: [GatherState(0, False, ANY_ID)]}
    for node in (0, 2, 3):
        harness.receive(node, piece(0))
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert [event.text for event in harness.env.events] == [
        "none of the last iteration: the run was ended before it was made"
    ]


def test_to_stop_without_the_weights_of_a_stage_fails() -> None:
    harness = coordinating(50)
    harness.coordinator.node_lost(2, "its process ended")
    harness.coordinator.on_stop_requests(2)
    assert is_now(harness.coordinator, CoordinatorState.FAILED)
    assert "no node is left that has the weights of stage 1" in harness.coordinator.failure


# Checkpoints

KEPT = Commit(0, 0.0, 0.0, wait=True, snapshot=True)
"""After the last of one iteration: the step is taken, and a copy is wanted."""


def test_a_run_ends_with_a_checkpoint_and_then_the_weights() -> None:
    store = RecordingStore()
    harness = gathering(checkpoint_every=50, store=store)
    messages = harness.env.new_messages()
    assert [each for each in messages[0] if each == KEPT or isinstance(each, GatherState)] == [
        KEPT,
        GatherState(0, True, ANY_ID),
    ]
    assert {node for node, controls in messages.items() if KEPT in controls} == {0, 2, 3}, "one of each stage"
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(1, (1, 1, 1))]
    assert harness.env.new_messages()[0][-1] == GatherState(0, False, ANY_ID)
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert store.done == [(1, (1, 1, 1))]
    assert not harness.env.events


def test_asked_once_the_iteration_that_is_under_way_is_the_last() -> None:
    """With a checkpoint of it, from which the run can go on."""
    store = RecordingStore()
    harness = coordinating(50, checkpoint_every=20, store=store)
    harness.iterate()
    harness.env.new_messages()
    harness.coordinator.on_stop_requests(1)
    harness.coordinator.on_stop_requests(1)
    assert [event.kind for event in harness.env.events] == ["ending"]
    assert not harness.env.sent
    harness.iterate()
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        harness.send(node, Stepped(1))
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(2, (2, 2, 2))]
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_a_run_that_leaves_its_nodes_is_stopped_and_can_be_continued() -> None:
    harness = coordinating(50)
    harness.iterate()
    harness.coordinator.leaves_nodes = True
    harness.coordinator.on_stop_requests(2)
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert harness.env.wal[-1] == {"stopped": 1}
    assert not any(isinstance(each, Stop) for messages in harness.env.new_messages().values() for each in messages)
    again = coordinating(50, wal=harness.env.wal)
    assert again.coordinator.term == 1
    assert "stopped" not in again.env.wal[-1]


def test_a_stage_that_is_lost_in_the_last_iteration_is_in_the_last_checkpoint() -> None:
    store = RecordingStore()
    harness = coordinating(1, checkpoint_every=1, store=store)
    harness.return_microbatches()
    harness.coordinator.node_lost(2, "its process ended")
    for answer in (harness.contributed, harness.averaged):
        for node in list(harness.coordinator.nodes):
            harness.send(node, answer(node))
    for node in list(harness.coordinator.nodes):
        harness.send(node, Stepped(0))
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    receivers = {node for node, stage, _ in harness.env.logged("welcome")[6:] if stage == 1}
    (receiver,) = receivers
    (pause,) = (event.text for event in harness.env.events if event.kind == "paused")
    assert pause.endswith(f"and 'n{receiver}' will take the place")
    harness.send(receiver, Ready(), Ready())
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert KEPT in harness.env.new_messages()[receiver]
    holders = list(harness.coordinator.membership.holders(harness.coordinator.plan).values())
    send_all(harness, *holders, kept=True)
    assert store.done == [(1, (1, 0, 1))], "that stage begins anew"
    send_all(harness, *holders, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_an_earlier_checkpoint_is_completed_before_the_last_is_made() -> None:
    store = RecordingStore()
    harness = gathering(3, checkpoint_every=2, store=store)
    last = structs.replace(KEPT, iteration=2)
    assert not any(control == last for _, control in harness.env.sent)
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(2, (2, 2, 2))]
    assert {node for node, controls in harness.env.new_messages().items() if last in controls} == {0, 2, 3}
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(2, (2, 2, 2)), (3, (3, 3, 3))]
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_the_last_checkpoint_starts_over_when_a_node_with_a_snapshot_is_lost() -> None:
    store = RecordingStore()
    harness = gathering(checkpoint_every=1, store=store)
    send_all(harness, 0, 2, kept=True)
    harness.env.new_messages()
    harness.coordinator.node_lost(3, "its process ended")
    assert store.abandoned == 1
    (replica,) = {node for node, controls in harness.env.new_messages().items() if KEPT in controls} - {0, 2}
    send_all(harness, 0, 2, replica, kept=True)
    assert store.done == [(1, (1, 1, 1))]
    send_all(harness, 0, 2, replica, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_a_checkpoint_is_made_while_training_goes_on() -> None:
    store = RecordingStore()
    harness = coordinating(5, checkpoint_every=2, store=store)
    harness.iterate()
    assert not any(isinstance(each, GatherState) for _, each in harness.env.sent)
    harness.env.new_messages()
    harness.iterate()
    messages = harness.env.new_messages()
    kept = {node for node, controls in messages.items() if any(isinstance(e, Commit) and e.snapshot for e in controls)}
    assert kept == {0, 2, 3}, "one of each stage"
    assert messages[0][-1] == GatherState(0, True, ANY_ID)
    assert GatherState(0, True, ANY_ID) not in messages[2]
    harness.receive(0, piece(0, "a copy", kept=True))
    harness.iterate()
    harness.receive(0, piece(1, kept=True))
    for node in (2, 3):
        assert not store.done
        harness.receive(node, piece(0, kept=True))
    assert store.done == [(2, (2, 2, 2))], "as of when it was made"
    assert store.saved_pieces == [(0, 0, "a copy"), (0, 1, None), (1, 0, None), (2, 0, None)]


@pytest.mark.parametrize(("lost", "abandoned"), [(3, 1), (5, 0)])
def test_a_checkpoint_is_given_up_with_a_node_that_holds_its_snapshot(lost: int, abandoned: int) -> None:
    store = RecordingStore()
    harness = coordinating(5, checkpoint_every=1, store=store)
    harness.iterate()
    harness.coordinator.node_lost(lost, "its process ended")
    assert store.abandoned == abandoned
    harness.receive(0, piece(0, "a copy", kept=True))
    assert len(store.saved_pieces) == 1 - abandoned
    assert not store.done


def test_a_piece_of_a_checkpoint_that_was_given_up_is_not_taken_for_one_of_the_last() -> None:
    store = RecordingStore()
    harness = gathering(3, checkpoint_every=2, store=store)
    harness.env.new_messages()
    harness.coordinator.node_lost(3, "its process ended")
    assert store.abandoned == 1
    assert not harness.env.sent, "node 0 has yet to answer"
    harness.receive(0, piece(0, "after two iterations", kept=True))
    assert harness.env.new_messages()[0] == [structs.replace(KEPT, iteration=2), GatherState(0, True, ANY_ID)]
    send_all(harness, 0, 2, 4, kept=True)
    assert store.saved_pieces[0] == (0, 0, "of 0")
    assert store.done == [(3, (3, 3, 3))]


def test_a_run_that_goes_on_from_a_checkpoint_sends_nodes_there_first() -> None:
    env = RecordingEnv(checkpoint_store=RecordingStore(made=4))
    coordinator = new_coordinator(env, 6, resumed_from=4)
    for node in range(6):
        coordinator.on_message(node, HELLO)
    for node, stage, origin in env.logged("welcome"):
        assert origin == StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), 7 + stage, iterations=4), node
    assert env.wal[0]["steps"] == [7, 8, 9], "before any node has them"
    harness = CoordinatorHarness(coordinator, env)
    harness.send(3, StateRequest(2, 0, 100, coordinator.membership[3].assignment))
    assert env.logged("state") == [(3, 2, 0, 100)]
    for node in range(6):
        harness.send(node, Ready())
    assert env.new_messages()[0] == [Begin(4, 1, False)]


# A disk that is full


def test_weights_that_cannot_be_written_are_held_and_nodes_are_not_dismissed() -> None:
    harness = gathering(deadlines=Deadlines(disk_space=timedelta(seconds=90), gather=timedelta(seconds=7)))
    coordinator, env = harness.coordinator, harness.env
    env.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    env.new_messages()
    send_all(harness, 0, kept=False)
    assert env.new_messages() == {0: [GatherState(1, False, ANY_ID)]}, "no other node is asked before there is room"
    harness.wait(60)
    assert not coordinator.over
    assert [event.text for event in env.events if event.kind == "storage"] == [
        "run/model: 2 GB cannot be written; nodes keep their state, and disk space is waited for, 2 minutes at most"
    ]
    assert env.new_messages() == {}
    env.unwritten = None
    harness.wait(4)
    assert env.new_messages() == {2: [GatherState(0, False, ANY_ID)]}, "it is not fetched a second time"
    assert [event.text for event in env.events][-1] == "the model can be written again"
    send_all(harness, 2, 3, kept=False)
    assert is_now(coordinator, CoordinatorState.DONE)
    assert [stage for stage, _, piece in env.stored if piece is None] == [0, 1, 2]


def test_without_disk_space_in_time_nodes_keep_their_state_for_the_next_coordinator() -> None:
    harness = gathering(deadlines=Deadlines(disk_space=timedelta(seconds=90)))
    harness.env.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send_all(harness, 0, kept=False)
    harness.env.new_messages()
    harness.wait(91)
    assert is_now(harness.coordinator, CoordinatorState.FAILED)
    assert harness.coordinator.failure == "run/model: 2 GB cannot be written; waited 90 s for disk space; ways on"
    assert harness.env.new_messages() == {}, "no node is told to stop"
    assert not any("done" in record for record in harness.env.wal)


def test_to_stop_does_not_wait_for_disk_space() -> None:
    harness = gathering()
    harness.env.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send_all(harness, 0, kept=False)
    harness.wait(10)
    harness.coordinator.on_stop_requests(1)
    harness.wait(1)
    assert is_now(harness.coordinator, CoordinatorState.FAILED)


def test_a_node_lost_while_the_disk_is_full_is_not_needed_if_its_weights_are_here() -> None:
    harness = gathering()
    send_all(harness, 0, 2, kept=False)
    harness.env.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send_all(harness, 3, kept=False)
    for node in (3, 4, 5):
        harness.coordinator.node_lost(node, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    harness.env.unwritten = None
    harness.wait(4)
    assert is_now(harness.coordinator, CoordinatorState.DONE)


def test_a_last_checkpoint_that_could_not_be_written_is_made_once_more_when_the_model_is_on_disk() -> None:
    store = RecordingStore()
    harness = gathering(checkpoint_every=50, store=store)
    store.lacking = "none after 1 iterations: no room"
    send_all(harness, 0, 2, 3, kept=True)
    harness.env.new_messages()
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert store.moved == 1
    assert [each for each in harness.env.new_messages()[0] if each == KEPT or isinstance(each, GatherState)][-2:] == [
        KEPT,
        GatherState(0, True, ANY_ID),
    ]
    send_all(harness, 0, 2, 3, kept=True)
    assert is_now(harness.coordinator, CoordinatorState.DONE), "once, whatever comes of it"
    assert store.done == [(1, (1, 1, 1))] * 2
    assert store.moved == 1
