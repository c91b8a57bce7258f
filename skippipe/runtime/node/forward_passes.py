"""Forward passes through the whole model: a node's part in evaluating held-out samples, and in teaching.

Both take paths through every stage, keep nothing for a backward pass and touch no gradient. Of the steps that are here,
the one that is furthest on its path goes first.

Held-out samples are evaluated between two iterations. The coordinator names the paths (`Validate`). A data node starts
the microbatches of its paths, as many at a time as a path has stages, so that every stage has one to compute, and
reports the loss of each (`Validated`). Whatever the coordinator says next ends it, complete or not, and what is still
on its way is dropped by its receiver.

The teacher's passes belong to an iteration (distillation). A microbatch that leaves stages out also passes all of them,
from its data node and back to it; its head waits for what comes back. All nodes derive these paths from the lanes and
the nodes that were lost (`routing.teacher_routes`). When these change, passes that are not done begin again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from skippipe import dispatch
from skippipe.constraints import circle
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.fencing import EarlyMessages, version_of
from skippipe.runtime.messages import Validate, Validated
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.node.ops import EvaluateSamples, OpResult, StageTask, TeacherForward
from skippipe.runtime.routing import Route
from skippipe.transport.message import LARGEST_COUNT, Message, TeacherHop, ValidationHop

teacher_urgency = python_version(dispatch.teacher_urgency)
MOST_EARLY = 64  # of one sender: messages that are kept because this node has not been told of their evaluation
DropCounter = Callable[[int, str], None]
"""Counts a message that is of no use: its sender, and why."""
Step = TypeVar("Step", EvaluateSamples, TeacherForward)


class _ForwardPasses(Generic[Step]):
    """Steps that are here, and what was sent on."""

    def __init__(self, number: int, env: NodeEnv) -> None:
        self._number = number
        self._env = env
        self._paths: Mapping[int, Sequence[int]] = {}
        """Lane → its path."""
        self._forget()

    def _forget(self) -> None:
        self._ready: list[tuple[int, Step]] = []
        """Steps, and when they became ready."""
        self._seen: set[tuple[int, int, int]] = set()
        self._sent: dict[tuple[int, int], deque[Message]] = {}
        """Lane and receiver → the last messages."""

    @property
    def peers(self) -> set[int]:
        """The nodes before and after this one."""
        pairs = [pair for path in self._paths.values() if self._number in path for pair in circle(path)]
        return {node for pair in pairs if self._number in pair for node in pair} - {self._number}

    def next(self) -> Step | None:
        """Take the step that goes next."""
        if not self._ready:
            return None
        chosen = min(self._ready, key=lambda each: (teacher_urgency(each[1].step), each[0], each[1].lane))
        self._ready.remove(chosen)
        return chosen[1]

    def reconnected(self, peer: int) -> None:
        """What was sent there last may be lost: it is sent again, and the peer takes nothing twice."""
        for (_, receiver), messages in self._sent.items():
            for message in messages if receiver == peer else ():
                self._env.send(receiver, message)

    def _comes_here(self, sender: int, hop: ValidationHop | TeacherHop) -> bool:
        path = self._paths.get(hop.lane, ())
        return 0 < hop.step <= len(path) and (
            path[hop.step % len(path)] == self._number and path[hop.step - 1] == sender
        )

    def _is_new(self, hop: ValidationHop | TeacherHop) -> bool:
        """Whether it is the first of its kind; it has come now."""
        which = hop.lane, hop.microbatch, hop.step
        if which in self._seen:
            return False
        self._seen.add(which)
        return True

    def _send_on(self, header: ValidationHop | TeacherHop, payload: Any, most: int) -> int:
        """Send to the next node of a path; gives that node. `most`: messages of a lane that can be on their way."""
        path = self._paths[header.lane]
        receiver = path[header.step % len(path)]
        message = Message(header, payload, self._env.now_ns())
        self._sent.setdefault((header.lane, receiver), deque(maxlen=most)).append(message)
        self._env.send(receiver, message)
        return receiver


class Evaluation(_ForwardPasses[EvaluateSamples]):
    """The evaluation that is under way, if one is."""

    def __init__(self, number: int, env: NodeEnv, drop: DropCounter) -> None:
        super().__init__(number, env)
        self._drop = drop
        self._order: Validate | None = None
        self._waiting: dict[int, Iterator[int]] = {}
        """Lane that begins here → microbatches that are still to be started."""
        self._early = EarlyMessages()
        self._newest = (-1, 0)
        """Iteration and epoch of the last evaluation that this node was told of, or that is over without it."""

    def begin(self, order: Validate) -> None:
        self._end_order()
        self._order, self._newest = order, (order.iteration, order.epoch)
        self._paths = dict(enumerate(order.paths))
        self._waiting = {
            lane: iter(range(lane, order.microbatches, len(order.paths)))
            for lane, path in enumerate(order.paths)
            if path[0] == self._number
        }
        for lane in self._waiting:
            for _ in order.paths[lane]:
                self._start_next(lane)
        for sender, message, _ in self._early.due(self._newest):
            self.receive(sender, message)

    def end(self, iteration: int) -> None:
        """An iteration begins: evaluations of the weights before it are over."""
        self._newest = max(self._newest, (iteration - 1, LARGEST_COUNT))
        self._early.due(self._newest)
        self._end_order()

    def _end_order(self) -> None:
        self._forget()
        self._paths, self._order, self._waiting = {}, None, {}

    def receive(self, sender: int, message: Message) -> None:
        """An activation; one that comes before the coordinator's order is kept for a while."""
        hop, label = message.header, message.kind.label
        assert isinstance(hop, ValidationHop)
        if version_of(message) > self._newest:
            if not self._early.keep(sender, message, self._env.now_ns(), MOST_EARLY):
                self._drop(sender, "too much ahead of its time")
        elif self._order is None or version_of(message) < self._newest:
            self._drop(sender, "of an evaluation that is over")
        elif not self._expects(sender, hop):
            self._drop(sender, f"{label} that does not come here from there")
        elif message.body is None or not self._env.fits(message, None):
            self._drop(sender, f"{label} of another shape or type")
        elif not self._is_new(hop):
            self._drop(sender, f"{label} that has been taken before")
        else:
            self._add(hop.lane, hop.microbatch, hop.step, message.body)

    def finished(self, task: EvaluateSamples, result: OpResult) -> None:
        """A step is done; without effect if its evaluation is over."""
        order = self._order
        if order is None or (task.iteration, task.epoch) != (order.iteration, order.epoch):
            return
        if task.is_head:
            loss = float(result.loss)
            self._env.send_control(Validated(order.iteration, order.epoch, task.microbatch, loss, result.tokens))
            self._start_next(task.lane)
            return
        hop = ValidationHop(order.iteration, task.lane, task.microbatch, task.step + 1, order.epoch)
        self._send_on(hop, result.payload, len(self._paths[task.lane]) + 1)

    def _start_next(self, lane: int) -> None:
        microbatch = next(self._waiting[lane], None)
        if microbatch is not None:
            self._add(lane, microbatch, 0)

    def _add(self, lane: int, microbatch: int, step: int, given: Any = None) -> None:
        order = self._order
        assert order is not None
        length = len(order.paths[lane])
        samples = EvaluateSamples(order.iteration, order.epoch, lane, microbatch, step, length, given)
        self._ready.append((self._env.now_ns(), samples))

    def _expects(self, sender: int, hop: ValidationHop) -> bool:
        assert self._order is not None
        known = hop.microbatch < self._order.microbatches and hop.microbatch % len(self._paths) == hop.lane
        return known and self._comes_here(sender, hop)


