"""Callbacks: streams that the receiver of messages opens, for peers that cannot call it.

A node behind a router can call others and cannot be called. So whoever has messages for it gets a stream that this node
has opened, and ZeroMQ's connections run through that stream: keys, admission, encryption, fast paths and the watch over
links are the same as on a direct connection, only another side has dialled.

    caller   has messages for a peer that it cannot dial. ZeroMQ connects to a port on loopback here, and this is
             joined to a stream from the peer. It waits CALL_S for one, then ZeroMQ tries again
    callee   dials, shows a token, and waits; a stream that is taken into use is joined to a port of its own mailbox

A stream begins with a token of the callee (see `token_gate`), an ACCEPTED of the caller, and the port at which the
callee's mailbox listens (0: the one for messages; others only for its fast paths) when it is taken into use. Whoever
had a stream of its own by a stolen token would gain nothing but to disturb, for what travels there is encrypted end to
end.

The caller takes streams at a port of its own, from the first time that it needs one. Between nodes a third party passes
the token on, and the port. A node that is to be called by its coordinator, of which it knows the address alone, tries
the ports that go with it (`callback_ports`).

Two nodes that both only call out meet at a relay (see `relay`): both dial it, and from there on it is as if the callee
had dialled the caller.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from skippipe.errors import UserError
from skippipe.transport.addresses import CONNECT_S, Place, callback_ports, join_address, split_all, tcp_server
from skippipe.transport.streams import StreamLoop, dial
from skippipe.transport.token_gate import BACKLOG, MAGIC, PREFACE, TOKEN_BYTES, TokenGate, token_of

PORT = struct.Struct("<H")
ACCEPTED = b"\x01"
CALL_S = 10.0  # for a stream from the peer, and for its use
ANSWER_S = 2.0  # for a caller to answer when it is dialled: its packet may be lost once; then there is no way there
REQUEST_AGAIN_S = 1.0  # from one request for a stream to the next
PARK_AGAIN_S = (0.05, 2.0)  # before a node dials again: at first, and at most
AHEAD = 16  # tokens of a series that are known in advance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A peer is to dial this node, at this port, and to show the token."""

    peer: str
    token: str
    port: int


