"""Messages to a node that its plan does not expect, and the transfer of state between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skippipe.collectives.schedule import Piece
from skippipe.runtime.coordinator.interfaces import CoordinatorState, Event
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    Begin,
    Commit,
    ControlMessage,
    Drain,
    Hello,
    NewPlan,
    PeerUpdate,
    Ready,
    Recover,
    Recovered,
    Reroute,
    StateDigest,
    StateRequest,
    Stepped,
    Stop,
    Welcome,
)
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.runtime.node.ops import Op
from skippipe.runtime.node.state_machine import MOST_EARLY
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.state_source import StateSource
from skippipe.training.train_job import ConsoleCallback
from skippipe.transport.message import BackupPiece, GradientPiece, Hop, Message, Stamp, StatePiece
from tests.helpers.single_node import (
    A_HOP,
    A_PIECE,
    LEARNING,
    Bench,
    average_alone,
    gradient_piece,
    hop,
    long_plan,
    plan_of,
    small_plan,
    state_piece,
)

VIOLATIONS: dict[str, tuple[int, int, Message, str]] = {
    "from a node that is not on the path": (2, 3, hop(0, 1), A_HOP),
    "from the other data node": (2, 1, hop(0, 1), A_HOP),
    "a step of another node": (2, 0, hop(0, 2), A_HOP),
    "the first step, which nobody sends": (0, 3, hop(0, 0), A_HOP),
    "a weight gradient, which nobody sends": (2, 3, hop(0, 8), A_HOP),
    "a step past all": (2, 3, hop(0, 10**6), A_HOP),
    "a lane that is not there": (2, 0, hop(7, 1), A_HOP),
    "a microbatch that is not there": (2, 0, hop(0, 1, 2), A_HOP),
    "an empty hop": (2, 0, Message(Hop(0, 0, 0, 1)), "a hop without a tensor"),
    "an empty gradient piece": (4, 3, Message(GradientPiece(0, 2, 0)), "a gradient piece without a tensor"),
    "a hop that is no activation": (
        2, 0, replace(hop(0, 1), body=gradient_piece(0).body), "a hop of another shape or type"
    ),
    "a piece that is no gradient": (
        4, 3, replace(gradient_piece(0), body=hop(0, 1).body), "a gradient piece of another shape or type"
    ),
    "another piece than the transfer's": (
        4, 3, gradient_piece(0, piece=1), "a gradient piece of another shape or type"
    ),
    "a gradient piece from a stranger": (4, 2, gradient_piece(0), A_PIECE),
    "a gradient piece the wrong way round": (4, 5, gradient_piece(0), A_PIECE),
    "a gradient piece for another node": (4, 3, gradient_piece(2), A_PIECE),
    "a gradient piece of another stage": (4, 3, gradient_piece(0, stage=1), A_PIECE),
    "a gradient piece past the last transfer": (4, 3, gradient_piece(12), A_PIECE),
    "a total before this node has contributed": (4, 3, gradient_piece(7, piece=1), A_PIECE),
    "a gradient piece where a node is alone": (2, 3, gradient_piece(0, stage=1), A_PIECE),
    "control between nodes": (
        2, 0, Message(Stamp(0, 0, 0), {"say": "stop"}), "a control that does not come here from there"
    ),
    "state that nobody asked for": (2, 0, state_piece(), "state that was not requested"),
}  # fmt: skip


def assert_alike(bench: Bench, twin: Bench) -> None:
    """It does what one does that never heard of it, now and when the next message comes that is due."""
    due = {0: (3, 3), 2: (0, 1), 4: (2, 2)}
    for more in (False, True):
        found = []
        for each in (bench, twin):
            node = each.node
            if more:
                sender, step = due[node.number]
                each.take(sender, hop(each.node.number == 4, step, iteration=node.iteration))
            found.append((each.work(), each.sent(), each.heard(), each.asked, node.phase, node.iteration, node.epoch))
            assert node.stopped is None
        assert found[0] == found[1]


def in_iteration(iteration: int, message: Message) -> Message:
    header = message.header
    return replace(message, header=replace(header, iteration=iteration)) if hasattr(header, "iteration") else message  # type: ignore[type-var]


@pytest.mark.parametrize("violation", VIOLATIONS)
@pytest.mark.parametrize("early", [False, True])
def test_what_the_plan_does_not_foresee_is_dropped_and_counted(violation: str, early: bool) -> None:
    number, sender, message, reason = VIOLATIONS[violation]
    bench, twin = Bench(number).begin(), Bench(number).begin()
    bench.take(sender, in_iteration(int(early), message))
    if early:  # it does not come in by being early either
        bench.begin(1)
        twin.begin(1)
    assert bench.node.dropped == {(sender, reason): 1}
    assert_alike(bench, twin)
    bench.take(sender, in_iteration(int(early), message))
    assert bench.node.dropped[sender, reason] == 2, "every one is counted"


def test_what_is_said_is_told_once_and_then_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(2).begin()
    for _ in range(5):
        bench.take(3, hop(0, 1))
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped a message of n3: {A_HOP} (later ones are only counted)"
    ]


@pytest.mark.parametrize("iteration", [0, 2])
def test_a_message_of_a_past_iteration_is_dropped(iteration: int) -> None:
    bench, twin = Bench(2).begin(3), Bench(2).begin(3)
    bench.take(0, hop(0, 1, iteration=iteration))
    assert bench.node.dropped == {(0, "of an iteration that is over"): 1}
    assert_alike(bench, twin)


def test_nobody_is_more_than_one_iteration_ahead() -> None:
    bench, twin = Bench(2).begin(), Bench(2).begin()
    bench.take(0, hop(0, 1, iteration=2))
    assert bench.node.dropped == {(0, "too far ahead"): 1}
    assert_alike(bench, twin)


def test_nothing_is_taken_twice_while_it_waits_or_later() -> None:
    bench = Bench(2).begin()
    bench.take(0, hop(0, 1), hop(0, 1))
    assert bench.work() == ["0/0 step 1"]
    bench.take(0, hop(0, 1))
    bench.take(3, hop(0, 5), hop(0, 5))
    assert bench.work() == ["0/0 step 5"]
    bench.take(0, hop(0, 1, 1))
    bench.take(3, hop(0, 5))  # of a microbatch that is long back
    assert bench.work() == ["0/1 step 1"]
    taken = "a hop that has been taken before"
    assert bench.node.dropped == {(0, taken): 2, (3, taken): 2}
    assert bench.sent() == [
        "0/0 step 2 → 3, epoch 0",
        "0/0 step 6 → 0, epoch 0",
        "0/1 step 2 → 3, epoch 0",
    ]


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


def test_what_comes_before_the_beginning_waits_for_it() -> None:
    bench = Bench(2).take(0, hop(0, 1, iteration=7), hop(1, 1, iteration=6))
    assert bench.work() == []
    bench.begin(7)
    assert bench.work() == ["0/0 step 1"]
    assert bench.node.dropped == {(0, "of an iteration that is over"): 1}


def test_what_is_early_is_bounded_for_each_sender() -> None:
    bench = Bench(2).begin()
    plan = bench.node.plan
    most = MOST_EARLY + 4 * len(plan.lanes) + len(plan.cluster.nodes)
    bench.take(0, *(hop(0, 1, iteration=1, epoch=1) for _ in range(most + 3)))
    bench.take(1, hop(1, 1, iteration=1, epoch=1))
    assert bench.node.dropped == {(0, "too much ahead of its time"): 3}
    bench.begin(1, 1)
    assert bench.work() == ["clear gradients", "0/0 step 1", "1/0 step 1"]


def test_what_the_plan_foresees_is_never_too_early() -> None:
    """A lane for every microbatch, all from node 0 to node 1, which is still busy with its step."""
    bench = Bench(1, plan_of(2, ((0,), (1,)), [(0, 1)] * (MOST_EARLY + 1))).begin()
    bench.take(0, *(hop(lane, 1, iteration=1) for lane in range(MOST_EARLY + 1)))
    assert not bench.node.dropped


def test_what_another_knows_first_waits_for_the_news() -> None:
    """A replica that heard of the change sends at once; who has not heard of it yet would not know why."""
    bench = Bench(5, long_plan()).begin()
    bench.take(4, hop(0, 3, epoch=1))
    assert bench.work() == []
    bench.hear(Reroute(0, 1, [3], [[0, 0, 0, 2, 4, 5]], []))
    assert bench.work() == ["0/0 step 3"]
    assert not bench.node.dropped


IN_THE_WRONG_PHASE: dict[str, ControlMessage] = {
    "a step before gradients are averaged": Commit(0, 1.0, 1.0, False, False, False),
    "averaging that nobody has settled": Average(0, 0, [4, 4, 4]),
    "of a node": Ready(),
    "a greeting": Hello("127.0.0.1:1", "1"),
    "a welcome that is not for the state machine": Welcome({}, {}),
    "an acquaintance that is not for the state machine": PeerUpdate({}),
    "a report": Stepped(0),
}


@pytest.mark.parametrize("wrong", IN_THE_WRONG_PHASE)
def test_control_in_the_wrong_phase_is_dropped(wrong: str) -> None:
    bench, twin = Bench(0).begin(), Bench(0).begin()
    bench.hear(IN_THE_WRONG_PHASE[wrong])
    assert [(sender, count) for (sender, _), count in bench.node.dropped.items()] == [(COORDINATOR, 1)]
    assert_alike(bench, twin)


@pytest.mark.parametrize(
    "old",
    [
        Reroute(1, 1, [3], [[0, 0, 0, 2, 4]], []),
        Reroute(2, 0, [3], [[0, 0, 0, 2, 4]], []),
        Drain(1, 5, False),
        Drain(2, 0, False),
        Average(2, 0, [1, 1, 1]),
    ],
)
def test_a_change_of_another_iteration_or_epoch_changes_nothing(old: ControlMessage) -> None:
    bench, twin = Bench(0).begin(2, 1), Bench(0).begin(2, 1)
    assert_alike(bench.hear(old), twin)


def test_a_step_is_taken_once_and_only_of_this_iteration() -> None:
    bench = Bench(5, plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 3), (1, 2, 4)))).begin(1)
    assert bench.work() == ["measure 0 alone"], "nobody comes here"
    bench.hear(Commit(0, 1.0, 1.0, True, False, False))
    assert bench.work() == []
    bench.hear(*[Commit(1, 1.0, 1.0, True, False, False)] * 2)
    assert bench.work() == ["optimizer step"]
    assert bench.heard()[-1] == Stepped(1)
    assert [what.split(" while ")[0] for _, what in bench.node.dropped] == ["Commit"] * 2
    assert bench.node.dropped.total() == 2
    bench.hear(Commit(1, 1.0, 1.0, True, False, False))
    assert bench.work() == []
    assert bench.heard()[-1] == Stepped(1), "a coordinator that was restarted after the step has to know"


def test_a_stop_ends_all() -> None:
    bench = Bench(0).begin().hear(Stop("enough"))
    assert bench.work() == []
    assert bench.node.stopped == Stop("enough")


@pytest.mark.parametrize("control", [StateDigest(0, "sound", 0), Stop("from a friend"), Begin(0, 9, False), Ready()])
def test_control_between_nodes_is_dropped_unless_one_recovers(control: ControlMessage) -> None:
    bench, twin = Bench(2).begin(), Bench(2).begin()
    bench.node.handle_peer_control(0, control)
    assert bench.node.dropped == {(0, f"{type(control).__name__} of no use here"): 1}
    assert_alike(bench, twin)


def test_state_from_a_checkpoint_that_was_not_requested_is_dropped() -> None:
    bench, twin = Bench(2).begin(), Bench(2).begin()
    for message in (state_piece(), Message(BackupPiece(0))):
        bench.node.receive(COORDINATOR, message)
    assert bench.node.dropped == {(COORDINATOR, "state that was not requested"): 2}
    assert_alike(bench, twin)


def test_a_change_of_an_iteration_whose_step_is_taken_is_dropped() -> None:
    bench = Bench(2).begin()
    average_alone(bench)
    bench.hear(Commit(0, 1.0, 1.0, True, False, False)).work()
    bench.hear(Reroute(0, 1, [3], [[0, 1, 0, 2, 4]], []))
    assert bench.node.phase is NodePhase.WAITING


# State transfer

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
    bench.hear(Commit(4, 1.0, 1.0, True, False, False)).work()
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
    bench.hear(Commit(4, 1.0, 1.0, True, False, False)).work()
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


def test_weights_are_read_after_the_step_that_was_committed() -> None:
    plan = small_plan()
    order: list[str] = []

    class Noted(SymbolicExecutor):
        def run(self, work: Op) -> Any:
            order.append(type(work).__name__)
            return super().run(work)

    computers = {node: (Noted if node == 0 else SymbolicExecutor)(node, plan) for node in plan.stage_of}
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(LEARNING, 50),
        executors=computers,
        stop_requests=lambda: 2 * (len(cluster.reports) == 2),
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert len(cluster.reports) == 2
    first = order.index("ReadWeights")
    assert order[:first].count("OptimizerStep") == 2, "shown as of the last step that everybody was told to take"
    assert sorted(cluster.stored) == [0, 1, 2]


def test_a_node_says_how_far_it_is() -> None:
    bench = Bench(2)
    assert bench.node.hello("here", "1") == Hello("here", "1")
    bench.begin(4, 3)
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 4, "RUNNING")
    average_alone(bench)
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 4, "AVERAGED")
    bench.hear(Commit(4, 1.0, 1.0, True, False, False))
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 5, "STEPPING")
    bench.work()
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 5, "WAITING")


def test_a_beginning_during_the_step_waits_for_it_and_brings_the_new_plan() -> None:
    bench = Bench(5, plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 3), (1, 2, 4)))).begin()
    bench.work()
    bench.hear(Commit(0, 1.0, 1.0, True, False, False))
    bench.decide()
    changed = plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 5), (1, 2, 4)))
    bench.hear(NewPlan(changed.to_json()), Begin(1, 4, False))
    bench.take(2, hop(0, 2, iteration=1, epoch=4))
    assert bench.end() == "optimizer step"
    assert bench.work() == ["0/0 step 2"]
    assert not any(isinstance(each, Stepped) for each in bench.heard())


def test_screen_and_text_of_an_event_have_the_same_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever people read counts iterations from 1."""
    bench = Bench(2).begin(4)
    idle = bench.node.doing
    bench.take(0, hop(0, 1, iteration=4)).decide()
    figures: Any = None
    screen = ConsoleCallback(figures, 10)
    for doing in (idle, bench.node.doing):
        assert doing.endswith(", iteration 5"), doing
        screen.happened(Event("slow", 4, f"is slow, but there: {doing}", "iowa-0"))
        assert capsys.readouterr().err.startswith("iteration     5  slow: ")
    assert idle != bench.node.doing
