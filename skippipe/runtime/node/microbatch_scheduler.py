"""The microbatches of one iteration on one node: which are ready, run, are held in memory, were added up and sent on.

Tasks are taken in the order that `dispatch` gives, as many at a time as the node has workers: one, or one for each
device that holds the whole stage. A microbatch stays on the device that has its activations. What was sent last on a
lane is kept until the lane's next microbatch comes by: if its receiver is lost, the node that takes over from it gets
it (see `routing`). What comes twice is taken once, and what has been added up once is never added up again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from skippipe import dispatch
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.messages import Averaged, MicrobatchDone, Reroute
from skippipe.runtime.node.copies import CopyTimes, MovingTensor
from skippipe.runtime.node.forward_passes import TeacherPasses
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.node.ops import DropMicrobatch, OpQueue, OpResult, StageTask
from skippipe.runtime.routing import apply_reroute, routes_of
from skippipe.stage_subset import hops_of
from skippipe.timeline import Timing
from skippipe.transport.message import Hop, Message
from skippipe.whole_paths import find_teacher_paths

all_steps, steps = python_version(dispatch.all_steps), python_version(dispatch.steps)
place, message_pass = python_version(dispatch.place), python_version(dispatch.message_pass)
is_weights, weights_after = python_version(dispatch.is_weights), python_version(dispatch.weights_after)
frees_slot, may_start = python_version(dispatch.frees_slot), python_version(dispatch.may_start)
urgency, goes_before = python_version(dispatch.urgency), python_version(dispatch.goes_before)

MicrobatchKey = tuple[int, int]
"""Lane and microbatch."""


class ReadyTask(NamedTuple):
    task: StageTask
    ready_ns: int


@dataclass
class RunningTask:
    task: StageTask
    ready_ns: int
    start_ns: int
    suppress_send: bool = False


class EpochHolder(Protocol):
    """The node that the scheduler works for."""

    devices: set[int]
    """Devices that work side by side, by number; one that is lost is removed."""

    @property
    def epoch(self) -> int: ...


class NodeSchedule:
    """One node's tasks in every iteration of a plan."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number = number
        self.plan = plan
        self.slots = plan.slots[number]
        self.slots_per_worker = self.slots // plan.workers[number]
        self.order = plan.dispatch.order
        self.tasks = sum(
            lane.microbatches
            for lane in plan.lanes
            for step in range(all_steps(len(lane.path), plan.split_backward))
            if lane.path[place(step, len(lane.path))] == number
        )
        visits = [plan.visits(lane) for lane in plan.lanes]
        hops = [hops_of(each, len(plan.stages)) for each in visits]
        self.hops = [[there.get(stage) for stage in each] for each, there in zip(visits, hops, strict=True)]
        """[lane][step]: how the path goes on after a forward step, if it leaves stages out."""
        self.teacher_paths = find_teacher_paths(plan) or {}
        """None in a plan by which a node builds a stage that is lost: it gets another one before it trains."""
        self.planned_ns: dict[tuple[int, int, int], int] = {}
        """Lane, microbatch and step → planned start of the task; empty if the plan has none, or not of the full
        timing."""
        if plan.expected is not None and plan.expected.timing is Timing.FULL:
            mine = [task for task in plan.expected.tasks if task.node == number]
            self.planned_ns = {(task.lane, task.microbatch, task.step): task.start_ns for task in mine}


