"""A node that gets the state of its stage from others or from a checkpoint, and one that sends it."""

from __future__ import annotations

import pytest

from skippipe.runtime.messages import COORDINATOR, Commit, Ready, Recover, Recovered, StateDigest, StateRequest
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import Message, StatePiece
from tests.helpers.single_node import Bench, average_alone, plan_of, state_piece

FROM_3 = Recover(StateSource("replica", (3,), (2,), (1.0,), 4), 0)


def recovering() -> Bench:
    """Node 5 has requested state of node 3."""
    bench = Bench(5).begin(4).hear(FROM_3)
    assert bench.work() == ["plan transfer", "begin averaging", "contribute to piece 2, 0 given"]
    assert bench.asked == [(3, StateRequest(2, 0, 1, 0))]
    bench.asked.clear()
    return bench


def test_a_node_takes_state_that_has_its_digest() -> None:
    bench = recovering()
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=4, body=(((9, 9),),)))
    assert bench.work() == ["write state"]
    assert bench.executor.state == [((9, 9),)]
    assert bench.heard() == [Recovered(4, 0)]
    bench.take(3, state_piece(iteration=4))
    assert bench.node.dropped == {(3, "state that was not requested"): 1}, "it has all"


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    bench = recovering()
    for _ in range(2):
        bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
        bench.take(3, state_piece(iteration=4, body=(((9, 9),),)))
    assert bench.work() == ["write state"]
    assert bench.heard() == [Recovered(4, 0)]


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (3, state_piece(7, iteration=4)),
        (4, state_piece(iteration=4)),
        (3, state_piece(iteration=3)),
        (2, state_piece(iteration=4)),
    ],
    ids=["other numbers", "of another", "of the iteration before", "of another stage"],
)
def test_a_node_takes_no_other_state(sender: int, message: Message) -> None:
    bench = recovering()
    assert isinstance(message.header, StatePiece)
    bench.node.handle_peer_control(sender, StateDigest(message.header.first, "sound", 0))
    bench.take(sender, message)
    assert bench.work() == []
    assert bench.executor.state == []
    assert not bench.heard()


def test_state_that_comes_too_late_is_requested_again() -> None:
    bench = recovering()
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=3))
    assert bench.asked == [(3, StateRequest(2, 0, 1, 0))]


def test_state_that_comes_early_is_of_the_next_iteration() -> None:
    bench = recovering()
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=5, body=(((9, 9),),)))
    assert bench.work() == [], "its own step is still to come, and would be one too many"
    bench.begin(5)
    assert "write state" in bench.work()
    assert bench.heard() == [Recovered(5, 0)]


def test_state_without_a_digest_is_not_taken() -> None:
    bench = recovering()
    bench.take(3, state_piece(iteration=4, body=(((9, 9),),)))
    assert bench.work() == []
    assert bench.executor.state == []


def test_another_source_is_asked_from_the_beginning() -> None:
    bench = recovering().hear(Recover(StateSource("replica", (4,), (2,), (1.0,), 4), 0))
    assert bench.work() == ["plan transfer"]
    assert bench.asked == [(4, StateRequest(2, 0, 1, 0))]
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=4))
    assert bench.node.dropped == {(3, "StateDigest of no use here"): 1, (3, "state that was not requested"): 1}


def test_a_broken_connection_to_the_source_makes_it_request_again() -> None:
    bench = recovering()
    bench.node.reconnected(4)
    assert bench.asked == []
    bench.node.reconnected(3)
    assert bench.asked == [(3, StateRequest(2, 0, 1, 0))]


def test_a_node_that_recovers_sends_no_state() -> None:
    bench = recovering()
    bench.node.handle_peer_control(4, StateRequest(2, 0, 1, 0))
    assert bench.work() == []
    assert bench.node.dropped == {(4, "StateRequest of no use here"): 1}
    able = Bench(3).begin(4)
    able.node.handle_peer_control(5, StateRequest(2, 0, 1, 0))
    assert able.work() == ["read state"]
    assert able.asked == [(5, StateDigest(0, "sound", 0))]
    assert [(to, message.header) for to, message in able.sent_messages] == [(5, StatePiece(4, 0))]


def test_state_after_the_last_step_before_a_pause_is_of_the_next_iteration() -> None:
    """Or a node that recovers, and has not taken that step yet, takes it twice."""
    bench = Bench(2).begin(4)
    average_alone(bench)
    bench.hear(Commit(4, 1.0, 1.0, wait=True)).work()
    bench.node.handle_peer_control(6, StateRequest(1, 0, 1, 0))
    assert bench.work() == ["read state"]
    assert [message.header for to, message in bench.sent_messages if to == 6] == [StatePiece(5, 0)]


def test_a_node_that_waits_takes_no_state_from_before_the_step_that_is_committed() -> None:
    """Its source may hear of the commit later than this node of the pause that follows."""
    bench = Bench(5).hear(Recover(StateSource("replica", (3,), (2,), (1.0,), 4, iterations=5), 0))
    assert bench.work() == ["plan transfer"]
    bench.asked.clear()
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=4, body=(((8, 8),),)))
    assert bench.work() == []
    assert bench.asked == [(3, StateRequest(2, 0, 1, 0))]
    bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
    bench.take(3, state_piece(iteration=5, body=(((9, 9),),)))
    assert bench.work() == ["write state"]
    assert bench.heard() == [Ready()]
    assert bench.executor.state == [((9, 9),)]


def test_a_node_that_has_stepped_and_waits_takes_no_state_from_before_that_step() -> None:
    bench = Bench(5, plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 3), (1, 2, 4)))).begin(4)
    bench.hear(Recover(StateSource("replica", (3,), (3,), (1.0,), 4, iterations=4), 0)).work()
    bench.hear(Commit(4, 1.0, 1.0, wait=True)).work()
    assert bench.node.phase is NodePhase.WAITING
    for iteration in (4, 5):
        bench.node.handle_peer_control(3, StateDigest(0, "sound", 0))
        bench.take(3, state_piece(iteration=iteration))
        assert bench.work() == ["write state"] * (iteration == 5)


def test_state_that_was_received_while_waiting_is_passed_on_as_of_the_iteration_that_begins() -> None:
    bench = Bench(2)
    bench.node.executor_ready(StateSource("checkpoint", (COORDINATOR,), (1,), (1.0,), 3, iterations=7), 0)
    bench.work()
    bench.node.receive(COORDINATOR, state_piece())
    bench.work()
    bench.node.handle_peer_control(6, StateRequest(1, 0, 1, 0))
    assert bench.work() == ["read state"]
    assert [message.header for to, message in bench.sent_messages if to == 6] == [StatePiece(7, 0)]


def test_a_node_that_begins_with_a_checkpoint_is_ready_when_it_has_it() -> None:
    bench = Bench(2)
    bench.node.executor_ready(StateSource("checkpoint", (COORDINATOR,), (1,), (1.0,), 3), 0)
    assert bench.work() == ["plan transfer"]
    assert bench.heard() == [StateRequest(1, 0, 1, 0)]
    bench.node.receive(COORDINATOR, state_piece(body=(((1, 1),),)))
    assert bench.work() == ["write state"]
    assert bench.heard() == [Ready()]
    assert bench.executor.state == [((1, 1),)]


def test_a_node_without_an_origin_is_ready_at_once() -> None:
    bench = Bench(2)
    bench.node.executor_ready(None, 0)
    assert bench.heard() == [Ready()]
