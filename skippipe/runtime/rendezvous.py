"""Who is there: nodes come, hear of each other, go, and some talk on although they were taken for dead.

Three state machines have nodes join them over a mailbox: the coordinator, the gateway and the conductor. All of them
have a `Listener`. The coordinator itself decides who is welcome and who has been silent for too long; for the other
two, `Rendezvous` does that.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.fencing import Fence, stamp_of, stamped
from skippipe.runtime.messages import ControlMessage, Hello, PeerUpdate, Stop, Welcome, from_json, to_json
from skippipe.transport.mailbox import Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Message, MessageKind, Received

log = logging.getLogger(__name__)
TURN_S = 0.2  # at most, from one look at the clock to the next
CLOSE_LINGER_S = 1.0  # for last words to leave
AGAIN_S = 1.0  # from one answer to somebody who counts as gone to the next

Gone = Callable[[], Iterable[tuple[str, str]]]
"""Nodes that are known to have ended since it was last asked, and how."""


def _warn(name: str, what: str) -> None:
    log.warning("nonsense from '%s' (later ones are only counted): %s", name, what)


@dataclass
class Listener:
    mailbox: Mailbox
    names: Iterable[str]
    """Of all who may come; without an entry among the keys nobody gets in."""
    publics: Mapping[str, str | None]
    complain: Callable[[str, str], None] = _warn
    """Of a node's first message that nobody understands, and what is wrong with it."""
    fence: Fence = field(default_factory=lambda: Fence(int(time.time())))
    """Keeps messages of the past out. Where nothing says how many have been in this place, a clock is a good guess."""
    addresses: dict[str, str] = field(init=False, default_factory=dict)
    """Of those who are there."""
    nonsense: Counter[str] = field(init=False, default_factory=Counter)
    """Node → messages that nobody understands."""
    _parted: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)
    """Where those who are gone were last, and from when on they may be told that they count as gone."""
    _answered: dict[str, float] = field(init=False, default_factory=dict)
    """When somebody who speaks in the name of one that is there was last told to say hello."""
    _stuck: set[str] = field(init=False, default_factory=set)
    """Nodes that do not take messages."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name in self.publics:
                self.mailbox.allow(name, self.publics[name])

    def meet(self, name: str, address: str) -> None:
        """From now on it can be told things, and the others know where it is; UserError if that is no address."""
        self._connect(name, address)
        self.addresses[name] = address
        self._parted.pop(name, None)
        self.fence.met(name)
        for other in self.addresses:
            if other != name:
                self.tell(other, PeerUpdate(self.introduced([name])))

    def part(self, name: str, linger_s: float = 0.0) -> bool:
        """It counts as gone, unless it says hello again; whether it was there."""
        if name not in self.addresses:
            return False
        self._parted[name] = self.addresses.pop(name), time.monotonic()
        self.fence.parted(name)
        self.mailbox.disconnect(name, linger_s)
        return True

    def introduced(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: [self.addresses.get(name, ""), self.publics.get(name)] for name in names}

    def tell(self, name: str, control: ControlMessage) -> None:
        self.send(name, stamped(to_json(control), self.fence.stamp(name)))

    def send(self, name: str, message: Message) -> None:
        try:
            self.mailbox.send(name, message)
        except NotConnected:
            pass  # it is gone, which is noticed elsewhere
        except QueueFull:
            self._stuck.add(name)

    def answer_a_ghost(self, name: str) -> None:
        """It was taken for dead and is not: it may say hello again."""
        address, told_from = self._parted.get(name, ("", inf))
        now = time.monotonic()
        if now >= told_from:
            self._parted[name] = address, now + AGAIN_S
            self._connect(name, address)
            self.tell(name, Stop("you were taken for dead", again=True))

    def understood(self, received: Received) -> ControlMessage | None:
        """What it says, if it makes sense and is not of the past."""
        name, stamp = received.peer, stamp_of(received.message)
        try:
            if received.message.kind is not MessageKind.CONTROL:
                raise UserError("a tensor where there should be none")
            control = from_json(received.message.body)
        except UserError as error:
            self.nonsense[name] += 1
            if self.nonsense[name] == 1:
                self.complain(name, str(error))
            return None
        if self.fence.takes(name, stamp, hello=isinstance(control, Hello)):
            return control
        if self.fence.is_ghost(name, stamp) and time.monotonic() > self._answered.get(name, -inf) + AGAIN_S:
            self._answered[name] = time.monotonic()
            again = Stop("another speaks in your name", again=True)
            self.send(name, stamped(to_json(again), self.fence.stamp(name, stamp.life)))
        return None

    def lost(self) -> list[tuple[str, str]]:
        """Who cannot be reached since it was last asked, and how that is known."""
        stuck, self._stuck = self._stuck, set()
        found = [(each.peer, f"its connection: {each.reason}") for each in self.mailbox.lost()]
        return [*found, *((name, "it does not take messages") for name in sorted(stuck))]

    def _connect(self, name: str, address: str) -> None:
        self._stuck.discard(name)
        self.mailbox.connect(name, address, self.publics.get(name))


class MembershipCallback(Protocol):
    """Has to know who comes and goes, and what is said."""

    def joined(self, name: str) -> None: ...

    def heard(self, name: str, control: ControlMessage) -> None: ...

    def lost(self, name: str, how: str) -> None:
        """It was there."""

    def refused(self, name: str, why: str) -> None:
        """It said hello, and cannot take part."""


@dataclass(kw_only=True)
class Rendezvous(Listener):
    """Greets whoever says hello, and parts with those who are lost or silent."""

    host: MembershipCallback
    node_config: dict[str, Any]
    """What nodes are told to do."""
    silent_s: float
    """How long a node may give no sign of life."""
    _heard: dict[str, float] = field(init=False, default_factory=dict)
    """Node → when it last gave a sign of life."""
    _turned: float = field(init=False, default_factory=time.monotonic)

    def turn(self) -> None:
        """Take in what has come, within TURN_S."""
        for received in self.mailbox.receive(TURN_S):
            self._deliver(received)
        for name, how in self.lost():
            self.lose(name, how)
        now, before = time.monotonic(), self._turned
        self._turned = now
        for name, heard in list(self._heard.items()):
            if now - before > self.silent_s / 2:  # we were held up, and it may have spoken
                self._heard[name] = now
            elif now - heard > self.silent_s:
                self.lose(name, f"no sign of life for {self.silent_s:g} s")

    def lose(self, name: str, how: str) -> bool:
        """Whether it was there."""
        if not self.part(name):
            return False
        del self._heard[name]
        self.host.lost(name, how)
        return True

    def close(self) -> None:
        """Everybody is told to end; returns when that is said."""
        for name in self.addresses:
            self.tell(name, Stop(""))
        self.mailbox.close(CLOSE_LINGER_S)

    def _deliver(self, received: Received) -> None:
        name, control = received.peer, self.understood(received)
        if isinstance(control, Hello):
            self._greet(name, control)
        elif control is not None and name in self.addresses:
            self._heard[name] = time.monotonic()
            self.host.heard(name, control)
        elif control is not None:
            self.answer_a_ghost(name)

    def _greet(self, name: str, hello: Hello) -> None:
        self.lose(name, "it was started again")
        try:
            if hello.version != __version__:
                self._turn_away(name, hello)
                return
            self.meet(name, hello.address)
        except UserError as error:
            self.host.refused(name, str(error))
            return
        self._heard[name] = time.monotonic()
        self.tell(name, Welcome(self.node_config, self.introduced(self.names)))
        self.host.joined(name)

    def _turn_away(self, name: str, hello: Hello) -> None:
        self._connect(name, hello.address)
        self.host.refused(name, f"it runs skippipe {hello.version}, this is {__version__}")
        self.tell(name, Stop(f"skippipe {hello.version} here, {__version__} where the others are: use one version"))
        self.mailbox.disconnect(name, CLOSE_LINGER_S)
