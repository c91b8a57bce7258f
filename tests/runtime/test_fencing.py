"""Messages of the past: of an earlier epoch, iteration, life or coordinator, late or twice. They change nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from skippipe.plan import Plan
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.coordinator.membership import MOST_BELIEVED, MemberState
from skippipe.runtime.coordinator.state_machine import CoordinatorState
from skippipe.runtime.fencing import NUMBERS_A_TERM, Fence, Life, stamp_of, stamped
from skippipe.runtime.messages import ControlMessage, Drain, Hello, LinkDown, MicrobatchDone, Ready, Recovered, Stepped
from skippipe.runtime.simulation.fault_injection import accuse, kill, kill_coordinator, replay_messages
from skippipe.transport.message import LARGEST_COUNT, CheckpointPiece, Message, Stamp
from tests.helpers.single_coordinator import HELLO, Safe, coordinating, is_now, learning_late
from tests.helpers.single_node import small_plan
from tests.helpers.virtual_chaos import Scenario, play, staged, thin, wide

# The books of an iteration


def book(epoch: int, told: list[ControlMessage]) -> Iteration:
    """Of iteration 3, begun in an epoch."""

    def throw_out(node: int, why: str) -> None:
        raise AssertionError(f"node {node} is thrown out: {why}")

    plan = small_plan()
    return Iteration(3, plan, epoch, set(plan.stage_of), told.append, throw_out)


def returns(page: Iteration, epoch: int) -> None:
    """Everything comes back, as far as nodes in this epoch can tell."""
    for lane, way in enumerate(page.plan.lanes):
        for microbatch in range(way.microbatches):
            page.hear(way.path[0], MicrobatchDone(3, epoch, lane, microbatch, 2.0))


def test_what_was_back_before_an_iteration_was_begun_again_is_not_back() -> None:
    told: list[ControlMessage] = []
    page = book(epoch=5, told=told)
    returns(page, epoch=4)
    assert not page.ledger.returned and not page.ledger.losses
    assert page.without(4, sorted(page.nodes - {4})) is not None
    assert not any(isinstance(each, Drain) for each in told), "healthy microbatches are on their way"
    returns(page, epoch=5)
    assert isinstance(told[-1], Drain)


def test_what_was_back_before_ways_changed_is_back() -> None:
    told: list[ControlMessage] = []
    page = book(epoch=5, told=told)
    assert page.without(4, sorted(page.nodes - {4})) is not None
    assert page.epoch == 6
    returns(page, epoch=5)
    assert isinstance(told[-1], Drain), "whoever has not heard of it yet still says what is true"


def test_a_lost_word_of_a_microbatch_that_was_back_does_not_hold_up_the_next() -> None:
    told: list[ControlMessage] = []
    page = book(epoch=5, told=told)
    assert page.without(4, sorted(page.nodes - {4})) is not None
    for lane, way in enumerate(page.plan.lanes):
        page.hear(way.path[0], MicrobatchDone(3, 6, lane, way.microbatches - 1, 2.0))
    assert isinstance(told[-1], Drain), "a lane has one microbatch on its way: those before must be back"


# Answers to what was asked before


def test_only_the_answer_to_the_last_order_makes_a_node_able() -> None:
    course, _ = learning_late()
    coordinator = course.coordinator
    peer = coordinator.membership[6]
    assert peer.standing is MemberState.LEARNING
    for number in (0, peer.assignment - 1, peer.assignment + 1):
        coordinator.hear(6, Ready(number))  # one of them said that its stage is built
        coordinator.hear(6, Recovered(1, number))
        assert peer.standing is MemberState.LEARNING
    coordinator.hear(6, Recovered(1, peer.assignment))
    assert is_able(coordinator.membership[6].standing)


def is_able(standing: MemberState) -> bool:
    return standing is MemberState.ABLE


def test_only_the_last_step_counts_as_the_last() -> None:
    course = coordinating(2)
    course.iterate(2)
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        course.hear(node, Stepped(0))
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        course.hear(node, Stepped(1))
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)


def test_a_piece_of_an_earlier_collection_is_not_taken() -> None:
    course = coordinating(5, kept_every=1, keeper=(safe := Safe()))
    course.iterate()
    number = course.room.collections[0]
    for other in (0, number - 1, number + 1):
        course.coordinator.receive(0, Message(CheckpointPiece(0, 0, other)))
    assert not safe.saved_pieces
    course.coordinator.receive(0, Message(CheckpointPiece(0, 0, number)))
    assert safe.saved_pieces == [(0, 0, None)]
    assert course.room.collections[2] != number


def test_numbers_and_epochs_of_a_coordinator_are_its_own() -> None:
    before = coordinating(5)
    before.iterate(2)
    first = coordinating(5, wal=before.room.notes)
    assert first.room.notes == [{"term": 1}], "before it says anything"
    for node in range(6):
        first.hear(node, Hello("127.0.0.1:1", HELLO.version, 1, 2, "RUNNING"))
    assert first.room.epoch > NUMBERS_A_TERM
    second = coordinating(5, wal=[*before.room.notes, *first.room.notes])
    for node in range(6):
        second.hear(node, Hello("127.0.0.1:1", HELLO.version, 1, 2, "RUNNING"))
    assert second.room.epoch > 2 * NUMBERS_A_TERM > first.room.epoch, "though nobody has seen the first one's"


# Stamps


def test_a_node_hears_what_is_meant_for_this_life_of_it_in_order_and_once() -> None:
    life, fence = Life(7), Fence(term=3)
    assert fence.takes("a", life.stamp(), hello=True)
    one, two, three = (fence.stamp("a") for _ in range(3))
    assert life.takes(one) and life.takes(three)
    assert not life.takes(one) and not life.takes(three) and not life.takes(two), "twice, or late"
    assert not Life(8).takes(three), "of another life"
    successor = Fence(term=4)
    assert successor.takes("a", life.stamp(), hello=True)
    assert life.takes(successor.stamp("a"))
    assert not life.takes(fence.stamp("a")), "another has taken its place"


def test_a_coordinator_hears_the_life_that_said_hello_last() -> None:
    fence, old, new = Fence(), Life(7), Life(8)
    hello, later = old.stamp(), old.stamp()
    assert fence.takes("a", hello, hello=True)
    fence.met("a")
    assert not fence.takes("a", hello, hello=True), "twice"
    assert fence.takes("a", old.stamp(), hello=False)
    assert not fence.takes("a", later, hello=False), "late"
    assert fence.takes("a", new.stamp(), hello=True)
    assert not fence.takes("a", old.stamp(), hello=False) and fence.is_ghost("a", old.stamp())
    assert not fence.takes("a", old.stamp(), hello=True), "that life is over"
    assert new.takes(fence.stamp("a")) and not old.takes(fence.stamp("a"))
    assert old.takes(fence.stamp("a", old.number)), "but it can be told so"


def test_one_that_was_taken_for_dead_is_heard_again_as_far_as_to_be_told() -> None:
    fence, life, stranger = Fence(), Life(7), Life(9)
    assert fence.takes("a", life.stamp(), hello=True)
    fence.met("a")
    assert not fence.takes("a", stranger.stamp(), hello=False)
    fence.parted("a")
    assert fence.takes("a", life.stamp(), hello=False) and life.takes(fence.stamp("a"))
    assert fence.takes("a", stranger.stamp(), hello=False) and stranger.takes(fence.stamp("a"))


@pytest.mark.parametrize("term", [5, LARGEST_COUNT])
def test_whoever_has_lost_count_of_its_predecessors_learns_it_from_nodes(term: int) -> None:
    fence, life = Fence(), Life(7)
    assert life.takes(Stamp(7, term, 9))
    assert fence.takes("a", life.stamp(), hello=True)
    word = fence.stamp("a")
    assert word.term == min(term + 1, LARGEST_COUNT)
    assert stamp_of(stamped({}, word)) == word


# Under virtual time


@pytest.fixture
def quiet_nodes() -> Iterator[None]:
    """They say what they drop, which is a lot."""
    log = logging.getLogger("skippipe.runtime")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


def scene(plan: Plan, *faults: object) -> Scenario:
    return Scenario(1, plan, 6, faults, "checkpoint", 2, uneven=False, drift=0.0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("quiet_nodes")
@pytest.mark.parametrize("plan", [wide(False), thin(True)])
def test_a_run_in_which_every_message_comes_again_is_the_same_run(plan: Plan) -> None:
    nodes = sorted(plan.stage_of)
    quiet = play(staged(replace(scene(plan, replay_messages(*nodes, share=0.0)), backup_every=0)))
    loud = play(staged(replace(scene(plan, *[replay_messages(*nodes, share=1.0).at(0)] * 2), backup_every=0)))
    assert loud.cluster.reports == quiet.cluster.reports
    assert loud.cluster.wal == quiet.cluster.wal
    assert not loud.cluster.events
    dropped = sum(sum(node.dropped.values()) for node in loud.cluster.nodes.values())
    assert dropped > 100


@pytest.mark.usefixtures("quiet_nodes")
def test_messages_come_again_in_other_lives_and_to_another_coordinator() -> None:
    plan = wide(False)
    again = replay_messages(*sorted(plan.stage_of), share=0.5).at(0)
    losses = [kill(node).at(1, "backward").back_after(0.01) for node in (0, 4)]
    played = play(staged(scene(plan, again, *losses, kill_coordinator().at(2, "averaging"))))
    kinds = [event.kind for _, event in played.cluster.events]
    assert {"gone", "joined", "recovered"} <= set(kinds)
    assert kinds.count("gone") <= 4, "nobody is lost because of what a former life has said"


def test_they_read_as_sentences() -> None:
    again = replay_messages(3, share=0.1).at(iteration=2, during="backward").back_after(1.5)
    told = "let 10% of the messages from and to node 3 come again later in iteration 2 during backward, for 1.5 s"
    assert str(again) == told
    assert str(accuse(4).at(1)) == "have node 4 report all its links as down in iteration 1 during forward"


# A peer that complains of everybody


def test_a_node_that_complains_of_everybody_is_the_one_that_leaves() -> None:
    course = coordinating(5, wide(False))
    for _ in range(MOST_BELIEVED + 1):
        for other in range(9):
            course.hear(4, LinkDown(other, course.room.epoch))
    assert course.room.logged("part") == [(4,)]
    gone = [event for event in course.room.events if event.kind == "gone"]
    assert [event.node for event in gone] == ["n4"]
    course.hear(4, HELLO)
    course.iterate()
    assert course.coordinator.membership[4].standing is MemberState.SPARE, "it has to wait"


def test_what_was_said_before_the_last_change_was_heard_of_has_no_effect() -> None:
    course = coordinating(5, wide(False))
    course.hear(0, LinkDown(3, 1))
    begun = course.room.epoch
    assert begun == 2
    course.hear(0, LinkDown(4, 1)).hear(0, LinkDown(6, 1))
    assert course.room.epoch == begun


@pytest.mark.usefixtures("quiet_nodes")
@pytest.mark.parametrize("accuser", [0, 4, 8])
def test_a_run_gets_over_a_peer_that_complains_of_everybody_all_the_time(accuser: int) -> None:
    played = play(staged(scene(wide(False), accuse(accuser).at(1))))
    cluster = played.cluster
    restarts = [event for _, event in cluster.events if event.kind == "restarted"]
    gone = [event for _, event in cluster.events if event.kind == "gone"]
    assert {event.node for event in gone} == {f"n{accuser}"}, "nobody else"
    assert len(restarts) <= MOST_BELIEVED
    for report in cluster.reports[2:]:
        assert report.plan is not None
        assert list(report.visits) == report.plan.exposure
