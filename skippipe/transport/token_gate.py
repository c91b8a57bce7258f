"""The first bytes of a stream: who opens one shows a token, and whoever takes it knows what the token is for.

A stream begins with MAGIC and a token of 32 bytes. Tokens are made known under CURVE before, to one peer, and are good
once: an eavesdropper who reads one comes too late. A token that is not known yet may be in a moment, for it comes over
another connection: such a stream waits for PREFACE_S. A number of them may wait, and no more.
"""

from __future__ import annotations

import hashlib
import re
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from skippipe.transport.streams import StreamLoop

MAGIC = b"SKPC"
TOKEN_BYTES = 32
HEX_TOKEN = re.compile(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
PREFACE = struct.Struct(f"<4s{TOKEN_BYTES}s")
PREFACE_S = 5.0  # for the first bytes of a stream, and for a token that is not known yet
MOST_STRANGERS = 64  # streams whose token is not known (yet), and those that have not shown any
BACKLOG = 128

Meaning = TypeVar("Meaning")


def token_of(secret: bytes, index: int) -> bytes:
    """Token of a series; one alone does not tell the others."""
    return hashlib.sha256(b"skippipe, a stream" + secret + index.to_bytes(8, "little")).digest()


class TokenGate(Generic[Meaning]):
    """Streams that come in, until each has shown its token. All methods are for the loop's thread."""

    def __init__(
        self, loop: StreamLoop, admit: Callable[[socket.socket, Meaning], None], most_strangers: int = MOST_STRANGERS
    ) -> None:
        """`admit` is called with a stream that has shown a token, and with what the token is for."""
        self._loop = loop
        self._admit = admit
        self._most_strangers = most_strangers
        self.expected: dict[bytes, Meaning] = {}
        self._strangers: dict[bytes, socket.socket] = {}
        self._unread: set[socket.socket] = set()
        self.refused = 0
        """Streams that were closed, since they have shown no good token in time."""

    def open(self, listening: socket.socket) -> None:
        """Take streams there."""
        self._loop.accept(listening, self.greet)

    def expect(self, token: bytes, meaning: Meaning) -> None:
        self.expected[token] = meaning
        stream = self._strangers.pop(token, None)
        if stream is not None:
            self._take(stream, token)

    def greet(self, stream: socket.socket, *, known: bool = False) -> None:
        """Find out what a new stream is; one that is known was opened from here, and does not count as a stranger."""
        if not known:
            while len(self._unread) >= self._most_strangers:
                self._refuse(self._unread.pop())
            self._unread.add(stream)
        came = bytearray()
        self._loop.after(PREFACE_S, lambda: self._refuse(stream) if len(came) < PREFACE.size else None)
        self._loop.watch(stream, selectors.EVENT_READ, lambda: self._read(stream, came))

    def _read(self, stream: socket.socket, came: bytearray) -> None:
        try:
            piece = stream.recv(PREFACE.size - len(came))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        came += piece
        if not piece or not MAGIC.startswith(bytes(came[: len(MAGIC)])):
            self._refuse(stream)
        elif len(came) == PREFACE.size:
            self._unread.discard(stream)
            self._loop.unwatch(stream)
            self._show(stream, bytes(came[len(MAGIC) :]))

    def _show(self, stream: socket.socket, token: bytes) -> None:
        if token in self.expected:
            self._take(stream, token)
        elif token in self._strangers or len(self._strangers) >= self._most_strangers:
            self._refuse(stream)
        else:
            self._strangers[token] = stream
            self._loop.after(PREFACE_S, lambda: self._forget(token, stream))

    def _take(self, stream: socket.socket, token: bytes) -> None:
        self._admit(stream, self.expected.pop(token))

    def _forget(self, token: bytes, stream: socket.socket) -> None:
        if self._strangers.get(token) is stream:
            del self._strangers[token]
            self._refuse(stream)

    def _refuse(self, stream: socket.socket) -> None:
        self._unread.discard(stream)
        if stream.fileno() >= 0:
            self.refused += 1
            self._loop.drop(stream)
