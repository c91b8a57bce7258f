"""The sending side of one connection: a bounded queue, the fate of the connection, and its fast path.

A peer may have several addresses, and a name may stand for several. They are tried side by side (`streams.dial`), and
ZeroMQ connects to the first that answers; if the right program does not, to the next. Until there is a connection,
messages wait here rather than in a socket, so that none is lost by going on to another address. Whether a link that
is up still carries anything is seen on a connection of its own (`LinkHeartbeat`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import zmq

from skippipe.codecs import Buffer
from skippipe.heartbeat import LINK_PROBES, PROBE_UNANSWERED
from skippipe.transport.addresses import (
    CONNECT_S,
    CONNECTION_EVENTS,
    HANDSHAKE_S,
    UNFINISHED_HANDSHAKE,
    Context,
    Place,
    Socket,
    close_sending,
    endpoint,
    is_numeric,
    join_address,
    keep_alive,
    monitor_events,
    push_socket,
)
from skippipe.transport.fast_path import FastPathMessage, FastPathSender, FastPathVerb, new_path_id
from skippipe.transport.keys import KeyPair
from skippipe.transport.streams import dial

RECONNECT_MOST_MS = 2000
PROBE_RECONNECT_MOST_MS = 1000
DIAL_AGAIN_S = 2.0  # before all addresses are tried again, while there is no connection
REQUEST_AGAIN_S = 30.0  # between two requests for a fast path, in case it breaks again and again


class LinkHeartbeat:
    """Keepalive of a link, the side that probes: a connection of its own, on which ZeroMQ sends probes and the other
    side, which needs nothing but a mailbox, answers.

    A link can be cut silently: packets are dropped, and neither side notices until TCP gives up on what it has sent,
    which takes many seconds, or never where nothing is sent. ZeroMQ's heartbeat probes at an interval and gives up when
    no answer comes. On the connection that carries messages it could not be used, because its answer would wait behind
    tensors of many megabytes, and a healthy slow link would count as dead. Here nothing else is sent, so an answer only
    waits for the network. Both ways are tested, for a probe and its answer have to pass. Both ends of it live in
    ZeroMQ's own threads: a process that computes or imports answers like any other, one that is stopped does not.
    """

    def __init__(
        self, context: Context, secure: Callable[[Socket], None], host: str, port: int, heartbeat_s: float
    ) -> None:
        """`secure` gives a socket its keys; host and port are those that messages go to as well."""
        self._unanswered_s = PROBE_UNANSWERED * heartbeat_s
        self.answered = False
        """The other side has answered at least once."""
        self.silent_since: float | None = time.monotonic()
        """Since when there is no answer, by `time.monotonic`; none: there is."""
        push = self._push = push_socket(context, host, 1, PROBE_RECONNECT_MOST_MS)
        push.setsockopt(zmq.HANDSHAKE_IVL, round(CONNECT_S * 1000))
        push.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(heartbeat_s / LINK_PROBES * 1000)))
        push.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(self._unanswered_s * 1000)))
        secure(push)
        self.monitor = push.get_monitor_socket(CONNECTION_EVENTS)
        push.connect(endpoint(host, port))

    def changed(self) -> bool:
        """Read the monitor's events; whether the answers have stopped, or come again."""
        before = self.silent_since
        for event in monitor_events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.answered, self.silent_since = True, None
            elif event == zmq.EVENT_DISCONNECTED and self.answered and self.silent_since is None:
                self.silent_since = time.monotonic() - self._unanswered_s
        return before != self.silent_since

    def close(self) -> None:
        self._push.disable_monitor()
        self.monitor.close(linger=0)
        self._push.close(linger=0)


class QueueFull(Exception):
    """The peer takes messages more slowly than they come; nothing of this one was sent. The argument is the peer."""


class NotConnected(Exception):
    """There is no connection to send over. The argument is the peer."""


class LossReason(StrEnum):
    """Why a connection was lost."""

    DISCONNECTED = "disconnected"
    """The connection, or its fast path, was up and broke. Messages on their way are lost, and those queued for the
    fast path; those still queued under CURVE are sent when it is up again."""
    HANDSHAKE = "handshake failed"
    """The program at that address has ended the handshake: if it does so every time, it does not hold the expected key;
    once, it may have ended itself. Tried again and again."""
    UNFINISHED = "handshake unfinished"
    """The program at that address has accepted a connection and is silent: it may be busy. Tried again and again."""
    FOREIGN = "protocol error"
    """The program at that address has another protocol, or another security. Given up, as when refused."""
    REFUSED = "refused"
    """The peer does not admit this key. Given up, with all that was queued, until `connect` is called again."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection that was lost."""

    peer: str
    reason: LossReason


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """Settings that all connections of a mailbox share."""

    context: Context
    poller: zmq.Poller
    name: str
    depth: int
    piece_bytes: int
    """The most bytes that a frame carries, outside fast paths."""
    fast_path: bool
    wake: Callable[[], None]


