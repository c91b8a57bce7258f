"""The fast lane: a second connection from one mailbox to another, for all messages once there are large ones.

libzmq encrypts with XSalsa20-Poly1305, in software. AES-256-GCM has instructions of its own in most processors and
is several times faster, so frames in the fast lane are sealed here (see `sealing`) and libzmq only carries them.
Trust comes from the connection under CURVE, over which three words of fixed layout are said:

    ask     from the sender: a random name for the lane
    offer   from the receiver, over its own connection to the sender: the port and a password, for that name
    switch  from the sender, when it is connected there: the key. From here on its messages come in the lane

Order follows from the place of `switch` among the messages: the receiver reads nothing from a lane before it, and
when a message comes under CURVE after it, the sender has given the lane up and the receiver does too. So a lane never
comes back to life; after a loss there is a new one with a new name, password and key, and until then, or where the
port cannot be reached, messages go under CURVE as if there were no lanes.

In a lane a message is a sealed frame with its header and the length of its payload, and the payload in sealed pieces.
They are messages of their own to ZeroMQ, so that sealing, transfer and opening of one payload overlap.
"""

from __future__ import annotations

import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import zmq

from skippipe.codecs import Buffer
from skippipe.transport.addresses import (
    CONNECTION_EVENTS,
    Context,
    close_sending,
    endpoint,
    keep_alive,
    monitor_events,
    pull_socket,
)
from skippipe.transport.aead import TAG_BYTES, Forged, Opener, Sealer
from skippipe.transport.message import HEADER, Malformed

LARGE_BYTES = 2**18  # a tensor of this size is worth a lane
PIECE_BYTES = 2**18  # stays in a processor's cache between sealing and sending
FRAMES_AT_ONCE = 64  # taken from one lane before others get their turn
LANE_DOMAIN = b"skippipe-lane"

LENGTH = struct.Struct("<Q")
WORD = struct.Struct("<4sB16sH32s")
WORD_MAGIC = b"SKPL"


class FastPathVerb(IntEnum):
    ASK = 1
    OFFER = 2
    SWITCH = 3


@dataclass(frozen=True, slots=True)
class FastPathMessage:
    """What two mailboxes say to each other about a lane, under CURVE."""

    verb: FastPathVerb
    lane: bytes
    port: int = 0
    secret: bytes = bytes(32)
    """The password in an offer, the key in a switch."""

    def to_bytes(self) -> bytes:
        return WORD.pack(WORD_MAGIC, self.verb, self.lane, self.port, self.secret)

    @classmethod
    def from_bytes(cls, data: Buffer) -> FastPathMessage:
        if len(data) != WORD.size:
            raise Malformed(f"{len(data)} bytes about a fast lane instead of {WORD.size}")
        _, verb, lane, port, secret = WORD.unpack(data)
        if verb not in tuple(FastPathVerb):
            raise Malformed(f"word {verb} about a fast lane is unknown")
        if verb == FastPathVerb.OFFER and not port:
            raise Malformed("a fast lane without a port")
        return cls(FastPathVerb(verb), lane, port, secret)


def new_path_id() -> bytes:
    return secrets.token_bytes(16)


def between(lane: bytes, sender: str, receiver: str) -> bytes:
    """The names cannot run into each other: both have their length in front."""
    return lane + b"".join(bytes([len(name.encode())]) + name.encode() for name in (sender, receiver))


