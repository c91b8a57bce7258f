"""A node's part in evaluating held-out samples: forward passes between two iterations, along paths through every stage.

The coordinator names the paths (`Validate`). A data node starts the microbatches of its paths, as many at a time as a
path has stages, so that every stage has one to compute, and reports the loss of each (`Validated`). Nothing of
training is touched: no gradient, no microbatch, no averaging. Whatever the coordinator says next ends it, complete or
not, and what is still on its way is dropped by its receiver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from skippipe.runtime.fencing import EarlyMessages, version_of
from skippipe.runtime.messages import Validate, Validated
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.node.ops import EvaluateSamples, OpResult
from skippipe.transport.message import LARGEST_COUNT, Message, ValidationHop

MOST_EARLY = 64  # of one sender: messages that are kept because this node has not been told of their evaluation


class Evaluation:
    """The evaluation that is under way, if one is."""

    def __init__(self, number: int, env: NodeEnv, drop: Callable[[int, str], None]) -> None:
        """`drop` counts a message that is of no use: its sender, and why."""
        self._number = number
        self._env = env
        self._drop = drop
        self._early = EarlyMessages()
        self._newest = (-1, 0)
        """Iteration and epoch of the last evaluation that this node was told of, or that is over without it."""
        self._order: Validate | None = None
        self._waiting: dict[int, Iterator[int]] = {}
        """Lane that begins here → microbatches that are still to be started."""
        self._forget()

    def begin(self, order: Validate) -> None:
        self._forget()
        self._order, self._newest = order, (order.iteration, order.epoch)
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
        self._forget()

    def _forget(self) -> None:
        self._order, self._waiting = None, {}
        self._ready: list[EvaluateSamples] = []
        self._seen: set[tuple[int, int]] = set()
        self._sent: dict[tuple[int, int], deque[Message]] = {}
        """Lane and receiver → the last messages: as many as can be on their way."""

    @property
    def peers(self) -> set[int]:
        """The nodes before and after this one."""
        paths = self._order.paths if self._order else []
        found = {path[at - 1] for path in paths for at, node in enumerate(path) if node == self._number}
        return found | {path[(at + 1) % len(path)] for path in paths for at, n in enumerate(path) if n == self._number}

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
        elif (hop.microbatch, hop.step) in self._seen:
            self._drop(sender, f"{label} that has been taken before")
        else:
            self._seen.add((hop.microbatch, hop.step))
            self._add(hop.lane, hop.microbatch, hop.step, message.body)

    def next(self) -> EvaluateSamples | None:
        """Take the step that goes next: of those that are here, the one that is furthest on its path."""
        if not self._ready:
            return None
        chosen = max(self._ready, key=lambda task: (task.step, -task.microbatch))
        self._ready.remove(chosen)
        return chosen

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
        path, step = order.paths[task.lane], task.step + 1
        receiver = path[step % len(path)]
        hop = ValidationHop(order.iteration, task.lane, task.microbatch, step, order.epoch)
        message = Message(hop, result.payload, self._env.now_ns())
        self._sent.setdefault((task.lane, receiver), deque(maxlen=len(path) + 1)).append(message)
        self._env.send(receiver, message)

    def reconnected(self, peer: int) -> None:
        """What was sent there last may be lost: it is sent again, and the peer takes nothing twice."""
        for (_, receiver), messages in self._sent.items():
            for message in messages if receiver == peer else ():
                self._env.send(receiver, message)

    def _start_next(self, lane: int) -> None:
        assert self._order is not None
        microbatch = next(self._waiting[lane], None)
        if microbatch is not None:
            self._add(lane, microbatch, 0)

    def _add(self, lane: int, microbatch: int, step: int, given: Any = None) -> None:
        order = self._order
        assert order is not None
        length = len(order.paths[lane])
        self._ready.append(EvaluateSamples(order.iteration, order.epoch, lane, microbatch, step, length, given))

    def _expects(self, sender: int, hop: ValidationHop) -> bool:
        assert self._order is not None
        paths = self._order.paths
        if hop.lane >= len(paths) or hop.microbatch % len(paths) != hop.lane:
            return False
        path, step = paths[hop.lane], hop.step
        known = hop.microbatch < self._order.microbatches and 0 < step <= len(path)
        return known and path[step % len(path)] == self._number and path[step - 1] == sender
