"""One peer that we send to: a bounded queue, what becomes of the connection, and its fast lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import zmq

from skippipe.codecs import Buffer
from skippipe.transport.addresses import (
    CONNECT_S,
    CONNECTION_EVENTS,
    Context,
    Socket,
    close_sending,
    endpoint,
    keep_alive,
    monitor_events,
)
from skippipe.transport.fast_path import FastPathMessage, FastPathSender, FastPathVerb, new_path_id
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_keepalive import LinkHeartbeat

RECONNECT_MS = 100
RECONNECT_MOST_MS = 2000
ASK_AGAIN_S = 30.0  # between two questions for a lane: one that breaks again and again is left alone for a while


class QueueFull(Exception):
    """The peer takes messages more slowly than they come; nothing of this one was sent. The argument is the peer."""


class NotConnected(Exception):
    """There is no connection to send over. The argument is the peer."""


class LossReason(StrEnum):
    DISCONNECTED = "disconnected"
    """The connection, or its fast lane, was up and broke. Messages on their way are gone, and those still queued for
    the lane; those still queued under CURVE go when it is up again."""
    HANDSHAKE = "handshake failed"
    """Somebody answers who does not hold the key we expect; tried again and again."""
    FOREIGN = "protocol error"
    """Somebody answers who does not speak our language, or not with our security. Given up, as when refused."""
    REFUSED = "refused"
    """The peer does not let our key in. Given up, with all that was queued, until `connect` is called again."""


@dataclass(frozen=True, slots=True)
class Lost:
    peer: str
    reason: LossReason


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """What all connections of a mailbox share."""

    context: Context
    poller: zmq.Poller
    name: str
    depth: int
    piece_bytes: int
    """What a frame carries at most, outside fast lanes."""
    fast_lane: bool
    wake: Callable[[], None]


class Sender:
    """A PUSH socket and its monitor; beside it, for a while or never, a lane and a heartbeat."""

    def __init__(self, wiring: SocketSettings, peer: str, host: str) -> None:
        self._wiring = wiring
        self._peer = peer
        self._host = host
        self.push = wiring.context.socket(zmq.PUSH)
        self.push.setsockopt(zmq.LINGER, 0)
        self.push.setsockopt(zmq.SNDHWM, wiring.depth)
        self.push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.push.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
        self.push.setsockopt(zmq.CONNECT_TIMEOUT, round(CONNECT_S * 1000))
        self.push.setsockopt(zmq.IPV6, int(":" in host))
        keep_alive(self.push)
        self.monitor = self.push.get_monitor_socket(CONNECTION_EVENTS)
        wiring.poller.register(self.monitor, zmq.POLLIN)
        self.connected = False
        self.lane: FastPathSender | None = None
        self.heartbeat: LinkHeartbeat | None = None
        self._asked: bytes | None = None
        self._lane_lost = False
        self._ask_from_s = 0.0

    def connect(self, port: int, keys: KeyPair | None, server: str | None) -> None:
        self._port, self._keys, self._server = port, keys, server
        self._secure(self.push)
        self.push.connect(endpoint(self._host, port))

    def _secure(self, socket: Socket) -> None:
        if self._keys is not None and self._server is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.encode())

    def watch(self, heartbeat_s: float) -> None:
        """From now on `heartbeat` says whether the link is silent."""
        wiring = self._wiring
        self.heartbeat = LinkHeartbeat(wiring.context, self._secure, endpoint(self._host, self._port), heartbeat_s)
        wiring.poller.register(self.heartbeat.monitor, zmq.POLLIN)

    def unwatch(self) -> None:
        if self.heartbeat is not None:
            self._wiring.poller.unregister(self.heartbeat.monitor)
            self.heartbeat.close()
            self.heartbeat = None

    def send(self, header: bytes, payload: Buffer) -> bool:
        """Queue all or nothing; False when there is no room. Large frames are not copied but held until they left."""
        lane = self.lane
        if lane is not None and lane.ready and not lane.in_use:
            lane.in_use = self.say(lane.switch())
        if lane is not None and lane.in_use:
            try:
                return lane.send(header, payload)
            except ConnectionError:
                self._lane_lost = True
                self.leave_lane()
                self._wiring.wake()  # to have it noticed
        cut, whole = self._wiring.piece_bytes, memoryview(payload)
        return self._put([header, *(whole[at : at + cut] for at in range(0, max(len(payload), 1), cut))])

    def has_room(self) -> bool:
        """For a message that does not go in the lane."""
        return bool(int(self.push.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def say(self, word: FastPathMessage) -> bool:
        try:
            return self._put([word.to_bytes()])
        except ConnectionError:
            return False

    def _put(self, frames: list[Buffer]) -> bool:
        frames = [self._wiring.name.encode(), *frames]
        for index, frame in enumerate(frames):
            more = zmq.SNDMORE if index < len(frames) - 1 else 0
            try:
                self.push.send(frame, zmq.NOBLOCK | more, copy=False)  # pyzmq copies what is under 64 KiB
            except zmq.Again:
                if index:  # room for the first part is room for all, unless the connection is being given up
                    raise ConnectionError from None
                return False
        return True

    def ask_for_lane(self) -> None:
        """Unless there is one, or it was asked for not long ago."""
        if (self.lane is not None and self.lane.ready) or time.monotonic() < self._ask_from_s:
            return
        self.leave_lane()  # it leads nowhere
        name = new_path_id()
        if self.say(FastPathMessage(FastPathVerb.ASK, name)):
            self._asked = name
            self._ask_from_s = time.monotonic() + ASK_AGAIN_S

    def take_lane(self, offer: FastPathMessage) -> None:
        if offer.lane != self._asked or self.lane is not None:
            return  # for a question of the past
        wiring = self._wiring
        self.lane = FastPathSender(
            wiring.context, self._host, offer, wiring.name, self._peer, depth=wiring.depth, wake=wiring.wake
        )
        wiring.poller.register(self.lane.monitor, zmq.POLLIN)

    def leave_lane(self, linger_s: float = 0.0) -> None:
        """Go on under CURVE."""
        self._asked = None
        if self.lane is not None:
            self._wiring.poller.unregister(self.lane.monitor)
            self.lane.close(linger_s)
            self.lane = None

    def news(self) -> LossReason | None:
        """Take in what the monitors have to say; the gravest loss, if there was any."""
        found: LossReason | None = None
        for event in monitor_events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                found = LossReason.REFUSED
            elif event == zmq.EVENT_DISCONNECTED and self.connected:
                self.connected = False
                self.leave_lane()  # its switch may be among what was lost
                self._ask_from_s = 0.0
                found = found or LossReason.DISCONNECTED
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                found = LossReason.FOREIGN
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                found = found or LossReason.HANDSHAKE
        if self.heartbeat is not None and self.heartbeat.news():
            self._wiring.wake()  # to have it noticed
        if self.lane is not None and self.lane.broken():
            self._lane_lost |= self.lane.in_use
            self.leave_lane()
        if self._lane_lost:
            self._lane_lost = False
            found = found or LossReason.DISCONNECTED
        return found

    def close(self, linger_s: float = 0.0) -> None:
        self.leave_lane(linger_s)
        self.unwatch()
        self._wiring.poller.unregister(self.monitor)
        self.push.disable_monitor()
        self.monitor.close(linger=0)
        close_sending(self.push, linger_s)
