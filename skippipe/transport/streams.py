"""TCP streams that one thread joins in pairs: what one end sends, the other gets, byte for byte.

Nothing here knows what the bytes mean. A direction that carries something has one buffer; until it is empty, nothing
more is read, so a slow receiver slows its sender down as if they were connected directly. All sockets are non-blocking,
and all callbacks run in the loop's thread; only `call` and `close` are for other threads.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain, count, zip_longest
from typing import Any, TypeAlias

from skippipe.transport.addresses import (
    CONNECT_S,
    KEEPALIVE_S,
    UNANSWERED_S,
    Place,
    family_of,
    is_numeric,
    split_address,
)

BUFFER_BYTES = 2**19
MOST_SPARE_BUFFERS = 16  # that are kept for the next direction that carries something
HALF_CLOSED_S = 5.0  # for the other direction, when one has ended
CLOSE_S = 2.0  # for the thread to end when it was told to
ACCEPT_AGAIN_S = 1.0  # from a stream that could not be taken, as where file descriptors have run out, to the next try
RACE_S = 0.25  # that an address has before the next one is tried beside it (RFC 8305, section 8)

Handler: TypeAlias = Callable[[], object]
Meter: TypeAlias = Callable[[int], float]
"""Is told how many bytes have come, and gives the seconds until they go on and more may be read."""

log = logging.getLogger(__name__)


def dial(addresses: Sequence[str], timeout_s: float = CONNECT_S, without: Collection[Place] = ()) -> socket.socket:
    """A connection to the first of some addresses (host:port) that answers. All that their names stand for, IPv6 and
    IPv4 in turn, are tried side by side, but for those to do without; OSError if none answers in time."""
    deadline = time.monotonic() + timeout_s
    failure: OSError = TimeoutError(f"no answer within {timeout_s:g} s")
    kinds: dict[int, list[Any]] = {}
    for host, port in sorted(map(split_address, addresses), key=lambda place: not is_numeric(place[0])):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failure = error
            continue
        for family, _, _, _, where in found:
            if where[:2] not in without:
                kinds.setdefault(family, []).append(where)
    in_turn = chain.from_iterable(zip_longest(*kinds.values()))
    waiting = deque(dict.fromkeys(where for where in in_turn if where is not None))
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                if waiting:
                    try:
                        attempt = _begin(waiting.popleft())
                    except OSError as error:  # no way there, or no addresses of this kind here
                        failure = error
                        continue
                    selector.register(attempt, selectors.EVENT_WRITE)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                for key, _ in selector.select(min(left_s, RACE_S) if waiting else left_s):
                    attempt = key.fileobj  # type: ignore[assignment]
                    selector.unregister(attempt)
                    code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not code:
                        set_options(attempt)
                        return attempt
                    failure = OSError(code, os.strerror(code))
                    attempt.close()
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    raise failure


def _begin(where: Any) -> socket.socket:
    """An attempt to connect; `where` is an address as `getaddrinfo` gives it."""
    attempt = socket.socket(family_of(where[0]), socket.SOCK_STREAM)
    attempt.setblocking(False)
    code = attempt.connect_ex(where)
    if code not in (0, errno.EINPROGRESS):
        attempt.close()
        raise OSError(code, os.strerror(code))
    return attempt


def set_options(stream: socket.socket) -> None:
    """No delay, and the same keepalive as ZeroMQ's sockets have (see `addresses.keep_alive`)."""
    stream.setblocking(False)
    options = {"TCP_KEEPIDLE": KEEPALIVE_S[0], "TCP_KEEPINTVL": KEEPALIVE_S[1], "TCP_KEEPCNT": KEEPALIVE_S[2]}
    with suppress(OSError):  # it is gone already
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * UNANSWERED_S}.items():
            if hasattr(socket, name):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class StreamLoop:
    """The thread, its sockets and its timers."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Handler] = deque()
        self._timers: list[tuple[float, int, Handler]] = []
        self._numbers = count()
        self._joins: set[Join] = set()
        self._buffers: list[memoryview] = []
        self._closing_at: float | None = None
        self._closed = False
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._thread = threading.Thread(target=self._run, name=f"streams of {name}", daemon=True)
        self._thread.start()

    def call(self, what: Handler) -> None:
        """Have something done in the loop's thread. From any thread; nothing is done once the loop is closed."""
        self._calls.append(what)
        with suppress(OSError):  # full: it is going to look anyway
            self._wakes.send(b"!")

    def close(self, linger_s: float = 0.0) -> None:
        """End the thread; streams that still carry something get that long to finish."""

        def begin() -> None:
            self._closing_at = time.monotonic() + linger_s

        self.call(begin)
        self._thread.join(linger_s + CLOSE_S)

    # In the loop's thread

    def watch(self, stream: socket.socket, events: int, handler: Handler) -> None:
        """Call the handler whenever the stream is ready for these events."""
        if not events:
            self.unwatch(stream)
        elif self._is_watched(stream):
            self._selector.modify(stream, events, handler)
        elif stream.fileno() >= 0:
            self._selector.register(stream, events, handler)

    def unwatch(self, stream: socket.socket) -> None:
        if self._is_watched(stream):
            self._selector.unregister(stream)

    def _is_watched(self, stream: socket.socket) -> bool:
        return stream.fileno() >= 0 and stream in self._selector.get_map()

    def drop(self, stream: socket.socket) -> None:
        """Close a stream, wherever it is watched."""
        self.unwatch(stream)
        stream.close()

    def after(self, seconds: float, what: Handler) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), what))

    def accept(self, listening: socket.socket, then: Callable[[socket.socket], None]) -> None:
        """Take the streams that come in there."""

        def come() -> None:
            try:
                stream, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # the stream waits in the queue, and would be reported at once, again and again
                log.warning("a stream cannot be taken, and is tried again in %g s: %s", ACCEPT_AGAIN_S, error)
                self.unwatch(listening)
                self.after(ACCEPT_AGAIN_S, lambda: self.accept(listening, then))
                return
            set_options(stream)
            then(stream)

        if listening.fileno() >= 0:
            listening.setblocking(False)
        self.watch(listening, selectors.EVENT_READ, come)

    def connect(self, where: tuple[str, int], then: Callable[[socket.socket | None], None]) -> None:
        """Connect to a numeric address of this machine; None if there is no answer within CONNECT_S."""
        stream = socket.socket(family_of(where[0]), socket.SOCK_STREAM)
        set_options(stream)
        pending = True

        def done(*, too_late: bool = False) -> None:
            nonlocal pending
            if pending:
                pending = False
                self.unwatch(stream)
                if too_late or stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    stream.close()
                    then(None)
                else:
                    then(stream)

        if stream.connect_ex(where) not in (0, errno.EINPROGRESS):
            done(too_late=True)
            return
        self.watch(stream, selectors.EVENT_WRITE, done)
        self.after(CONNECT_S, lambda: done(too_late=True))

    def join(
        self,
        left: socket.socket,
        right: socket.socket,
        *,
        to_right: bytes = b"",
        meters: tuple[Meter, Meter] | None = None,
        ended: Handler = lambda: None,
    ) -> Join:
        """Join two streams; the right one first gets the bytes that are given here. The meters are told what comes from
        either side."""
        joined = Join(self, left, right, meters, ended)
        self._joins.add(joined)
        joined.start(to_right)
        return joined

    def ended(self, joined: Join) -> None:
        self._joins.discard(joined)

    def take_buffer(self) -> memoryview:
        return self._buffers.pop() if self._buffers else memoryview(bytearray(BUFFER_BYTES))

    def put_buffer(self, buffer: memoryview) -> None:
        if len(self._buffers) < MOST_SPARE_BUFFERS:
            self._buffers.append(buffer)

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._wait_s()):
                    if self._selector.get_map().get(key.fd) is key:  # not if an earlier handler has closed it
                        self._guarded(key.data)
                while self._calls:
                    self._guarded(self._calls.popleft())
                while self._timers and self._timers[0][0] <= time.monotonic():
                    self._guarded(heapq.heappop(self._timers)[2])
                closing = self._closing_at
                self._closed = closing is not None and (not self._joins or time.monotonic() >= closing)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            for joined in list(self._joins):
                joined.close()
            self._wakes.close()
            self._selector.close()

    def _guarded(self, handler: Handler) -> None:
        try:
            handler()
        except Exception:
            log.exception("a stream is given up")

    def _wait_s(self) -> float | None:
        moments = [self._timers[0][0]] if self._timers else []
        if self._closing_at is not None:
            moments.append(self._closing_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)


