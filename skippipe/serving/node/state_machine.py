"""A node that serves: takes the steps that the gateway tells it of, and passes tensors on along their lane.

A state machine like the one that trains, over the same sockets. The gateway says who is fed what, and which way; from
other nodes come tensors only, and only those that a step foresees are taken.


Tensors that came before the step they are of was told: kept for a while, so much from each sender.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from skippipe.errors import UserError
from skippipe.runtime.messages import (
    COORDINATOR,
    ControlMessage,
    EndSequences,
    Hello,
    Ready,
    RunStep,
    Sampled,
    StepFailed,
    Stop,
)
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.node.ops import StateSource, op_name
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    NodeInfo,
    SampleTokens,
    ServingWork,
    StepInput,
    StepRefused,
    parse_step,
)
from skippipe.transport.message import Message, StepHop

log = logging.getLogger(__name__)
MOST_STEPS = 1024  # that are told of and not done


class ServingNode:
    epoch = 0

    def __init__(self, seat: NodeInfo, env: NodeEnv) -> None:
        self.number = seat.number
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → how many messages of that kind were not taken."""
        self._seat = seat
        self._env = env
        self._told: dict[tuple[int, int], StepInput] = {}
        """Step and place on its path → what to do when the tensor comes."""
        self._early = EarlyMessages()
        self._ready: deque[tuple[StepInput | None, int, ServingWork]] = deque()
        self._doing: tuple[StepInput | None, int, ServingWork] | None = None

    def hello(self, address: str, version: str) -> Hello:
        """To a gateway that is new: whatever this node was doing, nobody waits for it."""
        self._told.clear()
        self._early.clear()
        self._ready.clear()
        return Hello(address, version)

    def executor_ready(self, _origin: StateSource | None, _assignment: int) -> None:
        self._env.send_control(Ready())

    # What it is told

    def handle_control(self, control: ControlMessage) -> None:
        """From the gateway."""
        match control:
            case RunStep():
                self._feed(control)
            case EndSequences():
                for key in [key for key, told in self._told.items() if told.lane == control.lane]:
                    del self._told[key]
                self._ready = deque(each for each in self._ready if each[0] is None or each[0].lane != control.lane)
                self._ready.append((None, 0, FreeSlots(control.lane)))
            case Stop():
                self.stopped = control
            case _:
                self._drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        header = message.header
        if not isinstance(header, StepHop) or message.body is None:
            self._drop(sender, message.kind.label)
        elif (key := (header.step, header.place)) in self._told:
            self._take(key, sender, message.body)
        else:
            self._early.put(sender, key, message.body)

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        self._drop(sender, type(control).__name__)

    # What it does

    def finished(self, work: ServingWork, result: Any) -> None:
        assert self._doing is not None
        told, place, done = self._doing
        assert done is work
        self._doing = None
        if told is None:
            return
        if isinstance(result, StepRefused):
            at_fault = told.path[place - 1] if result.given else self.number
            self._env.send_control(StepFailed(told.step, at_fault, result.reason))
            return
        if isinstance(work, SampleTokens):
            self._env.send_control(Sampled(told.step, list(result)))
            return
        after = place + 1
        message = Message(StepHop(told.step, told.lane, after), result)
        receiver = told.path[after % len(told.path)]
        if receiver == self.number:  # the only stage that is left
            self.receive(receiver, message)
        else:
            self._env.send(receiver, message)

    def decide(self) -> None:
        if self._doing is None and self._ready:
            self._doing = self._ready.popleft()
            self._env.start(self._doing[2])

    @property
    def doing(self) -> str:
        return "serving" if self._doing is None else f"serving, {op_name(self._doing[2])}"

    def active_peers(self) -> set[int]:
        """Whoever comes next on a path that it has been told of."""
        near = {told.path[(place + 1) % len(told.path)] for (_, place), told in self._told.items()}
        return near - {self.number}

    def reconnected(self, _node: int) -> None:
        """A connection broke and came back: what was on its way may be gone, which the gateway notices."""

    def retry_requests(self, _timeout_ns: int) -> None:
        """Nothing is sent twice."""

    def _feed(self, feed: RunStep) -> None:
        """On its path the node has a place; the first one has another at the end."""
        if len(self._told) >= MOST_STEPS:
            self._drop(COORDINATOR, "more steps than are ever on their way")
            return
        try:
            told = parse_step(feed, self._seat)
        except UserError as error:
            self._drop(COORDINATOR, str(error))
            return
        place = told.path.index(self.number)
        if place == 0:
            self._ready.append((told, 0, ForwardStep(told.lane, told.rows, told.freed, told.tokens)))
            place = len(told.path)
        key = told.step, place
        self._told[key] = told
        before = told.path[place - 1]
        if (body := self._early.take(before, key)) is not None:
            self._take(key, before, body)

    def _take(self, key: tuple[int, int], sender: int, body: Any) -> None:
        told, place = self._told[key], key[1]
        if sender != told.path[place - 1]:
            self._drop(sender, "a tensor of a step that does not come from there")
            return
        if not self._env.fits(Message(StepHop(told.step, told.lane, place), body), told.count, len(told.rows)):
            self._drop(sender, "a tensor of another shape or type")
            return
        del self._told[key]
        if place == len(told.path):
            self._ready.append((told, place, SampleTokens(told.rows, told.how, body)))
        else:
            self._ready.append((told, place, ForwardStep(told.lane, told.rows, told.freed, body)))

    def _drop(self, sender: int, what: str) -> None:
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            log.warning("dropped from %s: %s (later ones are only counted)", sender, what)


MOST = 256
MOST_BYTES = 2**28


class EarlyMessages:
    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], Any]] = {}
        """Sender → step and place on its path → what came, the oldest first."""

    def put(self, sender: int, key: tuple[int, int], body: Any) -> None:
        """Steps that are given up are never told: what is too much, the oldest makes room for."""
        kept = self._kept.setdefault(sender, {})
        kept.pop(key, None)
        kept[key] = body
        while len(kept) > 1 and (len(kept) > MOST or sum(map(_bytes, kept.values())) > MOST_BYTES):
            del kept[next(iter(kept))]

    def take(self, sender: int, key: tuple[int, int]) -> Any:
        """None: it has not come."""
        return self._kept.get(sender, {}).pop(key, None)

    def clear(self) -> None:
        self._kept.clear()


def _bytes(body: Any) -> int:
    return int(getattr(body, "nbytes", 0))
