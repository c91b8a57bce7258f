"""The gateway as a process's thread: its state machine over a real mailbox, and answers for those who wait.

Requests come from other threads (an HTTP server's); each is told of its tokens as they are made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.control import (
    Alive,
    Broken,
    Close,
    Control,
    Failed,
    Hello,
    Meet,
    Ready,
    Sampled,
    Spoiled,
    Stop,
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.member import THE_COORDINATOR
from skippipe.serving.answering import Share
from skippipe.serving.brief import ServingBrief
from skippipe.serving.feeding import feeds
from skippipe.serving.gateway import Full, Gateway, ServingSettings, Step
from skippipe.serving.lanes import Distance, Even, Lane
from skippipe.serving.streams import Request, Stream
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, NotConnected, QueueFull, Security
from skippipe.transport.message import Kind, Message, Received

log = logging.getLogger(__name__)
TURN_S = 0.2  # at most, from one look at the deadlines to the next
GOODBYE_S = 1.0
LOADING_S = 600.0  # that a node may take for its weights

Told = Callable[[Stream], None]
"""Called on the front's thread, with every token and with the ending; must not wait."""
Gone = Callable[[], Iterable[tuple[str, str]]]
"""Nodes that are known to have ended since it was last asked, and how. Called often, on the front's thread."""


class Watching:
    """Is told what happens, on the front's thread."""

    def holds(self, node: str, stage: int) -> None:
        """It has its weights and takes steps from now on."""

    def gone(self, node: str, how: str) -> None: ...

    def failed(self, error: Exception) -> None:
        """The front is no more."""


@dataclass(frozen=True)
class Seen:
    """How things stand, for other threads to look at."""

    share: Share
    figures: dict[str, float]


