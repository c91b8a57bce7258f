"""A whole cluster in one thread, under virtual time: the same nodes and coordinator that run in processes.

Everything that happens is an event in a heap, so a run depends on its inputs alone and takes as long as it takes to
handle the events, not as long as the cluster would. With the plan's own durations an iteration takes exactly the time
that the simulator promises. Computers may be real (`tensors`) or `Symbols`, which check what they are handed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skippipe import __version__
from skippipe.averaging import chunk_ns
from skippipe.dispatch import is_weights, place
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.runtime.control import COORDINATOR, Control, Hello, Welcome
from skippipe.runtime.coordinator import Coordinator, IterationReport, Keeper, Watcher
from skippipe.runtime.durations import planned_ns
from skippipe.runtime.node import Node
from skippipe.runtime.work import (
    Computer,
    Keep,
    Load,
    Measure,
    Outcome,
    Pass,
    Reduce,
    Show,
    Step,
    Task,
    Work,
    piece_sent,
)
from skippipe.transport.message import Kind, Message

Disturb = Callable[[int], int]
"""What becomes of a planned duration."""


@dataclass
class _Place:
    """What one node sees of the world."""

    cluster: VirtualCluster
    number: int

    def now_ns(self) -> int:
        return self.cluster.now_ns

    def send(self, receiver: int, message: Message) -> None:
        self.cluster.carry(self.number, receiver, message)

    def say(self, control: Control) -> None:
        self.cluster.after(0, lambda: self.cluster.coordinator.hear(self.number, control))

    def start(self, work: Work) -> None:
        self.cluster.compute(self.number, work)


@dataclass
class _Desk:
    """What the coordinator sees of the world."""

    cluster: VirtualCluster

    def now_ns(self) -> int:
        return self.cluster.now_ns

    def meet(self, node: int, address: str) -> None:
        pass

    def tell(self, node: int, control: Control) -> None:
        if isinstance(control, Welcome):
            self.cluster.after(0, lambda: self.cluster.nodes[node].welcomed(control.resumed), node)
            return
        self.cluster.after(0, lambda: self.cluster.nodes[node].hear(control), node)

    def store(self, stage: int, piece: Any) -> None:
        self.cluster.stored.setdefault(stage, []).append(piece)

    def save(self, stage: int, piece: Any) -> None:
        if self.cluster.keeper is not None:
            self.cluster.keeper.save(stage, piece)

    def saved(self, iterations: int) -> None:
        if self.cluster.keeper is not None:
            self.cluster.keeper.saved(iterations)

    def give(self, node: int, piece: int) -> None:
        assert self.cluster.keeper is not None
        stage = self.cluster.plan.stage_of[node]
        body, steps = self.cluster.keeper.piece(stage, piece)
        message = Message(Kind.CHUNK, 0, stage, piece, steps, body)
        self.cluster.after(0, lambda: self.cluster.nodes[node].restore(message), node)

    def iteration_done(self, report: IterationReport) -> None:
        self.cluster.reports.append(report)
        if self.cluster.watcher is not None:
            self.cluster.watcher.iteration_done(report)


@dataclass
class VirtualCluster:
    plan: Plan
    learning: Learning
    iterations: int
    computers: Mapping[int, Computer] | None = None
    """Of the nodes; none: symbols."""
    disturb: Disturb = lambda duration_ns: duration_ns
    recorded: frozenset[int] = frozenset()
    watcher: Watcher | None = None
    first: int = 0
    kept_every: int = 0
    keeper: Keeper | None = None
    """Where checkpoints go, and where state comes from to go on from."""
    resumed: bool = False
    stopped: Callable[[], bool] = lambda: False
    """Whether somebody wants the run to end."""
    now_ns: int = 0
    reports: list[IterationReport] = field(default_factory=list)
    stored: dict[int, list[Any]] = field(default_factory=dict)
    finished_ns: int = 0
    """When the last node had taken its last step."""

    def __post_init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._count = 0
        self._link_free_ns: dict[tuple[int, int, Kind], int] = {}
        if self.computers is None:
            self.computers = {node: Symbols(node, self.plan) for node in self.plan.stage_of}
        self.nodes = {node: Node(node, self.plan, _Place(self, node)) for node in self.plan.stage_of}
        desk = _Desk(self)
        self.coordinator = Coordinator(
            self.plan,
            self.learning,
            desk,
            desk,
            self.iterations,
            first=self.first,
            recorded=self.recorded,
            kept_every=self.kept_every,
            resumed=self.resumed,
        )

    def run(self) -> None:
        """Until everybody is done."""
        hello = Hello("", __version__)
        for node in self.nodes:
            self.after(0, lambda node=node: self.coordinator.hear(node, hello))  # type: ignore[misc]
        while self._heap or not self.coordinator.over:
            if not self._heap:  # nothing will happen any more, but that somebody's patience ends
                self.now_ns = self.coordinator.deadline_ns()
                self.coordinator.tick()
                continue
            self.now_ns = self._heap[0][0]
            touched: dict[int, None] = {}
            while self._heap and self._heap[0][0] == self.now_ns:
                _, _, node, happen = heapq.heappop(self._heap)
                happen()
                touched[node] = None
            for node in touched:
                if node != COORDINATOR:
                    self.nodes[node].decide()
            if self.stopped():
                self.coordinator.finish_early()

    def after(self, delay_ns: int, happen: Callable[[], None], node: int = COORDINATOR) -> None:
        """Let something happen to a node, which then decides."""
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._count, node, happen))
        self._count += 1

    def compute(self, number: int, work: Work) -> None:
        assert self.computers is not None
        result = self.computers[number].run(work)
        duration_ns = self.disturb(planned_ns(self.plan, number, work))
        if isinstance(work, Step):
            self.finished_ns = max(self.finished_ns, self.now_ns + duration_ns)
        self.after(duration_ns, lambda: self.nodes[number].finished(work, result), number)

    def carry(self, sender: int, receiver: int, message: Message) -> None:
        if receiver == COORDINATOR:
            self.after(0, lambda: self.coordinator.receive(sender, message))
            return
        costs = self.plan.costs
        if message.kind is Kind.CHUNK:
            stage = self.plan.stage_of[sender]
            transmit_ns = int(chunk_ns(costs, stage, len(self.plan.stages[stage].ring))[sender, receiver])
        else:
            transmit_ns = int(costs.transmit_ns[sender, receiver])
        link = sender, receiver, message.kind  # hops and pieces of gradients do not wait for each other
        end_ns = max(self.now_ns, self._link_free_ns.get(link, 0)) + self.disturb(transmit_ns)
        self._link_free_ns[link] = end_ns
        arrival_ns = end_ns + int(costs.flight_ns[sender, receiver])
        self.after(arrival_ns - self.now_ns, lambda: self.nodes[receiver].receive(sender, message), receiver)


@dataclass(frozen=True)
class Trail:
    """Stands for an activation or its gradient: which steps made it."""

    lane: int
    microbatch: int
    steps: int
    nbytes: int = 0


@dataclass(frozen=True)
class Gradient:
    """Stands for a piece of a summed gradient: how many microbatches of each node are in it."""

    piece: int
    visits: Counter[int]
    nbytes: int = 0


class Symbols:
    """A computer that computes nothing, but notices what is missing, doubled or out of order."""

    def __init__(self, node: int, plan: Plan) -> None:
        self._node = node
        self._plan = plan
        self._ring = plan.stages[plan.stage_of[node]].ring
        self._at = self._ring.index(node)
        self._held: set[tuple[int, int]] = set()
        self._visits = 0
        self._pieces: list[Counter[int]] = []
        self.history: list[int] = []
        """Microbatches in the mean gradient of every step taken."""

    def run(self, work: Work) -> Any:
        match work:
            case Task():
                return self._task(work)
            case Pass():
                return self._pass(work)
            case Measure():
                whole = self._pieces or [Counter({self._node: self._visits})]
                assert all(piece.total() == work.visits for piece in whole), (self._node, whole, work.visits)
                self.history.append(work.visits)
                return float(work.visits)
            case Step():
                assert not self._held, "a microbatch is still here"
                self._visits, self._pieces = 0, []
                return None
            case Show():
                return None if work.piece else Trail(0, 0, 0)
            case Keep() | Load():
                return None
            case Reduce():
                raise AssertionError("symbols know no other way to average")

    def _task(self, task: Task) -> Outcome:
        length = len(self._plan.lanes[task.lane].path)
        assert self._plan.lanes[task.lane].path[place(task.step, length)] == self._node
        which = task.lane, task.microbatch
        last = 3 * length + 1 if self._plan.split_backward else 2 * length + 1
        if task.step < length:
            assert which not in self._held
            self._held.add(which)
        elif task.step > length and (is_weights(task.step, length) or not self._plan.split_backward):
            self._held.remove(which)
            self._visits += 1
        assert len(self._held) <= self._plan.slots[self._node], "more microbatches than memory slots"
        assert task.step < last
        if 0 < task.step <= 2 * length:
            assert task.given == Trail(*which, task.step)
        return Outcome(Trail(*which, task.step + 1), 0.0 if task.step == length else None)

    def _pass(self, work: Pass) -> Gradient | None:
        size = len(self._ring)
        if work.round == 0:
            self._pieces = [Counter({self._node: self._visits}) for _ in range(size)]
        else:
            piece = work.given.piece
            if work.round < size:
                self._pieces[piece] += work.given.visits
            else:
                self._pieces[piece] = work.given.visits
        if work.round == 2 * (size - 1):
            return None
        outgoing = piece_sent(self._at, work.round, size)
        return Gradient(outgoing, Counter(self._pieces[outgoing]))