class MicrobatchScheduler:
    """Chooses the node's next task, and keeps account of one iteration."""

    def __init__(
        self,
        schedule: NodeSchedule,
        iteration: int,
        node: EpochHolder,
        env: NodeEnv,
        ops: OpQueue,
        teacher: TeacherPasses,
        *,
        recorded: bool,
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
        """Copies between host and device of what recorded tasks were given, and of what they made."""
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
        self._teacher = teacher
        self._recorded = recorded
        self._begun_ns = self._averaging_ns = env.now_ns()
        self._ready: list[ReadyTask] = []
        self._running: dict[MicrobatchKey, RunningTask] = {}
        self._device_of: dict[MicrobatchKey, int] = {}
        """Microbatch → the device that has what its tasks have left here."""
        self._holding: set[MicrobatchKey] = set()
        self._headed: set[MicrobatchKey] = set()
        self._losses: dict[MicrobatchKey, Any] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self.newest: dict[int, int] = {}
        """Lane → its last microbatch that has come by, or begun here."""
        self._sent: dict[tuple[int, int], tuple[int, Any]] = {}
        teacher.begin(schedule.plan, self.routes, schedule.teacher_paths, (iteration, node.epoch))
        for lane, route in enumerate(self.routes):
            if route.path[0] == self._number:
                self._start_microbatch(lane, 0, self._begun_ns)

    # Tasks

    def next(self) -> StageTask | None:
        """Take the task that goes next; None if none may start."""
        busy = {each.task.device for each in self._running.values()}
        held = Counter(self._device_of[each] for each in self._holding)
        emptiest = min(self._node.devices - busy, key=lambda device: (held[device], device), default=-1)
        if emptiest < 0:
            return None
        best = -1
        for index, arrived in enumerate(self._ready):
            if self._may_start(arrived.task, held[emptiest], busy) and (
                best < 0 or goes_before(*self._rank(arrived), *self._rank(self._ready[best]))
            ):
                best = index
        if best < 0:
            return None
        chosen = self._ready.pop(best)
        which = chosen.task.lane, chosen.task.microbatch
        self._device_of.setdefault(which, emptiest)
        if chosen.task.step < chosen.task.length:
            self._holding.add(which)
        counted = self._headed if chosen.task.step == chosen.task.length else self.contributed
        wire_dtype = self._wire_dtype(chosen.task.lane, chosen.task.step)
        task = replace(
            chosen.task,
            counts=which not in counted,
            wire_dtype=wire_dtype,
            device=self._device_of[which],
            teacher_hidden=self._teacher.hidden(chosen.task),
        )
        self._running[which] = RunningTask(task, chosen.ready_ns, self._env.now_ns())
        return task

    def finish(self, task: StageTask, result: OpResult) -> None:
        """A running task is done."""
        which = lane, microbatch = task.lane, task.microbatch
        step, length = task.step, task.length
        running = self._running.pop(which)
        now_ns = self._env.now_ns()
        self._time(running, now_ns)
        self._note_copies(task, result.payload)
        if step == length:
            self._headed.add(which)
            self._losses[which] = result.loss
        if frees_slot(step, length, self._split):
            self._holding.discard(which)
            self._device_of.pop(which, None)
            self.contributed.add(which)
        if self._split and step > length and not is_weights(step, length):
            later = self._task(lane, microbatch, weights_after(step, length))
            self._ready.append(ReadyTask(later, now_ns))
        if step < steps(length) and not running.suppress_send:
            self._hop(lane, microbatch, step, result.payload)
        self.left -= 1

    def discard_running(self, task: StageTask) -> None:
        """The result of a running task is of no use."""
        which = task.lane, task.microbatch
        if which in self._running and self._running[which].task is task:  # not of an iteration that was given up
            del self._running[which]

    @property
    def is_done(self) -> bool:
        """Is nothing left of all that was planned, the teacher's passes among it?"""
        return self.left + self._teacher.left == 0

    @property
    def has_deferred(self) -> bool:
        """Are weight gradients still to be added, or does a task run?"""
        return bool(self._running) or any(self._is_deferred(each.task) for each in self._ready)

    @property
    def contribution(self) -> list[list[int]]:
        """Lane and microbatch of all that are in this node's sum of gradients."""
        return [list(each) for each in sorted(self.contributed)]

    def drain(self) -> None:
        """All microbatches are back: tasks that are ready, other than weight gradients, were sent twice."""
        self._ready = [each for each in self._ready if self._is_deferred(each.task)]

    def release_all(self) -> None:
        self._release(set(self._holding))

    def _start_microbatch(self, lane: int, microbatch: int, now_ns: int) -> None:
        self.newest[lane] = microbatch
        self._ready.append(ReadyTask(self._task(lane, microbatch, 0), now_ns))

    def _task(self, lane: int, microbatch: int, step: int) -> StageTask:
        """A task on the device that has the microbatch, or is likely to get it."""
        route = self.routes[lane]
        hop = self._schedule.hops[lane][step] if step < route.length else None
        data = route.first_microbatch + microbatch
        device = self._device_of.get((lane, microbatch), -1)
        if device < 0:
            device = self._likely_device()
        return StageTask(self._iteration, lane, microbatch, step, route.length, data, hop=hop, device=device)

    def _likely_device(self) -> int:
        """The device of a microbatch that is new here, if those that came before it go first; `next` decides."""
        busy = {each.task.device for each in self._running.values()}
        held = Counter(self._device_of[each] for each in self._holding)
        held.update(each.task.device for each in self._ready if each.task.step < each.task.length)
        full = {device for device in held if held[device] >= self._schedule.slots_per_worker}
        return min(self._node.devices, key=lambda device: (device in busy | full, held[device], device))

    def _wire_dtype(self, lane: int, step: int) -> str:
        """Codec of what a step sends on; after a reroute a node may get it that another link was planned for."""
        route = self.routes[lane]
        after = None if is_weights(step, route.length) else route.after(step)
        if after is None:
            return ""
        backward = bool(message_pass(after, route.length))
        return self._schedule.plan.hop_dtype(self._number, route.node_at(after), backward=backward)

    def _may_start(self, task: StageTask, held: int, busy: Set[int]) -> bool:
        """A task needs a free slot on the emptiest device, where so many are `held`; or what an earlier task has left
        here, which may have to run again first, and that device to be free."""
        which = task.lane, task.microbatch
        if which in self._running or self._device_of.get(which) in busy:  # the first: it comes again
            return False
        if self._teacher.holds_up(task):
            return False
        here = which in self._holding
        if task.step < task.length and here:  # it comes again: what was deferred of the first time goes before
            return not any(
                self._is_deferred(each.task) and (each.task.lane, each.task.microbatch) == which for each in self._ready
            )
        if task.step <= task.length:
            return may_start(task.step, task.length, held, self._schedule.slots_per_worker)
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

    def _time(self, running: RunningTask, now_ns: int) -> None:
        task, start_ns = running.task, running.start_ns
        if self._recorded:
            times = (running.ready_ns, start_ns, now_ns)  # what came early was ready when the iteration began
            row = [task.lane, task.microbatch, task.step, *(max(0, each - self._begun_ns) for each in times)]
            self.record.append([*row, task.device] if task.device else row)
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
            contribution=self.contribution,
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

    def take(self, sender: int, message: Message, arrived_ns: int) -> bool:
        """A hop that is expected; whether it is the first of its kind."""
        hop = message.header
        assert isinstance(hop, Hop)
        lane, microbatch = hop.lane, hop.microbatch
        if (lane, microbatch, hop.step) in self._seen or microbatch < self.newest.get(lane, 0):
            return False
        if microbatch > self.newest.get(lane, 0):
            self._forget_before(lane, microbatch)
        self._seen.add((lane, microbatch, hop.step))
        self.newest[lane] = microbatch
        lag_ns = arrived_ns - message.sent_ns
        self.lag_ns[sender] = min(lag_ns, self.lag_ns.get(sender, lag_ns))
        task = self._task(lane, microbatch, hop.step)
        given = self._env.prefetch(message.body, task.device)
        self._ready.append(ReadyTask(replace(task, given=given), arrived_ns))
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
        if microbatch < 0 or microbatch != self.newest.get(lane):
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

    def reroute(self, change: Reroute) -> list[StageTask]:
        """Follow the new routes; gives the running tasks whose results are of no use."""
        before = [route.path for route in self.routes]
        apply_reroute(self.routes, change)
        cancelled = [task for lane, at in change.skipped for task in self._forget_beyond(lane, at)]
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
        return cancelled

    def _forget_beyond(self, lane: int, at: int) -> list[StageTask]:
        """A place was skipped: tasks beyond it run again; gives the forward tasks among them that run now."""
        route = self.routes[lane]
        mine = [step for step in range(steps(route.length)) if route.node_at(step) == self._number]
        beyond = {step for step in mine if route.beyond(at, step)}
        self._seen = {each for each in self._seen if each[0] != lane or each[2] not in beyond}
        self._ready = [each for each in self._ready if each.task.lane != lane or each.task.step not in beyond]
        for step in beyond:
            self._sent.pop((lane, step), None)
        cancelled, kept = [], set()
        for running in self._running.values():
            if running.task.lane != lane or running.task.step not in beyond:
                continue
            if running.task.step < route.length:
                cancelled.append(running.task)
            else:  # what it adds up counts; only its output is not to be sent
                running.suppress_send = True
                kept.add(running.task.microbatch)
        if any(step < route.length for step in beyond):
            kept |= {each.task.microbatch for each in self._ready if each.task.lane == lane}  # deferred weights
            self._release({each for each in self._holding if each[0] == lane and each[1] not in kept})
        return cancelled

    def _forget_before(self, lane: int, microbatch: int) -> None:
        """A lane has one microbatch on its way: what came twice of those before is not needed any more."""
        old = [each for each in self._ready if each.task.lane == lane and each.task.microbatch < microbatch]
        kept = {each.task.microbatch for each in old if self._is_deferred(each.task)}
        self._ready = [each for each in self._ready if each not in old or self._is_deferred(each.task)]
        kept |= {running_microbatch for running_lane, running_microbatch in self._running if running_lane == lane}
        self._release({each for each in self._holding if each[0] == lane and microbatch > each[1] not in kept})

    def _release(self, microbatches: set[MicrobatchKey]) -> None:
        """Free the memory of microbatches that come again, or never."""
        self._holding -= microbatches
        for which in sorted(microbatches):
            self._device_of.pop(which, None)
            self._ops.add(DropMicrobatch(*which))
