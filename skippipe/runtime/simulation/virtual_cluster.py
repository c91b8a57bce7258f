"""A whole cluster in one thread, under virtual time: the same nodes and coordinator that run in processes.

Everything that happens is an event in a heap, so a run depends on its inputs alone and takes as long as it takes to
handle the events, not as long as the cluster would. With the plan's own durations an iteration takes exactly the time
that the simulator predicts. Executors may be real (`stage_executor`) or `SymbolicExecutor`, which checks its inputs.

Nodes can be killed, frozen, cut off and started again, and so can the coordinator (see `fault_injection`): what happens
then is what sockets and processes would do, without the seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from skippipe import __version__
from skippipe.cluster import Cluster
from skippipe.cost_model import ns
from skippipe.heartbeat import HEARTBEATS, RESEND
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import (
    Callback,
    CheckpointStore,
    Event,
    IterationReport,
    StopRequests,
    ValidationReport,
)
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.state_machine import Coordinator
from skippipe.runtime.fencing import Fence, Incarnation
from skippipe.runtime.messages import (
    COORDINATOR,
    ControlMessage,
    Heartbeat,
    Hello,
    LinkDown,
    StateRequest,
    Stop,
    TasksDone,
)
from skippipe.runtime.node.ops import Executor, Op, OptimizerStep, StageTask, planned_ns
from skippipe.runtime.node.state_machine import TrainingNode
from skippipe.runtime.simulation.fault_injection import Fault, MessageReplay, phase_of
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_network import VirtualNetwork
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import Message, Stamp, StatePiece

Disturb = Callable[[int], int]
"""Gives the actual duration for a planned one."""
Action = Callable[[], object]

FALSE_REPORTS = 20  # of each link within a heartbeat, by a node that reports links falsely
EXIT_NOTICED_NS = 1_000_000  # from the end of a process until the coordinator is told


@dataclass
class _NodeEnv:
    """The `NodeEnv` of one incarnation of a node; without effect once another one has begun."""

    cluster: VirtualCluster
    number: int
    incarnation: int

    @property
    def is_alive(self) -> bool:
        return self.cluster.alive.get(self.number) == self.incarnation

    def now_ns(self) -> int:
        return self.cluster.now_ns

    def send(self, receiver: int, message: Message) -> None:
        if self.is_alive:
            self.cluster.send(self.number, receiver, message)

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        if self.is_alive:
            self.cluster.send_control(self.number, control, to)

    def start(self, op: Op) -> None:
        self.cluster.start_op(self.number, op)

    def fits(self, message: Message, expected: Any) -> bool:
        return self.cluster.executor_of[self.number].fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        return self.cluster.executor_of[self.number].prefetch(given, device)


@dataclass
class _CoordinatorEnv(Callback):
    """The `CoordinatorEnv` of one incarnation of the coordinator; without effect once another one has begun."""

    cluster: VirtualCluster
    incarnation: int
    fence: Fence = field(default_factory=Fence)

    def now_ns(self) -> int:
        return self.cluster.now_ns

    @property
    def checkpoint_store(self) -> CheckpointStore | None:
        return self.cluster.checkpoint_store

    def hear(self, node: int, control: ControlMessage, stamp: Stamp) -> None:
        if self.fence.accepts(node, stamp, hello=isinstance(control, Hello)):
            self.cluster.coordinator.on_message(node, control)
        elif self.fence.is_other_incarnation(node, stamp):
            self.send(node, Stop("another node has joined under your name", again=True), stamp.incarnation)

    def connect(self, node: int, address: str) -> bool:  # noqa: ARG002
        self.fence.joined(node)
        return True

    def is_called(self, node: int) -> bool:  # noqa: ARG002
        return False

    def disconnect(self, node: int) -> None:
        self.fence.left(node)

    def send(self, node: int, control: ControlMessage, incarnation: int | None = None) -> None:
        self._send(node, lambda: self.cluster.nodes[node].handle_control(control), incarnation)

    def send_welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        self._send(node, lambda: self.cluster.assign(node, plan, origin, assignment))

    def send_plan(self, node: int, plan: Plan) -> None:
        self._send(node, lambda: self.cluster.nodes[node].replan(plan))

    def store_weights(self, stage: int, number: int, piece: Any) -> None:
        self.cluster.stored[stage] = [*(self.cluster.stored[stage] if number else ()), piece]

    def append_wal(self, record: dict[str, Any]) -> None:
        if self.incarnation == self.cluster.coordinator_incarnation:
            self.cluster.wal.append(record)

    def send_checkpoint_state(self, node: int, stage: int, request: StateRequest) -> None:
        assert self.cluster.checkpoint_store is not None
        state = self.cluster.checkpoint_store.state(stage, request.first, request.count)
        message = Message(StatePiece(0, request.first, request.assignment), state)
        self._deliver(node, lambda: self.cluster.nodes[node].receive(COORDINATOR, message))

    def iteration_done(self, report: IterationReport) -> None:
        self.cluster.reports.append(report)
        self.cluster.callback.iteration_done(report)

    def validated(self, report: ValidationReport) -> None:
        self.cluster.validations.append(report)
        self.cluster.callback.validated(report)

    def happened(self, event: Event) -> None:
        self.cluster.events.append((self.cluster.now_ns, event))
        self.cluster.callback.happened(event)

    def measured(self, cluster: Cluster) -> None:
        self.cluster.callback.measured(cluster)

    def _send(self, node: int, action: Action, incarnation: int | None = None) -> None:
        stamp = self.fence.stamp(node, incarnation)
        self._deliver(node, lambda: action() if self.cluster.incarnation_of[node].accepts(stamp) else None)

    def _deliver(self, node: int, action: Action) -> None:
        if self.incarnation == self.cluster.coordinator_incarnation:
            self.cluster.deliver(COORDINATOR, node, action, self.cluster.control_delay_ns(COORDINATOR, node))


@dataclass
class VirtualCluster:
    """A coordinator and its nodes under virtual time; `run` runs them to the end."""

    plan: Plan
    settings: CoordinatorSettings
    executors: Mapping[int, Executor] | None = None
    """Node → its executor; none: symbolic ones."""
    disturb: Disturb = lambda duration_ns: duration_ns
    callback: Callback = field(default_factory=Callback)
    checkpoint_store: CheckpointStore | None = None
    """Where checkpoints go, and where the state comes from that a resumed run starts with."""
    stop_requests: StopRequests = lambda: 0
    builder: Callable[[int, Plan], Executor] | None = None
    """Makes the executor of a node that was started again, or moved; none: a symbolic one."""
    faults: Sequence[Fault] = ()
    """Faults to inject. Heartbeats are sent only if there are any."""
    late: Mapping[int, float] = field(default_factory=dict)
    """Node that is not there at the start → seconds until it is."""
    now_ns: int = 0
    reports: list[IterationReport] = field(default_factory=list)
    validations: list[ValidationReport] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)
    stored: dict[int, list[Any]] = field(default_factory=dict)
    wal: list[dict[str, Any]] = field(default_factory=list)
    finished_ns: int = 0
    """When the last node had taken its last step."""

    def __post_init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Action]] = []
        self._count = 0
        self._network = VirtualNetwork(self.plan.costs, lambda planned_ns: self.disturb(planned_ns))
        self._busy_ns: dict[int, int] = {}
        """Node → since when it has had work without a pause."""
        self._idle_ns: dict[int, int] = {}
        """Node → since when it has no work."""
        self.frozen: dict[int, list[Action]] = {}
        """Node → what is delivered to it once it thaws."""
        self._broken: set[tuple[int, int]] = set()
        """Links that carry nothing: from, to."""
        self._slowed: dict[int, float] = {}
        """Node → factor of the duration of its operations."""
        self._delayed: dict[tuple[int, int], float] = {}
        """Link → factor of its latency and transfer times."""
        self._pending = list(self.faults)
        self._incarnations = 0
        self.alive = {node: 0 for node in self.plan.stage_of if node not in self.late}
        """Node that is alive → the number of its incarnation."""
        self.coordinator_incarnation = 0
        self.incarnation_of = {node: Incarnation(1) for node in range(len(self.plan.cluster.nodes))}
        self._replay = MessageReplay()
        self._accusers: set[int] = set()
        symbolic = {node: SymbolicExecutor(node, self.plan) for node in self.plan.stage_of}
        self.executor_of: dict[int, Executor] = dict(self.executors or symbolic)
        self.nodes = {node: TrainingNode(node, self.plan, _NodeEnv(self, node, 0)) for node in self.plan.stage_of}
        self.coordinator = self._start_coordinator(())

    def _start_coordinator(self, wal: Any) -> Coordinator:
        self._env = env = _CoordinatorEnv(self, self.coordinator_incarnation)
        coordinator = Coordinator(self.plan, self.settings, env, env, wal)
        env.fence.term = coordinator.term
        return coordinator

    def run(self) -> None:
        """Run until the coordinator and all nodes are done."""
        for node in self.alive:
            self._send_hello(node)
        for node, seconds in self.late.items():
            self.after(int(seconds * 1e9), partial(self.start, node))
        if self.faults:
            self._send_heartbeats()
        while self._heap or not self.coordinator.over:
            if self.faults and self.coordinator.over:
                break
            if not self._heap:  # nothing will happen any more, but that a deadline passes
                self.now_ns = max(self.now_ns, self.coordinator.deadline_ns())
                self.coordinator.tick()
                continue
            self.now_ns = self._heap[0][0]
            touched: dict[int, None] = {}
            while self._heap and self._heap[0][0] == self.now_ns:
                *_, node, action = heapq.heappop(self._heap)
                action()
                touched[node] = None
            for node in touched:
                if node != COORDINATOR and node in self.alive and node not in self.frozen:
                    self.nodes[node].decide()
                    stop = self.nodes[node].stopped
                    if stop is not None and stop.again:  # it was declared dead by mistake
                        self._rejoin(node, self.nodes[node].plan)
            self.coordinator.on_stop_requests(self.stop_requests())

    def after(self, delay_ns: int, action: Action, node: int = COORDINATOR, rank: int = 0) -> None:
        """Let something happen to a node, which then decides; of what happens at one time, the smallest rank first."""
        heapq.heappush(self._heap, (self.now_ns + delay_ns, rank, self._count, node, action))
        self._count += 1

    def deliver(self, sender: int, node: int, action: Action, delay_ns: int = 0, rank: int = 0) -> None:
        """Something that happens to a node if it still is the same incarnation by then, and later if it is frozen."""
        if sender != node:
            self._replay_later(sender, node, action, delay_ns)
        incarnation = self.alive.get(node)
        if incarnation is not None and (sender, node) not in self._broken:
            self.after(delay_ns, lambda: self._arrive(node, action, incarnation), node, rank)

    def _replay_later(self, sender: int, receiver: int, action: Action, delay_ns: int = 0) -> None:
        """What comes after a delay may come again, in another incarnation of either or to another coordinator."""
        for later_ns in self._replay.of(sender, receiver):
            self.after(delay_ns + later_ns, lambda: self._arrive(receiver, action, None), receiver)

    def _arrive(self, node: int, action: Action, incarnation: int | None) -> None:
        """Something arrives at one incarnation of a node, or at any (None); or at the coordinator."""
        if node in self.alive and incarnation not in (None, self.alive[node]):
            return
        if node in self.frozen:
            self.frozen[node].append(action)
        elif node in self.alive or node == COORDINATOR:
            action()

    def control_delay_ns(self, sender: int, receiver: int) -> int:
        return self._replay.arrival_ns(sender, receiver, self.now_ns) - self.now_ns

    def send_control(self, sender: int, control: ControlMessage, to: int) -> None:
        if to != COORDINATOR:
            delay_ns = int(self.plan.costs.flight_ns[sender, to]) if isinstance(control, TasksDone) else 0
            self.deliver(sender, to, lambda: self.nodes[to].handle_peer_control(sender, control), delay_ns)
        else:
            stamp = self.incarnation_of[sender].stamp()
            self._deliver_to_coordinator(sender, lambda: self._env.hear(sender, control, stamp))

    def start_op(self, number: int, op: Op) -> None:
        node, result = self.nodes[number], self.executor_of[number].run(op)
        duration_ns = int(self.disturb(planned_ns(self.plan, node.stage, number, op)) * self._slowed.get(number, 1.0))
        if isinstance(op, OptimizerStep):
            self.finished_ns = max(self.finished_ns, self.now_ns + duration_ns)
        if self._idle_ns.pop(number, None) != self.now_ns and len(node.ops.running) == 1:
            self._busy_ns[number] = self.now_ns

        def finish() -> None:
            if self.nodes[number] is node:  # or it has got another stage meanwhile
                node.finished(op, result)
            if not node.ops.running:
                self._idle_ns[number] = self.now_ns

        rank = op.lane - len(self.plan.lanes) if isinstance(op, StageTask) else 0  # as lanes in the simulator
        self.deliver(number, number, finish, duration_ns, rank)
        for fault in [each for each in self._pending if self._strikes(each, number, op)]:
            self._pending.remove(fault)
            self.after(duration_ns // 2, lambda fault=fault: self._begin(fault))  # type: ignore[misc]

    def send(self, sender: int, receiver: int, message: Message) -> None:
        if receiver == COORDINATOR:
            self._deliver_to_coordinator(sender, lambda: self.coordinator.on_piece(sender, message))
            return
        size, planned_ns = self._network.planned(self.nodes[sender], (sender, receiver), message)
        factor = self._delayed.get((sender, receiver), 1.0)
        first_ns, took_ns = self._network.send((sender, receiver), size, planned_ns, factor, self.now_ns)

        def arrive() -> None:
            self.nodes[receiver].receive(sender, message)

        def download() -> None:
            start_ns = self._network.download(receiver, size, self.now_ns)
            self.deliver(sender, receiver, arrive, start_ns + took_ns - self.now_ns)

        if self._network.is_shared(receiver):
            self.after(first_ns - self.now_ns, download, receiver)
        else:
            self.deliver(sender, receiver, arrive, first_ns + took_ns - self.now_ns)

    def assign(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        """A node gets its stage; a node that had one gives it up."""
        if self.nodes[node].iteration >= 0 or self.nodes[node].stage != plan.stage_of[node]:
            self._new_machine(node, plan)
        self.nodes[node].replan(plan)
        self.nodes[node].executor_ready(origin, assignment)

    # Faults

    def _strikes(self, fault: Fault, number: int, op: Op) -> bool:
        if (phase := phase_of(op)) is None or phase != fault.during:
            return False
        common = phase in ("forward", "backward", "averaging", "step")  # that every node does, if it does anything
        any_node = not common or not any(node in self.alive for node in fault.nodes)
        return fault.strikes(number, op, self.nodes[number].iteration, any_node=any_node)

    def _begin(self, fault: Fault) -> None:
        begin, end = self._effect(fault)
        begin()
        if fault.lasts_s is not None:
            self.after(int(fault.lasts_s * 1e9), end)

    def _effect(self, fault: Fault) -> tuple[Action, Action]:
        """What happens when a fault begins, and when it ends."""
        node, other = fault.nodes[0], fault.nodes[-1]
        links = [(node, other)] if fault.kind == "cut one way" else [(node, other), (other, node)]
        match fault.kind:
            case "kill" if node == COORDINATOR:
                return self.kill_coordinator, self.restart_coordinator
            case "kill":
                return lambda: self.kill(node), lambda: self.start(node)
            case "freeze":
                return lambda: node in self.alive and self.frozen.setdefault(node, []), lambda: self.thaw(node)
            case "cut" | "cut one way":
                return lambda: self._cut(links), lambda: self._mend(links)
            case "slow node":
                return lambda: self._slowed.update({node: fault.times}), lambda: self._slowed.pop(node, None)
            case "slow link":
                slow = dict.fromkeys(links, fault.times)
                return lambda: self._delayed.update(slow), lambda: [self._delayed.pop(link, None) for link in links]
            case "poison":
                return lambda: self._poison(node), lambda: None
            case "lose":
                return lambda: cast(Any, self.executor_of[node]).lose(fault.device, "as planned"), lambda: None
            case "stale":
                return lambda: self._replay.begin(fault), lambda: self._replay.end(fault)
            case "accuse":
                return lambda: self._accuse(node), lambda: self._accusers.discard(node)

    def kill(self, node: int) -> None:
        if self.alive.pop(node, None) is None:
            return
        self.frozen.pop(node, None)
        self._network.forget(node)
        self.after(EXIT_NOTICED_NS, partial(self._to_coordinator, partial(self._report_exit, node)))

    def start(self, node: int) -> None:
        """Start another incarnation of a node."""
        if node in self.alive:
            return
        self._incarnations += 1
        self.alive[node] = self._incarnations
        self._rejoin(node, self.plan)

    def thaw(self, node: int) -> None:
        for action in self.frozen.pop(node, ()):
            self.deliver(node, node, action)

    def _cut(self, links: Sequence[tuple[int, int]]) -> None:
        for sender, receiver in links:
            self._broken.add((sender, receiver))
            if COORDINATOR not in (sender, receiver):
                self.after(self._heartbeat_ns, partial(self._report_link, sender, receiver))

    def _mend(self, links: Sequence[tuple[int, int]]) -> None:
        for sender, receiver in links:
            self._broken.discard((sender, receiver))
            if sender in self.alive and receiver in self.alive and COORDINATOR not in (sender, receiver):
                self.deliver(sender, sender, lambda s=sender, r=receiver: self.nodes[s].reconnected(r))  # type: ignore[misc]

    def kill_coordinator(self) -> None:
        """The coordinator's process ends; its write-ahead log stays."""
        self.coordinator_incarnation += 1

    def restart_coordinator(self) -> None:
        """The coordinator is started again, from its log, and nodes find it."""
        self.coordinator_incarnation += 1
        self.coordinator = self._start_coordinator(list(self.wal))
        for node in self.alive:
            self._send_hello(node)

    @property
    def _coordinator_is_down(self) -> bool:
        return self._env.incarnation != self.coordinator_incarnation

    @property
    def _heartbeat_ns(self) -> int:
        return ns(self.settings.deadlines.heartbeat.total_seconds())

    def _poison(self, node: int) -> None:
        if isinstance(executor := self.executor_of[node], SymbolicExecutor):
            executor.poison = True

    def _accuse(self, node: int) -> None:
        self._accusers.add(node)
        for accused in sorted(self.plan.stage_of.keys() - {node}):
            self._report_link(node, accused)

    def _deliver_to_coordinator(self, sender: int, action: Action) -> None:
        delay_ns, arrive = self.control_delay_ns(sender, COORDINATOR), partial(self._to_coordinator, action)
        self._replay_later(sender, COORDINATOR, arrive, delay_ns)
        if (sender, COORDINATOR) not in self._broken:
            self.after(delay_ns, arrive)

    def _to_coordinator(self, action: Action) -> None:
        if not self._coordinator_is_down:
            action()

    def _report_exit(self, node: int) -> None:
        if node not in self.alive:
            self.coordinator.node_lost(node, "its process ended")

    def _report_link(self, sender: int, receiver: int) -> None:
        """A node reports a link that is cut and needed; an accuser reports any."""
        lies = sender in self._accusers
        if not lies and (sender, receiver) not in self._broken:
            return
        if sender in self.alive and receiver in self.alive and sender not in self.frozen:
            node = self.nodes[sender]
            if lies or receiver in node.active_peers():
                self.send_control(sender, LinkDown(receiver, node.epoch), COORDINATOR)
        self.after(self._heartbeat_ns // (FALSE_REPORTS if lies else 1), lambda: self._report_link(sender, receiver))

    def _new_machine(self, node: int, plan: Plan) -> None:
        self.nodes[node] = TrainingNode(node, plan, _NodeEnv(self, node, self.alive[node]))
        self.executor_of[node] = self.builder(node, plan) if self.builder else SymbolicExecutor(node, plan)
        self._busy_ns.pop(node, None)
        self._idle_ns.pop(node, None)

    def _send_hello(self, node: int) -> None:
        if node not in self.frozen:
            self.send_control(node, self.nodes[node].hello("", __version__), COORDINATOR)

    def _rejoin(self, node: int, plan: Plan) -> None:
        self.incarnation_of[node] = Incarnation(self.incarnation_of[node].number + 1)
        self._new_machine(node, plan)
        self._send_hello(node)

    def _send_heartbeats(self) -> None:
        """Heartbeats of all nodes, and the coordinator's look at the clock."""
        interval_ns = self._heartbeat_ns // HEARTBEATS
        for node in list(self.alive):
            if node not in self.frozen:
                busy_ns = self.now_ns - self._busy_ns.get(node, self.now_ns) if node not in self._idle_ns else 0
                self.send_control(node, Heartbeat(self.nodes[node].doing, busy_ns / 1e9), COORDINATOR)
                self.nodes[node].retry_requests(int(RESEND * HEARTBEATS * interval_ns))
        if not self._coordinator_is_down:
            self.after(0, lambda: self._to_coordinator(lambda: self.coordinator.tick()))
        if not self.coordinator.over:
            self.after(interval_ns, self._send_heartbeats)
