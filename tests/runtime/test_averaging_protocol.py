"""Pieces that a node takes, forwards for other stages, or keeps until a peer has done its tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippipe.collectives.schedule import Piece
from skippipe.plan import Plan
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.messages import Commit, Drain, Reroute, TasksDone
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.transport.message import Message
from tests.helpers.single_node import A_PIECE, Bench, average_alone, gradient_piece, hop, small_plan

FROM_4, TO_3, FROM_3, TO_4 = 0, 2, 4, 5
"""Numbers of transfers by way of node 2: there and back."""


def relayed_plan() -> Plan:
    """Stage 2 sums at node 3; node 4 sends by way of node 2, which is alone on stage 1, node 5 straight."""
    plan = small_plan()
    stage = replace(plan.stages[2], pieces=(Piece(3, 1, (), ((4, 2),)),))
    nodes, transfers = stage.averaging.nodes, stage.averaging.schedule.transfers
    for number, link in ((FROM_4, (4, 2)), (TO_3, (2, 3)), (FROM_3, (3, 2)), (TO_4, (2, 4))):
        assert (nodes[transfers[number].sender], nodes[transfers[number].receiver]) == link
    return replace(plan, stages=(*plan.stages[:2], stage))


def shared_plan(*nodes: int) -> Plan:
    """The same, and the downloads of these nodes are shared."""
    plan = relayed_plan()
    rated = [
        replace(each, download_bytes_per_s=1e6) if at in nodes else each for at, each in enumerate(plan.cluster.nodes)
    ]
    return replace(plan, cluster=replace(plan.cluster, nodes=tuple(rated)))


def pieces_of(bench: Bench) -> list[tuple[int, Message]]:
    """Pieces that were sent since it was last asked: receiver and message."""
    found = [each for each in bench.sent_messages if each[1].kind == gradient_piece(0).kind]
    bench.sent_messages.clear()
    return found


def numbers_of(bench: Bench) -> list[tuple[int, int]]:
    """The same: receiver and number of the transfer."""
    return [(receiver, message.header.transfer) for receiver, message in pieces_of(bench)]  # type: ignore[attr-defined]


def test_a_piece_is_not_taken_twice_before_while_or_after_it_is_passed_on() -> None:
    taken = 4, "a gradient piece that has been taken before"
    bench = Bench(5).begin()  # no lane comes here: it averages at once
    assert bench.decide() == "begin averaging"
    bench.take(4, gradient_piece(1, piece=1), gradient_piece(1, piece=1))
    assert bench.node.dropped == {taken: 1}
    bench.end()
    assert bench.work() == ["contribute to piece 2, 0 given", "contribute to piece 1, 1 given"]
    bench.take(4, gradient_piece(1, piece=1))
    assert bench.work() == []
    assert bench.node.dropped == {taken: 2}
    bench.take(4, gradient_piece(3, piece=0))
    assert bench.decide() == "contribute to piece 0, 1 given, total"
    bench.take(4, gradient_piece(3, piece=0))
    bench.end()
    assert bench.work() == []
    assert bench.sent() == ["transfer 2 → 3, epoch 0", "transfer 4 → 3, epoch 0", "transfer 6 → 3, epoch 0"]
    bench.take(4, gradient_piece(10, piece=1), gradient_piece(8, piece=2))
    assert bench.decide() == "adopt piece 2", "which is to be passed on"
    bench.take(4, gradient_piece(8, piece=2))
    assert bench.node.dropped == {taken: 4}
    bench.end()
    assert bench.decide() == "adopt piece 1"
    assert bench.sent() == ["transfer 11 → 3, epoch 0"]


def test_contributions_that_come_before_this_node_is_done_wait_and_go_in_the_order_of_the_schedule() -> None:
    """Node 3 is the root of the first piece, the others send straight to it; of the second by way of node 4."""
    pieces = Piece(3, 2), Piece(5, 1, ((3, 4),))
    plan = small_plan()
    plan = replace(plan, stages=(*plan.stages[:2], replace(plan.stages[2], pieces=pieces)))
    bench = Bench(3, plan).begin()
    for number, sender in ((1, 5), (0, 4)):
        each = plan.stages[2].averaging.schedule.transfers[number]
        assert (each.sender, each.receiver) == (sender - 3, 0)
        bench.take(sender, gradient_piece(number))
    total = plan.stages[2].averaging.schedule.transfers.index((True, 1, 1, 1, 0, 0))
    bench.take(4, gradient_piece(total, piece=1))
    assert bench.node.dropped == {(4, A_PIECE): 1}, "a total to which this node has not contributed"
    for microbatch in range(2):
        bench.take(2, hop(0, 2, microbatch)).work()
        bench.take(0, hop(0, 4, microbatch))
        done = bench.work()
    assert done[-3:] == ["begin averaging", "contribute to piece 1, 0 given", "contribute to piece 0, 2 given, total"]
    assert len(bench.sent()) == 4 + 3
    bench.take(4, gradient_piece(total, piece=1))
    assert bench.decide() == "adopt piece 1"


def test_a_relay_forwards_the_very_body_and_not_before_its_own_tasks_are_done() -> None:
    bench, given = Bench(2, relayed_plan()).begin(), gradient_piece(FROM_4)
    bench.take(4, given)
    assert bench.work() == []
    bench.take(0, hop(0, 1)).work()
    assert not pieces_of(bench)
    bench = Bench(2, relayed_plan()).begin().take(4, given)
    average_alone(bench)
    ((receiver, message),) = pieces_of(bench)
    assert receiver == 3
    assert message.header == gradient_piece(TO_3).header
    assert message.body is given.body
    assert not bench.node.dropped


def test_a_relay_that_has_reported_its_average_still_forwards() -> None:
    bench = Bench(2, relayed_plan()).begin()
    average_alone(bench)
    assert bench.node.phase is NodePhase.AVERAGED
    for sender, number, forwarded in ((4, FROM_4, (3, TO_3)), (3, FROM_3, (4, TO_4))):
        bench.take(sender, gradient_piece(number))
        assert bench.work() == []
        assert numbers_of(bench) == [forwarded]


def test_a_relay_takes_each_piece_once_and_only_from_its_sender() -> None:
    bench = Bench(2, relayed_plan()).begin()
    average_alone(bench)
    bench.take(5, gradient_piece(FROM_4)).take(3, gradient_piece(FROM_4)).take(4, gradient_piece(TO_3))
    assert bench.node.dropped == {(5, A_PIECE): 1, (3, A_PIECE): 1, (4, A_PIECE): 1}
    bench.node.dropped.clear()
    bench.take(4, gradient_piece(FROM_4), gradient_piece(FROM_4)).work()
    assert bench.node.dropped == {(4, "a gradient piece that has been taken before"): 1}
    assert numbers_of(bench) == [(3, TO_3)]


@pytest.mark.parametrize("change", [Reroute(0, 1, [5], [], []), Drain(0, 1, False)])
def test_what_a_relay_holds_of_an_attempt_that_was_given_up_does_not_leave(change: Reroute | Drain) -> None:
    bench = Bench(2, shared_plan(3)).begin()
    average_alone(bench)
    bench.take(4, gradient_piece(FROM_4)).hear(change).work()
    bench.node.handle_peer_control(3, TasksDone(0, 0))
    bench.work()
    bench.take(4, gradient_piece(FROM_4)).work()
    assert not pieces_of(bench)
    assert bench.node.dropped == {(4, "a gradient piece of an attempt that was given up"): 1}


def test_what_was_forwarded_is_sent_again_when_a_connection_is_made_again() -> None:
    bench = Bench(2, relayed_plan()).begin()
    average_alone(bench)
    bench.take(4, gradient_piece(FROM_4)).take(3, gradient_piece(FROM_3)).work()
    first = pieces_of(bench)
    assert [receiver for receiver, _ in first] == [4, 3] or [receiver for receiver, _ in first] == [3, 4]
    for peer in (3, 4):
        bench.node.reconnected(peer)
        assert pieces_of(bench) == [each for each in first if each[0] == peer]
    bench.node.reconnected(5)
    assert not pieces_of(bench)


def test_what_was_forwarded_is_let_go_of_with_its_iteration() -> None:
    bench = Bench(2, relayed_plan()).begin()
    average_alone(bench)
    bench.take(4, gradient_piece(FROM_4)).work()
    bench.hear(Commit(0, 1.0, 1.0)).work()
    pieces_of(bench)
    bench.node.reconnected(3)
    assert not pieces_of(bench)


def test_a_piece_for_a_node_whose_download_is_shared_leaves_when_that_has_done_its_tasks() -> None:
    bench = Bench(2, shared_plan(3)).begin()
    average_alone(bench)
    bench.take(4, gradient_piece(FROM_4)).take(3, gradient_piece(FROM_3)).work()
    assert numbers_of(bench) == [(4, TO_4)], "node 3 has said nothing yet"
    for iteration, epoch in ((1, 0), (0, 1)):  # of another iteration or epoch
        other = Bench(2, shared_plan(3)).begin()
        average_alone(other)
        other.take(4, gradient_piece(FROM_4))
        other.node.handle_peer_control(3, TasksDone(iteration, epoch))
        assert other.work() == []
        assert not pieces_of(other)
    bench.node.handle_peer_control(3, TasksDone(0, 0))
    bench.work()
    assert numbers_of(bench) == [(3, TO_3)]
    bench.node.handle_peer_control(3, TasksDone(0, 0))
    bench.work()
    assert not pieces_of(bench), "an announcement that comes again sends nothing again"


@pytest.mark.parametrize("old", [TasksDone(2, 4), TasksDone(3, 3), TasksDone(4, 3)])
def test_an_announcement_that_comes_late_or_again_takes_none_back(old: TasksDone) -> None:
    bench = Bench(2, shared_plan(3)).begin(3, 4)
    for each in (TasksDone(3, 4), old):
        bench.node.handle_peer_control(3, each)
    average_alone(bench)
    bench.take(4, gradient_piece(FROM_4, iteration=3, epoch=4)).work()
    assert numbers_of(bench) == [(3, TO_3)]


def test_the_coordinator_knows_which_links_are_used_without_a_lost_relay() -> None:
    def unused(*_: object) -> None:
        raise AssertionError("nothing is sent, no node is evicted")

    plan = relayed_plan()
    iteration = Iteration(0, plan, 0, set(plan.stage_of), unused, unused)
    assert iteration.uses(4, 2)
    assert not iteration.uses(3, 4)
    iteration.nodes.discard(2)
    assert iteration.uses(3, 4), "node 4 sends straight to the root then"


def test_a_node_whose_download_is_shared_announces_itself_once_to_all_that_send_to_it_and_after_a_break_again() -> None:
    bench = Bench(2, shared_plan(2)).begin()
    bench.node.reconnected(4)
    assert bench.asked == [], "its tasks are not done"
    average_alone(bench)
    assert bench.asked == [(3, TasksDone(0, 0)), (4, TasksDone(0, 0))]
    bench.asked.clear()
    bench.node.reconnected(4)
    assert bench.asked == [(4, TasksDone(0, 0))]
    other = Bench(2, shared_plan(3)).begin()
    average_alone(other)
    assert other.asked == []
