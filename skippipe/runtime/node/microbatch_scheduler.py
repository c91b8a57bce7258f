"""The microbatches of one iteration on one node: which are ready, run, are held in memory, were added up and sent on.

Tasks are taken in the order that `dispatch` gives. What was sent last on a lane is kept until the lane's next
microbatch comes by: if its receiver is lost, the node that takes over from it gets it (see `routing`). What comes twice
is taken once, and what has been added up once is never added up again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from skippipe import dispatch
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.messages import Averaged, MicrobatchDone, Reroute
from skippipe.runtime.node.copies import CopyTimes, MovingTensor
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.node.ops import DropMicrobatch, OpQueue, OpResult, StageTask
from skippipe.runtime.routing import apply_reroute, routes_of
from skippipe.timeline import Timing
from skippipe.transport.message import Hop, Message

all_steps, steps, place = (
    python_version(dispatch.all_steps),
    python_version(dispatch.steps),
    python_version(dispatch.place),
)
message_pass = python_version(dispatch.message_pass)
is_weights, weights_after = python_version(dispatch.is_weights), python_version(dispatch.weights_after)
frees_slot, may_start = python_version(dispatch.frees_slot), python_version(dispatch.may_start)
urgency, goes_before = python_version(dispatch.urgency), python_version(dispatch.goes_before)

MicrobatchKey = tuple[int, int]
"""Lane and microbatch."""

KINDS_OF_TASK = ("forward", "head", "backward", "weights")


class ReadyTask(NamedTuple):
    task: StageTask
    ready_ns: int


class EpochHolder(Protocol):
    """The node that the scheduler works for."""

    @property
    def epoch(self) -> int: ...


class NodeSchedule:
    """One node's tasks in every iteration of a plan."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number = number
        self.plan = plan
        self.slots = plan.slots[number]
        self.order = plan.dispatch.order
        self.tasks = sum(
            lane.microbatches
            for lane in plan.lanes
            for step in range(all_steps(len(lane.path), plan.split_backward))
            if lane.path[place(step, len(lane.path))] == number
        )
        self.targets = [(*plan.visits(lane)[1:], len(plan.stages)) for lane in plan.lanes]
        """[lane][step]: the stage that follows a forward step."""
        self.planned_ns: dict[tuple[int, int, int], int] = {}
        """Lane, microbatch and step → planned start of the task; empty if the plan has none, or not of the full
        timing."""
        if plan.expected is not None and plan.expected.timing is Timing.FULL:
            mine = [task for task in plan.expected.tasks if task.node == number]
            self.planned_ns = {(task.lane, task.microbatch, task.step): task.start_ns for task in mine}