class Callbacks:
    """The streams of one mailbox, on both sides. Public methods are for the mailbox's thread."""

    def __init__(self, name: str, wake: Callable[[], None], local: Callable[[int], Place | None]) -> None:
        """`local` gives the address of a port of the mailbox, if it may be called; in the loop's thread."""
        self._loop = StreamLoop(name)
        self._wake = wake
        self._local = local
        self._requests: deque[CallRequest] = deque()
        self._failed: deque[str] = deque()
        self._port = 0
        """Where streams are taken; 0: nowhere."""
        self._ports: dict[str, dict[int, socket.socket]] = defaultdict(dict)
        """Peer → port there → the listener on loopback for it."""
        # the rest belongs to the loop's thread
        self._gate: TokenGate[tuple[str, int]] = TokenGate(self._loop, self._admit)
        """A token is for the peer that shows it; with its number in a series, −1: it is not of one."""
        self._series: dict[str, bytes] = {}
        self._idle: dict[str, list[socket.socket]] = defaultdict(list)
        self._waiting: dict[str, deque[tuple[socket.socket, int]]] = defaultdict(deque)
        """Peer → ZeroMQ's connections that wait for a stream, and the port that they are for."""
        self._parking = 0
        self._parked: socket.socket | None = None
        self._numbers = count(1)

    # The caller

    def listen(self, address: str) -> None:
        """Take streams at a port that goes with this address, the mailbox's own; or at any, for peers who are told. Of
        several addresses, at the same port."""
        for host, port in split_all(address):
            for each in (self._port,) if self._port else (*callback_ports(port), 0):
                with suppress(OSError):
                    self._listen(host, each)
                    break
            else:
                log.error("%s: no port is free for nodes that only call out; they cannot be reached from here", host)

    def _listen(self, host: str, port: int) -> None:
        listening = tcp_server(host, port, BACKLOG)
        self._port = int(listening.getsockname()[1])
        self._loop.call(lambda: self._gate.open(listening))

    def place_of(self, peer: str, port: int) -> Place:
        """Where to connect to, instead of a port of the peer; of others than 0 only the last one asked for stays."""
        ports = self._ports[peer]
        if port not in ports:
            for old in [each for each in ports if each and port]:
                self._loop.call(partial(self._loop.drop, ports.pop(old)))
            listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            ports[port] = listening
            self._loop.call(lambda: self._loop.accept(listening, lambda stream: self._wait(peer, stream, port)))
        return str(ports[port].getsockname()[0]), int(ports[port].getsockname()[1])

    def release(self, peer: str, linger_s: float) -> None:
        """ZeroMQ does not connect to this peer any more, or only for so long; connections that stand end by
        themselves."""
        listeners = list(self._ports.pop(peer, {}).values())

        def forget() -> None:
            for listening in listeners:
                self._loop.drop(listening)

        def end() -> None:
            forget()
            for stream, _ in self._waiting.pop(peer, ()):
                self._loop.drop(stream)

        self._loop.call((lambda: self._loop.after(linger_s, forget)) if linger_s else end)

    def expect_series(self, peer: str, secret: bytes) -> None:
        """The peer dials by itself, with tokens of this series, and always has one stream ready."""

        def begin() -> None:
            if self._series.get(peer) == secret:
                return  # some tokens of it are used
            self._forget_tokens(peer)
            self._series[peer] = secret
            for index in range(AHEAD):
                self._gate.expect(token_of(secret, index), (peer, index))

        self._loop.call(begin)

    def forbid(self, peer: str) -> None:
        """Take no streams of this peer any more."""

        def end() -> None:
            self._forget_tokens(peer)
            for stream in self._idle.pop(peer, ()):
                self._loop.drop(stream)

        self._loop.call(end)

    def take_requests(self) -> list[CallRequest]:
        """Callbacks that are wanted since the last call; whoever uses the mailbox has to pass them on."""
        return [self._requests.popleft() for _ in range(len(self._requests))]

    # The callee

    def park(self, address: str, secret: bytes) -> None:
        """From now on always have one stream ready at that mailbox; the one that was ready before is closed."""
        ports = [[(host, each) for each in callback_ports(port)] for host, port in split_all(address)]
        choices = [[join_address(*each) for each in same] for same in zip(*ports, strict=True)]

        def begin() -> None:
            self._parking = next(self._numbers)
            if self._parked is not None:
                self._loop.drop(self._parked)
                self._parked = None
            self._park(self._parking, choices, secret, 0, PARK_AGAIN_S[0])

        self._loop.call(begin)

    def answer(self, peer: str, addresses: Sequence[str], token: bytes) -> None:
        """Dial, once, for a peer that has asked for it."""

        def failed() -> None:
            self._failed.append(peer)
            self._wake()

        self._dial(addresses, [token], lambda stream: self._await(stream), failed, ANSWER_S)

    def take_failed(self) -> list[str]:
        """Peers that have asked for a call since the last time, and do not answer it."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def meet(self, addresses: Sequence[str], token: bytes, callback: bytes | None) -> None:
        """Dial a relay, once, that a peer dials as well: for a peer that has asked for it, whose token for callbacks is
        given; or for this one's own request."""
        if callback is None:
            self._dial(addresses, [token], lambda stream: self._gate.greet(stream, known=True))
        else:
            self._dial(addresses, [token, callback], lambda stream: self._await(stream))

    def close(self, linger_s: float) -> None:
        self._loop.close(linger_s)

    # In the loop's thread: the caller

    def _admit(self, stream: socket.socket, meaning: tuple[str, int]) -> None:
        peer, index = meaning
        if index >= 0:
            self._gate.expect(token_of(self._series[peer], index + AHEAD), (peer, index + AHEAD))
        try:
            stream.send(ACCEPTED)
        except OSError:
            self._loop.drop(stream)
            return
        self._keep(peer, stream)

    def _keep(self, peer: str, stream: socket.socket) -> None:
        """A stream of a peer is ready for use."""
        self._idle[peer].append(stream)
        self._loop.watch(stream, selectors.EVENT_READ, lambda: self._spoil(peer, stream))
        self._match(peer)

    def _spoil(self, peer: str, stream: socket.socket) -> None:
        """A stream that is not in use has ended, or says what it has no business to say."""
        with suppress(ValueError):
            self._idle[peer].remove(stream)
        self._loop.drop(stream)

    def _wait(self, peer: str, stream: socket.socket, port: int) -> None:
        """ZeroMQ has connected, and a stream of the peer is needed."""
        self._waiting[peer].append((stream, port))
        self._loop.after(CALL_S, lambda: self._wait_no_more(peer, stream, port))
        self._match(peer)
        if peer not in self._series:
            self._request(peer, stream, port)

    def _request(self, peer: str, stream: socket.socket, port: int) -> None:
        """Have the peer dial, again and again while it has not: it may not have been there."""
        if (stream, port) not in self._waiting[peer]:
            return
        token = secrets.token_bytes(TOKEN_BYTES)
        self._gate.expect(token, (peer, -1))
        self._loop.after(CALL_S, lambda: self._gate.expected.pop(token, None))
        self._requests.append(CallRequest(peer, token.hex(), self._port))
        self._wake()
        self._loop.after(REQUEST_AGAIN_S, lambda: self._request(peer, stream, port))

    def _wait_no_more(self, peer: str, stream: socket.socket, port: int) -> None:
        with suppress(ValueError):
            self._waiting[peer].remove((stream, port))
            self._loop.drop(stream)

    def _match(self, peer: str) -> None:
        while self._waiting[peer] and self._idle[peer]:
            inner, port = self._waiting[peer].popleft()
            outer = self._idle[peer].pop()  # the newest: others may be of the past
            self._loop.unwatch(outer)
            self._loop.join(inner, outer, to_right=PORT.pack(port))

    def _forget_tokens(self, peer: str) -> None:
        self._series.pop(peer, None)
        for token in [token for token, (whose, _) in self._gate.expected.items() if whose == peer]:
            del self._gate.expected[token]

    # In the loop's thread: the callee

    def _dial(
        self,
        addresses: Sequence[str],
        tokens: Sequence[bytes],
        then: Callable[[socket.socket], None],
        failed: Callable[[], None] = lambda: None,
        within_s: float = CONNECT_S,
    ) -> None:
        """Dial and show a token, or one after another, in a thread of its own: to look up a name blocks."""

        def run() -> None:
            try:
                stream = dial(addresses, within_s)
                stream.send(b"".join(PREFACE.pack(MAGIC, token) for token in tokens))
            except (OSError, UserError) as error:
                log.debug("no callback to %s: %s", ", ".join(addresses), error)
                self._loop.call(failed)
            else:
                self._loop.call(lambda: then(stream))

        threading.Thread(target=run, name="dial", daemon=True).start()

    def _park(self, number: int, choices: list[list[str]], secret: bytes, index: int, wait_s: float) -> None:
        """Dial the first choice, the address of it that answers first; the next time, if that one does not accept this
        stream, the other choice, and another address first."""

        def again(index: int, wait_s: float, *, same: bool = False) -> None:
            first = choices[0]
            others = choices if same else [*choices[1:], [*first[1:], first[0]]]
            self._loop.after(
                wait_s, lambda: self._park(number, others, secret, index, min(2 * wait_s, PARK_AGAIN_S[1]))
            )

        def dialled(stream: socket.socket) -> None:
            if number != self._parking:
                stream.close()
                return
            accepted = False

            def on_accepted() -> None:
                nonlocal accepted
                accepted = True

            def over() -> None:
                if number == self._parking and self._parked is stream:
                    self._parked = None
                    again(index + accepted, PARK_AGAIN_S[0] if accepted else wait_s, same=accepted)

            self._parked = stream
            self._await(stream, on_accepted, over, parked=True)

        if number == self._parking:
            self._dial(choices[0], [token_of(secret, index)], dialled, lambda: again(index, wait_s))

    def _await(
        self,
        stream: socket.socket,
        on_accepted: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
        *,
        parked: bool = False,
    ) -> None:
        """Wait until the caller accepts a stream and takes it into use, which it has CALL_S for; a `parked` stream may
        wait for its use for any time. Then `over` is called, as when the stream ends."""
        came = bytearray()
        pending = True

        def end(*, keep: bool = False) -> None:
            nonlocal pending
            if pending:
                pending = False
                self._loop.unwatch(stream)
                if not keep:
                    self._loop.drop(stream)
                over()

        def read() -> None:
            before = len(came)
            try:
                came.extend(stream.recv(len(ACCEPTED) + PORT.size - before))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass
            if len(came) == before or came[: len(ACCEPTED)] != ACCEPTED:
                end()
                return
            if not before:
                on_accepted()
            if len(came) == len(ACCEPTED) + PORT.size:
                end(keep=True)
                self._serve(stream, PORT.unpack(came[len(ACCEPTED) :])[0])

        self._loop.watch(stream, selectors.EVENT_READ, read)
        self._loop.after(CALL_S, lambda: None if came and parked else end())

    def _serve(self, stream: socket.socket, port: int) -> None:
        """A stream is taken into use: join it to the port of the mailbox that the caller wants."""
        where = self._local(port)
        if where is None:
            log.debug("a callback wants port %d, which is not one of the mailbox's", port)
            self._loop.drop(stream)
            return

        def connected(inner: socket.socket | None) -> None:
            if inner is None:
                self._loop.drop(stream)
            else:
                self._loop.join(stream, inner)

        self._loop.connect(where, connected)
