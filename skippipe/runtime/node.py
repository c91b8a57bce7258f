"""A node's part in training, as a state machine.

It sees the clock, the network and its computer only through `Outside`, so the same code runs in a process with sockets
and in one thread under virtual time. It never waits: messages and finished work are taken in by `receive` and
`finished`, and `decide` then starts what goes next. Whoever runs it takes in all that happens at one time before it
calls `decide`, as the simulator does.

An iteration: tasks in the order that `dispatch` gives, until none is left; then the stage's ring averages gradients;
then the coordinator, which knows all norms, says how to step; then the next iteration begins.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from skippipe import dispatch
from skippipe.compiled import plain
from skippipe.plan import Plan
from skippipe.rules import circle
from skippipe.runtime.control import COORDINATOR, Averaged, Begin, Collect, Control, Proceed, Ready, Stepped, Stop, Want
from skippipe.runtime.work import Keep, Load, Measure, Outcome, Pass, Reduce, Show, Step, Task, Work
from skippipe.timeline import Timing
from skippipe.transport.message import Kind, Message

all_steps, steps, place = plain(dispatch.all_steps), plain(dispatch.steps), plain(dispatch.place)
is_weights, weights_after = plain(dispatch.is_weights), plain(dispatch.weights_after)
frees_slot, may_start = plain(dispatch.frees_slot), plain(dispatch.may_start)
urgency, goes_before = plain(dispatch.urgency), plain(dispatch.goes_before)


class Outside(Protocol):
    """All that a node can do to the world."""

    def now_ns(self) -> int: ...

    def send(self, receiver: int, message: Message) -> None: ...

    def say(self, control: Control) -> None:
        """To the coordinator."""

    def start(self, work: Work) -> None:
        """Have it run; `finished` follows. One work at a time."""


class ProtocolBroken(Exception):
    """Somebody sent what the plan does not foresee."""


class Phase(Enum):
    WAITING = "waiting for the coordinator to begin"
    RUNNING = "running tasks"
    AVERAGING = "averaging gradients"
    AVERAGED = "waiting for the coordinator's step"
    STEPPING = "taking the optimizer step"
    FINISHED = "finished"


class Arrived(NamedTuple):
    task: Task
    ready_ns: int


@dataclass(frozen=True)
class Neighbours:
    """In the gradient ring of the stage."""

    before: int
    after: int
    rounds: int


class Node:
    def __init__(self, number: int, plan: Plan, outside: Outside, *, own_ring: bool = True) -> None:
        self.number = number
        self.plan = plan
        self.stage = plan.stage_of[number]
        self.phase = Phase.WAITING
        self.iteration = -1
        self.stopped: Stop | None = None
        self._outside = outside
        self._own_ring = own_ring
        self._split = plan.split_backward
        self._paths = [lane.path for lane in plan.lanes]
        self._slots = plan.slots[number]
        self._urgency = plan.dispatch.forward_urgency
        self._visits = plan.exposure[self.stage]
        self._tasks = sum(
            lane.microbatches
            for lane in plan.lanes
            for step in range(all_steps(len(lane.path), plan.split_backward))
            if lane.path[place(step, len(lane.path))] == number
        )
        self._planned_ns = _planned_starts(plan, number)
        self._ring = self._neighbours()
        self._ready: list[Arrived] = []
        self._running: tuple[Arrived, int] | None = None
        self._chores: deque[Work] = deque()
        self._busy = False
        self._held = 0
        self._left = 0
        self._seen: set[tuple[int, ...]] = set()
        self._early: list[tuple[Message, int]] = []
        self._chunks: dict[int, Any] = {}
        self._next_round = 0
        self._proceed: Proceed | None = None
        self._begun_ns = 0
        self._recorded = False
        self._record: list[list[int]] = []
        self._losses: list[tuple[int, int, Any]] = []
        self._sent_bytes: dict[int, int] = {}

    def hear(self, control: Control) -> None:
        """From the coordinator."""
        match control:
            case Begin() if self.phase is Phase.WAITING:
                self._begin(control.iteration, control.recorded)
            case Proceed() if self.phase is Phase.AVERAGED and control.iteration == self.iteration:
                self.phase = Phase.STEPPING
                self._proceed = control
                self._chores.append(Step(control.rate, control.scale))
                if control.kept and self.plan.stages[self.stage].ring[0] == self.number:
                    self._chores.append(Keep())
            case Begin() | Proceed():
                raise ProtocolBroken(
                    f"told to {type(control).__name__.lower()} iteration {control.iteration} while {self.phase.value}"
                    f" in iteration {self.iteration}"
                )
            case Collect():  # after the step, if one was asked for
                self._chores.append(Show(control.piece, control.kept))
            case Stop():
                self.stopped = control
            case _:
                raise ProtocolBroken(f"a node has no use for {type(control).__name__}")

    def welcomed(self, resumed: bool) -> None:
        """The stage is built; its state is as the seed has it, or still to come."""
        self._outside.say(Want(0) if resumed else Ready())

    def restore(self, message: Message) -> None:
        """A piece of the state to go on from, from the coordinator.

        The last has no body; its `step` is the number of steps that the optimizer has taken.
        """
        if self.phase is not Phase.WAITING or message.kind is not Kind.CHUNK:
            raise ProtocolBroken(f"state to go on from came while {self.phase.value}")
        self._chores.append(Load(message.microbatch, message.body, message.step))

    def receive(self, sender: int, message: Message) -> None:
        """From another node; what comes from one that is an iteration ahead is kept until this node gets there."""
        early = self.phase is Phase.WAITING or message.iteration == self.iteration + 1
        if message.iteration != self.iteration and not early:
            raise ProtocolBroken(f"a message of iteration {message.iteration} while in {self.iteration}")
        self._check(sender, message)
        which = message.iteration, message.kind, message.lane, message.microbatch, message.step
        if which in self._seen:
            raise ProtocolBroken(f"{_what(message)} came twice")
        self._seen.add(which)
        if early:
            self._early.append((message, self._outside.now_ns()))
        else:
            self._accept(message, self._outside.now_ns())

    def finished(self, work: Work, result: Any) -> None:
        self._busy = False
        match work:
            case Task():
                self._task_ended(result)
            case Pass():
                self._passed_on(work.round, result)
            case Reduce():
                self._chores.append(Measure(self._visits))
            case Measure():
                self._report(result)
            case Step():
                self._stepped()
            case Show():
                message = Message(Kind.CHUNK, max(0, self.iteration), self.stage, work.piece, int(work.kept), result)
                self._outside.send(COORDINATOR, message)
            case Load():
                self._outside.say(Ready() if work.given is None else Want(work.piece + 1))
            case Keep():
                pass

    def decide(self) -> None:
        """Start what goes next, if nothing runs."""
        if self._busy or self.stopped:
            return
        if self._chores:
            self._start(self._chores.popleft())
            return
        if self.phase is not Phase.RUNNING:
            return
        best = -1
        for index, arrived in enumerate(self._ready):
            task = arrived.task
            if not may_start(task.step, len(self._paths[task.lane]), self._held, self._slots):
                continue
            if best < 0 or goes_before(*self._rank(arrived), *self._rank(self._ready[best])):
                best = index
        if best < 0:
            return
        chosen = self._ready.pop(best)
        if chosen.task.step < len(self._paths[chosen.task.lane]):
            self._held += 1
        self._running = chosen, self._outside.now_ns()
        self._start(chosen.task)

    def talks_to(self) -> set[int]:
        """The nodes before and after this one on its lanes and in its ring."""
        pairs = [pair for path in self._paths if self.number in path for pair in circle(path)]
        if self._ring is not None:
            pairs += [(self.number, self._ring.before), (self.number, self._ring.after)]
        return {node for pair in pairs if self.number in pair for node in pair} - {self.number}

    def _rank(self, arrived: Arrived) -> tuple[int, int, int]:
        """Of tasks that are ready, the one that the plan has first goes first.

        The simulator takes the one that was ready first. If all goes as planned that is the same; if not, this brings
        the node back to the order that was promised, instead of making one late message the cause of many.
        """
        task = arrived.task
        at_ns = self._planned_ns.get((task.lane, task.microbatch, task.step), arrived.ready_ns)
        return urgency(task.step, len(self._paths[task.lane]), self._urgency), at_ns, task.lane

    def _start(self, work: Work) -> None:
        self._busy = True
        self._outside.start(work)

    def _begin(self, iteration: int, recorded: bool) -> None:
        self.iteration = iteration
        self.phase = Phase.RUNNING
        self._begun_ns = self._outside.now_ns()
        self._recorded = recorded
        self._left = self._tasks
        self._seen = {which for which in self._seen if which[0] == iteration}
        self._chunks.clear()
        self._next_round = 0
        self._proceed = None
        self._record, self._losses, self._sent_bytes = [], [], {}
        for lane, path in enumerate(self._paths):
            if path[0] == self.number:
                self._ready.append(Arrived(Task(iteration, lane, 0, 0), self._begun_ns))
        early, self._early = self._early, []
        for message, arrived_ns in early:
            if message.iteration != iteration:
                raise ProtocolBroken(f"a message of iteration {message.iteration} before {iteration} began")
            self._accept(message, arrived_ns)
        if self._left == 0:
            self._average()

    def _check(self, sender: int, message: Message) -> None:
        """Does the plan foresee it, from this sender?"""
        if message.body is None:
            raise ProtocolBroken(f"{_what(message)} came empty")
        if message.kind is Kind.CHUNK:
            foreseen = (
                self._own_ring
                and self._ring is not None
                and sender == self._ring.before
                and (message.lane, message.microbatch) == (self.stage, 0)
                and 0 <= message.step < self._ring.rounds
            )
        else:
            foreseen = message.kind is Kind.HOP and self._on_its_way(sender, message)
        if not foreseen:
            raise ProtocolBroken(f"{_what(message)} does not come here from node {sender}")

    def _on_its_way(self, sender: int, message: Message) -> bool:
        if not 0 <= message.lane < len(self._paths):
            return False
        path, step = self._paths[message.lane], message.step
        return (
            0 <= message.microbatch < self.plan.lanes[message.lane].microbatches
            and 0 < step < steps(len(path))
            and path[place(step, len(path))] == self.number
            and path[place(step - 1, len(path))] == sender
        )

    def _accept(self, message: Message, arrived_ns: int) -> None:
        if message.kind is Kind.CHUNK:
            self._chunks[message.step] = message.body
            self._pass_next()
        else:
            task = Task(self.iteration, message.lane, message.microbatch, message.step, message.body)
            self._ready.append(Arrived(task, arrived_ns))

    def _task_ended(self, outcome: Outcome) -> None:
        assert self._running is not None
        (task, ready_ns), start_ns = self._running
        self._running = None
        lane, microbatch, step = task.lane, task.microbatch, task.step
        path = self._paths[lane]
        length = len(path)
        if self._recorded:
            times = (ready_ns, start_ns, self._outside.now_ns())  # what came early was ready when the iteration began
            self._record.append([lane, microbatch, step, *(max(0, each - self._begun_ns) for each in times)])
        if outcome.loss is not None:
            self._losses.append((lane, microbatch, outcome.loss))
        if frees_slot(step, length, self._split):
            self._held -= 1
        if self._split and step > length and not is_weights(step, length):
            later = Task(self.iteration, lane, microbatch, weights_after(step, length))
            self._ready.append(Arrived(later, self._outside.now_ns()))
        if step + 1 < steps(length):
            self._hop(path[place(step + 1, length)], lane, microbatch, step + 1, outcome.payload)
        elif step + 1 == steps(length) and microbatch + 1 < self.plan.lanes[lane].microbatches:
            self._ready.append(Arrived(Task(self.iteration, lane, microbatch + 1, 0), self._outside.now_ns()))
        self._left -= 1
        if self._left == 0:
            self._average()

    def _hop(self, receiver: int, lane: int, microbatch: int, step: int, payload: Any) -> None:
        self._send(receiver, Message(Kind.HOP, self.iteration, lane, microbatch, step, payload))

    def _send(self, receiver: int, message: Message) -> None:
        self._sent_bytes[receiver] = self._sent_bytes.get(receiver, 0) + getattr(message.body, "nbytes", 0)
        self._outside.send(receiver, message)

    def _average(self) -> None:
        self.phase = Phase.AVERAGING
        if self._ring is None:
            self._chores.append(Measure(self._visits))
        elif not self._own_ring:
            self._chores.append(Reduce())
        else:
            self._chores.append(Pass(0))

    def _passed_on(self, round_: int, payload: Any) -> None:
        assert self._ring is not None
        self._next_round = round_ + 1
        if round_ < self._ring.rounds:
            self._send(self._ring.after, Message(Kind.CHUNK, self.iteration, self.stage, 0, round_, payload))
            self._pass_next()
        else:
            self._chores.append(Measure(self._visits))

    def _pass_next(self) -> None:
        """Go on with the ring if this node has done its part of the round and the neighbour's has come."""
        given = self._chunks.get(self._next_round - 1)
        if self._next_round > 0 and given is not None:
            del self._chunks[self._next_round - 1]
            self._chores.append(Pass(self._next_round, given))
            self._next_round = -1  # until this one has been passed on

    def _report(self, squared_norm: float) -> None:
        self.phase = Phase.AVERAGED
        losses = [[lane, microbatch, float(loss)] for lane, microbatch, loss in self._losses]
        sent = [[receiver, count] for receiver, count in sorted(self._sent_bytes.items())]
        self._outside.say(Averaged(self.iteration, squared_norm, losses, self._record, sent))

    def _stepped(self) -> None:
        assert self._proceed is not None
        if self._proceed.last:
            self.phase = Phase.FINISHED
            self._outside.say(Stepped(self.iteration))
        else:
            self._begin(self.iteration + 1, self._proceed.recorded)

    def _neighbours(self) -> Neighbours | None:
        ring = self.plan.stages[self.stage].ring
        if len(ring) == 1:
            return None
        at = ring.index(self.number)
        return Neighbours(ring[at - 1], ring[(at + 1) % len(ring)], 2 * (len(ring) - 1))


def _what(message: Message) -> str:
    if message.kind is Kind.CHUNK:
        return f"round {message.step} of the ring of stage {message.lane}"
    return f"step {message.step} of microbatch {message.microbatch} on lane {message.lane}"


def _planned_starts(plan: Plan, node: int) -> dict[tuple[int, int, int], int]:
    """When the plan starts each of the node's tasks; empty if it promises nothing, or not in full."""
    if plan.expected is None or plan.expected.timing is not Timing.FULL:
        return {}
    return {(task.lane, task.microbatch, task.step): task.start_ns for task in plan.expected.tasks if task.node == node}
