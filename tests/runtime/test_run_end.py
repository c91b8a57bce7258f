"""How a coordinator ends a run and makes checkpoints, whoever is lost meanwhile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.interfaces import WriteFailed
from skippipe.runtime.coordinator.state_machine import Coordinator, CoordinatorState, Deadlines
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
from skippipe.runtime.node.ops import StateSource
from skippipe.transport.message import CheckpointPiece, Message, WeightsPiece
from tests.helpers.single_coordinator import ASKED, HELLO, Course, Room, Safe, coordinating, is_now
from tests.helpers.single_node import AT_ONCE, LEARNING, small_plan

# The end


def piece(number: int, body: Any = None, *, kept: bool = False) -> Message:
    return Message((CheckpointPiece if kept else WeightsPiece)(0, number), body)


def collecting(iterations: int = 1, **others: Any) -> Course:
    course = coordinating(iterations, **others)
    course.iterate(iterations)
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        course.hear(node, Stepped(iterations - 1))
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    return course


def test_weights_come_from_one_node_of_each_stage_in_turn() -> None:
    course = collecting(deadlines=Deadlines(collect=timedelta(seconds=7)))
    coordinator, room = course.coordinator, course.room
    assert [control for control in room.news()[0] if isinstance(control, GatherState)] == [GatherState(0, False, ASKED)]
    course.wait(5)
    course.receive(0, piece(0, "some weights"))
    assert room.news() == {0: [GatherState(1, False, ASKED)]}
    course.wait(6)
    assert not coordinator.over, "every piece gives it time"
    course.receive(0, piece(1))
    assert room.news() == {2: [GatherState(0, False, ASKED)]}
    course.receive(2, piece(0))
    assert room.news() == {3: [GatherState(0, False, ASKED)]}
    course.receive(3, piece(0))
    assert is_now(coordinator, CoordinatorState.DONE)
    assert room.news() == {node: [Stop("")] for node in range(6)}
    assert room.notes[-1] == {"done": 0}
    assert room.stored == [(0, 0, "some weights"), (0, 1, None), (1, 0, None), (2, 0, None)]


@pytest.mark.parametrize(
    ("node", "message"),
    [(3, piece(0, "x")), (0, piece(1, "x")), (0, piece(0, "x", kept=True)), (6, piece(0, "x"))],
    ids=["of another stage", "of another number", "of a checkpoint", "of a stranger"],
)
def test_weights_that_nobody_asked_for_are_not_stored(node: int, message: Message) -> None:
    course = collecting()
    course.room.news()
    course.receive(node, message)
    assert (course.room.stored, course.room.told) == ([], [])
    course = coordinating()
    course.receive(node, message)
    assert (course.room.stored, course.room.told) == ([], [])


def test_when_the_holder_is_lost_the_stage_comes_from_another_from_its_beginning() -> None:
    course = collecting()
    course.receive(0, piece(0, "half of it"))
    course.room.news()
    course.coordinator.lost(0, "its process ended")
    assert course.room.news() == {1: [GatherState(0, False, ASKED)]}
    course.receive(0, piece(1, "too late"))
    course.receive(1, piece(0, "all of it"))
    course.receive(1, piece(1))
    course.room.news()
    assert course.room.stored == [(0, 0, "half of it"), (0, 0, "all of it"), (0, 1, None)]
    for node in (2, 3):
        course.receive(node, piece(0))
    assert is_now(course.coordinator, CoordinatorState.DONE)
    assert sorted(course.room.news()) == [1, 2, 3, 4, 5]


def test_when_the_last_holder_is_lost_a_newcomer_may_still_bring_it() -> None:
    course = collecting()
    course.receive(0, piece(0))
    course.room.news()
    course.coordinator.lost(2, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    assert not course.coordinator.failure
    learners = {node for node, stage, _ in course.room.logged("welcome")[6:] if stage == 1}
    if not learners:
        course.hear(6, HELLO)
        learners = {6}
    (learner,) = learners
    course.hear(learner, Ready())
    learn = [control for control in course.room.news()[learner] if isinstance(control, Recover)]
    assert [each.origin.kind for each in learn] == ["neighbours"]
    course.hear(learner, Ready())
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    assert course.room.news() == {learner: [GatherState(0, False, ASKED)]}


def test_a_node_lost_before_its_last_step_is_not_waited_for() -> None:
    course = coordinating(1)
    course.iterate()
    for node in (0, 1, 2, 4, 5):
        course.hear(node, Stepped(0))
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    course.coordinator.lost(3, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)


@pytest.mark.parametrize("state", ["joining", "preparing", "paused", "reuniting"])
def test_to_finish_early_before_there_is_anything_to_keep_is_to_stop(state: str) -> None:
    room = Room()
    wal = coordinating().room.notes if state == "reuniting" else ()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 2, survival=AT_ONCE, wal=wal)
    course = Course(coordinator, room)
    for node in range(5 if state in ("joining", "reuniting") else 6):
        course.hear(node, HELLO)
    if state == "paused":
        for node in range(6):
            course.hear(node, Ready())
        for node in (0, 1):
            coordinator.lost(node, "its process ended")
    assert coordinator.state.name.lower() == state
    room.news()
    coordinator.finish_early()
    assert is_now(coordinator, CoordinatorState.DONE)
    assert room.news() == {node: [Stop("")] for node in coordinator.membership}
    assert not room.stored


def test_to_finish_early_in_training_is_to_collect_what_there_is_at_once() -> None:
    course = coordinating(50)
    course.iterate()
    course.room.news()
    course.coordinator.finish_early()
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    assert course.room.news() == {0: [GatherState(0, False, ASKED)]}
    course.hear(0, course.averaged(0))
    course.coordinator.finish_early()
    assert not course.room.told
    course.wait(3.9)
    assert not course.coordinator.over
    course.receive(0, piece(0, "half of it"))
    course.wait(0.1)
    assert course.coordinator.failure == "waited 4 s for n0 to send its weights", "no more time for every piece"


def test_asked_twice_it_does_not_wait_for_the_iteration() -> None:
    course = coordinating(50)
    course.iterate()
    course.coordinator.asked_to_end(1)
    assert is_now(course.coordinator, CoordinatorState.TRAINING)
    course.coordinator.asked_to_end(2)
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)


def test_to_finish_early_after_the_last_iteration_is_to_finish() -> None:
    course = coordinating(1)
    course.iterate()
    course.coordinator.finish_early()
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        course.hear(node, Stepped(0))
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    course.coordinator.finish_early()
    for node in (0, 2, 3):
        course.receive(node, piece(0))
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_to_finish_early_does_not_wait_for_a_checkpoint() -> None:
    course = collecting(kept_every=1, keeper=Safe())
    course.room.news()
    course.coordinator.finish_early()
    assert course.room.news() == {0: [GatherState(0, False, ASKED)]}
    for node in (0, 2, 3):
        course.receive(node, piece(0))
    assert is_now(course.coordinator, CoordinatorState.DONE)
    assert [event.text for event in course.room.events] == [
        "none of the last iteration: the run was ended before it was made"
    ]


def test_a_stage_without_weights_cannot_be_finished_early() -> None:
    course = coordinating(50)
    course.coordinator.lost(2, "its process ended")
    course.coordinator.finish_early()
    assert is_now(course.coordinator, CoordinatorState.FAILED)
    assert "nobody is left who has the weights of stage 1" in course.coordinator.failure


# Checkpoints

KEPT = Commit(0, 0.0, 0.0, last=True, kept=True, recorded=False)
"""After the last of one iteration: the step is taken, and a copy is wanted."""


def send(course: Course, *nodes: int, kept: bool) -> None:
    """All that they have, in one piece."""
    for node in nodes:
        course.receive(node, piece(0, f"of {node}", kept=kept))
        course.receive(node, piece(1, kept=kept))


def test_a_run_ends_with_a_checkpoint_and_then_the_weights() -> None:
    safe = Safe()
    course = collecting(kept_every=50, keeper=safe)
    told = course.room.news()
    assert [each for each in told[0] if each == KEPT or isinstance(each, GatherState)] == [
        KEPT,
        GatherState(0, True, ASKED),
    ]
    assert {node for node, controls in told.items() if KEPT in controls} == {0, 2, 3}, "one of each stage"
    send(course, 0, 2, 3, kept=True)
    assert safe.done == [(1, (1, 1, 1))]
    assert course.room.news()[0][-1] == GatherState(0, False, ASKED)
    send(course, 0, 2, 3, kept=False)
    assert is_now(course.coordinator, CoordinatorState.DONE)
    assert safe.done == [(1, (1, 1, 1))]
    assert not course.room.events


def test_asked_once_the_iteration_that_is_under_way_is_the_last() -> None:
    """With a checkpoint of it, from which the run can go on."""
    safe = Safe()
    course = coordinating(50, kept_every=20, keeper=safe)
    course.iterate()
    course.room.news()
    course.coordinator.asked_to_end(1)
    course.coordinator.asked_to_end(1)
    assert [event.kind for event in course.room.events] == ["ending"]
    assert not course.room.told
    course.iterate()
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        course.hear(node, Stepped(1))
    send(course, 0, 2, 3, kept=True)
    assert safe.done == [(2, (2, 2, 2))]
    send(course, 0, 2, 3, kept=False)
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_a_stage_that_is_lost_in_the_last_iteration_is_in_the_last_checkpoint() -> None:
    safe = Safe()
    course = coordinating(1, kept_every=1, keeper=safe)
    course.come_back()
    course.coordinator.lost(2, "its process ended")
    for answer in (course.contributed, course.averaged):
        for node in list(course.coordinator.nodes):
            course.hear(node, answer(node))
    for node in list(course.coordinator.nodes):
        course.hear(node, Stepped(0))
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    learners = {node for node, stage, _ in course.room.logged("welcome")[6:] if stage == 1}
    (learner,) = learners
    (pause,) = (event.text for event in course.room.events if event.kind == "paused")
    assert pause.endswith(f"and 'n{learner}' will take the place")
    course.hear(learner, Ready(), Ready())
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    assert KEPT in course.room.news()[learner]
    holders = list(course.coordinator.membership.holders(course.coordinator.plan).values())
    send(course, *holders, kept=True)
    assert safe.done == [(1, (1, 0, 1))], "that stage begins anew"
    send(course, *holders, kept=False)
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_an_earlier_checkpoint_is_completed_before_the_last_is_made() -> None:
    safe = Safe()
    course = collecting(3, kept_every=2, keeper=safe)
    last = structs.replace(KEPT, iteration=2)
    assert not any(control == last for _, control in course.room.told)
    send(course, 0, 2, 3, kept=True)
    assert safe.done == [(2, (2, 2, 2))]
    assert {node for node, controls in course.room.news().items() if last in controls} == {0, 2, 3}
    send(course, 0, 2, 3, kept=True)
    assert safe.done == [(2, (2, 2, 2)), (3, (3, 3, 3))]
    send(course, 0, 2, 3, kept=False)
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_the_last_checkpoint_is_begun_again_when_one_who_has_a_copy_is_lost() -> None:
    safe = Safe()
    course = collecting(kept_every=1, keeper=safe)
    send(course, 0, 2, kept=True)
    course.room.news()
    course.coordinator.lost(3, "its process ended")
    assert safe.abandoned == 1
    (heir,) = {node for node, controls in course.room.news().items() if KEPT in controls} - {0, 2}
    send(course, 0, 2, heir, kept=True)
    assert safe.done == [(1, (1, 1, 1))]
    send(course, 0, 2, heir, kept=False)
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_a_checkpoint_is_made_while_training_goes_on() -> None:
    safe = Safe()
    course = coordinating(5, kept_every=2, keeper=safe)
    course.iterate()
    assert not any(isinstance(each, GatherState) for _, each in course.room.told)
    course.room.news()
    course.iterate()
    told = course.room.news()
    kept = {node for node, controls in told.items() if any(isinstance(e, Commit) and e.kept for e in controls)}
    assert kept == {0, 2, 3}, "one of each stage"
    assert told[0][-1] == GatherState(0, True, ASKED)
    assert GatherState(0, True, ASKED) not in told[2]
    course.receive(0, piece(0, "a copy", kept=True))
    course.iterate()
    course.receive(0, piece(1, kept=True))
    for node in (2, 3):
        assert not safe.done
        course.receive(node, piece(0, kept=True))
    assert safe.done == [(2, (2, 2, 2))], "as of when it was made"
    assert safe.saved_pieces == [(0, 0, "a copy"), (0, 1, None), (1, 0, None), (2, 0, None)]


@pytest.mark.parametrize(("lost", "abandoned"), [(3, 1), (5, 0)])
def test_a_checkpoint_is_given_up_with_a_node_that_holds_its_copy(lost: int, abandoned: int) -> None:
    safe = Safe()
    course = coordinating(5, kept_every=1, keeper=safe)
    course.iterate()
    course.coordinator.lost(lost, "its process ended")
    assert safe.abandoned == abandoned
    course.receive(0, piece(0, "a copy", kept=True))
    assert len(safe.saved_pieces) == 1 - abandoned
    assert not safe.done


def test_a_piece_of_a_checkpoint_that_was_given_up_is_not_taken_for_one_of_the_last() -> None:
    safe = Safe()
    course = collecting(3, kept_every=2, keeper=safe)
    course.room.news()
    course.coordinator.lost(3, "its process ended")
    assert safe.abandoned == 1
    assert not course.room.told, "node 0 has yet to answer"
    course.receive(0, piece(0, "after two iterations", kept=True))
    assert course.room.news()[0] == [structs.replace(KEPT, iteration=2), GatherState(0, True, ASKED)]
    send(course, 0, 2, 4, kept=True)
    assert safe.saved_pieces[0] == (0, 0, "of 0")
    assert safe.done == [(3, (3, 3, 3))]


def test_a_run_that_goes_on_from_a_checkpoint_sends_nodes_there_first() -> None:
    room = Room(keeper=Safe(made=4))
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 2, first=4, resumed=True)
    for node in range(6):
        coordinator.hear(node, HELLO)
    for node, stage, origin in room.logged("welcome"):
        assert origin == StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), 7 + stage), node
    course = Course(coordinator, room)
    course.hear(3, StateRequest(2, 0, 100, coordinator.membership[3].assignment))
    assert room.logged("give") == [(3, 2, 0, 100)]
    for node in range(6):
        course.hear(node, Ready())
    assert room.news()[0] == [Begin(4, 1, False)]


# A disk that is full


def test_weights_that_cannot_be_written_are_held_and_nodes_are_not_dismissed() -> None:
    course = collecting(deadlines=Deadlines(room=timedelta(seconds=90), collect=timedelta(seconds=7)))
    coordinator, room = course.coordinator, course.room
    room.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    room.news()
    send(course, 0, kept=False)
    assert room.news() == {0: [GatherState(1, False, ASKED)]}, "nobody else is asked before there is room"
    course.wait(60)
    assert not coordinator.over
    assert [event.text for event in room.events if event.kind == "storage"] == [
        "run/model: 2 GB cannot be written; nodes keep their state, and room is waited for, 2 minutes at most"
    ]
    assert room.news() == {}
    room.unwritten = None
    course.wait(4)
    assert room.news() == {2: [GatherState(0, False, ASKED)]}, "it is not fetched a second time"
    assert [event.text for event in room.events][-1] == "the model can be written again"
    send(course, 2, 3, kept=False)
    assert is_now(coordinator, CoordinatorState.DONE)
    assert [stage for stage, _, piece in room.stored if piece is None] == [0, 1, 2]


def test_when_there_is_no_room_in_time_nodes_keep_their_state_for_the_next_coordinator() -> None:
    course = collecting(deadlines=Deadlines(room=timedelta(seconds=90)))
    course.room.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send(course, 0, kept=False)
    course.room.news()
    course.wait(91)
    assert is_now(course.coordinator, CoordinatorState.FAILED)
    assert course.coordinator.failure == "run/model: 2 GB cannot be written; waited 90 s for room; ways on"
    assert course.room.news() == {}, "nobody is told to stop"
    assert not any("done" in record for record in course.room.notes)


def test_whoever_asks_for_the_end_does_not_wait_for_room() -> None:
    course = collecting()
    course.room.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send(course, 0, kept=False)
    course.wait(10)
    course.coordinator.asked_to_end(1)
    course.wait(1)
    assert is_now(course.coordinator, CoordinatorState.FAILED)


def test_a_node_lost_while_room_is_waited_for_is_not_needed_if_its_weights_are_here() -> None:
    course = collecting()
    send(course, 0, 2, kept=False)
    course.room.unwritten = WriteFailed("run/model: 2 GB cannot be written", "ways on")
    send(course, 3, kept=False)
    for node in (3, 4, 5):
        course.coordinator.lost(node, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    course.room.unwritten = None
    course.wait(4)
    assert is_now(course.coordinator, CoordinatorState.DONE)


def test_a_last_checkpoint_that_could_not_be_written_is_made_once_more_when_the_model_is_on_disk() -> None:
    safe = Safe()
    course = collecting(kept_every=50, keeper=safe)
    safe.lacking = "none after 1 iterations: no room"
    send(course, 0, 2, 3, kept=True)
    course.room.news()
    send(course, 0, 2, 3, kept=False)
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    assert safe.moved == 1
    assert [each for each in course.room.news()[0] if each == KEPT or isinstance(each, GatherState)][-2:] == [
        KEPT,
        GatherState(0, True, ASKED),
    ]
    send(course, 0, 2, 3, kept=True)
    assert is_now(course.coordinator, CoordinatorState.DONE), "once, whatever comes of it"
    assert safe.done == [(1, (1, 1, 1))] * 2
    assert safe.moved == 1
