"""What a node and a coordinator are told, and what they make of it: they are deaf to nonsense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from skippipe.learning import Learning
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.control import (
    Averaged,
    Begin,
    Collect,
    Control,
    Failed,
    Hello,
    Proceed,
    Ready,
    Stepped,
    Stop,
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.coordinator import Coordinator, Deadlines, IterationReport, State
from skippipe.runtime.node import Node, Phase, ProtocolBroken
from skippipe.runtime.virtual import Gradient, Symbols, Trail, VirtualCluster
from skippipe.runtime.work import Outcome, Work
from skippipe.transport.message import Kind, Message
from skippipe.workload import Workload
from tests.plans import TINY, uniform_cluster

LEARNING = Learning(warmup=2, iterations=10)


# A node and what it is told


@dataclass
class Bench:
    """A node by itself; what it does to the world is noted."""

    now: int = 0
    sent: list[tuple[int, Message]] = field(default_factory=list)
    said: list[Control] = field(default_factory=list)
    started: list[Work] = field(default_factory=list)

    def now_ns(self) -> int:
        return self.now

    def send(self, receiver: int, message: Message) -> None:
        self.sent.append((receiver, message))

    def say(self, control: Control) -> None:
        self.said.append(control)

    def start(self, work: Work) -> None:
        self.started.append(work)


def small_plan(**others: Any) -> Plan:
    """Stage 0 on nodes 0 and 1, stage 1 on 2, stage 2 on the ring 3, 4, 5. Lanes 0→2→3 and 1→2→4, two each."""
    workload = Workload(TINY, 16, 1, 4)
    stages = (Stage(3, (0, 1), (0, 1)), Stage(2, (2,), (2,)), Stage(3, (3, 4, 5), (3, 4, 5)))
    return Plan(uniform_cluster(6), workload, stages, (Lane((0, 2, 3), 2), Lane((1, 2, 4), 2)), **others)


def begun(number: int, iteration: int = 0) -> tuple[Node, Bench]:
    bench = Bench()
    node = Node(number, small_plan(), bench)
    node.hear(Begin(iteration, False))
    return node, bench


def hop(lane: int, step: int, *, microbatch: int = 0, iteration: int = 0) -> Message:
    return Message(Kind.HOP, iteration, lane, microbatch, step, Trail(lane, microbatch, step))  # type: ignore[arg-type]


def chunk(round_: int, *, stage: int = 2, iteration: int = 0, piece: int = 0) -> Message:
    return Message(Kind.CHUNK, iteration, stage, piece, round_, Gradient(0, {}))  # type: ignore[arg-type]


VIOLATIONS: dict[str, tuple[int, int, Message, str]] = {
    "from a node that is not on the path": (2, 3, hop(0, 1), "step 1 of microbatch 0 on lane 0 does not come here"),
    "from the other data node": (2, 1, hop(0, 1), "does not come here from node 1"),
    "a step of another node": (2, 0, hop(0, 2), "does not come here"),
    "the first step, which nobody sends": (0, 3, hop(0, 0), "does not come here"),
    "a weight gradient, which nobody sends": (2, 3, hop(0, 8), "does not come here"),
    "a lane that is not there": (2, 0, hop(7, 1), "on lane 7 does not come here"),
    "a microbatch that is not there": (2, 0, hop(0, 1, microbatch=2), "microbatch 2 on lane 0"),
    "two iterations ahead": (2, 0, hop(0, 1, iteration=2), "a message of iteration 2 while in 0"),
    "an empty hop": (2, 0, Message(Kind.HOP, 0, 0, 0, 1), "came empty"),
    "an empty chunk": (4, 3, Message(Kind.CHUNK, 0, 2, 0, 0), "came empty"),
    "a chunk from a stranger": (4, 2, chunk(0), "round 0 of the ring of stage 2 does not come here from node 2"),
    "a chunk the wrong way round": (4, 5, chunk(0), "does not come here from node 5"),
    "a chunk of another stage": (4, 3, chunk(0, stage=1), "ring of stage 1"),
    "a chunk past the last round": (4, 3, chunk(4), "round 4 of the ring"),
    "a chunk where there is no ring": (2, 3, chunk(0, stage=1), "round 0 of the ring of stage 1"),
    "control between nodes": (2, 0, Message(Kind.CONTROL, 0, 0, 0, 1, {"say": "stop"}), "does not come here"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
@pytest.mark.parametrize("early", [False, True])
def test_what_the_plan_does_not_foresee_is_refused(violation: str, early: bool) -> None:
    number, sender, message, complaint = VIOLATIONS[violation]
    node, bench = begun(number)
    if early and message.iteration == 0:
        message = replace(message, iteration=1)  # it does not come in by being early either
    before = (node.phase, list(bench.sent), list(bench.started))
    with pytest.raises(ProtocolBroken, match=complaint):
        node.receive(sender, message)
    node.decide()
    assert (node.phase, bench.sent) == before[:2]
    assert all(getattr(work, "step", 0) == 0 for work in bench.started)  # nothing of it was started


@pytest.mark.parametrize("message", [hop(0, 1), hop(0, 1, iteration=1)])
def test_nothing_is_taken_twice(message: Message) -> None:
    node, bench = begun(2)
    node.receive(0, message)
    with pytest.raises(ProtocolBroken, match="came twice"):
        node.receive(0, message)
    node.decide()
    assert len(bench.started) == (message.iteration == 0)


def test_a_chunk_is_not_taken_twice_while_or_after_it_is_passed_on() -> None:
    bench = Bench()
    node = Node(5, small_plan(), bench)  # no lane comes here: its ring begins at once
    node.hear(Begin(0, False))
    node.decide()
    node.finished(bench.started[-1], Gradient(0, {}))  # type: ignore[arg-type]
    node.receive(4, chunk(0))
    for _ in range(2):
        with pytest.raises(ProtocolBroken, match="round 0 of the ring of stage 2 came twice"):
            node.receive(4, chunk(0))
        node.decide()  # round 1 runs
    assert [getattr(work, "round", None) for work in bench.started] == [0, 1]
    assert [message.step for _, message in bench.sent] == [0]


def test_a_message_of_a_past_iteration_is_refused() -> None:
    node, _ = begun(2, iteration=3)
    with pytest.raises(ProtocolBroken, match="iteration 2 while in 3"):
        node.receive(0, hop(0, 1, iteration=2))


def test_what_comes_before_the_beginning_waits_for_it() -> None:
    bench = Bench(now=5)
    node = Node(2, small_plan(), bench)
    node.receive(0, hop(0, 1, iteration=7))
    node.decide()
    assert not bench.started
    bench.now = 9
    node.hear(Begin(7, True))
    node.decide()
    (task,) = bench.started
    bench.now = 11
    node.finished(task, Outcome(Trail(0, 0, 2)))
    assert [receiver for receiver, _ in bench.sent] == [3]
    with pytest.raises(ProtocolBroken, match="a message of iteration 7 before 8 began"):
        stale = Node(2, small_plan(), bench)
        stale.receive(0, hop(0, 1, iteration=7))
        stale.hear(Begin(8, False))


@pytest.mark.parametrize(
    "control",
    [
        Begin(0, False),
        Begin(1, False),
        Proceed(0, 1.0, 1.0, False, False, False),
        Ready(),
        Hello("127.0.0.1:1", "1"),
        Welcome({}, {}, False),
        Stepped(0),
    ],
)
def test_a_node_that_runs_tasks_is_told_nothing_but_collect_and_stop(control: Control) -> None:
    node, bench = begun(0)
    with pytest.raises(ProtocolBroken):
        node.hear(control)
    assert node.phase is Phase.RUNNING
    node.hear(Stop("enough"))
    node.decide()
    assert not bench.started


def test_weights_are_shown_after_the_step_that_was_asked_for() -> None:
    plan = small_plan()
    order: list[str] = []

    class Noted(Symbols):
        def run(self, work: Work) -> Any:
            order.append(type(work).__name__)
            return super().run(work)

    class Impatient:
        def iteration_done(self, report: IterationReport) -> None:
            if report.iteration == 1:
                cluster.coordinator.finish_early()

    computers = {node: (Noted if node == 0 else Symbols)(node, plan) for node in plan.stage_of}
    cluster = VirtualCluster(plan, LEARNING, 50, computers=computers, watcher=Impatient())
    cluster.run()
    assert cluster.coordinator.state is State.DONE, cluster.coordinator.failure
    assert len(cluster.reports) == 2
    first = order.index("Show")
    assert order[:first].count("Step") == 2, "shown as of the last step that everybody was told to take"
    assert sorted(cluster.stored) == [0, 1, 2]


# The coordinator and what it is told


@dataclass
class Room:
    """What a coordinator does to the world, noted; some nodes cannot be reached."""

    now: int = 0
    told: list[tuple[int, Control]] = field(default_factory=list)
    reports: list[IterationReport] = field(default_factory=list)
    stored: list[tuple[int, Any]] = field(default_factory=list)
    saved_pieces: list[tuple[int, Any]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    deaf: dict[int, type[Control]] = field(default_factory=dict)
    coordinator: Coordinator | None = None

    def now_ns(self) -> int:
        return self.now

    def meet(self, node: int, address: str) -> None:
        pass

    def tell(self, node: int, control: Control) -> None:
        assert self.coordinator is not None
        if node in self.deaf and isinstance(control, self.deaf[node]):
            self.coordinator.lost(node, "it does not take messages")
            return
        self.told.append((node, control))

    def store(self, stage: int, piece: Any) -> None:
        self.stored.append((stage, piece))

    def save(self, stage: int, piece: Any) -> None:
        self.saved_pieces.append((stage, piece))

    def saved(self, iterations: int) -> None:
        self.saved_pieces.append((iterations, "done"))

    def give(self, node: int, piece: int) -> None:
        self.given.append((node, piece))

    def iteration_done(self, report: IterationReport) -> None:
        self.reports.append(report)

    def last_told(self) -> dict[int, Control]:
        return dict(self.told)


def coordinating(iterations: int = 2, **others: Any) -> tuple[Coordinator, Room]:
    from skippipe import __version__

    room = Room()
    coordinator = room.coordinator = Coordinator(small_plan(), LEARNING, room, room, iterations, **others)
    for node in range(6):
        coordinator.hear(node, Hello("127.0.0.1:1", __version__))
    for node in range(6):
        coordinator.hear(node, Ready())
    assert coordinator.state is State.TRAINING
    return coordinator, room


def averaged(node: int, iteration: int = 0, **others: Any) -> Averaged:
    losses = [[node, number, 1.0] for number in range(2)] if node < 2 else []
    return replace(Averaged(iteration, 4.0, losses, [], []), **others)


def assert_failed(coordinator: Coordinator, room: Room, *words: str) -> None:
    assert coordinator.state is State.FAILED
    for word in words:
        assert word in coordinator.failure
    assert room.last_told() == dict.fromkeys(range(6), Stop(coordinator.failure))


@pytest.mark.parametrize(
    ("node", "said", "complaint"),
    [
        (3, Stepped(0), "said Stepped while training"),
        (3, Ready(), "said Ready while training"),
        (3, Hello("127.0.0.1:1", "1"), "said Hello while training"),
        (3, Begin(0, False), "said Begin while training"),
        (3, averaged(3, 1), "said Averaged while training"),
        (3, Failed("out of memory"), "node 'n3': out of memory"),
        (0, averaged(0, losses=[[0, 0, 1.0]]), "losses of 1 microbatches, not of the 2"),
        (0, averaged(0, losses=[[0, 0, 1.0], [0, 0, 1.0]]), "losses of 2 microbatches, not of the 2"),
        (0, averaged(0, losses=[[0, 0, 1.0], [0, 1]]), "losses"),
        (0, averaged(0, losses=[[0, 0], [0, 1]]), "losses"),
        (3, averaged(3, losses=[[0, 0, 1.0], [0, 1, 1.0]]), "not of the 0"),
        (3, averaged(3, sent_bytes=[[9, 1]]), "not there"),
        (3, averaged(3, sent_bytes=[[1]]), "not there"),
        (3, averaged(3, tasks=[[1, 2]]), "tasks"),
        (3, averaged(3, tasks=[[5, 0, 0, 0, 0, 0]]), "tasks"),
    ],
)
def test_a_node_that_says_nonsense_ends_the_run(node: int, said: Control, complaint: str) -> None:
    coordinator, room = coordinating()
    coordinator.hear(node, said)
    assert_failed(coordinator, room, complaint, f"'n{node}'")
    told = len(room.told)
    coordinator.hear(1, averaged(1))  # what comes later changes nothing
    coordinator.lost(2, "late")
    coordinator.fail("later")
    coordinator.tick()
    assert len(room.told) == told
    assert complaint in coordinator.failure


def test_a_node_reports_once() -> None:
    coordinator, room = coordinating()
    coordinator.hear(3, averaged(3))
    coordinator.hear(3, averaged(3))
    assert_failed(coordinator, room, "'n3' said Averaged when it had said all")


def test_replicas_that_differ_end_the_run() -> None:
    coordinator, room = coordinating()
    for node in range(6):
        coordinator.hear(node, averaged(node, squared_norm=4.0 if node != 4 else 4.000001))
    assert_failed(coordinator, room, "stage 2", "n4 4.000001", "n3 4.0")
    assert not room.reports


def test_replicas_may_agree_that_it_is_no_number() -> None:
    coordinator, room = coordinating()
    for node in range(6):
        said = averaged(node, squared_norm=float("nan") if node > 2 else 4.0)
        coordinator.hear(node, from_json(to_json(said)))
    assert coordinator.state is State.TRAINING
    assert room.reports[0].norm != room.reports[0].norm
    coordinator, room = coordinating()
    for node in range(6):
        coordinator.hear(node, averaged(node, squared_norm=float("nan") if node == 4 else 4.0))
    assert_failed(coordinator, room, "stage 2")


@pytest.mark.parametrize("state", ["to join", "to be ready", "to average gradients", "to take the last step"])
def test_a_deadline_that_passes_names_those_who_are_missing(state: str) -> None:
    from skippipe import __version__

    room = Room()
    deadlines = Deadlines(*(timedelta(seconds=7) for _ in range(4)))
    coordinator = room.coordinator = Coordinator(small_plan(), LEARNING, room, room, 1, deadlines=deadlines)
    said: list[Callable[[int], Control]] = [
        lambda _: Hello("127.0.0.1:1", __version__),
        lambda _: Ready(),
        averaged,
        lambda _: Stepped(0),
    ]
    for what in said:
        if coordinator.state.value == state:
            for node in (0, 1, 3, 5):
                coordinator.hear(node, what(node))
            break
        for node in range(6):
            coordinator.hear(node, what(node))
    room.now = 6_999_999_999
    coordinator.tick()
    assert not coordinator.over
    room.now = 7_000_000_000
    coordinator.tick()
    assert_failed(coordinator, room, f"waited 7 s for n2, n4 {state}")


def test_weights_come_from_one_node_of_each_stage_in_turn() -> None:
    coordinator, room = coordinating(iterations=1, deadlines=Deadlines(collect=timedelta(seconds=7)))
    for said in (averaged, lambda _: Stepped(0)):
        for node in range(6):
            coordinator.hear(node, said(node))
    assert coordinator.state is State.COLLECTING
    assert room.told[-1] == (0, Collect(0, kept=False))
    piece = Message(Kind.CHUNK, 0, 0, 0, 0, "some weights")  # type: ignore[arg-type]
    end = Message(Kind.CHUNK, 0, 0, 1, 0)
    room.now = 5_000_000_000
    coordinator.receive(0, piece)
    room.now = 11_000_000_000
    coordinator.tick()
    assert not coordinator.over, "every piece gives it time"
    coordinator.receive(0, end)
    assert room.told[-1] == (2, Collect(0, kept=False))
    room.now = 18_000_000_000
    coordinator.tick()
    assert_failed(coordinator, room, "waited 7 s for n2 to send its weights")
    assert room.stored == [(0, "some weights"), (0, None)]


def test_weights_that_nobody_asked_for_end_the_run() -> None:
    coordinator, room = coordinating()
    coordinator.receive(3, Message(Kind.CHUNK, 0, 0, 1, 1))
    assert_failed(coordinator, room, "'n3' sent weights")
    assert not room.stored


@pytest.mark.parametrize(("kind", "iterations"), [(Begin, 2), (Proceed, 2), (Proceed, 1), (Collect, 1)])
def test_a_node_that_cannot_be_told_ends_the_run(kind: type[Control], iterations: int) -> None:
    from skippipe import __version__

    room = Room(deaf={0: kind})
    coordinator = room.coordinator = Coordinator(small_plan(), LEARNING, room, room, iterations)
    said: list[Callable[[int], Control]] = [
        lambda _: Hello("127.0.0.1:1", __version__),
        lambda _: Ready(),
        averaged,
        lambda _: Stepped(0),
    ]
    for what in said:
        for node in range(6):
            coordinator.hear(node, what(node))
    assert_failed(coordinator, room, "node 'n0' is gone (it does not take messages)")


def test_one_version_for_all() -> None:
    room = Room()
    coordinator = room.coordinator = Coordinator(small_plan(), LEARNING, room, room, 1)
    coordinator.hear(4, Hello("127.0.0.1:1", "0.0.0"))
    assert_failed(coordinator, room, "node 'n4' runs skippipe 0.0.0")


@pytest.mark.parametrize(
    "control",
    [
        Hello("[::1]:5", "1.0"),
        Welcome({"plan": {"deep": [1]}}, {"n0": ["127.0.0.1:1", None]}, True),
        Ready(),
        Begin(3, True),
        Averaged(2, float("inf"), [[0, 1, float("-inf")]], [[0, 1, 2, 3, 4, 5]], [[1, 10**12]]),
        Proceed(3, 1e-4, 0.5, True, True, False),
        Collect(0, kept=False),
        Stepped(4),
        Stop(""),
        Stop("the run was ended"),
        Failed("über 5 GB"),
    ],
)
def test_control_there_and_back(control: Control) -> None:
    assert from_json(to_json(control)) == control


def test_reasons_of_many_lines_arrive_in_one() -> None:
    assert from_json(to_json(Failed("one\ntwo\x1b[2J"))) == Failed("one two [2J")