class TeacherPasses(_ForwardPasses[TeacherForward]):
    """The teacher's passes of an iteration, and what this node keeps of them: what has come back to a data node; where
    hidden states teach, also what has come by on the nodes of the lane itself."""

    def __init__(self, number: int, env: NodeEnv) -> None:
        super().__init__(number, env)
        self._plan: Plan | None = None
        self._routes: Sequence[Route] = ()
        self._version = (-1, 0)
        """The iteration, and the epoch since which passes have their paths."""
        self._hidden: dict[tuple[int, int], Any] = {}
        """Lane and microbatch → the hidden states of the whole model."""
        self._begun: dict[int, int] = {}
        """Lane that begins here → the last microbatch whose pass has begun on these paths."""
        self.left = 0
        """Steps that are still to come, if all goes as planned."""

    def begin(
        self, plan: Plan, routes: Sequence[Route], paths: Mapping[int, Sequence[int]], version: tuple[int, int]
    ) -> None:
        """An iteration begins, or starts over: `paths` are those of `teacher_routes`, lanes without one have no
        teacher."""
        self._plan, self._routes = plan, routes
        self._hidden.clear()
        self.left = sum(plan.lanes[lane].microbatches for lane, path in paths.items() if self._number in path)
        self.reroute((), paths, version)

    def reroute(self, changed: Collection[int], paths: Mapping[int, Sequence[int]], version: tuple[int, int]) -> None:
        """Begin again, on other paths, what is not done. Where hidden states teach, nodes that are new on `changed`
        lanes have none, so what is on its way there passes once more."""
        self._forget()
        self._paths, self._version = paths, version
        self._begun.clear()
        if self._by_hidden_states:
            ends_here = {lane for lane in changed if paths.get(lane, (-1,))[0] == self._number}
            self._hidden = {key: each for key, each in self._hidden.items() if key[0] not in ends_here}

    def advance(self, newest: Mapping[int, int]) -> bool:
        """Begin the passes of microbatches whose turn it is, `newest` on each lane, and of the next ones when these are
        done; whether a step is here."""
        for old in [key for key in self._hidden if key[1] < newest.get(key[0], 0)]:
            del self._hidden[old]
        for lane, path in self._paths.items():
            if path[0] != self._number or lane not in newest:
                continue
            current = newest[lane]
            for microbatch in (current, current + 1):
                if self._begun.get(lane, -1) >= microbatch or microbatch >= self._routes[lane].microbatches:
                    continue
                if microbatch > current and (lane, current) not in self._hidden:
                    break
                self._begun[lane] = microbatch
                if (lane, microbatch) not in self._hidden:
                    self._add(lane, microbatch, 0)
        return bool(self._ready)

    def holds_up(self, task: StageTask) -> bool:
        """Whether a task needs what the teacher has not brought yet."""
        return self._teaches(task) and (task.lane, task.microbatch) not in self._hidden

    def hidden(self, task: StageTask) -> Any:
        """The teacher's hidden states that a task learns from; None: it has no teacher."""
        return self._hidden[task.lane, task.microbatch] if self._teaches(task) else None

    def _teaches(self, task: StageTask) -> bool:
        by_hidden_states = self._by_hidden_states and task.length < task.step < 2 * task.length
        return task.lane in self._paths and (task.step == task.length or by_hidden_states)

    @property
    def _by_hidden_states(self) -> bool:
        return self._plan is not None and self._plan.workload.teacher == "hidden"

    def expects(self, sender: int, hop: TeacherHop) -> bool:
        """Does this hop come here, from there?"""
        return self._comes_here(sender, hop) and hop.microbatch < self._routes[hop.lane].microbatches

    def take(self, _sender: int, message: Message, _arrived_ns: int) -> bool:
        """A hop that is expected; whether it is the first of its kind."""
        hop = message.header
        assert isinstance(hop, TeacherHop)
        if not self._is_new(hop):
            return False
        is_back = hop.step == len(self._paths[hop.lane])
        if is_back or (self._by_hidden_states and self._number in self._routes[hop.lane].path):
            self._hidden[hop.lane, hop.microbatch] = message.body  # not on its way to the device, as it may wait long
        if not is_back:
            self._add(hop.lane, hop.microbatch, hop.step, self._env.prefetch(message.body, 0))
        return True

    def finished(self, task: TeacherForward, result: OpResult) -> int | None:
        """A step is done: the node that its result goes to; None if it is of no use any more."""
        if (task.iteration, task.epoch) != self._version:
            return None
        self.left -= 1
        iteration, epoch = self._version
        hop = TeacherHop(iteration, task.lane, task.microbatch, task.step + 1, epoch)
        return self._send_on(hop, result.payload, 1)  # a lane's next pass begins when the one before it is back

    def _add(self, lane: int, microbatch: int, step: int, given: Any = None) -> None:
        assert self._plan is not None
        path = self._paths[lane]
        data, length = self._routes[lane].first_microbatch + microbatch, len(path)
        wire_dtype = self._plan.hop_dtype(self._number, path[(step + 1) % length], backward=False)
        forward = TeacherForward(*self._version, lane, microbatch, step, length, data, given, wire_dtype)
        self._ready.append((self._env.now_ns(), forward))