class Front:
    def __init__(
        self,
        brief: ServingBrief,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        settings: ServingSettings | None = None,
        distance: Distance | None = None,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        gone: Gone = lambda: (),
        watching: Watching | None = None,
    ) -> None:
        self._brief = brief
        self._publics = publics
        self._gone = gone
        self._watching = watching or Watching()
        self._names = {number: name for name, number in brief.number.items()}
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        for name in brief.stage_of:
            if name in publics:
                self._mailbox.allow(name, publics[name])
        self.gateway = Gateway(len(brief.layers), self, settings or ServingSettings(), distance or Even())
        self.counted: Counter[str] = Counter()
        """What has happened how often, for whoever watches."""
        self.seen = Seen(Share(0, len(brief.layers)), {})
        self._addresses: dict[str, str] = {}
        self._parted: dict[str, tuple[str, float]] = {}
        """Where those who are gone were last, and from when on they may be told that they count as gone."""
        self._heard: dict[str, float] = {}
        """Node → when it last gave a sign of life."""
        self._told: dict[int, Told] = {}
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._over = threading.Event()
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def address(self) -> str:
        return self._mailbox.address

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nodes are told to end; returns when that is said."""
        self._over.set()
        self._mailbox.wake()
        if self._thread.is_alive():
            self._thread.join(2 * GOODBYE_S)

    # From other threads

    def submit(self, request: Request, told: Told, refused: Callable[[Exception], None], begun: Told) -> None:
        """`begun` gets the stream, by which it can be cancelled; or `refused` says why there is none."""

        def ask() -> None:
            try:
                stream = self.gateway.submit(request)
            except Exception as error:
                refused(error)
                return
            self._told[stream.number] = told
            begun(stream)

        self._ask(ask)
        if self._over.is_set():
            refused(Full("the server is being stopped"))

    def cancel(self, number: int) -> None:
        self._ask(lambda: self.gateway.cancel(number))

    def hang_up(self) -> None:
        """Whoever is being answered is told that it is over."""
        self._ask(self.gateway.close)

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.put(what)
        self._mailbox.wake()

    # The loop

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._turn()
        except Exception as error:
            self._watching.failed(error)
        finally:
            self._over.set()
            self._do_what_is_asked()
            self.gateway.close()
            for name in list(self._addresses):
                self._tell(name, Stop(""))
            self._mailbox.close(GOODBYE_S)

    def _turn(self) -> None:
        for received in self._mailbox.receive(TURN_S):
            self._deliver(received)
        self._do_what_is_asked()
        for lost in self._mailbox.lost():
            self._lost(lost.peer, f"its connection: {lost.reason}")
        for name, how in self._gone():
            self._lost(name, how)
        now, before = time.monotonic(), self._turned
        self._turned = now
        if now - before > self._brief.heartbeat_s / 2:  # we were held up, and they may have spoken
            self._heard = dict.fromkeys(self._heard, now)
        for name in [name for name in self._heard if self._silent_s(name) > self._patience_s(name)]:
            self._lost(name, f"no sign of life for {self._patience_s(name):g} s")
        self.gateway.tick()
        self.seen = self._look()

    def _do_what_is_asked(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._asked.get_nowait()()

    def _look(self) -> Seen:
        gateway = self.gateway
        there = int(gateway.share * gateway.stages) if gateway.is_open else 0
        happened = {f"{what.replace(' ', '_')}_total": float(count) for what, count in self.counted.items()}
        figures = {"nodes": float(len(gateway.stage_of)), "streams": float(len(gateway.streams)), **happened}
        return Seen(Share(there, gateway.stages), figures)

    def _silent_s(self, name: str) -> float:
        return time.monotonic() - self._heard[name]

    def _patience_s(self, name: str) -> float:
        """While it loads its weights, a node says nothing."""
        ready = self._brief.number[name] in self.gateway.stage_of
        return self._brief.heartbeat_s if ready else max(LOADING_S, self._brief.heartbeat_s)

    def _deliver(self, received: Received) -> None:
        name, message = received.peer, received.message
        try:
            if message.kind is not Kind.CONTROL:
                raise UserError("a tensor where there should be none")
            control = from_json(message.body)
        except UserError as error:
            self.counted["nonsense"] += 1
            if self.counted["nonsense"] == 1:
                log.warning("nonsense from '%s' (later ones are only counted): %s", name, error)
            return
        if isinstance(control, Hello):
            self._greet(name, control)
        elif name in self._addresses:
            self._heard[name] = time.monotonic()
            self._hear(name, control)
        elif self._brief.number.get(name) is not None:
            self._answer_a_ghost(name)

    def _hear(self, name: str, control: Control) -> None:
        node = self._brief.number[name]
        match control:
            case Ready():
                self.gateway.joined(node, self._brief.stage_of[name])
                self._watching.holds(name, self._brief.stage_of[name])
            case Sampled():
                self._sampled(node, control)
            case Spoiled():
                self._spoiled(node, control)
            case Broken() if control.peer in self._names:
                self.counted["broken links"] += 1
                self.gateway.broken(node, control.peer)
            case Failed():
                self._lost(name, control.reason)
            case Alive():
                pass
            case _:
                log.warning("'%s' says %s, which is not for a gateway", name, type(control).__name__)

    def _sampled(self, node: int, control: Sampled) -> None:
        try:
            if not all(token < self._brief.vocabulary for token in control.tokens):
                raise ValueError("says tokens that nobody knows")
            self.gateway.sampled(control.step, control.tokens, node)
        except ValueError as error:
            self._lost(self._names[node], str(error))

    def _spoiled(self, node: int, control: Spoiled) -> None:
        """Whoever made what is of no use has to start over, and may come back."""
        self.counted["spoiled steps"] += 1
        path = self.gateway.spoiled(control.step, node)
        if path and control.node == path[path.index(node) - 1]:
            self._lost(self._names[control.node], f"'{self._names[node]}' got from it {control.reason}")
        elif path:
            log.warning("'%s' cannot do a step: %s", self._names[node], control.reason)

    def _greet(self, name: str, hello: Hello) -> None:
        if name not in self._brief.stage_of:
            return
        if name in self._addresses:
            self._lost(name, "it was started again")
        try:
            self._mailbox.connect(name, hello.address, self._publics.get(name))
        except UserError as error:
            log.warning("'%s' cannot be reached: %s", name, error)
            return
        if hello.version != __version__:
            self._tell(name, Stop(f"skippipe {hello.version} here, {__version__} at the gateway: use one version"))
            self._mailbox.disconnect(name, GOODBYE_S)
            return
        self._addresses[name] = hello.address
        self._parted.pop(name, None)
        self._heard[name] = time.monotonic()
        self._tell(name, Welcome(self._brief.to_json(), self._introduced(self._brief.stage_of), {}))
        for other in self._addresses:
            if other != name:
                self._tell(other, Meet(self._introduced([name])))

    def _answer_a_ghost(self, name: str) -> None:
        """It was taken for dead and is not: it may say hello again."""
        address, told_from = self._parted.get(name, ("", inf))
        now = time.monotonic()
        if now >= told_from:
            self._parted[name] = address, now + self._brief.heartbeat_s
            self._mailbox.connect(name, address, self._publics.get(name))
            self._tell(name, Stop("you were taken for dead", again=True))

    def _lost(self, name: str, how: str) -> None:
        address = self._addresses.pop(name, None)
        if address is None:
            return
        self._parted[name] = address, 0.0
        self.counted["lost nodes"] += 1
        self._heard.pop(name, None)
        self._mailbox.disconnect(name)
        self.gateway.lost(self._brief.number[name])
        self._watching.gone(name, how)

    def _introduced(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: [self._addresses.get(name, ""), self._publics.get(name)] for name in names}

    def _tell(self, name: str, control: Control) -> None:
        try:
            self._mailbox.send(name, _message(control))
        except NotConnected:
            pass  # it is gone, which is noticed elsewhere
        except QueueFull:
            self._asked.put(lambda: self._lost(name, "it does not take messages"))

    # What the gateway sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def step(self, step: Step) -> None:
        for node, feed in feeds(step).items():
            self._tell(self._names[node], feed)

    def close_lane(self, lane: Lane) -> None:
        for node in lane.path:
            self._tell(self._names[node], Close(lane.number))

    def said(self, stream: Stream) -> None:
        told = self._told.get(stream.number)
        if stream.ending is not None:
            self._told.pop(stream.number, None)
        if told is not None:
            told(stream)


def _message(control: Control) -> Message:
    return Message(Kind.CONTROL, 0, 0, 0, 0, to_json(control))
