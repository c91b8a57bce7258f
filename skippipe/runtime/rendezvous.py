"""Rendezvous: nodes join, learn each other's addresses, and leave; some go on sending after they were declared dead.

Nodes join three state machines over a mailbox: the training coordinator, the serving gateway and the profiling
coordinator. All of them use a `Listener`. The training coordinator itself decides which nodes take part and which have
been silent for too long; for the other two, `Rendezvous` does that.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import inf
from typing import Any, Protocol

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.heartbeat import HEARTBEATS, HELD_UP
from skippipe.runtime.fencing import Fence, stamp_of
from skippipe.runtime.message_json import control_of, stamped
from skippipe.runtime.messages import (
    CallBack,
    CallFailed,
    ControlMessage,
    Hello,
    PeerUpdate,
    RelayGrant,
    RequestCallback,
    Stop,
    Welcome,
)
from skippipe.runtime.relay_pool import RELAY_SILENT_S, RelayInfo, RelayPool
from skippipe.transport.addresses import join_address, site_of, split_all
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Message, Received
from skippipe.transport.relay import CALLEE, CALLER
from skippipe.transport.token_gate import HEX_TOKEN, TOKEN_BYTES, token_of

log = logging.getLogger(__name__)
CLOSE_LINGER_S = 1.0  # for the last messages to leave
EXIT_MESSAGE_S = 0.5  # for the last messages of a node whose connection broke to arrive
REACHED_S = 5.0  # for a node to be reached at the address that it announces; then it has to call
NOT_THE_NODE = (LossReason.HANDSHAKE, LossReason.UNFINISHED, LossReason.FOREIGN)  # another machine has this address
RELAY_ONLY_S = (60.0, 3600.0)  # until two nodes that cannot call each other try again: at first, and at most
REQUESTED_S = 10.0  # from a request to be called to the report that it failed
REJOIN_REQUEST_S = 1.0  # from one request to a node that was declared dead to the next

EndedNodes = Callable[[], Iterable[tuple[str, str]]]
"""Nodes whose processes have ended since the last call, and how."""


def poll_s(timeout_s: float) -> float:
    """Seconds from one look at the clock to the next: often enough to tell silence from a loop that was held up."""
    return min(0.2, timeout_s / HEARTBEATS)


def _warn(name: str, what: str) -> None:
    log.warning("malformed message from '%s' (later ones are only counted): %s", name, what)


@dataclass
class Listener:
    """Connections to the nodes of a run, behind a fence that keeps stale messages out."""

    mailbox: Mailbox
    names: Iterable[str]
    """Nodes that may join; one without an entry among the keys is not let in."""
    publics: Mapping[str, str | None]
    on_malformed: Callable[[str, str], None] = _warn
    """Called with a node's first message that cannot be read, and with what is wrong with it."""
    on_reached: Callable[[str], None] = lambda name: None
    """Called with a node that can be reached at the address that it has announced."""
    on_out_only: Callable[[str, str, str], None] = lambda name, address, site: None
    """Called with a node that cannot be reached, with the address that it has announced, and with its site, if it may
    be reached there."""
    on_relay: Callable[[str, RelayInfo | None], None] = lambda name, info: None
    """Called with a relay that has come, and what it may carry, or that is gone (None)."""
    on_relay_only: Callable[[str, str, bool], None] = lambda a, b, now: None
    """Called with two nodes of which neither can call the other, as both have said; and when they are to try again."""
    fence: Fence = field(default_factory=lambda: Fence(int(time.time())))
    """Keeps stale messages out. Where nothing tells how many coordinators there were, a clock is a good guess."""
    addresses: dict[str, str] = field(init=False, default_factory=dict)
    """Connected node → its address."""
    malformed: Counter[str] = field(init=False, default_factory=Counter)
    """Node → messages that could not be read."""
    _disconnected: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)
    """Lost node → its last address, and the time from which it may be told to join again."""
    _broken: dict[str, tuple[float, str]] = field(init=False, default_factory=dict)
    """Node whose connection broke → until when its last messages are awaited, and what is known of its end."""
    _answered: dict[str, float] = field(init=False, default_factory=dict)
    """Node → when another incarnation of it was last told to join again."""
    _stuck: set[str] = field(init=False, default_factory=set)
    """Nodes that do not take messages."""
    _secrets: dict[str, str] = field(init=False, default_factory=dict)
    """Node → the secret of the streams that it opens, if it cannot be reached."""
    _calls: dict[str, tuple[float, list[Message]]] = field(init=False, default_factory=dict)
    """Node that has not been reached yet → until when it is called, and what was sent to it meanwhile."""
    _sites: dict[str, tuple[str, str]] = field(init=False, default_factory=dict)
    """Node that cannot be reached from here → its site, by the address that its calls come from, and where it listens.
    Machines behind one router have one site, and reach each other there."""
    _requested_at: dict[tuple[str, str], float] = field(init=False, default_factory=dict)
    """Node and peer → when the node last asked to be called by it."""
    _relay_only: dict[frozenset[str], float] = field(init=False, default_factory=dict)
    """Pair of nodes of which neither can call the other, though one or both can be called from here → when they are to
    try again: it may have been for a moment."""
    _relay_only_s: dict[frozenset[str], float] = field(init=False, default_factory=dict)
    """Pair → how long it was or is not to try."""
    relay_names: frozenset[str] = field(init=False, default=frozenset())
    """Members that may join as relays."""
    _pool: RelayPool = field(init=False, default_factory=RelayPool)

    def __post_init__(self) -> None:
        for name in self.names:
            if name in self.publics:
                self.mailbox.allow(name, self.publics[name])

    def connect(self, name: str, address: str) -> None:
        """Make a node reachable, and tell the others its address; UserError if that is no address."""
        self._open(name, address)
        self.addresses[name] = address
        for pair in [pair for pair in self._relay_only_s if name in pair]:
            del self._relay_only_s[pair]
            self._relay_only.pop(pair, None)
        self._disconnected.pop(name, None)
        self._broken.pop(name, None)  # that was another incarnation
        self.fence.joined(name)
        self._sites.pop(name, None)
        self._calls.pop(name, None)
        if address == OUT_ONLY:
            self.on_out_only(name, address, "")
        else:
            self._calls[name] = time.monotonic() + REACHED_S, []
        self._tell_others(name)

    def _tell_others(self, name: str) -> None:
        for other in self.addresses:
            if other != name:
                self.send(other, PeerUpdate(self.peer_addresses([name], other)))

    def unreachable_from(self, name: str) -> list[str]:
        """Connected nodes that a node cannot call, and that cannot call it; none while there is a relay."""
        return [] if self.relays else [other for other in self.addresses if {name, other} in self.pairs_without_link()]

    def pairs_without_link(self) -> list[frozenset[str]]:
        """Pairs of connected nodes of which neither can call the other."""
        out_only = [name for name, address in self.addresses.items() if address == OUT_ONLY]
        pairs = {frozenset((a, b)) for a, b in combinations(out_only, 2) if not self._address_at_site(a, b)}
        return sorted(pairs | {pair for pair in self._relay_only if pair <= self.addresses.keys()}, key=sorted)

    @property
    def relays(self) -> Mapping[str, RelayInfo]:
        """Relays that are there."""
        return self._pool.relays

    def is_called(self, name: str) -> bool:
        """Is it still being found out whether a node can be reached?"""
        return name in self._calls

    def disconnect(self, name: str, linger_s: float = 0.0) -> bool:
        """Treat a node as lost, unless it joins again; False if it was not connected."""
        if name not in self.addresses:
            return False
        self._disconnected[name] = self.addresses.pop(name), time.monotonic()
        self._calls.pop(name, None)
        self._broken.pop(name, None)
        self.fence.left(name)
        self.mailbox.disconnect(name, linger_s)
        return True

    def peer_addresses(self, names: Iterable[str], receiver: str) -> dict[str, Any]:
        """Address and public key of each node, as `PeerUpdate` has them; without the address of one that the receiver
        meets at a relay."""
        met = {name for pair in self._relay_only if receiver in pair for name in pair & self.addresses.keys()}
        addresses = {name: self._address_at_site(name, receiver) or self.addresses.get(name, "") for name in names}
        return {
            name: [OUT_ONLY if name in met and self.relays else address, self.publics.get(name)]
            for name, address in addresses.items()
        }

    def _address_at_site(self, name: str, receiver: str) -> str:
        """Where a node that cannot be called from here listens, if the receiver is such a node of the same site."""
        site, address = self._sites.get(name, ("", ""))
        return address if site and site == self._sites.get(receiver, ("", ""))[0] else ""

    def send(self, name: str, control: ControlMessage) -> None:
        self.send_message(name, stamped(control, self.fence.stamp(name)))

    def send_message(self, name: str, message: Message) -> None:
        if name in self._calls:
            self._calls[name][1].append(message)
        try:
            self.mailbox.send(name, message)
        except NotConnected:
            pass  # it is lost, which is noticed elsewhere
        except QueueFull:
            self._stuck.add(name)

    def request_rejoin(self, name: str) -> None:
        """Tell a node that was declared dead and is not to join again."""
        address, allowed_from = self._disconnected.get(name, ("", inf))
        now = time.monotonic()
        if now >= allowed_from:
            self._disconnected[name] = address, now + REJOIN_REQUEST_S
            if not self.mailbox.connects_to(name):  # another attempt would end the one that is under way
                self._open(name, address)
            self.send(name, Stop("declared dead", again=True))

    def decode(self, received: Received) -> ControlMessage | None:
        """The control message, if it can be read and is not stale."""
        name, stamp = received.peer, stamp_of(received.message)
        try:
            control = control_of(received.message)
        except UserError as error:
            self.malformed[name] += 1
            if self.malformed[name] == 1:
                (_warn if name in self.relay_names else self.on_malformed)(name, str(error))
            return None
        if self.fence.accepts(name, stamp, hello=isinstance(control, Hello)):
            if name in self.relay_names or (isinstance(control, Hello) and control.relay):
                if isinstance(control, Hello):
                    self._heard_relay(name, control)
                return None
            if isinstance(control, RequestCallback):
                self._pass_on(name, control)
                return None
            if isinstance(control, CallFailed):
                self._call_failed(name, control.peer)
                return None
            if isinstance(control, Hello):
                self._secrets[name] = control.callback
            return control
        stale = self.fence.is_other_incarnation(name, stamp)
        if stale and time.monotonic() > self._answered.get(name, -inf) + REJOIN_REQUEST_S:
            self._answered[name] = time.monotonic()
            again = Stop("another node has joined under your name", again=True)
            self.send_message(name, stamped(again, self.fence.stamp(name, stamp.incarnation)))
        return None

    def lost(self) -> list[tuple[str, str]]:
        """Nodes that have become unreachable since the last call, and how that is known. What they sent before has had
        time to arrive: it may say why they end."""
        stuck, self._stuck = self._stuck, set()
        lost = {each.peer: each.reason for each in self.mailbox.lost()}
        connected = self.mailbox.connected
        for name in self.relay_names & lost.keys():
            self.lose_relay(name, f"its connection: {lost.pop(name)}")
        for name in self._pool.silent(time.monotonic()):
            self.lose_relay(name, f"no word for {RELAY_SILENT_S:g} s")
        for pair in [pair for pair, until in self._relay_only.items() if time.monotonic() >= until]:
            del self._relay_only[pair]
            self._tell_relay_only([pair])
            one, other = sorted(pair)
            self.on_relay_only(one, other, False)
        for name, (until, _) in list(self._calls.items()):
            if name not in self._calls:
                continue  # disconnected meanwhile, because of another that was reached
            if name in connected:
                del self._calls[name]
                self.on_reached(name)
            elif self._is_not_there(name, until, lost.get(name)) and self._await_calls(name):
                lost.pop(name, None)
        now = time.monotonic()
        for name, reason in lost.items():
            self._broken.setdefault(name, (now + EXIT_MESSAGE_S, f"its connection: {reason}"))
        found = [(name, how) for name, (until, how) in self._broken.items() if now >= until]
        for name, _ in found:
            del self._broken[name]
        return [*found, *((name, "it does not take messages") for name in sorted(stuck - self.relay_names))]

    def lose_relay(self, name: str, how: str) -> None:
        """A relay is gone, or its key was revoked; streams that it has joined are the nodes' affair."""
        if self._pool.remove(name):
            self.mailbox.disconnect(name, CLOSE_LINGER_S)
            log.info("relay '%s' is gone: %s", name, how)
            if not self.relays:
                self._tell_relay_only(self._relay_only)
            self.on_relay(name, None)

    def _heard_relay(self, name: str, hello: Hello) -> None:
        if name not in self.relays or self._secrets.get(name) != hello.callback:
            self._secrets[name] = hello.callback
            with suppress(UserError):  # without a secret it cannot be told anything
                self._open(name, OUT_ONLY)
        try:
            if hello.version != __version__:
                raise UserError(f"skippipe {hello.version} here, {__version__} at the coordinator: use one version")
            if name not in self.relay_names:
                raise UserError(f"'{name}' was invited as a node: start it with 'skippipe node', or invite a relay")
            info = RelayInfo.of(hello)
        except UserError as error:
            self.send(name, Stop(str(error)))
            return
        if self._pool.heard(name, info, time.monotonic()):
            log.info("relay '%s' is at %s", name, info.address)
            if len(self.relays) == 1:
                self._tell_relay_only(self._relay_only)
            self.on_relay(name, info)

    def _is_not_there(self, name: str, until: float, lost: LossReason | None) -> bool:
        """Is there no node at the address that was announced? One that has answered, and no more, may be busy."""
        return lost in NOT_THE_NODE or (time.monotonic() >= until and name not in self.mailbox.answered)

    def _await_calls(self, name: str) -> bool:
        """A node cannot be reached where it says it is: from now on it calls, if it can."""
        _, sent = self._calls.pop(name)
        if not HEX_TOKEN.fullmatch(self._secrets.get(name, "")):
            return False
        log.warning("'%s' cannot be called at %s: it calls others instead", name, self.addresses[name])
        announced, self.addresses[name] = self.addresses[name], OUT_ONLY
        self._sites[name] = site_of(self.mailbox.host_of(name)), announced
        self._open(name, OUT_ONLY)
        for message in sent:
            self.send_message(name, message)
        self._tell_others(name)
        here = [other for other in self.addresses if other != name and self._address_at_site(other, name)]
        if here:
            self.send(name, PeerUpdate(self.peer_addresses(here, name)))
        self.on_out_only(name, announced, self._sites.get(name, ("", ""))[0])
        return True

    def _pass_on(self, name: str, request: RequestCallback) -> None:
        """A node cannot reach another: have that one call it, if it can be called, or both meet at a relay."""
        address = self._address_at_site(name, request.peer) or self.addresses.get(name, OUT_ONLY)
        if request.peer not in self.addresses.keys() - {name}:
            return
        self._requested_at[name, request.peer] = time.monotonic()
        apart = self.relays and frozenset((name, request.peer)) in self._relay_only
        if address != OUT_ONLY and request.port and not apart:
            where = [join_address(host, request.port) for host, _ in split_all(address)]
            self.send(request.peer, CallBack(name, ",".join(where), request.token))
        elif relay := self._pool.choose(name, request.peer, time.monotonic()):
            meeting, secret = self.relays[relay].address, secrets.token_bytes(TOKEN_BYTES)
            self.send(relay, RelayGrant(name, request.peer, secret.hex()))
            self.send(name, CallBack(request.peer, meeting, "", token_of(secret, CALLER).hex()))
            self.send(request.peer, CallBack(name, meeting, request.token, token_of(secret, CALLEE).hex()))

    def _call_failed(self, name: str, peer: str) -> None:
        """A node was to call a peer that cannot call it, and cannot either."""
        pair = frozenset((name, peer))
        recent = time.monotonic() < self._requested_at.get((peer, name), -inf) + REQUESTED_S
        if recent and pair <= self.addresses.keys() and pair not in self._relay_only:
            log.warning("'%s' and '%s' cannot call each other", name, peer)
            self._relay_only_s[pair] = min(2 * self._relay_only_s.get(pair, RELAY_ONLY_S[0] / 2), RELAY_ONLY_S[1])
            self._relay_only[pair] = time.monotonic() + self._relay_only_s[pair]
            if self.relays:
                self._tell_relay_only([pair])
            self.on_relay_only(name, peer, True)

    def _tell_relay_only(self, pairs: Iterable[frozenset[str]]) -> None:
        """Nodes that cannot call each other are told to meet at a relay; or to try again, if there is none."""
        for name, peer in (order for pair in pairs for order in permutations(sorted(pair))):
            if {name, peer} <= self.addresses.keys():
                self.send(name, PeerUpdate(self.peer_addresses([peer], name)))

    def _open(self, name: str, address: str) -> None:
        self._stuck.discard(name)
        if address == OUT_ONLY:
            secret = self._secrets.get(name, "")
            if not HEX_TOKEN.fullmatch(secret):
                raise UserError("it only calls out, and has sent no secret for its calls")
            self.mailbox.expect_callbacks(name, bytes.fromhex(secret))
        self.mailbox.connect(name, address, self.publics.get(name))


