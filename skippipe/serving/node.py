"""A node that serves: takes the steps that the gateway tells it of, and passes tensors on along their lane.

A state machine like the one that trains, over the same sockets. The gateway says who is fed what, and which way; from
other nodes come tensors only, and only those that a step foresees are taken.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from skippipe.runtime.control import COORDINATOR, Close, Control, Feed, Hello, Ready, Sampled, Stop
from skippipe.runtime.outside import Outside
from skippipe.serving.work import Chance, Choose, FedRow, Forget, Pass, ServingWork
from skippipe.transport.message import Kind, Message

log = logging.getLogger(__name__)
MOST_STEPS = 1024  # that are told of and not done, or whose tensors came before they were told of


class ServingNode:
    def __init__(self, number: int, stage: int, outside: Outside) -> None:
        self.number = number
        self.stage = stage
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → how many messages of that kind were not taken."""
        self._outside = outside
        self._told: dict[tuple[int, int], Feed] = {}
        """Step and place on its path → what to do when the tensor comes."""
        self._early: dict[tuple[int, int], tuple[int, Any]] = {}
        """Tensors of steps that we have not been told of, and who sent them."""
        self._ready: deque[tuple[Feed | None, int, ServingWork]] = deque()
        self._doing: tuple[Feed | None, int, ServingWork] | None = None

    def hello(self, address: str, version: str) -> Hello:
        """To a gateway that is new: whatever this node was doing, nobody waits for it."""
        self._told.clear()
        self._early.clear()
        self._ready.clear()
        return Hello(address, version)

    def welcomed(self, _origin: dict[str, Any]) -> None:
        self._outside.say(Ready())

    # What it is told

    def hear(self, control: Control) -> None:
        """From the gateway."""
        match control:
            case Feed():
                self._feed(control)
            case Close():
                for key in [key for key, feed in self._told.items() if feed.lane == control.lane]:
                    del self._told[key]
                self._ready = deque(each for each in self._ready if each[0] is None or each[0].lane != control.lane)
                self._ready.append((None, 0, Forget(control.lane)))
            case Stop():
                self.stopped = control
            case _:
                self._drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        key = message.iteration, message.step
        if message.kind is not Kind.HOP or message.body is None:
            self._drop(sender, f"a {message.kind.name.lower()}")
        elif key in self._told:
            self._take(key, sender, message.body)
        elif len(self._early) < MOST_STEPS:
            self._early[key] = sender, message.body
        else:
            self._drop(sender, "too much that we have not been told of")

    def asked(self, sender: int, control: Control) -> None:
        self._drop(sender, type(control).__name__)

    def restore(self, _message: Message) -> None:
        self._drop(COORDINATOR, "state")

    # What it does

    def finished(self, work: ServingWork, result: Any) -> None:
        assert self._doing is not None
        feed, place, done = self._doing
        assert done is work
        self._doing = None
        if feed is None:
            return
        if isinstance(work, Choose):
            self._outside.say(Sampled(feed.step, list(result)))
            return
        after = place + 1
        message = Message(Kind.HOP, feed.step, feed.lane, 0, after, result)
        receiver = feed.path[after % len(feed.path)]
        if receiver == self.number:  # the only stage that is left
            self.receive(receiver, message)
        else:
            self._outside.send(receiver, message)

    def decide(self) -> None:
        if self._doing is None and self._ready:
            self._doing = self._ready.popleft()
            self._outside.start(self._doing[2])

    @property
    def doing(self) -> str:
        return "serving" if self._doing is None else f"serving, {type(self._doing[2]).__name__.lower()}"

    def talks_to(self) -> set[int]:
        """Whoever comes next on a path that it has been told of."""
        near = {feed.path[(place + 1) % len(feed.path)] for (_, place), feed in self._told.items()}
        return near - {self.number}

    def lost(self, _node: int) -> None:
        """A connection broke and came back: what was on its way may be gone, which the gateway notices."""

    def remind(self, _patience_ns: int) -> None:
        """Nothing is sent twice."""

    def _feed(self, feed: Feed) -> None:
        """On its path the node has a place; the first one has another at the end."""
        if self.number not in feed.path:
            self._drop(COORDINATOR, "a step that does not come here")
            return
        if len(self._told) >= MOST_STEPS:
            self._drop(COORDINATOR, "more steps than are ever on their way")
            return
        place = feed.path.index(self.number)
        if place == 0:
            rows = _rows(feed)
            self._ready.append((feed, 0, Pass(feed.lane, rows, tuple(feed.freed), tuple(map(tuple, feed.tokens)))))
            place = len(feed.path)
        key = feed.step, place
        self._told[key] = feed
        if key in self._early:
            self._take(key, *self._early.pop(key))

    def _take(self, key: tuple[int, int], sender: int, body: Any) -> None:
        feed, place = self._told[key], key[1]
        tokens = sum(row[2] for row in feed.rows)
        if sender != feed.path[place - 1]:
            self._drop(sender, "a tensor of a step that does not come from there")
            return
        if not self._outside.fits(Message(Kind.HOP, feed.step, feed.lane, 0, place, body), tokens, len(feed.rows)):
            self._drop(sender, "a tensor of another shape or type")
            return
        del self._told[key]
        rows = _rows(feed)
        if place == len(feed.path):
            chances = zip(feed.chances, feed.seeds, strict=True)
            chosen = tuple(Chance(heat, int(top_k), top_p, seed) for (heat, top_k, top_p), seed in chances)
            self._ready.append((feed, place, Choose(rows, chosen, body)))
        else:
            self._ready.append((feed, place, Pass(feed.lane, rows, tuple(feed.freed), body)))

    def _drop(self, sender: int, what: str) -> None:
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            log.warning("dropped from %s: %s (later ones are only counted)", sender, what)


def _rows(feed: Feed) -> tuple[FedRow, ...]:
    return tuple(FedRow(*row) for row in feed.rows)