class FastPathSender:
    """The sender's end: connected once, never again."""

    def __init__(
        self,
        context: Context,
        host: str,
        offer: FastPathMessage,
        sender: str,
        receiver: str,
        depth: int,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called, in another thread, when there is room for a message that `send` had none for."""
        self.name = offer.lane
        self.ready = False
        self.in_use = False
        self._depth = depth
        self._wake = wake
        self._sealer = Sealer(between(offer.lane, sender, receiver))
        self._queued: deque[weakref.ref[memoryview]] = deque()
        self._waited_for = False
        self.push = context.socket(zmq.PUSH)
        self.push.setsockopt(zmq.LINGER, 0)
        self.push.setsockopt(zmq.SNDHWM, 0)  # messages are counted here: libzmq would count their pieces
        self.push.setsockopt(zmq.RECONNECT_IVL, -1)
        self.push.setsockopt(zmq.IPV6, int(":" in host))
        self.push.setsockopt(zmq.PLAIN_USERNAME, offer.lane.hex().encode())
        self.push.setsockopt(zmq.PLAIN_PASSWORD, offer.secret.hex().encode())
        keep_alive(self.push)
        self.push.copy_threshold = 0  # a small frame that is copied would count as sent
        self.monitor = self.push.get_monitor_socket(CONNECTION_EVENTS | zmq.EVENT_CLOSED)
        self.push.connect(endpoint(host, offer.port))

    def switch(self) -> FastPathMessage:
        return FastPathMessage(FastPathVerb.SWITCH, self.name, secret=self._sealer.key)

    def broken(self) -> bool:
        """Take in what the monitor has to say."""
        events = set(monitor_events(self.monitor))
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self.ready = True
        return bool(events - {zmq.EVENT_HANDSHAKE_SUCCEEDED})

    def send(self, header: bytes, payload: Buffer) -> bool:
        """Queue all or nothing; False when there is no room, ConnectionError when the connection is gone."""
        if not self._has_room():
            self._waited_for = True
            if not self._has_room():  # once more, or what left just before would wake nobody
                return False
            self._waited_for = False
        opening = header + LENGTH.pack(len(payload))
        whole = memoryview(payload)
        pieces = [whole[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]
        try:
            self._put(self._sealer.seal(opening), last=not pieces)
            for index, piece in enumerate(pieces):
                self._put(self._sealer.seal(piece, opening), last=index == len(pieces) - 1)
        except zmq.Again:
            raise ConnectionError from None
        return True

    def _put(self, frame: bytes, *, last: bool) -> None:
        """pyzmq holds on to the view until libzmq has sent it: when the last one of a message dies, it has left."""
        view = memoryview(frame)
        if last:
            self._queued.append(weakref.ref(view, self._left))
        self.push.send(view, zmq.NOBLOCK, copy=False)

    def _has_room(self) -> bool:
        while self._queued and self._queued[0]() is None:
            self._queued.popleft()
        return len(self._queued) < self._depth

    def _left(self, _: weakref.ref[memoryview]) -> None:
        if self._waited_for:
            self._waited_for = False
            self._wake()

    def close(self, linger_s: float) -> None:
        self._queued.clear()
        self.push.disable_monitor()
        self.monitor.close(linger=0)
        close_sending(self.push, linger_s)


class FastPathReceiver:
    """The receiver's end: a port of its own, so that a lane that must wait keeps nobody else waiting."""

    def __init__(self, context: Context, host: str, lane: bytes, largest_bytes: int, depth: int) -> None:
        self.name = lane
        self.token = secrets.token_bytes(32)
        self._largest_bytes = largest_bytes
        self._opener: Opener | None = None
        self._opening = bytearray(HEADER.size + LENGTH.size)
        self._payload: memoryview | None = None
        self._filled = 0
        self._most_frames = depth + -(-largest_bytes // PIECE_BYTES)  # one message of the largest size, or small ones
        self.pull = pull_socket(context, host, PIECE_BYTES + TAG_BYTES, self._most_frames)
        self.pull.setsockopt(zmq.PLAIN_SERVER, 1)
        self.pull.setsockopt(zmq.ZAP_DOMAIN, LANE_DOMAIN)
        try:
            self.pull.bind(endpoint(host, "*"))
        except zmq.ZMQError:
            self.pull.close()
            raise
        self.port = int(self.pull.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def is_open(self) -> bool:
        return self._opener is not None

    def offer(self) -> FastPathMessage:
        return FastPathMessage(FastPathVerb.OFFER, self.name, self.port, self.token)

    def open(self, key: bytes, sender: str, receiver: str) -> None:
        self._opener = Opener(key, between(self.name, sender, receiver))

    def messages(self, *, all_there: bool = False) -> Iterator[list[Buffer]]:
        """Header and payload of the messages that are there whole; Forged or Malformed ends it for good."""
        assert self._opener is not None
        for _ in range(self._most_frames if all_there else FRAMES_AT_ONCE):
            try:
                frame = self.pull.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frame.more:
                raise Forged("frames that hang together")
            if self._payload is None:
                self._opener.open_into(frame.buffer, self._opening)
                (size,) = LENGTH.unpack_from(self._opening, HEADER.size)
                if size > self._largest_bytes:
                    raise Malformed(f"{size} bytes; at most {self._largest_bytes} are taken")
                self._payload, self._filled = np.empty(size, np.uint8).data, 0  # not touched: a length takes no memory
            else:
                until = min(self._filled + PIECE_BYTES, len(self._payload))
                self._opener.open_into(frame.buffer, self._payload[self._filled : until], bytes(self._opening))
                self._filled = until
            if self._filled == len(self._payload):
                payload, self._payload = self._payload, None
                yield [bytes(self._opening[: HEADER.size]), payload]

    def close(self) -> None:
        self.pull.close()
