"""A coordinator by itself: what it does to the world, and nodes that say what well-behaved ones would."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from skippipe import __version__
from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import WriteFailed
from skippipe.runtime.coordinator.state_machine import Callback, Coordinator, CoordinatorState, Event, IterationReport
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
    from_json,
    to_json,
)
from skippipe.runtime.node.ops import StateSource
from skippipe.transport.message import Message
from tests.helpers.plans import uniform_cluster
from tests.helpers.single_node import AT_ONCE, LEARNING, plan_of, small_plan


@dataclass
class Safe:
    """Keeps checkpoints, or notes that it would."""

    made: int | None = None
    saved_pieces: list[tuple[int, int, Any]] = field(default_factory=list)
    done: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    abandoned: int = 0
    lacking: str = ""
    moved: int = 0

    def save(self, stage: int, number: int, piece: Any) -> None:
        self.saved_pieces.append((stage, number, piece))

    def saved(self, iterations: int, steps: Sequence[int]) -> None:
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
class Room(Callback):
    """What a coordinator does to the world, in the order in which it does it."""

    now_s: float = 0.0
    keeper: Safe | None = None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    told: list[tuple[int, ControlMessage]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    stored: list[tuple[int, int, Any]] = field(default_factory=list)
    reports: list[IterationReport] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unwritten: WriteFailed | None = None
    """Why no stage can be written at the moment."""
    epoch: int = 0
    heirs: dict[int, int] = field(default_factory=dict)
    """Lane → its data node, if that is another than planned."""
    collections: dict[int, int] = field(default_factory=dict)
    """Node → the number under which it was last asked for a piece."""

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def meet(self, node: int, address: str) -> bool:
        self.log.append(("meet", node, address))
        return True

    def part(self, node: int) -> None:
        self.log.append(("part", node))

    def tell(self, node: int, control: ControlMessage) -> None:
        assert from_json(to_json(control)) == control
        if isinstance(control, GatherState):
            self.collections[node] = control.collection
            control = structs.replace(control, collection=ASKED)
        self.log.append(("tell", node, control))
        self.told.append((node, control))
        if isinstance(control, (Begin, Reroute, Drain)):
            self.epoch = control.epoch
        if isinstance(control, (Begin, Commit)):
            self.heirs.clear()
        elif isinstance(control, Reroute):
            self.heirs |= {lane: path[0] for lane, _, *path in control.lanes}

    def welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:  # noqa: ARG002
        self.log.append(("welcome", node, plan.stage_of[node], origin))

    def replan(self, node: int, plan: Plan) -> None:
        self.log.append(("replan", node, plan))

    def store(self, stage: int, number: int, piece: Any) -> None:
        if piece is None and self.unwritten is not None:
            raise self.unwritten
        self.stored.append((stage, number, piece))

    def note(self, record: dict[str, Any]) -> None:
        self.log.append(("note", record))
        self.notes.append(record)

    def give(self, node: int, stage: int, want: StateRequest) -> None:
        self.log.append(("give", node, stage, want.first, want.count))

    def iteration_done(self, report: IterationReport) -> None:
        self.reports.append(report)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    # what a test asks

    def news(self) -> dict[int, list[ControlMessage]]:
        """What was told since it was last asked, node by node."""
        found: dict[int, list[ControlMessage]] = {}
        for node, control in self.told:
            found.setdefault(node, []).append(control)
        self.told.clear()
        return found

    def logged(self, what: str) -> list[tuple[Any, ...]]:
        return [each[1:] for each in self.log if each[0] == what]

    def happenings(self) -> list[str]:
        return [event.kind for event in self.events]


ASKED = 0
"""Stands for any number of a collection."""
HELLO = Hello("127.0.0.1:1", __version__)


def is_now(coordinator: Coordinator, state: CoordinatorState) -> bool:
    return coordinator.state is state


@dataclass
class Course:
    """A coordinator in a room, and nodes that say what well-behaved ones would."""

    coordinator: Coordinator
    room: Room

    def hear(self, node: int, *controls: ControlMessage) -> Course:
        """Ready and Learned answer what the node was told last."""
        for control in controls:
            if isinstance(control, Ready | Recovered) and node in self.coordinator.membership:
                control = structs.replace(control, assignment=self.coordinator.membership[node].assignment)
            self.coordinator.hear(node, control)
        return self

    def receive(self, node: int, message: Message) -> None:
        """A piece, under the number that it was asked for."""
        header: Any = replace(message.header, collection=self.room.collections.get(node, 0))  # type: ignore[type-var]
        self.coordinator.receive(node, replace(message, header=header))

    def visits(self, node: int) -> list[list[int]]:
        lanes = enumerate(self.coordinator.plan.lanes)
        return [[lane, each] for lane, way in lanes if node in way.path for each in range(way.microbatches)]

    def averaged(self, node: int, **others: Any) -> Averaged:
        said = Averaged(self.coordinator.iteration, self.room.epoch, 4.0, self.visits(node), [], [], [], [])
        return structs.replace(said, **others)

    def contributed(self, node: int, visits: list[list[int]] | None = None) -> DrainAck:
        return DrainAck(self.coordinator.iteration, self.room.epoch, self.visits(node) if visits is None else visits)

    def come_back(self, *lanes: int, loss: float = 2.0) -> None:
        """All microbatches, or those of some lanes, at their data node."""
        for lane, way in enumerate(self.coordinator.plan.lanes):
            for microbatch in range(way.microbatches if not lanes or lane in lanes else 0):
                home = self.room.heirs.get(lane, way.path[0])
                self.hear(home, MicrobatchDone(self.coordinator.iteration, self.room.epoch, lane, microbatch, loss))

    def average(self, **norms: float) -> None:
        """Everybody who is there; `n4=5.0`: node 4 finds another norm."""
        for node in list(self.coordinator.nodes):
            self.hear(node, self.averaged(node, squared_norm=norms.get(f"n{node}", 4.0)))

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            self.come_back()
            self.average()

    def everybody(self, control: ControlMessage) -> dict[int, list[ControlMessage]]:
        return {node: [control] for node in self.coordinator.nodes}

    def wait(self, seconds: float, *silent: int, alive: bool = True, busy: Collection[int] = ()) -> None:
        """Ticks every second; all but some give signs of life, and some have work all the time."""
        since, until = self.room.now_s, self.room.now_s + seconds
        while self.room.now_s < until:
            self.room.now_s = min(until, self.room.now_s + 1.0)
            for node in self.coordinator.membership if alive else ():
                if node not in silent:
                    self.hear(node, Heartbeat("something", self.room.now_s - since if node in busy else 0.0))
            self.coordinator.tick()


def coordinating(iterations: int = 2, plan: Plan | None = None, keeper: Safe | None = None, **others: Any) -> Course:
    """As far as the first iteration, or as it goes with a journal."""
    room = Room(keeper=keeper)
    others = {"survival": AT_ONCE, **others}
    coordinator = Coordinator(plan or small_plan(), LEARNING, room, room, iterations, **others)
    course = Course(coordinator, room)
    if not others.get("wal"):
        for said in (HELLO, Ready()):
            for node in sorted(coordinator.plan.stage_of):
                course.hear(node, said)
        assert is_now(coordinator, CoordinatorState.TRAINING)
        room.news()
    return course


def assert_goes_on(course: Course, *lost: int) -> None:
    """To the end, without some of the nodes."""
    coordinator, room = course.coordinator, course.room
    assert is_now(coordinator, CoordinatorState.TRAINING), coordinator.failure
    assert not set(lost) & set(coordinator.nodes)
    course.come_back()
    for answer in (course.contributed, course.averaged):
        for node in list(coordinator.nodes):
            course.hear(node, answer(node))
    assert any(report.iteration == 0 for report in room.reports)
    assert coordinator.iteration == 1 or is_now(coordinator, CoordinatorState.STEPPING)


def even_plan() -> Plan:
    """Two nodes on each of three stages; nobody needs node 6."""
    return plan_of(7, ((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))


def with_a_quick_one(nodes: int) -> Cluster:
    """Nodes that are slow, so that it counts who works, and the last one of them quicker."""
    slow = uniform_cluster(nodes, flops_per_s=1e6)
    return replace(slow, nodes=(*slow.nodes[:-1], replace(slow.nodes[-1], flops_per_s=4e6)))


def learning_late() -> tuple[Course, int]:
    """Node 6 learns; and from whom."""
    course = coordinating(5, replace(even_plan(), cluster=with_a_quick_one(7)))
    course.hear(6, HELLO)
    assert course.room.logged("meet")[-1] == (6, HELLO.address)
    ((number, stage, origin),) = course.room.logged("welcome")[6:]
    assert (number, origin) == (6, None)
    course.hear(6, Ready())
    assert not course.room.told, "it has to wait for the next iteration"
    course.iterate()
    begin, learn = course.room.news()[6]
    assert begin == Begin(1, 1, False)
    assert isinstance(learn, Recover)
    assert learn.origin.kind == "replica"
    assert learn.origin.stages == (stage,)
    assert [each[0] for each in course.room.logged("replan")] == list(range(7))
    assert course.coordinator.nodes == list(range(7))
    assert all(6 not in lane.path for lane in course.coordinator.plan.lanes)
    (teacher,) = learn.origin.sources
    assert teacher in course.coordinator.plan.stages[stage].nodes
    return course, teacher
