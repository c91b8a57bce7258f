"""The fast path: a second connection from one mailbox to another, for all messages once there are large ones.

libzmq encrypts with XSalsa20-Poly1305, in software. AES-256-GCM has instructions of its own in most processors and
is several times faster, so frames in the fast path are sealed here (see `aead`) and libzmq only carries them.
Trust comes from the connection under CURVE, over which three messages of fixed layout are sent:

    request  from the sender: a random name for the path
    offer    from the receiver, over its own connection to the sender: the port and a password, for that name
    switch   from the sender, when it is connected there: the key. From here on its messages come in the fast path

Order follows from the place of `switch` among the messages: the receiver reads nothing from a path before it, and
when a message comes under CURVE after it, the sender has given the path up and the receiver does too. So a path never
comes back to life; after a loss there is a new one with a new name, password and key, and until then, or where the
port cannot be reached, messages go under CURVE as if there were no fast paths.

In a fast path a message is a sealed frame with its header and the length of its payload, and the payload in sealed
pieces. They are messages of their own to ZeroMQ, so that sealing, transfer and opening of one payload overlap.
"""

from __future__ import annotations

import logging
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import zmq

from skippipe.codecs import Buffer
from skippipe.transport.addresses import (
    CONNECTION_EVENTS,
    Context,
    Place,
    bind,
    close_sending,
    endpoint,
    keep_alive,
    monitor_events,
    pull_socket,
    push_socket,
)
from skippipe.transport.aead import TAG_BYTES, Forged, Opener, Sealer
from skippipe.transport.message import HEADER, Malformed

log = logging.getLogger(__name__)
LARGE_BYTES = 2**18  # a tensor of this size is worth a fast path
PIECE_BYTES = 2**18  # stays in a processor's cache between sealing and sending
FRAMES_AT_ONCE = 64  # taken from one path before others get their turn
PATH_DOMAIN = b"skippipe-lane"

LENGTH = struct.Struct("<Q")
VERB = struct.Struct("<4sB16sH32s")
VERB_MAGIC = b"SKPL"


class FastPathVerb(IntEnum):
    """What a `FastPathMessage` does."""

    REQUEST = 1
    OFFER = 2
    SWITCH = 3


@dataclass(frozen=True, slots=True)
class FastPathMessage:
    """A message between two mailboxes about a fast path, under CURVE."""

    verb: FastPathVerb
    path_id: bytes
    port: int = 0
    secret: bytes = bytes(32)
    """The password in an offer, the key in a switch."""

    def to_bytes(self) -> bytes:
        return VERB.pack(VERB_MAGIC, self.verb, self.path_id, self.port, self.secret)

    @classmethod
    def from_bytes(cls, data: Buffer) -> FastPathMessage:
        if len(data) != VERB.size:
            raise Malformed(f"{len(data)} bytes about a fast path instead of {VERB.size}")
        _, verb, path_id, port, secret = VERB.unpack(data)
        if verb not in tuple(FastPathVerb):
            raise Malformed(f"verb {verb} of a fast path is unknown")
        if verb == FastPathVerb.OFFER and not port:
            raise Malformed("a fast path without a port")
        return cls(FastPathVerb(verb), path_id, port, secret)


def new_path_id() -> bytes:
    return secrets.token_bytes(16)


def between(path_id: bytes, sender: str, receiver: str) -> bytes:
    """Binds frames to path, sender and receiver; names have their length in front, so that they cannot run together."""
    return path_id + b"".join(bytes([len(name.encode())]) + name.encode() for name in (sender, receiver))