Route: TypeAlias = Callable[[int], Place]
"""Where to connect to for a port of the peer."""


class Sender:
    """A PUSH socket and its monitor; beside it, for a while or never, a fast path and a keepalive."""

    def __init__(self, settings: SocketSettings, peer: str, places: Sequence[Place], route: Route | None) -> None:
        """`places` are where the peer may be. With a route it is at one of them, and its other ports are elsewhere."""
        self._settings = settings
        self._peer = peer
        self._places = places
        self._host, self._port = "", 0
        self._route: Route = route or (lambda port: (self._host, port))
        self._held: deque[list[Buffer]] | None = None
        """Messages that wait for a connection; none: there is one address, and they wait in ZeroMQ's socket."""
        if len(places) > 1 or not is_numeric(places[0][0]):
            self._held = deque()
        self._dialling = False
        self._dial_at = 0.0
        self._found: deque[Place | None] = deque()
        """What dialling has found, by another thread."""
        self._wrong: dict[Place, LossReason] = {}
        """Where another program answers, or one that says nothing."""
        self._greeting: Place | None = None
        """Where the handshake is waited for."""
        self._make_socket()
        self.answered = False
        """A machine has answered at that address, whatever runs there."""
        self.connected = False
        self.fast_path: FastPathSender | None = None
        self.heartbeat: LinkHeartbeat | None = None
        self._requested: bytes | None = None
        self._path_lost = False
        self._request_from_s = 0.0

    def _make_socket(self) -> None:
        self.push = push_socket(self._settings.context, self._host, self._settings.depth, RECONNECT_MOST_MS)
        keep_alive(self.push)
        self.monitor = self.push.get_monitor_socket(CONNECTION_EVENTS | zmq.EVENT_CONNECTED)
        self._settings.poller.register(self.monitor, zmq.POLLIN)

    def _close_socket(self, linger_s: float) -> None:
        self._settings.poller.unregister(self.monitor)
        with suppress(KeyError):  # nobody waits for room
            self._settings.poller.unregister(self.push)
        close_sending(self.push, self.monitor, linger_s)

    def connect(self, keys: KeyPair | None, server: str | None) -> None:
        self._keys, self._server = keys, server
        if self._held is None:
            self._connect_to(self._places[0])
        else:
            self._dial()

    def _connect_to(self, place: Place) -> None:
        if self._host:  # another socket: what the monitor of this one still reports would be taken for the new place
            self.unwatch()
            self._close_socket(0.0)
            self._make_socket()
        self._host, self._port = place
        self.push.setsockopt(zmq.IPV6, int(":" in self._host))
        self._secure(self.push)
        self.push.connect(endpoint(self._host, self._port))

    def _dial(self) -> None:
        """Find out, in a thread of its own, which address answers first."""
        self._dialling = True
        addresses, wrong = [join_address(*place) for place in self._places], list(self._wrong)
        found, wake = self._found, self._settings.wake

        def run() -> None:
            try:
                with dial(addresses, without=wrong) as stream:
                    found.append(stream.getpeername()[:2])
            except OSError:
                found.append(None)
            wake()

        threading.Thread(target=run, name=f"dial {self._peer}", daemon=True).start()

    def _poll_dialling(self) -> LossReason | None:
        """Connect to the address that has answered first, or dial again; a loss if only wrong programs answer."""
        loss, now = None, time.monotonic()
        while self._found:
            place, self._dialling = self._found.popleft(), False
            self._dial_at = now + DIAL_AGAIN_S
            if place is None and self._wrong:
                loss = next(reversed(self._wrong.values()))
                self._wrong.clear()
            elif place is not None and not self.connected and place != (self._host, self._port):
                self._connect_to(place)
                self.answered, self._greeting = True, place
                self._dial_at = now + HANDSHAKE_S
        if not (self.connected or self._dialling) and now >= self._dial_at:
            if self._greeting is not None:
                self._wrong[self._greeting] = LossReason.UNFINISHED
            self._dial()
        return loss

    def _is_wrong(self, reason: LossReason) -> LossReason | None:
        """Another program answers: the loss, if there is no other address to try."""
        if self._held is None:
            return reason
        self._wrong[self._host, self._port] = reason
        self._greeting, self._dial_at = None, 0.0
        return None

    def _send_held(self) -> None:
        while self._held and self._put_into_socket(self._held[0]):
            self._held.popleft()
        if self._held:  # `receive` returns when there is room
            self._settings.poller.register(self.push, zmq.POLLOUT)

    def _secure(self, socket: Socket) -> None:
        if self._keys is not None and self._server is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.encode())

    def watch(self, heartbeat_s: float) -> None:
        """From now on `heartbeat` tells whether the link is silent."""
        settings = self._settings
        self.heartbeat = LinkHeartbeat(settings.context, self._secure, self._host, self._port, heartbeat_s)
        settings.poller.register(self.heartbeat.monitor, zmq.POLLIN)

    def unwatch(self) -> None:
        if self.heartbeat is not None:
            self._settings.poller.unregister(self.heartbeat.monitor)
            self.heartbeat.close()
            self.heartbeat = None

    def send(self, header: bytes, payload: Buffer) -> bool:
        """Queue all or nothing; False when there is no room. Large frames are not copied: they are held until sent."""
        path = self.fast_path
        if path is not None and path.ready and not path.in_use:
            path.in_use = self.send_verb(path.switch())
        if path is not None and path.in_use:
            try:
                return path.send(header, payload)
            except ConnectionError:
                self._path_lost = True
                self.close_fast_path()
                self._settings.wake()  # to have it noticed
        cut, whole = self._settings.piece_bytes, memoryview(payload)
        return self._put([header, *(whole[at : at + cut] for at in range(0, max(len(payload), 1), cut))])

    def has_room(self) -> bool:
        """Is there room for a message outside the fast path?"""
        return not self.holds and bool(int(self.push.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    @property
    def holds(self) -> bool:
        """Do messages wait here for a connection?"""
        return self._held is not None and (bool(self._held) or not self.connected)

    def send_verb(self, verb: FastPathMessage) -> bool:
        try:
            return self._put([verb.to_bytes()])
        except ConnectionError:
            return False

    def _put(self, frames: list[Buffer]) -> bool:
        if not self.holds:
            return self._put_into_socket(frames)
        assert self._held is not None
        if len(self._held) >= self._settings.depth:
            return False
        self._held.append(frames)
        return True

    def _put_into_socket(self, frames: list[Buffer]) -> bool:
        frames = [self._settings.name.encode(), *frames]
        for index, frame in enumerate(frames):
            more = zmq.SNDMORE if index < len(frames) - 1 else 0
            try:
                self.push.send(frame, zmq.NOBLOCK | more, copy=False)  # pyzmq copies what is under 64 KiB
            except zmq.Again:
                if index:  # room for the first part is room for all, unless the connection is being given up
                    raise ConnectionError from None
                return False
        return True

    def request_fast_path(self) -> None:
        """Request a fast path, unless there is one or it was requested not long ago."""
        if (self.fast_path is not None and self.fast_path.ready) or time.monotonic() < self._request_from_s:
            return
        self.close_fast_path()  # it never came up
        name = new_path_id()
        if self.send_verb(FastPathMessage(FastPathVerb.REQUEST, name)):
            self._requested = name
            self._request_from_s = time.monotonic() + REQUEST_AGAIN_S

    def open_fast_path(self, offer: FastPathMessage) -> None:
        if offer.path_id != self._requested or self.fast_path is not None:
            return  # the answer to a request of the past
        settings, place = self._settings, self._route(offer.port)
        self.fast_path = FastPathSender(
            settings.context, place, offer, settings.name, self._peer, depth=settings.depth, wake=settings.wake
        )
        settings.poller.register(self.fast_path.monitor, zmq.POLLIN)

    def close_fast_path(self, linger_s: float = 0.0) -> None:
        """Close the fast path; messages go under CURVE again."""
        self._requested = None
        if self.fast_path is not None:
            self._settings.poller.unregister(self.fast_path.monitor)
            self.fast_path.close(linger_s)
            self.fast_path = None

    def poll(self) -> LossReason | None:
        """Read the monitors' events; the gravest loss, if there was any."""
        found: LossReason | None = None
        for event in monitor_events(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self.answered = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self._greeting = None
                self._wrong.clear()
                self._settings.wake()  # to have it noticed
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                found = LossReason.REFUSED
            elif event == zmq.EVENT_DISCONNECTED and self.connected:
                self.connected = False
                self.close_fast_path()  # its `switch` may be among what was lost
                self._request_from_s = self._dial_at = 0.0
                found = found or LossReason.DISCONNECTED
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                found = self._is_wrong(LossReason.FOREIGN) or found
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                found = found or self._is_wrong(LossReason.HANDSHAKE)
            elif event == UNFINISHED_HANDSHAKE:
                found = found or self._is_wrong(LossReason.UNFINISHED)
        if self._held is not None:
            found = self._poll_dialling() or found
        if self.connected and self._held:
            self._send_held()
        if self.heartbeat is not None and self.heartbeat.changed():
            self._settings.wake()  # to have it noticed
        if self.fast_path is not None and self.fast_path.broken():
            self._path_lost |= self.fast_path.in_use
            self.close_fast_path()
        if self._path_lost:
            self._path_lost = False
            found = found or LossReason.DISCONNECTED
        return found

    def close(self, linger_s: float = 0.0) -> None:
        self.close_fast_path(linger_s)
        self.unwatch()
        if linger_s and self._host and self._held:
            self._send_held()
        self._close_socket(linger_s)
