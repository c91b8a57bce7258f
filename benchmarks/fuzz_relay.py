"""A million broken beginnings of streams, and broken hellos of relays: none may do more than be refused.

python -m benchmarks.fuzz_relay [--frames 1000000] [--seed 0] [--processes 1] [--only NUMBER]

As `benchmarks.fuzz`, with the same promises. A stream comes in pieces of any size, and its first 36 bytes are damaged
in most cases. It is let in if and only if they are those of a token that is expected, once; nothing behind them is
read, since that is for the other node. Grants, which are control messages, are among those of `benchmarks.fuzz`.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

from benchmarks import fuzz
from benchmarks.fuzz import LIMITS, Reader, odd_json, spoiled
from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import Hello
from skippipe.runtime.relay_pool import RelayInfo
from skippipe.transport.message import Malformed, _json
from skippipe.transport.relay import CALLEE, CALLER
from skippipe.transport.streams import Handler, StreamLoop
from skippipe.transport.token_gate import MAGIC, PREFACE, TokenGate, token_of

SECRET = bytes(range(32))
TOKENS = [token_of(SECRET, side) for side in (CALLER, CALLEE)]
BEHIND = b"what the other node is to get"
ADDRESSES = ("10.0.0.1:5560", "hub.example.org:1,[2001:db8::7]:65535", "none", "", "a:0", ":5560", "[::1]:x", "1:2:3")
NUMBERS = (0.0, 1.0, -1.0, 1e9, 1e300, 4096.0, 0.5, 2**53, float("inf"), float("nan"))


class Stream:
    """The receiving end of a stream that comes in pieces, and then ends."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.closed = False

    def recv(self, most: int) -> bytes:
        if not self.pieces:
            return b""
        first, self.pieces[0] = self.pieces[0][:most], self.pieces[0][most:]
        if not self.pieces[0]:
            del self.pieces[0]
        return first

    def fileno(self) -> int:
        return -1 if self.closed else 1

    def close(self) -> None:
        self.closed = True


class StillLoop(StreamLoop):
    """Calls nothing by itself."""

    def __init__(self) -> None:
        self.handlers: dict[Any, Callable[[], object]] = {}
        self.timers: list[Callable[[], object]] = []

    def watch(self, stream: Any, events: int, handler: Handler) -> None:  # noqa: ARG002
        self.handlers[stream] = handler

    def unwatch(self, stream: Any) -> None:
        self.handlers.pop(stream, None)

    def after(self, seconds: float, what: Handler) -> None:  # noqa: ARG002
        self.timers.append(what)


def bad_preface(rng: random.Random) -> list[bytes]:
    good = PREFACE.pack(MAGIC, rng.choice([*TOKENS, rng.randbytes(32)]))
    content = good if rng.random() < 0.3 else spoiled(rng, good, MAGIC * 20)
    content += rng.choice([b"", BEHIND, rng.randbytes(rng.randrange(80))])
    cuts = sorted(rng.randrange(len(content) + 1) for _ in range(rng.randrange(6)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def show(frames: list[bytes]) -> bool:
    """Show the same stream twice to a gate that expects both tokens; UserError if the first is refused."""
    loop, admitted = StillLoop(), list[tuple[Any, int]]()

    def admit(stream: socket.socket, side: int) -> None:
        admitted.append((stream, side))

    gate: TokenGate[int] = TokenGate(loop, admit)
    for side, token in enumerate(TOKENS):
        gate.expect(token, side)
    content = b"".join(frames)
    expected = next((side for side, token in enumerate(TOKENS) if content.startswith(MAGIC + token)), None)
    for attempt in range(2):
        stream = Stream([frame for frame in frames if frame])
        gate.greet(stream, known=False)  # type: ignore[arg-type]
        while stream in loop.handlers:
            loop.handlers[stream]()
        if expected is None or attempt:
            assert len(admitted) == (expected is not None), "let in without a good token, or with one twice"
        else:
            assert admitted == [(stream, expected)] and not stream.closed
            assert b"".join(stream.pieces) == content[PREFACE.size :], "what is behind is not the relay's"
    while loop.timers:
        loop.timers.pop(0)()
    assert gate.refused == 2 - len(admitted), "a stream that was refused is still there"
    if expected is None:
        raise UserError("no token that is expected")
    return True


def bad_hello(rng: random.Random) -> list[bytes]:
    rates = [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 3, 3, 3, 3, 4)))]
    value = to_json(Hello(rng.choice(ADDRESSES), __version__, callback=rng.randbytes(32).hex(), relay=rates))
    if rng.random() < 0.4:
        return [odd_json(rng, value).encode(errors="surrogatepass")]
    return [json.dumps(value).encode()]


def take_hello(frames: list[bytes]) -> bool:
    hello = from_json(_json(frames, len(frames[0]), LIMITS))  # as a mailbox does
    if not isinstance(hello, Hello):
        raise UserError("another message")
    info = RelayInfo.of(hello)
    assert info.bytes_per_s > 0 and info.node_bytes_per_s > 0 and info.streams >= 0
    return True


READERS = {
    "prefaces": Reader(bad_preface, show, (UserError,), 70),
    "hellos": Reader(bad_hello, take_hello, (Malformed, UserError), 30),
}


if __name__ == "__main__":
    fuzz.READERS.clear()
    fuzz.READERS.update(READERS)
    fuzz.TURNS[:] = [name for name, reader in READERS.items() for _ in range(reader.share)]
    fuzz.main()
