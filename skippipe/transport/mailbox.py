"""A node's mailbox: one socket that all peers send to, and one queue for each peer it sends to.

All queues are bounded and nothing blocks but `receive`, which has a deadline. `send` refuses when a queue is full;
what an unbroken connection has taken arrives, in order. When a connection breaks, `lost` tells, and what was on its way
may be lost: a node that needs an answer requests it again.

Security "curve" encrypts and checks both sides' keys. "none" is for one machine: it works on loopback only.

On the wire a message is a frame with the sender's name, the header, and the payload in one frame or more. The name is
there in both modes so that there is one format; under CURVE it must be the one that goes with the authenticated key,
and a node whose name and key do not match is noticed with its first message. Under CURVE the payload is cut into
pieces, so that encryption, transfer and decryption of one message overlap: ZeroMQ seals a frame whole before its
first byte leaves. libzmq refuses a frame above the limit before it takes memory for it; how many frames a message
has it does not limit, so a peer on the list could still fill the memory of a node. Others cannot: they get no further
than the handshake.

Where two mailboxes are connected both ways under CURVE, the first large tensor opens a fast path (see `fast_path`), and
from then on all messages in that direction go there. Nothing changes for callers but the speed.

Handshakes are answered inside `receive`: a node that does not call it for HANDSHAKE_BEGUN_S keeps others from
connecting (connections that stand are not affected).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeAlias

import zmq

from skippipe.codecs import EncodedTensor
from skippipe.errors import UserError
from skippipe.transport import aead
from skippipe.transport.addresses import LEAST_LINGER_S, OUT_ONLY, SLOW_HANDSHAKE_S, is_loopback, split_all
from skippipe.transport.callbacks import Callbacks, CallRequest
from skippipe.transport.fast_path import LARGE_BYTES
from skippipe.transport.keys import KeyPair, check_key
from skippipe.transport.message import Limits, Message, Received, to_frames
from skippipe.transport.receiver import LONGEST_NAME, Receiver
from skippipe.transport.sender import LossReason, Lost, NotConnected, QueueFull, Route, Sender, SocketSettings

__all__ = ["OUT_ONLY", "LossReason", "Lost", "Mailbox", "NotConnected", "QueueFull"]

Security: TypeAlias = Literal["curve", "none"]

ATTEMPT_S = 2.0  # for an attempt to connect, until something answers
PIECE_BYTES = 2**20
IO_THREADS = 2  # share the connections and do the encryption: one alone would do it all in turn
MOST_SOCKETS = 2**14  # of ZeroMQ; a connection takes three, with a fast path each way seven; two more if watched


class Mailbox:
    """One per process, used by one thread; only `wake` may be called from others."""

    def __init__(
        self,
        name: str,
        keys: KeyPair | None,
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        largest_bytes: int = 2**28,
        depth: int = 16,
        json_bytes: int = 2**22,
        trusted: str | None = None,
        fast_path: bool = True,
    ) -> None:
        """`listen` may have several addresses with commas between them, and so may those of peers.

        `largest_bytes` of payload and `depth` messages to a queue bound the memory that a connection can take.

        Of JSON `json_bytes` are taken at most, for it takes many times its size in memory; from the `trusted` peer, 16
        times as many. `fast_path` counts under CURVE only, and where the package `cryptography` is installed at both
        ends; its port is any free one of the host that the mailbox listens on.
        """
        if security == "curve" and keys is None:
            raise UserError(f"'{name}': security 'curve' needs a key pair; make one or choose 'none' on one machine")
        if not 0 < len(name.encode()) <= LONGEST_NAME:
            raise UserError(f"'{name}': a node's name has 1 to {LONGEST_NAME} bytes")
        places = split_all("127.0.0.1:0" if listen == OUT_ONLY else listen)
        self.name = name
        self.security = security
        self._keys = keys if security == "curve" else None
        for host, _ in places:
            self._check_loopback(host)
        self._limits = Limits(payload_bytes=largest_bytes, json_bytes=json_bytes)
        self._outgoing: dict[str, Sender] = {}
        self._lost: dict[str, LossReason] = {}
        self.sent_bytes: Counter[str] = Counter()

        self._context = zmq.Context(IO_THREADS)
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._poller = zmq.Poller()
        self._settings = SocketSettings(
            self._context,
            self._poller,
            name,
            depth,
            piece_bytes=PIECE_BYTES if security == "curve" else largest_bytes,
            fast_path=fast_path and security == "curve" and aead.AVAILABLE,
            wake=self.wake,
        )
        self._incoming = Receiver(self._settings, self._keys, places, self._limits, trusted)
        self.address = OUT_ONLY if listen == OUT_ONLY else self._incoming.address
        self._callbacks: Callbacks | None = None
        self._takes_callbacks = False
        self.malformed = self._incoming.malformed
        self.received_bytes = self._incoming.received_bytes

        self._wake_lock = threading.Lock()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._closed = False

    def _check_loopback(self, host: str) -> None:
        if self.security == "none" and not is_loopback(host):
            raise UserError(f"{host}: security 'none' is for one machine; use a loopback address or security 'curve'")

    def allow(self, peer: str, public: str | None = None) -> None:
        """Admit a peer's messages. Under CURVE its public key is what counts; with security none, its name."""
        if self._keys is not None and public is None:
            raise UserError(f"key of '{peer}': missing; under CURVE every peer needs one")
        self._incoming.allow(peer, public)

    def forbid(self, peer: str) -> None:
        """Refuse this peer's messages from now on; it cannot connect again either."""
        self._incoming.forbid(peer)
        if self._callbacks is not None:
            self._callbacks.forbid(peer)

    def on_handshake(self, update: Callable[[], None]) -> None:
        """Have `update` called, inside `receive`, before a peer that connects is let in or refused: it may `allow` and
        `forbid`."""
        self._incoming.on_handshake = update

    @property
    def refused(self) -> int:
        """The number of connections and messages of senders that are not on the list, and of forged frames."""
        return self._incoming.auth.refused

    @property
    def last_refused(self) -> str:
        return self._incoming.auth.last_refused

    @property
    def connected(self) -> frozenset[str]:
        """Peers that this mailbox is connected to, as of the last `receive` or `lost`."""
        return frozenset(peer for peer, outgoing in self._outgoing.items() if outgoing.connected)

    def connects_to(self, peer: str) -> bool:
        """Is there a connection to this peer, or an attempt that goes on?"""
        return peer in self._outgoing

    def host_of(self, peer: str) -> str:
        """The address that messages of this peer come from; empty if none has come."""
        return self._incoming.host_of.get(peer, "")

    @property
    def answered(self) -> frozenset[str]:
        """Peers at whose addresses a machine has answered, connected or not."""
        return frozenset(peer for peer, outgoing in self._outgoing.items() if outgoing.answered)

    def attempt_is_over(self, peer: str, began: float) -> bool:
        """Whether it is time to connect to this peer anew: the last attempt, which that ends, began then by
        `time.monotonic`."""
        return time.monotonic() > began + (SLOW_HANDSHAKE_S if peer in self.answered else ATTEMPT_S)

    @property
    def on_fast_path(self) -> frozenset[str]:
        """Peers that the next message goes to on a fast path, as of the last `receive` or `lost`."""
        return frozenset(peer for peer, out in self._outgoing.items() if out.fast_path and out.fast_path.ready)

    def connect(self, peer: str, address: str, public: str | None = None) -> None:
        """Start to connect, and to reconnect whenever the connection breaks; an earlier connection is closed.

        Of several addresses with commas between them, the first at which the peer answers is taken.

        With OUT_ONLY in the place of an address, connections go through streams that the peer opens (see `callbacks`).
        """
        places = [("127.0.0.1", 0)] if address == OUT_ONLY else split_all(address)
        for host, _ in places:
            self._check_loopback(host)
        if self._keys is not None:
            if public is None:
                raise UserError(f"key of '{peer}': missing; under CURVE the other side must prove its identity")
            check_key(public, f"key of '{peer}'")
        self.disconnect(peer)
        route = self._callback_route(peer) if address == OUT_ONLY else None
        outgoing = Sender(self._settings, peer, [route(0)] if route else places, route)
        try:
            outgoing.connect(self._keys, public)
        except zmq.ZMQError as error:
            outgoing.close()
            raise UserError(f"{address}: cannot connect there: {zmq.strerror(error.errno or 0)}; check it") from None
        self._outgoing[peer] = outgoing

    def _callback_route(self, peer: str) -> Route:
        callbacks = self._get_callbacks()
        if not self._takes_callbacks and self.address != OUT_ONLY:
            self._takes_callbacks = True
            callbacks.listen(self.address)
        return lambda port: callbacks.place_of(peer, port)

    def _get_callbacks(self) -> Callbacks:
        if self._callbacks is None:
            self._callbacks = Callbacks(self.name, self.wake, self._incoming.place_of)
        return self._callbacks

    def expect_callbacks(self, peer: str, secret: bytes) -> None:
        """The peer, which cannot be called, calls `be_callable` with this address and secret."""
        self._get_callbacks().expect_series(peer, secret)

    def be_callable(self, address: str, secret: bytes) -> None:
        """Let the mailbox at this address, or at one of several, send here over streams that this one opens, and opens
        again when they are lost; another one than before is not served any more. The secret is for that peer only, and
        for one time."""
        self._get_callbacks().park(address, secret)

    def call_requests(self) -> list[CallRequest]:
        """Callbacks that this mailbox needs since the last call: someone has to tell the peer, who `answer`s."""
        return self._callbacks.take_requests() if self._callbacks is not None else []

    def answer(self, peer: str, addresses: Sequence[str], token: str) -> None:
        """Call back a peer that has requested it."""
        self._get_callbacks().answer(peer, addresses, bytes.fromhex(token))

    def failed_calls(self) -> list[str]:
        """Peers that have asked for a call since the last time, and do not answer it."""
        return self._callbacks.take_failed() if self._callbacks is not None else []

    def meet(self, addresses: Sequence[str], token: str, callback: str) -> None:
        """Meet a peer at a relay: one that has requested a callback with this token, or that this mailbox has requested
        one of (empty)."""
        self._get_callbacks().meet(addresses, bytes.fromhex(token), bytes.fromhex(callback) if callback else None)

    def watch(self, peers: Collection[str], heartbeat_s: float) -> None:
        """From now on `silent` tells which of the links to these peers are cut, as far as there are connections."""
        for peer, outgoing in self._outgoing.items():
            if peer not in peers:
                outgoing.unwatch()
            elif outgoing.heartbeat is None and outgoing.connected:
                outgoing.watch(heartbeat_s)

    @property
    def watched(self) -> frozenset[str]:
        """Peers that have answered over a link that is watched."""
        return frozenset(peer for peer, out in self._outgoing.items() if out.heartbeat and out.heartbeat.answered)

    @property
    def silent(self) -> dict[str, float]:
        """Peers that do not answer over a link that is watched → since when, by `time.monotonic`: whatever the state of
        the connection for messages, nothing gets there, or nothing back."""
        watched = {peer: outgoing.heartbeat for peer, outgoing in self._outgoing.items() if outgoing.heartbeat}
        return {peer: each.silent_since for peer, each in watched.items() if each.silent_since is not None}

    def disconnect(self, peer: str, linger_s: float = 0.0) -> None:
        """Close the connection; what is still queued gets `linger_s` to leave (in the background)."""
        outgoing = self._outgoing.pop(peer, None)
        if outgoing is not None:
            self._stop_waiting(outgoing)
            outgoing.close(linger_s)
            if self._callbacks is not None:
                self._callbacks.release(peer, linger_s)
        self._lost.pop(peer, None)

    def send(self, peer: str, message: Message, due_ns: int = 0) -> int:
        """Queue a message and give its size in bytes; QueueFull or NotConnected if that cannot be."""
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            raise NotConnected(peer)
        header, payload = to_frames(message, due_ns)
        if len(payload) > self._limits.payload_bytes:
            raise ValueError(f"{len(payload)} bytes for '{peer}'; at most {self._limits.payload_bytes} can be sent")
        try:
            queued = outgoing.send(header, payload)
            if self._settings.fast_path and isinstance(message.body, EncodedTensor) and len(payload) >= LARGE_BYTES:
                outgoing.request_fast_path()
        except ConnectionError:
            self._lose(peer, LossReason.REFUSED)
            raise NotConnected(peer) from None
        if not queued:
            on_fast_path = outgoing.fast_path is not None and outgoing.fast_path.in_use
            if not (on_fast_path or outgoing.holds):  # a fast path calls `wake`, and so does a new connection
                self._poller.register(outgoing.push, zmq.POLLOUT)
            raise QueueFull(peer)
        size = len(self.name.encode()) + len(header) + len(payload)
        self.sent_bytes[peer] += size
        return size

    def receive(self, timeout_s: float) -> list[Received]:
        """The messages that have arrived; waits for at most `timeout_s`.

        It waits less when woken, when a connection is lost, and when a queue that was full has room again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(math.ceil(left_s * 1000)))
            self._incoming.answer_authentication()
            lost = self._poll_connections()
            woken = self._woken in ready
            if woken:
                os.read(self._woken, 65536)
            roomy = [outgoing for outgoing in self._outgoing.values() if outgoing.push in ready]
            for outgoing in roomy:
                self._stop_waiting(outgoing)
            found = self._incoming.drain(self._outgoing)
            if found or lost or woken or roomy or not left_s:
                return found

    def lost(self) -> list[Lost]:
        """Connections that broke or were refused since the last call; one that never came up is no loss."""
        self._poll_connections()
        lost = [Lost(peer, reason) for peer, reason in self._lost.items()]
        self._lost.clear()
        return lost

    def wake(self) -> None:
        """Make `receive` return, now or when it is next called. From any thread."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: `receive` is going to return anyway
            if not self._closed:
                os.write(self._wakes, b"!")

    def close(self, linger_s: float = 0.0) -> None:
        """Give what is queued `linger_s` to leave, then close everything."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._woken)
            os.close(self._wakes)
        for peer in list(self._outgoing):
            self.disconnect(peer, linger_s)
        self._incoming.close()
        self._context.term()  # waits for the queues, and their linger has an end
        if self._callbacks is not None:
            self._callbacks.close(max(linger_s, LEAST_LINGER_S))

    def _poll_connections(self) -> bool:
        losses = {peer: outgoing.poll() for peer, outgoing in self._outgoing.items()}
        for peer, reason in losses.items():
            if reason is not None:
                self._lose(peer, reason)
        return any(losses.values())

    def _stop_waiting(self, outgoing: Sender) -> None:
        """Room in this queue is not waited for (any more)."""
        with contextlib.suppress(KeyError):
            self._poller.unregister(outgoing.push)

    def _lose(self, peer: str, reason: LossReason) -> None:
        if reason in (LossReason.REFUSED, LossReason.FOREIGN):
            self.disconnect(peer)  # libzmq does not try again, and would queue messages for ever
        self._lost[peer] = reason