class FastPathSender:
    """The sender's end: it connects once, and never again."""

    def __init__(
        self,
        context: Context,
        place: Place,
        offer: FastPathMessage,
        sender: str,
        receiver: str,
        depth: int,
        wake: Callable[[], None],
    ) -> None:
        """`place` is the host and port that lead to the receiver's. `wake` is called, in another thread, when there is
        room for a message that `send` had none for."""
        self.path_id = offer.path_id
        self.ready = False
        self.in_use = False
        self._depth = depth
        self._wake = wake
        self._sealer = Sealer(between(offer.path_id, sender, receiver))
        self._queued: deque[weakref.ref[memoryview]] = deque()
        self._has_waiter = False
        self.push = push_socket(context, place[0], 0)  # messages are counted here: libzmq would count their pieces
        self.push.setsockopt(zmq.PLAIN_USERNAME, offer.path_id.hex().encode())
        self.push.setsockopt(zmq.PLAIN_PASSWORD, offer.secret.hex().encode())
        keep_alive(self.push)
        self.push.copy_threshold = 0  # a small frame that is copied would count as sent
        self.monitor = self.push.get_monitor_socket(CONNECTION_EVENTS | zmq.EVENT_CLOSED)
        self.push.connect(endpoint(*place))

    def switch(self) -> FastPathMessage:
        return FastPathMessage(FastPathVerb.SWITCH, self.path_id, secret=self._sealer.key)

    def broken(self) -> bool:
        """Read the monitor's events; whether the connection is gone."""
        events = set(monitor_events(self.monitor))
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self.ready = True
        return bool(events - {zmq.EVENT_HANDSHAKE_SUCCEEDED})

    def send(self, header: bytes, payload: Buffer) -> bool:
        """Queue all or nothing; False when there is no room, ConnectionError when the connection is gone."""
        if not self._has_room():
            self._has_waiter = True
            if not self._has_room():  # once more, or what left just before would not wake the caller
                return False
            self._has_waiter = False
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
        """pyzmq holds on to the view until libzmq has sent it: when the last one of a message is freed, it has left."""
        view = memoryview(frame)
        if last:
            self._queued.append(weakref.ref(view, self._left))
        self.push.send(view, zmq.NOBLOCK, copy=False)

    def _has_room(self) -> bool:
        while self._queued and self._queued[0]() is None:
            self._queued.popleft()
        return len(self._queued) < self._depth

    def _left(self, _: weakref.ref[memoryview]) -> None:
        if self._has_waiter:
            self._has_waiter = False
            self._wake()

    def close(self, linger_s: float) -> None:
        self._queued.clear()
        close_sending(self.push, self.monitor, linger_s)


class FastPathReceiver:
    """The receiver's end: a port of its own, so that a path that must wait does not make others wait."""

    def __init__(self, context: Context, hosts: Sequence[str], path_id: bytes, largest_bytes: int, depth: int) -> None:
        self.path_id = path_id
        self.token = secrets.token_bytes(32)
        self._largest_bytes = largest_bytes
        self._opener: Opener | None = None
        self._opening = bytearray(HEADER.size + LENGTH.size)
        self._payload: memoryview | None = None
        self._filled = 0
        self._most_frames = depth + -(-largest_bytes // PIECE_BYTES)  # one message of the largest size, or small ones
        self.pull = pull_socket(context, PIECE_BYTES + TAG_BYTES, self._most_frames)
        self.pull.setsockopt(zmq.PLAIN_SERVER, 1)
        self.pull.setsockopt(zmq.ZAP_DOMAIN, PATH_DOMAIN)
        self.port = 0
        for host in hosts:
            try:
                self.port = bind(self.pull, host, self.port)[1]
            except zmq.ZMQError:
                if not self.port:
                    self.pull.close()
                    raise
                log.debug("no fast path at %s: port %d is taken there", host, self.port)

    @property
    def is_open(self) -> bool:
        return self._opener is not None

    def offer(self) -> FastPathMessage:
        return FastPathMessage(FastPathVerb.OFFER, self.path_id, self.port, self.token)

    def open(self, key: bytes, sender: str, receiver: str) -> None:
        self._opener = Opener(key, between(self.path_id, sender, receiver))

    def messages(self, *, all_there: bool = False) -> Iterator[list[Buffer]]:
        """Header and payload of the messages that have arrived whole; Forged or Malformed ends it for good."""
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