class _Direction:
    """Bytes on their way from one stream to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, meter: Meter | None) -> None:
        self.source, self.target, self.meter = source, target, meter
        self.buffer: memoryview | None = None
        """While there is something to send on."""
        self.start = self.end = 0
        self.paused = False
        """What there is to send on has to wait."""
        self.over = False
        """The source sends nothing more."""
        self.shut = False
        """The target has been told that the source is over."""

    @property
    def pending(self) -> bool:
        return self.buffer is not None

    @property
    def sends(self) -> bool:
        return self.pending and not self.paused

    @property
    def reads(self) -> bool:
        return not (self.pending or self.paused or self.over)


class Join:
    """Two streams, joined until both have ended or either breaks."""

    def __init__(
        self,
        loop: StreamLoop,
        left: socket.socket,
        right: socket.socket,
        meters: tuple[Meter, Meter] | None,
        ended: Handler,
    ) -> None:
        self._loop = loop
        self._ended = ended
        self._closed = False
        self._events: dict[socket.socket, int] = {}
        from_left, from_right = meters or (None, None)
        there, back = _Direction(left, right, from_left), _Direction(right, left, from_right)
        self._ways = (there, back)
        self._from = {left: there, right: back}
        self._to = {right: there, left: back}

    def start(self, to_right: bytes) -> None:
        there, _ = self._ways
        if to_right:
            there.buffer = self._loop.take_buffer()
            there.buffer[: len(to_right)] = to_right
            there.start, there.end = 0, len(to_right)
            self._guarded(self._send, there)
        self._update()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for stream in self._from:
                self._loop.drop(stream)
            for way in self._ways:
                way.buffer = None
            self._loop.ended(self)
            self._ended()

    def _ready(self, stream: socket.socket) -> None:
        if self._to[stream].sends:
            self._guarded(self._send, self._to[stream])
        if not self._closed and self._from[stream].reads:
            self._guarded(self._receive, self._from[stream])
        if not self._closed:
            self._update()

    def _guarded(self, step: Callable[[_Direction], None], way: _Direction) -> None:
        try:
            step(way)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()

    def _receive(self, way: _Direction) -> None:
        buffer = self._loop.take_buffer()
        try:
            size = way.source.recv_into(buffer)
        except OSError:
            self._loop.put_buffer(buffer)
            raise
        if not size:
            self._loop.put_buffer(buffer)
            way.over = True
            self._shut(way)
            return
        way.buffer, way.start, way.end = buffer, 0, size
        if way.meter is not None and (wait_s := way.meter(size)) > 0:
            way.paused = True
            self._loop.after(wait_s, lambda: self._resume(way))
        else:
            self._send(way)

    def _send(self, way: _Direction) -> None:
        assert way.buffer is not None
        way.start += way.target.send(way.buffer[way.start : way.end])
        if way.start == way.end:
            self._loop.put_buffer(way.buffer)
            way.buffer = None

    def _shut(self, way: _Direction) -> None:
        way.shut = True
        way.target.shutdown(socket.SHUT_WR)
        if all(each.shut for each in self._ways):
            self.close()
        else:
            self._loop.after(HALF_CLOSED_S, self.close)

    def _resume(self, way: _Direction) -> None:
        way.paused = False
        if not self._closed and way.pending:
            self._guarded(self._send, way)
        if not self._closed:
            self._update()

    def _update(self) -> None:
        """Wait for what can happen next with each stream."""
        for stream, way in self._from.items():
            if self._closed:
                return
            writes = self._to[stream].sends
            wanted = selectors.EVENT_READ * way.reads | selectors.EVENT_WRITE * writes
            if self._events.get(stream, 0) != wanted:
                self._events[stream] = wanted
                self._loop.watch(stream, wanted, lambda stream=stream: self._ready(stream))  # type: ignore[misc]
