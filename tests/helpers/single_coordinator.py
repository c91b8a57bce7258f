"""A coordinator by itself: an environment that records its effects, and nodes that send what correct ones would."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from skippipe import __version__
from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import (
    Callback,
    CoordinatorState,
    Event,
    IterationReport,
    WriteFailed,
)
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.state_machine import Coordinator
from skippipe.runtime.coordinator.wal_records import WalRecord
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import (
    Averaged,
    Begin,
    Commit,
    ControlMessage,
    Drain,
    DrainAck,
    GatherState,
    Heartbeat,
    Hello,
    MicrobatchDone,
    Ready,
    Recover,
    Recovered,
    Reroute,
    StateRequest,
    Stepped,
)
from skippipe.runtime.state_source import MalformedWeights, StateSource
from skippipe.transport.message import CheckpointPiece, Message, WeightsPiece
from tests.helpers.plans import uniform_cluster
from tests.helpers.single_node import AT_ONCE, LEARNING, plan_of, small_plan


@dataclass
class RecordingStore:
    """A checkpoint store that records its calls."""

    made: int | None = None
    saved_pieces: list[tuple[int, int, Any]] = field(default_factory=list)
    done: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    abandoned: int = 0
    lacking: str = ""
    moved: int = 0

    def save(self, stage: int, number: int, piece: Any) -> None:
        self.saved_pieces.append((stage, number, piece))

    def saved(self, iterations: int, steps: Sequence[int], validation_loss: float | None = None) -> None:  # noqa: ARG002
        self.done.append((iterations, tuple(steps)))

    def abandon(self) -> None:
        self.abandoned += 1

    def state(self, stage: int, first: int, count: int) -> Any:  # noqa: ARG002
        raise AssertionError("for processes only")

    def steps(self, stage: int) -> int:
        return 7 + stage

    def newest(self) -> int | None:
        return self.made

    def lack(self) -> str:
        return self.lacking

    def move(self) -> None:
        self.moved += 1


@dataclass
class RecordingEnv(Callback):
    """The effects of a coordinator on the outside, in their order."""

    now_s: float = 0.0
    checkpoint_store: RecordingStore | None = None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    sent: list[tuple[int, ControlMessage]] = field(default_factory=list)
    wal: list[dict[str, Any]] = field(default_factory=list)
    stored: list[tuple[int, int, Any]] = field(default_factory=list)
    reports: list[IterationReport] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unwritten: WriteFailed | MalformedWeights | None = None
    """Why no stage can be stored at the moment."""
    epoch: int = 0
    data_nodes: dict[int, int] = field(default_factory=dict)
    """Lane → its data node, if that is another than planned."""
    called: set[int] = field(default_factory=set)
    """Nodes of which it is not known yet whether they can be called."""
    collections: dict[int, int] = field(default_factory=dict)
    """Node → the id of its last request for a piece."""

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def connect(self, node: int, address: str) -> bool:
        self.log.append(("connect", node, address))
        return True

    def is_called(self, node: int) -> bool:
        return node in self.called

    def disconnect(self, node: int) -> None:
        self.log.append(("disconnect", node))

    def send(self, node: int, control: ControlMessage) -> None:
        assert from_json(to_json(control)) == control
        if isinstance(control, GatherState):
            self.collections[node] = control.collection
            control = structs.replace(control, collection=ANY_ID)
        self.log.append(("send", node, control))
        self.sent.append((node, control))
        if isinstance(control, (Begin, Reroute, Drain)):
            self.epoch = control.epoch
        if isinstance(control, (Begin, Commit)):
            self.data_nodes.clear()
        elif isinstance(control, Reroute):
            self.data_nodes |= {lane: path[0] for lane, _, *path in control.lanes}

    def send_welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:  # noqa: ARG002
        self.log.append(("welcome", node, plan.stage_of[node], origin))

    def send_plan(self, node: int, plan: Plan) -> None:
        self.log.append(("plan", node, plan))

    def store_weights(self, stage: int, number: int, piece: Any) -> None:
        if piece is None and self.unwritten is not None:
            raise self.unwritten
        self.stored.append((stage, number, piece))

    def append_wal(self, record: dict[str, Any]) -> None:
        self.log.append(("wal", record))
        self.wal.append(record)

    def send_checkpoint_state(self, node: int, stage: int, request: StateRequest) -> None:
        self.log.append(("state", node, stage, request.first, request.count))

    def iteration_done(self, report: IterationReport) -> None:
        self.reports.append(report)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    # What a test looks at

    def new_messages(self) -> dict[int, list[ControlMessage]]:
        """Node → messages sent to it since the last call."""
        found: dict[int, list[ControlMessage]] = {}
        for node, control in self.sent:
            found.setdefault(node, []).append(control)
        self.sent.clear()
        return found

    def logged(self, what: str) -> list[tuple[Any, ...]]:
        return [each[1:] for each in self.log if each[0] == what]

    def event_kinds(self) -> list[str]:
        return [event.kind for event in self.events]


ANY_ID = 0
"""Stands for the id of any request."""
HELLO = Hello("127.0.0.1:1", __version__)


def is_now(coordinator: Coordinator, state: CoordinatorState) -> bool:
    return coordinator.state is state


@dataclass
class CoordinatorHarness:
    """A coordinator in its environment, and nodes that send what correct ones would."""

    coordinator: Coordinator
    env: RecordingEnv

    def send(self, node: int, *controls: ControlMessage) -> CoordinatorHarness:
        """Deliver messages of a node; Ready and Recovered answer its last order."""
        for control in controls:
            if isinstance(control, Ready | Recovered) and node in self.coordinator.membership:
                control = structs.replace(control, assignment=self.coordinator.membership[node].assignment)
            self.coordinator.on_message(node, control)
        return self

    def receive(self, node: int, message: Message) -> None:
        """Deliver a piece of a node, under the id of its last request."""
        header: Any = replace(message.header, collection=self.env.collections.get(node, 0))  # type: ignore[type-var]
        self.coordinator.on_piece(node, replace(message, header=header))

    def contribution(self, node: int) -> list[list[int]]:
        lanes = enumerate(self.coordinator.plan.lanes)
        return [[lane, each] for lane, way in lanes if node in way.path for each in range(way.microbatches)]

    def averaged(self, node: int, **others: Any) -> Averaged:
        report = Averaged(self.coordinator.iteration, self.env.epoch, 4.0, self.contribution(node), [], [], [], [])
        return structs.replace(report, **others)

    def contributed(self, node: int, rows: list[list[int]] | None = None) -> DrainAck:
        rows = self.contribution(node) if rows is None else rows
        return DrainAck(self.coordinator.iteration, self.env.epoch, rows)

    def return_microbatches(self, *lanes: int) -> None:
        """All microbatches, or those of some lanes, return to their data nodes."""
        for lane, way in enumerate(self.coordinator.plan.lanes):
            for microbatch in range(way.microbatches if not lanes or lane in lanes else 0):
                home = self.env.data_nodes.get(lane, way.path[0])
                self.send(home, MicrobatchDone(self.coordinator.iteration, self.env.epoch, lane, microbatch, 2.0))

    def average(self, **norms: float) -> None:
        """All nodes report their average; `n4=5.0`: node 4 finds another norm."""
        for node in list(self.coordinator.nodes):
            self.send(node, self.averaged(node, squared_norm=norms.get(f"n{node}", 4.0)))

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            self.return_microbatches()
            self.average()

    def to_all(self, control: ControlMessage) -> dict[int, list[ControlMessage]]:
        return {node: [control] for node in self.coordinator.nodes}

    def wait(self, seconds: float, *silent: int, busy: Collection[int] = ()) -> None:
        """Ticks every second; all but some nodes send heartbeats, and some have work all the time."""
        since, until = self.env.now_s, self.env.now_s + seconds
        while self.env.now_s < until:
            self.env.now_s = min(until, self.env.now_s + 1.0)
            for node in self.coordinator.membership:
                if node not in silent:
                    self.send(node, Heartbeat("something", self.env.now_s - since if node in busy else 0.0))
            self.coordinator.tick()


def new_coordinator(
    env: RecordingEnv, iterations: int, plan: Plan | None = None, wal: Sequence[WalRecord] = (), **settings: Any
) -> Coordinator:
    return Coordinator(plan or small_plan(), CoordinatorSettings(LEARNING, iterations, **settings), env, env, wal)


def coordinating(
    iterations: int = 2,
    plan: Plan | None = None,
    store: RecordingStore | None = None,
    wal: Sequence[WalRecord] = (),
    **settings: Any,
) -> CoordinatorHarness:
    """A coordinator in its first iteration or, with a write-ahead log, at the start."""
    env = RecordingEnv(checkpoint_store=store)
    coordinator = new_coordinator(env, iterations, plan, wal, **{"recovery": AT_ONCE, **settings})
    harness = CoordinatorHarness(coordinator, env)
    if not wal:
        for control in (HELLO, Ready()):
            for node in sorted(coordinator.plan.stage_of):
                harness.send(node, control)
        assert is_now(coordinator, CoordinatorState.TRAINING)
        env.new_messages()
    return harness


def piece(number: int, body: Any = None, *, kept: bool = False) -> Message:
    return Message((CheckpointPiece if kept else WeightsPiece)(0, number), body)


def gathering(iterations: int = 1, **others: Any) -> CoordinatorHarness:
    """All iterations are done: weights, or first a checkpoint, are gathered."""
    harness = coordinating(iterations, **others)
    harness.iterate(iterations)
    assert is_now(harness.coordinator, CoordinatorState.STEPPING)
    for node in range(6):
        harness.send(node, Stepped(iterations - 1))
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    return harness


def send_all(harness: CoordinatorHarness, *nodes: int, kept: bool) -> None:
    """All that they have, in one piece."""
    for node in nodes:
        harness.receive(node, piece(0, f"of {node}", kept=kept))
        harness.receive(node, piece(1, kept=kept))


def assert_goes_on(harness: CoordinatorHarness, *lost: int) -> None:
    """The iteration is committed without some of the nodes."""
    coordinator, env = harness.coordinator, harness.env
    assert is_now(coordinator, CoordinatorState.TRAINING), coordinator.failure
    assert not set(lost) & set(coordinator.nodes)
    harness.return_microbatches()
    for answer in (harness.contributed, harness.averaged):
        for node in list(coordinator.nodes):
            harness.send(node, answer(node))
    assert any(report.iteration == 0 for report in env.reports)
    assert coordinator.iteration == 1 or is_now(coordinator, CoordinatorState.STEPPING)


def even_plan() -> Plan:
    """Two nodes on each of three stages; node 6 is a spare."""
    return plan_of(7, ((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))


def with_a_quick_one(nodes: int) -> Cluster:
    """Nodes that are slow, so that it counts which of them work, and the last one quicker."""
    slow = uniform_cluster(nodes, flops_per_s=1e6)
    return replace(slow, nodes=(*slow.nodes[:-1], replace(slow.nodes[-1], flops_per_s=4e6)))


def recovering_late() -> tuple[CoordinatorHarness, int]:
    """Node 6 joins late and fetches its state; and from which node."""
    harness = coordinating(5, replace(even_plan(), cluster=with_a_quick_one(7)))
    harness.send(6, HELLO)
    assert harness.env.logged("connect")[-1] == (6, HELLO.address)
    ((number, stage, origin),) = harness.env.logged("welcome")[6:]
    assert (number, origin) == (6, None)
    harness.send(6, Ready())
    assert not harness.env.sent, "it has to wait for the next iteration"
    harness.iterate()
    begin, recover = harness.env.new_messages()[6]
    assert begin == Begin(1, 1, False)
    assert isinstance(recover, Recover)
    assert recover.origin.kind == "replica"
    assert recover.origin.stages == (stage,)
    assert [each[0] for each in harness.env.logged("plan")] == list(range(7))
    assert harness.coordinator.nodes == list(range(7))
    assert all(6 not in lane.path for lane in harness.coordinator.plan.lanes)
    (source,) = recover.origin.sources
    assert source in harness.coordinator.plan.stages[stage].nodes
    return harness, source
