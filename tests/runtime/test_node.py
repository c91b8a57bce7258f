"""Messages to a node that its plan does not expect, come early or late, and how far it is in an iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
    Reroute,
    StateDigest,
    Stepped,
    Stop,
    Welcome,
)
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.runtime.node.ops import Op
from skippipe.runtime.node.state_machine import MOST_EARLY
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.training.train_job import ConsoleCallback
from skippipe.transport.message import BackupPiece, GradientPiece, Hop, Message, Stamp
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
    "a step before gradients are averaged": Commit(0, 1.0, 1.0),
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
    bench.hear(Commit(0, 1.0, 1.0, wait=True))
    assert bench.work() == []
    bench.hear(*[Commit(1, 1.0, 1.0, wait=True)] * 2)
    assert bench.work() == ["optimizer step"]
    assert bench.heard()[-1] == Stepped(1)
    assert [what.split(" while ")[0] for _, what in bench.node.dropped] == ["Commit"] * 2
    assert bench.node.dropped.total() == 2
    bench.hear(Commit(1, 1.0, 1.0, wait=True))
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
    bench.hear(Commit(0, 1.0, 1.0, wait=True)).work()
    bench.hear(Reroute(0, 1, [3], [[0, 1, 0, 2, 4]], []))
    assert bench.node.phase is NodePhase.WAITING


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
    bench.hear(Commit(4, 1.0, 1.0, wait=True))
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 5, "STEPPING")
    bench.work()
    assert bench.node.hello("here", "1") == Hello("here", "1", 3, 5, "WAITING")


def test_a_beginning_during_the_step_waits_for_it_and_brings_the_new_plan() -> None:
    bench = Bench(5, plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 3), (1, 2, 4)))).begin()
    bench.work()
    bench.hear(Commit(0, 1.0, 1.0, wait=True))
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


def test_a_snapshot_of_what_was_committed_is_made_also_while_the_next_iteration_runs() -> None:
    """Of a job that is restarted with fewer iterations: those that are done are all, and the next one has begun."""
    bench = Bench(2).begin(3)
    bench.hear(Commit(2, 0.0, 0.0, wait=True, snapshot=True))
    assert bench.work() == ["snapshot state"]
    bench.hear(Commit(1, 0.0, 0.0, wait=True, snapshot=True))
    assert bench.work() == [], "that state is gone"