class MicrobatchScheduler:
    """Chooses the node's next task, and keeps account of one iteration."""

    def __init__(
        self, schedule: NodeSchedule, iteration: int, node: EpochHolder, env: NodeEnv, ops: OpQueue, *, recorded: bool
    ) -> None:
        self.routes = routes_of(schedule.plan)
        self.left = schedule.tasks
        """Tasks that are still to come, if all goes as planned."""
        self.contributed: set[MicrobatchKey] = set()
        """Microbatches that are in this node's sum of gradients."""
        self.record: list[list[int]] = []
        self.took_ns: dict[int, list[int]] = {}
        """Kind of task → number of tasks, and ns that they took."""
        self._copies: list[tuple[StageTask, CopyTimes]] = []
        """Of recorded tasks: copies of what they were given, and of what they made."""
        self.lag_ns: dict[int, int] = {}
        """Sender → the least time that a hop took from there."""
        self.sent_bytes: Counter[int] = Counter()
        self._schedule = schedule
        self._number = schedule.number
        self._split = schedule.plan.split_backward
        self._iteration = iteration
        self._node = node
        self._env = env
        self._ops = ops
        self._recorded = recorded
        self._begun_ns = self._averaging_ns = env.now_ns()
        self._ready: list[ReadyTask] = []
        self._running: tuple[ReadyTask, int] | None = None
        self._suppress_send = False
        self._holding: set[MicrobatchKey] = set()
        self._headed: set[MicrobatchKey] = set()
        self._losses: dict[MicrobatchKey, Any] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._newest: dict[int, int] = {}
        self._sent: dict[tuple[int, int], tuple[int, Any]] = {}
        for lane, route in enumerate(self.routes):
            if route.path[0] == self._number:
                self._start_microbatch(lane, 0, self._begun_ns)

    # Tasks

    def next(self) -> StageTask | None:
        """Take the task that goes next; None if none may start."""
        best = -1
        for index, arrived in enumerate(self._ready):
            if self._may_start(arrived.task) and (
                best < 0 or goes_before(*self._rank(arrived), *self._rank(self._ready[best]))
            ):
                best = index
        if best < 0:
            return None
        chosen = self._ready.pop(best)
        task = chosen.task
        if task.step < task.length:
            self._holding.add((task.lane, task.microbatch))
        self._running = chosen, self._env.now_ns()
        counted = self._headed if task.step == task.length else self.contributed
        return replace(
            task, counts=(task.lane, task.microbatch) not in counted, wire_dtype=self._wire_dtype(task.lane, task.step)
        )

    def finish(self, result: OpResult) -> None:
        """The running task is done."""
        assert self._running is not None
        (task, ready_ns), start_ns = self._running
        self._running = None
        suppressed, self._suppress_send = self._suppress_send, False
        now_ns = self._env.now_ns()
        lane, microbatch, step, length = task.lane, task.microbatch, task.step, task.length
        which = lane, microbatch
        self._time(task, ready_ns, start_ns, now_ns)
        self._note_copies(task, result.payload)
        if step == length:
            self._headed.add(which)
            self._losses[which] = result.loss
        if frees_slot(step, length, self._split):
            self._holding.discard(which)
            self.contributed.add(which)
        if self._split and step > length and not is_weights(step, length):
            later = self._task(lane, microbatch, weights_after(step, length))
            self._ready.append(ReadyTask(later, now_ns))
        if step < steps(length) and not suppressed:
            self._hop(lane, microbatch, step, result.payload)
        self.left -= 1

    def discard_running(self) -> None:
        """The result of the running task is of no use."""
        self._running = None

    @property
    def has_deferred(self) -> bool:
        """Are weight gradients still to be added, or does a task run?"""
        return self._running is not None or any(self._is_deferred(each.task) for each in self._ready)

    @property
    def visits(self) -> list[list[int]]:
        """Lane and microbatch of all that are in this node's sum of gradients."""
        return [list(each) for each in sorted(self.contributed)]

    def drain(self) -> None:
        """All microbatches are back: tasks that are ready, other than weight gradients, were sent twice."""
        self._ready = [each for each in self._ready if self._is_deferred(each.task)]

    def release_all(self) -> None:
        self._release(set(self._holding))

    def _start_microbatch(self, lane: int, microbatch: int, now_ns: int) -> None:
        self._newest[lane] = microbatch
        self._ready.append(ReadyTask(self._task(lane, microbatch, 0), now_ns))

    def _task(self, lane: int, microbatch: int, step: int, given: Any = None) -> StageTask:
        route = self.routes[lane]
        target = self._schedule.targets[lane][step] if step < route.length else 0
        data = route.first_microbatch + microbatch
        return StageTask(self._iteration, lane, microbatch, step, route.length, data, given, target)

    def _wire_dtype(self, lane: int, step: int) -> str:
        """Codec of what a step sends on; after a reroute a node may get it that another link was planned for."""
        route = self.routes[lane]
        after = None if is_weights(step, route.length) else route.after(step)
        if after is None:
            return ""
        backward = bool(message_pass(after, route.length))
        return self._schedule.plan.hop_dtype(self._number, route.node_at(after), backward=backward)

    def _may_start(self, task: StageTask) -> bool:
        """A task needs a free slot, or what an earlier task has left here, which may have to run again first."""
        which = task.lane, task.microbatch
        here = which in self._holding
        if task.step < task.length and here:  # it comes again: what was deferred of the first time goes before
            return not any(
                self._is_deferred(each.task) and (each.task.lane, each.task.microbatch) == which for each in self._ready
            )
        if task.step <= task.length:
            return may_start(task.step, task.length, len(self._holding), self._schedule.slots)
        return here

    def _is_deferred(self, task: StageTask) -> bool:
        return task.is_weights and (task.lane, task.microbatch) in self._holding

    def _rank(self, arrived: ReadyTask) -> tuple[int, int, int]:
        """The place of a ready task: the one that the plan has first goes first.

        The simulator takes the one that was ready first. If all goes as planned that is the same; if not, this brings
        the node back to the order that was promised, instead of making one late message the cause of many.
        """
        task = arrived.task
        at_ns = self._schedule.planned_ns.get((task.lane, task.microbatch, task.step), arrived.ready_ns)
        return urgency(task.step, task.length, task.lane, self._schedule.order), at_ns, task.lane

    def _time(self, task: StageTask, ready_ns: int, start_ns: int, now_ns: int) -> None:
        if self._recorded:
            times = (ready_ns, start_ns, now_ns)  # what came early was ready when the iteration began
            row = [task.lane, task.microbatch, task.step, *(max(0, each - self._begun_ns) for each in times)]
            self.record.append(row)
        kind = (task.step >= task.length) + (task.step > task.length) + task.is_weights
        sums = self.took_ns.setdefault(kind, [0, 0])
        sums[0] += 1
        sums[1] += now_ns - start_ns

    def _note_copies(self, task: StageTask, payload: Any) -> None:
        """Not the tensors, which would stay on the device."""
        for tensor in (task.given, payload) if self._recorded else ():
            if isinstance(tensor, MovingTensor) and tensor.copy is not None:
                self._copies.append((replace(task, given=None), tensor.copy.times))

    # Reports

    def averaging_begins(self) -> None:
        self._averaging_ns = self._env.now_ns()

    def report(self, squared_norm: float, step_ns: int) -> Averaged:
        """The account of the iteration, now that gradients are averaged. `step_ns`: of the optimizer step before it."""
        times_ns = (self._averaging_ns - self._begun_ns, self._env.now_ns() - self._begun_ns, step_ns)
        return Averaged(
            self._iteration,
            self._node.epoch,
            squared_norm,
            visits=self.visits,
            tasks=self.record,
            sent_bytes=[[receiver, count] for receiver, count in sorted(self.sent_bytes.items())],
            speeds=[[kind, *sums] for kind, sums in sorted(self.took_ns.items())],
            lags=[[sender, lag_ns / 1e9] for sender, lag_ns in sorted(self.lag_ns.items())],
            closing=list(times_ns) if self._recorded else [],
            copies=[
                [
                    *(task.lane, task.microbatch, task.step, each.direction),
                    *(max(0, at_ns - self._begun_ns) for at_ns in (each.began_ns, each.ended_ns)),
                ]
                for task, each in self._copies
                if each.ended_ns
            ],
        )

    # Hops

    def expects(self, sender: int, hop: Hop) -> bool:
        """Does this hop come here, from there?"""
        if hop.lane >= len(self.routes):
            return False
        route, step = self.routes[hop.lane], hop.step
        before = route.before(step) if 0 < step < steps(route.length) else None
        return (
            before is not None
            and hop.microbatch < route.microbatches
            and route.node_at(step) == self._number
            and route.node_at(before) == sender
            and not route.is_stale(step, hop.epoch)
        )

    def take(self, sender: int, message: Message, hop: Hop, arrived_ns: int) -> bool:
        """A hop that is expected; whether it is the first of its kind."""
        lane, microbatch = hop.lane, hop.microbatch
        if (lane, microbatch, hop.step) in self._seen or microbatch < self._newest.get(lane, 0):
            return False
        if microbatch > self._newest.get(lane, 0):
            self._forget_before(lane, microbatch)
        self._seen.add((lane, microbatch, hop.step))
        self._newest[lane] = microbatch
        lag_ns = arrived_ns - message.sent_ns
        self.lag_ns[sender] = min(lag_ns, self.lag_ns.get(sender, lag_ns))
        self._ready.append(ReadyTask(self._task(lane, microbatch, hop.step, message.body), arrived_ns))
        return True

    def send_again_to(self, peer: int) -> None:
        """Send what was sent there last, if it still matters."""
        for lane, route in enumerate(self.routes):
            for step in range(steps(route.length)):
                after = route.after(step)
                if after is not None and route.node_at(after) == peer:
                    self._send_again(lane, step)

    def _hop(self, lane: int, microbatch: int, step: int, payload: Any) -> None:
        route = self.routes[lane]
        if route.after(step) is not None:
            self._sent[lane, step] = microbatch, payload
            self._send(lane, microbatch, step, payload)
            return
        loss = self._losses.get((lane, microbatch), float("nan"))
        self._env.send_control(MicrobatchDone(self._iteration, self._node.epoch, lane, microbatch, float(loss)))
        if microbatch + 1 < route.microbatches:
            self._start_microbatch(lane, microbatch + 1, self._env.now_ns())

    def _send_again(self, lane: int, step: int) -> None:
        microbatch, payload = self._sent.get((lane, step), (-1, None))
        route = self.routes[lane]
        if microbatch < 0 or microbatch != self._newest.get(lane):
            return
        went_back = (lane, microbatch, route.back(step)) in self._seen
        if step < route.length and went_back and route.after(step) != route.length:
            return  # but a new data node runs the head in any case
        self._send(lane, microbatch, step, payload)

    def _send(self, lane: int, microbatch: int, step: int, payload: Any) -> None:
        after = self.routes[lane].after(step)
        assert after is not None
        receiver = self.routes[lane].node_at(after)
        self.sent_bytes[receiver] += getattr(payload, "nbytes", 0)
        hop = Hop(self._iteration, lane, microbatch, after, self._node.epoch)
        self._env.send(receiver, Message(hop, payload, self._env.now_ns()))

    # When nodes are lost

    def reroute(self, change: Reroute) -> bool:
        """Follow the new routes; whether the result of the running task is of no use."""
        before = [route.path for route in self.routes]
        apply_reroute(self.routes, change)
        cancelled = [self._forget_beyond(lane, at) for lane, at in change.skipped]
        for lane, on_its_way, *path in change.lanes:
            route = self.routes[lane]
            if path[0] == self._number != before[lane][0] and on_its_way < route.microbatches:
                self._start_microbatch(lane, on_its_way, self._env.now_ns())
            replaced = {at for at in range(len(path)) if path[at] != before[lane][at]}
            skipped = {at for other, at in change.skipped if other == lane}
            for step in range(steps(route.length)):
                after = route.after(step)
                if after is None or route.node_at(step) != self._number or place(step, route.length) in route.skipped:
                    continue
                passed_over = set(range(step + 1, min(after, route.length))) if step < route.length else set()
                if place(after, route.length) in replaced or skipped & passed_over:
                    self._send_again(lane, step)
        return any(cancelled)

    def _forget_beyond(self, lane: int, at: int) -> bool:
        """A place was skipped: tasks beyond it run again; whether the running task is one of them."""
        route = self.routes[lane]
        mine = [step for step in range(steps(route.length)) if route.node_at(step) == self._number]
        beyond = {step for step in mine if route.beyond(at, step)}
        self._seen = {each for each in self._seen if each[0] != lane or each[2] not in beyond}
        self._ready = [each for each in self._ready if each.task.lane != lane or each.task.step not in beyond]
        for step in beyond:
            self._sent.pop((lane, step), None)
        cancelled, kept = False, set()
        if self._running is not None and (task := self._running[0].task).lane == lane and task.step in beyond:
            if task.step < route.length:
                cancelled = True
            else:  # what it adds up counts; only its output is not to be sent
                self._suppress_send = True
                kept.add(task.microbatch)
        if any(step < route.length for step in beyond):
            kept |= {each.task.microbatch for each in self._ready if each.task.lane == lane}  # deferred weights
            self._release({each for each in self._holding if each[0] == lane and each[1] not in kept})
        return cancelled

    def _forget_before(self, lane: int, microbatch: int) -> None:
        """A lane has one microbatch on its way: what came twice of those before is not needed any more."""
        old = [each for each in self._ready if each.task.lane == lane and each.task.microbatch < microbatch]
        kept = {each.task.microbatch for each in old if self._is_deferred(each.task)}
        self._ready = [each for each in self._ready if each not in old or self._is_deferred(each.task)]
        if self._running is not None and self._running[0].task.lane == lane:
            kept.add(self._running[0].task.microbatch)
        self._release({each for each in self._holding if each[0] == lane and microbatch > each[1] not in kept})

    def _release(self, microbatches: set[MicrobatchKey]) -> None:
        """Free the memory of microbatches that come again, or never."""
        self._holding -= microbatches
        for which in sorted(microbatches):
            self._ops.add(DropMicrobatch(*which))
