"""The sending side of one connection: a bounded queue, the fate of the connection, and its fast path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import zmq

from skippipe.codecs import Buffer
from skippipe.transport.addresses import (
    CONNECTION_EVENTS,
    Context,
    Socket,
    close_sending,
    endpoint,
    keep_alive,
    monitor_events,
    push_socket,
)
from skippipe.transport.fast_path import FastPathMessage, FastPathSender, FastPathVerb, new_path_id
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_keepalive import LinkHeartbeat

RECONNECT_MOST_MS = 2000
REQUEST_AGAIN_S = 30.0  # between two requests for a fast path, in case it breaks again and again


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
    """The program at that address does not hold the expected key; tried again and again."""
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


Route: TypeAlias = Callable[[int], tuple[str, int]]
"""Where to connect to for a port of the peer: host and port."""


class Sender:
    """A PUSH socket and its monitor; beside it, for a while or never, a fast path and a keepalive."""

    def __init__(self, settings: SocketSettings, peer: str, route: Route, port: int) -> None:
        self._settings = settings
        self._peer = peer
        self._route = route
        self._host, self._port = route(port)
        self.push = push_socket(settings.context, self._host, settings.depth, RECONNECT_MOST_MS)
        keep_alive(self.push)
        self.monitor = self.push.get_monitor_socket(CONNECTION_EVENTS | zmq.EVENT_CONNECTED)
        settings.poller.register(self.monitor, zmq.POLLIN)
        self.answered = False
        """A machine has answered at that address, whatever runs there."""
        self.connected = False
        self.fast_path: FastPathSender | None = None
        self.heartbeat: LinkHeartbeat | None = None
        self._requested: bytes | None = None
        self._path_lost = False
        self._request_from_s = 0.0

    def connect(self, keys: KeyPair | None, server: str | None) -> None:
        self._keys, self._server = keys, server
        self._secure(self.push)
        self.push.connect(endpoint(self._host, self._port))

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
        return bool(int(self.push.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send_verb(self, verb: FastPathMessage) -> bool:
        try:
            return self._put([verb.to_bytes()])
        except ConnectionError:
            return False

    def _put(self, frames: list[Buffer]) -> bool:
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
                self._settings.wake()  # to have it noticed
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                found = LossReason.REFUSED
            elif event == zmq.EVENT_DISCONNECTED and self.connected:
                self.connected = False
                self.close_fast_path()  # its `switch` may be among what was lost
                self._request_from_s = 0.0
                found = found or LossReason.DISCONNECTED
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                found = LossReason.FOREIGN
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                found = found or LossReason.HANDSHAKE
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
        self._settings.poller.unregister(self.monitor)
        close_sending(self.push, self.monitor, linger_s)