class MembershipCallback(Protocol):
    """Is told which nodes join and leave, and what they send."""

    def joined(self, name: str) -> None: ...

    def received(self, name: str, control: ControlMessage) -> None: ...

    def lost(self, name: str, how: str) -> None:
        """A node that had joined is lost."""

    def refused(self, name: str, why: str) -> None:
        """A node has tried to join, and cannot take part."""


@dataclass(kw_only=True)
class Rendezvous(Listener):
    """Lets nodes join, and declares those dead that are silent for too long."""

    host: MembershipCallback
    node_config: dict[str, Any]
    """What nodes are told to do."""
    timeout_s: float
    """Seconds without a heartbeat after which a node is declared dead."""
    _last_seen: dict[str, float] = field(init=False, default_factory=dict)
    """Node → when its last message arrived."""
    _polled: float = field(init=False, default_factory=time.monotonic)

    def poll(self) -> None:
        """Take in what has arrived, and look at the clock."""
        for received in self.mailbox.receive(poll_s(self.timeout_s)):
            self._deliver(received)
        for name, how in self.lost():
            self.declare_lost(name, how)
        now, before = time.monotonic(), self._polled
        self._polled = now
        for name, seen in list(self._last_seen.items()):
            if now - before > HELD_UP * self.timeout_s:  # this process was held up: a message may be on its way
                self._last_seen[name] = now
            elif now - seen > self.timeout_s:
                self.declare_lost(name, f"no heartbeat for {self.timeout_s:g} s")

    def declare_lost(self, name: str, how: str) -> bool:
        """False if the node was not connected."""
        if not self.disconnect(name):
            return False
        del self._last_seen[name]
        self.host.lost(name, how)
        return True

    def close(self) -> None:
        """Stop all nodes; returns when the messages have left."""
        for name in self.addresses:
            self.send(name, Stop(""))
        self.mailbox.close(CLOSE_LINGER_S)

    def _deliver(self, received: Received) -> None:
        name, control = received.peer, self.decode(received)
        if isinstance(control, Hello):
            self._on_hello(name, control)
        elif control is not None and name in self.addresses:
            self._last_seen[name] = time.monotonic()
            self.host.received(name, control)
        elif control is not None:
            self.request_rejoin(name)

    def _on_hello(self, name: str, hello: Hello) -> None:
        self.declare_lost(name, "it was restarted")
        try:
            if hello.version != __version__:
                self._refuse_version(name, hello)
                return
            self.connect(name, hello.address)
        except UserError as error:
            self.host.refused(name, str(error))
            return
        self._last_seen[name] = time.monotonic()
        self.send(name, Welcome(self.node_config, self.peer_addresses(self.names, name)))
        self.host.joined(name)

    def _refuse_version(self, name: str, hello: Hello) -> None:
        self._open(name, hello.address)
        self.host.refused(name, f"it runs skippipe {hello.version}, this is {__version__}")
        self.send(name, Stop(f"skippipe {hello.version} here, {__version__} where the others are: use one version"))
        self.mailbox.disconnect(name, CLOSE_LINGER_S)
