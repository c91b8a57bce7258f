"""A whole cluster in one thread, under virtual time: the same nodes and coordinator that run in processes.

Everything that happens is an event in a heap, so a run depends on its inputs alone and takes as long as it takes to
handle the events, not as long as the cluster would. With the plan's own durations an iteration takes exactly the time
that the simulator promises. Computers may be real (`tensors`) or `Symbols`, which check what they are handed.

Nodes can be killed, frozen, cut off and started again, and so can the coordinator (see `faults`): what happens then is
what sockets and processes would do, without the seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skippipe import __version__
from skippipe.averaging import chunk_ns
from skippipe.cluster import Cluster
from skippipe.costs import ns
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.recipe import Recipe
from skippipe.runtime.apprentice import is_backup, loan
from skippipe.runtime.control import COORDINATOR, Alive, Broken, Control, Hello, Stop, Want
from skippipe.runtime.coordinator import Coordinator, Deadlines, Event, IterationReport, Keeper, Survival, Watcher
from skippipe.runtime.durations import planned_ns
from skippipe.runtime.echoes import Echoes
from skippipe.runtime.faults import Fault, phase_of
from skippipe.runtime.fencing import Fence, Life, Stamp
from skippipe.runtime.node import Node
from skippipe.runtime.surroundings import Asked
from skippipe.runtime.symbols import PIECES, Symbols
from skippipe.runtime.work import Computer, Step, Work
from skippipe.transport.message import Kind, Message

Disturb = Callable[[int], int]
"""What becomes of a planned duration."""

FALSE_REPORTS = 20  # of each link within a heartbeat, by a node that reports links falsely
NOTICED_NS = 1_000_000  # from the end of a process to the news of it


@dataclass
class _Place:
    """What one node sees of the world. It sees nothing any more when another life of the node has begun."""

    cluster: VirtualCluster
    number: int
    life: int

    @property
    def lives(self) -> bool:
        return self.cluster.lives.get(self.number) == self.life

    def now_ns(self) -> int:
        return self.cluster.now_ns

    def send(self, receiver: int, message: Message) -> None:
        self.cluster.carry(self, receiver, message)

    def say(self, control: Control, to: int = COORDINATOR) -> None:
        self.cluster.say(self, control, to)

    def start(self, work: Work) -> None:
        self.cluster.compute(self, work)

    def fits(self, message: Message, at: int, size: int) -> bool:
        return self.cluster.machines[self.number].fits(message, at, size)


@dataclass
class _Desk(Watcher):
    """What a coordinator sees of the world; nothing any more once another has taken its place."""

    cluster: VirtualCluster
    life: int
    fence: Fence = field(default_factory=Fence)

    def now_ns(self) -> int:
        return self.cluster.now_ns

    @property
    def keeper(self) -> Keeper | None:
        return self.cluster.keeper

    def hear(self, node: int, control: Control, stamp: Stamp) -> None:
        if self.fence.takes(node, stamp, hello=isinstance(control, Hello)):
            self.cluster.coordinator.hear(node, control)
        elif self.fence.is_ghost(node, stamp):
            self.tell(node, Stop("another speaks in your name", again=True), stamp.life)

    def meet(self, node: int, address: str) -> bool:  # noqa: ARG002
        self.fence.met(node)
        return True

    def part(self, node: int) -> None:
        self.fence.parted(node)

    def tell(self, node: int, control: Control, life: int | None = None) -> None:
        self._say(node, lambda: self.cluster.nodes[node].hear(control), life)

    def welcome(self, node: int, plan: Plan, origin: dict[str, Any], assignment: int) -> None:
        self._say(node, lambda: self.cluster.build(node, plan, origin, assignment))

    def replan(self, node: int, plan: Plan) -> None:
        self._say(node, lambda: self.cluster.nodes[node].replan(plan))

    def store(self, stage: int, number: int, piece: Any) -> None:
        if number == 0:
            self.cluster.stored[stage] = []
        self.cluster.stored[stage].append(piece)

    def note(self, record: dict[str, Any]) -> None:
        if self.life == self.cluster.reign:
            self.cluster.journal.append(record)

    def give(self, node: int, stage: int, want: Want) -> None:
        assert self.cluster.keeper is not None
        message = loan(want.first, self.cluster.keeper.state(stage, want.first, want.count), want.assignment)
        self._reach(node, lambda: self.cluster.nodes[node].restore(message))

    def iteration_done(self, report: IterationReport) -> None:
        self.cluster.reports.append(report)
        if self.cluster.watcher is not None:
            self.cluster.watcher.iteration_done(report)

    def happened(self, event: Event) -> None:
        self.cluster.events.append((self.cluster.now_ns, event))
        if self.cluster.watcher is not None:
            self.cluster.watcher.happened(event)

    def measured(self, cluster: Cluster) -> None:
        if self.cluster.watcher is not None:
            self.cluster.watcher.measured(cluster)

    def _say(self, node: int, happen: Callable[[], None], life: int | None = None) -> None:
        stamp = self.fence.stamp(node, life)
        self._reach(node, lambda: happen() if self.cluster.born[node].takes(stamp) else None)

    def _reach(self, node: int, happen: Callable[[], None]) -> None:
        if self.life == self.cluster.reign:
            self.cluster.reach(COORDINATOR, node, happen, self.cluster.lateness_ns(COORDINATOR, node))


@dataclass
class VirtualCluster:
    plan: Plan
    learning: Learning
    iterations: int
    computers: Mapping[int, Computer] | None = None
    """Of the nodes; none: symbols."""
    recipe: Recipe = field(default_factory=Recipe)
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """For paths of other lengths."""
    disturb: Disturb = lambda duration_ns: duration_ns
    recorded: Container[int] = frozenset()
    watcher: Watcher | None = None
    first: int = 0
    kept_every: int = 0
    keeper: Keeper | None = None
    """Where checkpoints go, and where state comes from to go on from."""
    resumed: bool = False
    asked: Asked = lambda: 0
    """For the end of the run."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    survival: Survival = field(default_factory=Survival)
    builder: Callable[[int, Plan], Computer] | None = None
    """Makes the computer of a node that was started again, or moved; none: symbols."""
    faults: Sequence[Fault] = ()
    """What goes wrong. If anything does, nodes give signs of life, and somebody listens."""
    now_ns: int = 0
    reports: list[IterationReport] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)
    stored: dict[int, list[Any]] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    finished_ns: int = 0
    """When the last node had taken its last step."""

    def __post_init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._count = 0
        self._link_free_ns: dict[tuple[int, int, Kind], int] = {}
        self._busy_ns: dict[int, int] = {}
        """Node → since when it has had work all the time."""
        self._idle_ns: dict[int, int] = {}
        """Node → since when it has none."""
        self.frozen: dict[int, list[Callable[[], None]]] = {}
        """Node → what happened to it meanwhile."""
        self.broken: set[tuple[int, int]] = set()
        """Links that carry nothing: from, to."""
        self.slowed: dict[int, float] = {}
        """Node → how many times longer its tasks take."""
        self.delayed: dict[tuple[int, int], float] = {}
        """Link → how many times longer it takes."""
        self.reign = 0
        self._lived = 0
        self._pending = list(self.faults)
        self.lives = dict.fromkeys(self.plan.stage_of, 0)
        self.born = {node: Life(1) for node in range(len(self.plan.cluster.nodes))}
        self._echoes = Echoes()
        self._accusers: set[int] = set()
        made = self.computers or {node: Symbols(node, self.plan) for node in self.plan.stage_of}
        self.machines = dict(made)
        self.nodes = {node: Node(node, self.plan, _Place(self, node, 0)) for node in self.plan.stage_of}
        self.coordinator = self._appoint(())

    def _appoint(self, journal: Any) -> Coordinator:
        self._appointed = self.reign
        self._desk = desk = _Desk(self, self.reign)
        coordinator = Coordinator(
            self.plan,
            self.learning,
            desk,
            desk,
            self.iterations,
            first=self.first,
            recipe=self.recipe,
            plans=self.plans,
            recorded=self.recorded,
            kept_every=self.kept_every,
            resumed=self.resumed,
            deadlines=self.deadlines,
            survival=self.survival,
            journal=journal,
        )
        desk.fence.term = coordinator.term
        return coordinator

    def run(self) -> None:
        """Until everybody is done."""
        for node in self.nodes:
            self._greet(node)
        if self.faults:
            self._beat()
        while self._heap or not self.coordinator.over:
            if self.faults and self.coordinator.over:
                break
            if not self._heap:  # nothing will happen any more, but that somebody's patience ends
                self.now_ns = max(self.now_ns, self.coordinator.deadline_ns())
                self.coordinator.tick()
                continue
            self.now_ns = self._heap[0][0]
            touched: dict[int, None] = {}
            while self._heap and self._heap[0][0] == self.now_ns:
                _, _, node, happen = heapq.heappop(self._heap)
                happen()
                touched[node] = None
            for node in touched:
                if node != COORDINATOR and node in self.lives and node not in self.frozen:
                    self.nodes[node].decide()
                    self._look_after(node)
            self.coordinator.asked_to_end(self.asked())

    def after(self, delay_ns: int, happen: Callable[[], None], node: int = COORDINATOR) -> None:
        """Let something happen to a node, which then decides."""
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._count, node, happen))
        self._count += 1

    def reach(self, sender: int, node: int, happen: Callable[[], None], delay_ns: int = 0) -> None:
        """Something that happens to a node if it still lives the same life by then, and later if it is frozen."""
        if sender != node:
            self.echo(sender, node, happen, delay_ns)
        life = self.lives.get(node)
        if life is not None and (sender, node) not in self.broken:
            self.after(delay_ns, lambda: self._arrive(node, happen, life), node)

    def echo(self, sender: int, receiver: int, happen: Callable[[], None], delay_ns: int = 0) -> None:
        """What comes after a delay may come again, in another life of either or to another coordinator."""
        for later_ns in self._echoes.of(sender, receiver):
            self.after(delay_ns + later_ns, lambda: self._arrive(receiver, happen, None), receiver)

    def _arrive(self, node: int, happen: Callable[[], None], life: int | None) -> None:
        """At a node, in one of its lives or in any; or at the coordinator."""
        if node in self.lives and life not in (None, self.lives[node]):
            return
        if node in self.frozen:
            self.frozen[node].append(happen)
        elif node in self.lives or node == COORDINATOR:
            happen()

    def lateness_ns(self, sender: int, receiver: int) -> int:
        return self._echoes.arrival_ns(sender, receiver, self.now_ns) - self.now_ns

    def say(self, place: _Place, control: Control, to: int) -> None:
        if not place.lives:
            return
        sender = place.number
        if to != COORDINATOR:
            self.reach(sender, to, lambda: self.nodes[to].asked(sender, control))
        else:
            stamp = self.born[sender].stamp()
            self._reach_coordinator(sender, lambda: self._desk.hear(sender, control, stamp))

    def compute(self, place: _Place, work: Work) -> None:
        number = place.number
        result = self.machines[number].run(work)
        planned = planned_ns(self.plan, self.nodes[number].stage, number, work)
        duration_ns = int(self.disturb(planned) * self.slowed.get(number, 1.0))
        if isinstance(work, Step):
            self.finished_ns = max(self.finished_ns, self.now_ns + duration_ns)
        if self._idle_ns.pop(number, None) != self.now_ns:
            self._busy_ns[number] = self.now_ns
        node = self.nodes[number]

        def finish() -> None:
            self._idle_ns[number] = self.now_ns
            node.finished(work, result)

        self.reach(number, number, finish, duration_ns)
        for fault in [each for each in self._pending if self._strikes(each, number, work)]:
            self._pending.remove(fault)
            self.after(duration_ns // 2, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def carry(self, place: _Place, receiver: int, message: Message) -> None:
        sender = place.number
        if not place.lives:
            return
        if receiver == COORDINATOR:
            self._reach_coordinator(sender, lambda: self.coordinator.receive(sender, message))
            return
        plan, costs = self.nodes[sender].plan, self.plan.costs
        if message.kind is Kind.CHUNK:
            stage = self.nodes[sender].stage
            transmit_ns = int(chunk_ns(costs, stage, max(1, len(plan.stages[stage].ring)))[sender, receiver])
            if is_backup(message):
                size = getattr(message.body, "nbytes", plan.workload.backup_bytes // PIECES)
                transmit_ns = ns(size / costs.bandwidth_bytes_per_s[sender, receiver])
        else:
            transmit_ns = int(costs.transmit_ns[sender, receiver])
        link = sender, receiver, message.kind  # hops and pieces of gradients do not wait for each other
        times = self.delayed.get((sender, receiver), 1.0)
        end_ns = max(self.now_ns, self._link_free_ns.get(link, 0)) + int(self.disturb(transmit_ns) * times)
        self._link_free_ns[link] = end_ns
        arrival_ns = end_ns + int(costs.flight_ns[sender, receiver] * times)
        delay_ns = arrival_ns - self.now_ns
        self.reach(sender, receiver, lambda: self.nodes[receiver].receive(sender, message), delay_ns)

    def build(self, node: int, plan: Plan, origin: dict[str, Any], assignment: int) -> None:
        """A node is told its stage; a node that had one forgets it."""
        if self.nodes[node].iteration >= 0 or self.nodes[node].stage != plan.stage_of[node]:
            self._new_machine(node, plan)
        self.nodes[node].replan(plan)
        self.nodes[node].welcomed(origin, assignment)

    # What goes wrong

    def _strikes(self, fault: Fault, number: int, work: Work) -> bool:
        phase = phase_of(work)
        if phase is None or phase != fault.during:
            return False
        common = phase in ("forward", "backward", "averaging", "step")  # that every node does, if it does anything
        anybody = not common or not any(node in self.lives for node in fault.nodes)
        return fault.strikes(number, work, self.nodes[number].iteration, anybody=anybody)

    def _strike(self, fault: Fault) -> None:
        node, other = fault.nodes[0], fault.nodes[-1]
        links = [(node, other)] if fault.kind == "cut one way" else [(node, other), (other, node)]
        match fault.kind:
            case "kill" if node == COORDINATOR:
                self.depose()
            case "kill":
                self.kill(node)
            case "freeze":
                self.freeze(node)
            case "cut" | "cut one way":
                for link in links:
                    self.cut(*link)
            case "slow node":
                self.slowed[node] = fault.times
            case "slow link":
                self.delayed |= dict.fromkeys(links, fault.times)
            case "poison":
                if isinstance(machine := self.machines[node], Symbols):
                    machine.poison = True
            case "stale":
                self._echoes.begin(fault)
            case "accuse":
                self._accusers.add(node)
                for accused in sorted(self.plan.stage_of.keys() - {node}):
                    self._complain(node, accused)
        if fault.lasts_s is not None:
            self.after(int(fault.lasts_s * 1e9), lambda: self._relent(fault, links))

    def _relent(self, fault: Fault, links: list[tuple[int, int]]) -> None:
        node = fault.nodes[0]
        match fault.kind:
            case "kill" if node == COORDINATOR:
                self.reappoint()
            case "kill":
                self.start(node)
            case "freeze":
                self.thaw(node)
            case "cut" | "cut one way":
                for link in links:
                    self.mend(*link)
            case "slow node":
                self.slowed.pop(node, None)
            case "slow link":
                for link in links:
                    self.delayed.pop(link, None)
            case "stale":
                self._echoes.end(fault)
            case "accuse":
                self._accusers.discard(node)

    def kill(self, node: int) -> None:
        if self.lives.pop(node, None) is None:
            return
        self.frozen.pop(node, None)
        for link in [link for link in self._link_free_ns if node in link[:2]]:
            del self._link_free_ns[link]
        self.after(NOTICED_NS, lambda: self._to_coordinator(lambda: self._notice(node)))

    def start(self, node: int) -> None:
        """A new life."""
        if node in self.lives:
            return
        self._lived += 1
        self.lives[node] = self._lived
        self.born[node] = Life(self.born[node].number + 1)
        self._new_machine(node, self.plan)
        self._greet(node)

    def freeze(self, node: int) -> None:
        if node in self.lives:
            self.frozen.setdefault(node, [])

    def thaw(self, node: int) -> None:
        for happen in self.frozen.pop(node, ()):
            self.reach(node, node, happen)

    def cut(self, sender: int, receiver: int) -> None:
        """One way."""
        self.broken.add((sender, receiver))
        if COORDINATOR not in (sender, receiver):
            heartbeat_ns = ns(self.deadlines.heartbeat.total_seconds())
            self.after(heartbeat_ns, lambda: self._complain(sender, receiver))

    def mend(self, sender: int, receiver: int) -> None:
        self.broken.discard((sender, receiver))
        if sender in self.lives and receiver in self.lives and COORDINATOR not in (sender, receiver):
            self.reach(sender, sender, lambda: self.nodes[sender].lost(receiver))

    def depose(self) -> None:
        """The coordinator's process ends; what it has noted stays."""
        self.reign += 1

    def reappoint(self) -> None:
        """It is started again, from its notes, and nodes find it."""
        self.reign += 1
        self.coordinator = self._appoint(list(self.journal))
        for node in self.lives:
            self._greet(node)

    @property
    def deposed(self) -> bool:
        return self._appointed != self.reign

    def _reach_coordinator(self, sender: int, happen: Callable[[], None]) -> None:
        delay_ns = self.lateness_ns(sender, COORDINATOR)
        self.echo(sender, COORDINATOR, lambda: self._to_coordinator(happen), delay_ns)
        if (sender, COORDINATOR) not in self.broken:
            self.after(delay_ns, lambda: self._to_coordinator(happen))

    def _to_coordinator(self, happen: Callable[[], None]) -> None:
        """If it lives."""
        if not self.deposed:
            happen()

    def _notice(self, node: int) -> None:
        if node not in self.lives:
            self.coordinator.lost(node, "its process ended")

    def _complain(self, sender: int, receiver: int) -> None:
        """Of a link that is cut and needed; an accuser complains of any."""
        lies = sender in self._accusers
        if not lies and (sender, receiver) not in self.broken:
            return
        if sender in self.lives and receiver in self.lives and sender not in self.frozen:
            node = self.nodes[sender]
            if lies or receiver in node.talks_to():
                self.say(_Place(self, sender, self.lives[sender]), Broken(receiver, node.epoch), COORDINATOR)
        heartbeat_ns = ns(self.deadlines.heartbeat.total_seconds())
        self.after(heartbeat_ns // (FALSE_REPORTS if lies else 1), lambda: self._complain(sender, receiver))

    def _new_machine(self, node: int, plan: Plan) -> None:
        self.nodes[node] = Node(node, plan, _Place(self, node, self.lives[node]))
        self.machines[node] = self.builder(node, plan) if self.builder else Symbols(node, plan)
        self._busy_ns.pop(node, None)
        self._idle_ns.pop(node, None)

    def _greet(self, node: int) -> None:
        if node not in self.frozen:
            self.say(_Place(self, node, self.lives[node]), self.nodes[node].hello("", __version__), COORDINATOR)

    def _look_after(self, node: int) -> None:
        """One that was taken for dead says hello again, as if it were new."""
        stop = self.nodes[node].stopped
        if stop is not None and stop.again:
            self.born[node] = Life(self.born[node].number + 1)
            self._new_machine(node, self.nodes[node].plan)
            self._greet(node)

    def _beat(self) -> None:
        """Signs of life, and the coordinator's look at the clock."""
        interval_ns = ns(self.deadlines.heartbeat.total_seconds()) // 5
        for node in list(self.lives):
            if node not in self.frozen:
                busy_ns = self.now_ns - self._busy_ns.get(node, self.now_ns) if node not in self._idle_ns else 0
                alive = Alive(self.nodes[node].doing, busy_ns / 1e9)
                self.say(_Place(self, node, self.lives[node]), alive, COORDINATOR)
                self.nodes[node].remind(10 * interval_ns)
        if not self.deposed:
            self.after(0, lambda: self._to_coordinator(lambda: self.coordinator.tick()))
        if not self.coordinator.over:
            self.after(interval_ns, self._beat)
