"""Stale messages, of an earlier epoch, iteration, incarnation or coordinator, late or twice, change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.coordinator.membership import MAX_COSTLY_REPORTS, MemberState
from skippipe.runtime.fencing import IDS_PER_TERM, Fence, Incarnation
from skippipe.runtime.messages import ControlMessage, Drain, Hello, LinkDown, MicrobatchDone, Ready, Recovered, Stepped
from skippipe.runtime.simulation.fault_injection import accuse, kill, kill_coordinator, replay_messages
from skippipe.transport.message import LARGEST_COUNT, CheckpointPiece, Message, Stamp
from tests.helpers.fault_scenarios import Scenario, thin, wide
from tests.helpers.single_coordinator import HELLO, RecordingStore, coordinating, is_now, recovering_late
from tests.helpers.single_node import small_plan
from tests.helpers.virtual_chaos import play, staged

# One iteration


def new_iteration(epoch: int, messages: list[ControlMessage]) -> Iteration:
    """Of iteration 3, begun in an epoch."""

    def evict(node: int, why: str) -> None:
        raise AssertionError(f"node {node} is evicted: {why}")

    plan = small_plan()
    return Iteration(3, plan, epoch, set(plan.stage_of), messages.append, evict)


def returns(iteration: Iteration, epoch: int) -> None:
    """Everything comes back, as far as nodes in this epoch can tell."""
    for lane, way in enumerate(iteration.plan.lanes):
        for microbatch in range(way.microbatches):
            iteration.on_message(way.path[0], MicrobatchDone(3, epoch, lane, microbatch, 2.0))


def test_a_microbatch_that_returned_before_the_iteration_started_over_does_not_count() -> None:
    messages: list[ControlMessage] = []
    iteration = new_iteration(epoch=5, messages=messages)
    returns(iteration, epoch=4)
    assert not iteration.log.returned and not iteration.log.losses
    assert iteration.reroute(4, sorted(iteration.nodes - {4})) is not None
    assert not any(isinstance(each, Drain) for each in messages), "healthy microbatches are on their way"
    returns(iteration, epoch=5)
    assert isinstance(messages[-1], Drain)


def test_a_microbatch_that_returned_before_a_reroute_counts() -> None:
    messages: list[ControlMessage] = []
    iteration = new_iteration(epoch=5, messages=messages)
    assert iteration.reroute(4, sorted(iteration.nodes - {4})) is not None
    assert iteration.epoch == 6
    returns(iteration, epoch=5)
    assert isinstance(messages[-1], Drain), "a node that has not received the change still reports what is true"


def test_a_lost_message_of_a_returned_microbatch_does_not_hold_up_the_next() -> None:
    messages: list[ControlMessage] = []
    iteration = new_iteration(epoch=5, messages=messages)
    assert iteration.reroute(4, sorted(iteration.nodes - {4})) is not None
    for lane, way in enumerate(iteration.plan.lanes):
        iteration.on_message(way.path[0], MicrobatchDone(3, 6, lane, way.microbatches - 1, 2.0))
    assert isinstance(messages[-1], Drain), "a lane has one microbatch on its way: those before must be back"


# Answers to earlier orders


def test_only_the_answer_to_the_last_order_makes_a_node_active() -> None:
    harness, _ = recovering_late()
    coordinator = harness.coordinator
    member = coordinator.membership[6]
    assert member.state is MemberState.RECOVERING
    for number in (0, member.assignment - 1, member.assignment + 1):
        coordinator.on_message(6, Ready(number))  # one of them is the order to build its stage
        coordinator.on_message(6, Recovered(1, number))
        assert member.state is MemberState.RECOVERING
    coordinator.on_message(6, Recovered(1, member.assignment))
    assert is_active(coordinator.membership[6].state)


def is_active(state: MemberState) -> bool:
    return state is MemberState.ACTIVE


def test_only_the_last_step_counts_as_the_last() -> None:
    harness = coordinating(2)
    harness.iterate(2)
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        harness.send(node, Stepped(0))
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        harness.send(node, Stepped(1))
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)


def test_a_piece_of_an_earlier_request_is_not_taken() -> None:
    harness = coordinating(5, checkpoint_every=1, store=(store := RecordingStore()))
    harness.iterate()
    number = harness.env.collections[0]
    for other in (0, number - 1, number + 1):
        harness.coordinator.on_piece(0, Message(CheckpointPiece(0, 0, other)))
    assert not store.saved_pieces
    harness.coordinator.on_piece(0, Message(CheckpointPiece(0, 0, number)))
    assert store.saved_pieces == [(0, 0, None)]
    assert harness.env.collections[2] != number


def test_ids_and_epochs_of_a_coordinator_are_its_own() -> None:
    before = coordinating(5)
    before.iterate(2)
    first = coordinating(5, wal=before.env.wal)
    assert first.env.wal == [{"term": 1}], "before it says anything"
    for node in range(6):
        first.send(node, Hello("127.0.0.1:1", HELLO.version, 1, 2, "RUNNING"))
    assert first.env.epoch > IDS_PER_TERM
    second = coordinating(5, wal=[*before.env.wal, *first.env.wal])
    for node in range(6):
        second.send(node, Hello("127.0.0.1:1", HELLO.version, 1, 2, "RUNNING"))
    assert second.env.epoch > 2 * IDS_PER_TERM > first.env.epoch, "though no node has seen the first one's"


@pytest.mark.parametrize("epoch", [3 * IDS_PER_TERM, LARGEST_COUNT, 2**53])
def test_an_epoch_that_no_coordinator_has_begun_is_not_believed(epoch: int) -> None:
    """No message could carry the one after it."""
    before = coordinating(5)
    before.iterate(2)
    harness = coordinating(5, wal=before.env.wal)
    for node in range(6):
        harness.send(node, Hello("127.0.0.1:1", HELLO.version, epoch if node == 3 else 1, 2, "RUNNING"))
    assert IDS_PER_TERM < harness.env.epoch < 2 * IDS_PER_TERM


# Stamps


def test_a_node_accepts_messages_for_its_incarnation_in_order_and_once() -> None:
    node, fence = Incarnation(7), Fence(term=3)
    assert fence.accepts("a", node.stamp(), hello=True)
    one, two, three = (fence.stamp("a") for _ in range(3))
    assert node.accepts(one) and node.accepts(three)
    assert not node.accepts(one) and not node.accepts(three) and not node.accepts(two), "twice, or late"
    assert not Incarnation(8).accepts(three), "of another node"
    successor = Fence(term=4)
    assert successor.accepts("a", node.stamp(), hello=True)
    assert node.accepts(successor.stamp("a"))
    assert not node.accepts(fence.stamp("a")), "another has taken its place"


def test_a_coordinator_accepts_the_incarnation_that_joined_last() -> None:
    fence, old, new = Fence(), Incarnation(7), Incarnation(8)
    hello, later = old.stamp(), old.stamp()
    assert fence.accepts("a", hello, hello=True)
    fence.joined("a")
    assert not fence.accepts("a", hello, hello=True), "twice"
    assert fence.accepts("a", old.stamp(), hello=False)
    assert not fence.accepts("a", later, hello=False), "late"
    assert fence.accepts("a", new.stamp(), hello=True)
    assert not fence.accepts("a", old.stamp(), hello=False) and fence.is_other_incarnation("a", old.stamp())
    assert not fence.accepts("a", old.stamp(), hello=True), "that node is over"
    assert new.accepts(fence.stamp("a")) and not old.accepts(fence.stamp("a"))
    assert old.accepts(fence.stamp("a", old.number)), "but it can be told to rejoin"


def test_a_node_that_was_declared_dead_can_be_told_to_rejoin() -> None:
    fence, node, stranger = Fence(), Incarnation(7), Incarnation(9)
    assert fence.accepts("a", node.stamp(), hello=True)
    fence.joined("a")
    assert not fence.accepts("a", stranger.stamp(), hello=False)
    fence.left("a")
    assert fence.accepts("a", node.stamp(), hello=False) and node.accepts(fence.stamp("a"))
    assert fence.accepts("a", stranger.stamp(), hello=False) and stranger.accepts(fence.stamp("a"))


@pytest.mark.parametrize("term", [5, LARGEST_COUNT])
def test_a_coordinator_without_a_log_learns_its_term_from_nodes(term: int) -> None:
    fence, node = Fence(), Incarnation(7)
    assert node.accepts(Stamp(7, term, 9))
    assert fence.accepts("a", node.stamp(), hello=True)
    word = fence.stamp("a")
    assert word.term == min(term + 1, LARGEST_COUNT)


# Under virtual time


def scene(plan: Plan, *faults: object) -> Scenario:
    return Scenario(1, plan, 6, faults, "checkpoint", 2, uneven=False, drift=0.0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("quiet_nodes")
@pytest.mark.parametrize(("made", "split"), [(wide, False), (thin, True)])
def test_a_run_in_which_every_message_comes_again_is_the_same_run(made: Callable[[bool], Plan], split: bool) -> None:
    plan = made(split)
    nodes = sorted(plan.stage_of)
    quiet = play(staged(replace(scene(plan, replay_messages(*nodes, share=0.0)), backup_every=0)))
    loud = play(staged(replace(scene(plan, *[replay_messages(*nodes, share=1.0).at(0)] * 2), backup_every=0)))
    assert loud.cluster.reports == quiet.cluster.reports
    assert loud.cluster.wal == quiet.cluster.wal
    assert not loud.cluster.events
    dropped = sum(sum(node.dropped.values()) for node in loud.cluster.nodes.values())
    assert dropped > 100


@pytest.mark.usefixtures("quiet_nodes")
def test_messages_arrive_again_in_other_incarnations_and_at_another_coordinator() -> None:
    plan = wide(False)
    again = replay_messages(*sorted(plan.stage_of), share=0.5).at(0)
    losses = [kill(node).at(1, "backward").back_after(0.01) for node in (0, 4)]
    played = play(staged(scene(plan, again, *losses, kill_coordinator().at(2, "averaging"))))
    kinds = [event.kind for _, event in played.cluster.events]
    assert {"lost", "joined", "coordinator-restarted"} <= set(kinds)
    assert kinds.count("lost") <= 4, "no node is lost because of a message of a former incarnation"


def test_they_read_as_sentences() -> None:
    again = replay_messages(3, share=0.1).at(iteration=2, during="backward").back_after(1.5)
    sentence = "let 10% of the messages from and to node 3 come again later in iteration 2 during backward, for 1.5 s"
    assert str(again) == sentence
    assert str(accuse(4).at(1)) == "have node 4 report all its links as down in iteration 1 during forward"


# A peer that reports all links down


def test_a_node_that_reports_all_links_down_is_evicted() -> None:
    harness = coordinating(5, wide(False))
    for _ in range(MAX_COSTLY_REPORTS + 1):
        for other in range(9):
            harness.send(4, LinkDown(other, harness.env.epoch))
    assert harness.env.logged("disconnect") == [(4,)]
    gone = [event for event in harness.env.events if event.kind == "lost"]
    assert [event.node for event in gone] == ["n4"]
    harness.send(4, HELLO)
    harness.iterate()
    assert harness.coordinator.membership[4].state is MemberState.SPARE, "it has to wait"


def test_a_report_from_before_the_last_change_has_no_effect() -> None:
    harness = coordinating(5, wide(False))
    harness.send(0, LinkDown(3, 1))
    begun = harness.env.epoch
    assert begun == 2
    harness.send(0, LinkDown(4, 1)).send(0, LinkDown(6, 1))
    assert harness.env.epoch == begun


@pytest.mark.usefixtures("quiet_nodes")
@pytest.mark.parametrize("reporter", [0, 4, 8])
def test_a_run_gets_over_a_peer_that_reports_all_links_down_all_the_time(reporter: int) -> None:
    played = play(staged(scene(wide(False), accuse(reporter).at(1))))
    cluster = played.cluster
    restarts = [event for _, event in cluster.events if event.kind == "restarted"]
    gone = [event for _, event in cluster.events if event.kind == "lost"]
    assert {event.node for event in gone} == {f"n{reporter}"}, "no other node"
    assert len(restarts) <= MAX_COSTLY_REPORTS
    after = [report for report in cluster.reports if report.iteration > max(event.iteration for event in gone)]
    assert after
    for report in after:
        assert report.plan is not None
        assert list(report.stage_microbatches) == report.plan.exposure
