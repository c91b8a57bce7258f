"""A relay: where two nodes meet that can both only call out.

The coordinator grants a stream between two nodes with a secret, from which two tokens follow, one for each. Both nodes
dial the relay and show their tokens (`token_gate`); then it joins the two streams. From there on it is as if one node
had dialled the other (`callbacks`): keys, encryption, fast paths and the watch over links are theirs, end to end. The
relay forwards bytes that it cannot read, and could do no more to them than to lose them.

It has limits: bytes a second, of all together and of each node (whoever sends a byte is charged with it); streams, of
all together and of each node; and the time for which a stream may be idle. A sender above its rate is read from more
slowly, and what was read goes on when it is paid for, so that it is felt as on any slow connection. A little of every
stream goes on at once in any case: nodes probe whether a link still carries anything.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf

from skippipe.transport.addresses import join_address, listening_socket, split_address
from skippipe.transport.streams import Join, Meter, StreamLoop
from skippipe.transport.token_gate import BACKLOG, TokenGate, token_of

CALLER, CALLEE = 0, 1
"""The index of a side's token: of the node that has asked for the stream, and of its peer."""
MOST_STRANGERS = 1024  # streams that have not shown a good token: at the start of a run all nodes dial at once
MEET_S = 10.0  # for both nodes to dial, from the grant on
FREE_BYTES_PER_S, FREE_BYTES = 4096.0, 4096  # of a stream, beyond any rate: a link is probed behind tensors, too
BURST_S = 0.01  # of its rate that a node may send at once after a pause
LOOKS_PER_IDLE = 4  # looks at the streams in the time for which one may be idle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayLimits:
    bytes_per_s: float = inf
    """What all nodes together may send."""
    node_bytes_per_s: float = inf
    """What one node may send."""
    streams: int = 4096
    """Joined streams at one time; two nodes need up to six."""
    node_streams: int = 512
    """Joined streams of one node at one time."""
    idle_s: float = 600.0
    """A stream that carries nothing for that long is closed."""


@dataclass(frozen=True)
class RelayLoad:
    """What a relay does, and has done."""

    streams: int
    nodes: int
    forwarded_bytes: int
    refused: int
    """Streams without a good token, or above a limit."""


class Bucket:
    """Bytes a second, of whatever is charged to it."""

    def __init__(self, bytes_per_s: float, burst_s: float = BURST_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._free_at = 0.0

    def take(self, size: int, now: float) -> float:
        """Charge so many bytes; gives the seconds until more may be read."""
        self._free_at = max(self._free_at, now - self._burst_s) + size / self._bytes_per_s
        return self._free_at - now

    def affords(self, size: int, now: float) -> bool:
        """Whether so many bytes need not wait; they are charged only then."""
        free_at = max(self._free_at, now - self._burst_s) + size / self._bytes_per_s
        if free_at > now:
            return False
        self._free_at = free_at
        return True


@dataclass(eq=False)
class _Grant:
    nodes: tuple[str, str]
    """The caller and the callee."""
    streams: dict[int, socket.socket] = field(default_factory=dict)
    """Side → its stream, once it has dialled, and until both are joined."""
    join: Join | None = None
    used_at: float = 0.0
    """When the joined streams last carried something."""


class Relay:
    """The streams that one process joins. Public methods may be called from any thread."""

    def __init__(self, listen: str, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        host, port = split_address(listen)
        listening = listening_socket(host, port, BACKLOG, "is the port taken?")
        self.address = join_address(host, int(listening.getsockname()[1]))
        self._loop = StreamLoop("the relay")
        # the rest belongs to the loop's thread
        self._gate: TokenGate[tuple[_Grant, int]] = TokenGate(self._loop, self._dialled, MOST_STRANGERS)
        self._buckets = {"": Bucket(self.limits.bytes_per_s)}
        """Node → its bucket; without a name: of all together."""
        self._joined: set[_Grant] = set()
        self._of_node: Counter[str] = Counter()
        self._forwarded_bytes = 0
        self._refused = 0
        self._loop.call(lambda: self._gate.open(listening))
        self._loop.call(self._close_idle)

    def grant(self, caller: str, callee: str, secret: bytes) -> None:
        """Join the streams that show the tokens of this secret, once."""

        def begin() -> None:
            made, tokens = _Grant((caller, callee)), [token_of(secret, side) for side in (CALLER, CALLEE)]
            self._loop.after(MEET_S, lambda: self._expire(made, tokens))
            for side, token in enumerate(tokens):
                self._gate.expect(token, (made, side))

        self._loop.call(begin)

    @property
    def load(self) -> RelayLoad:
        nodes = sum(1 for count in list(self._of_node.values()) if count)
        return RelayLoad(len(self._joined), nodes, self._forwarded_bytes, self._refused + self._gate.refused)

    def close(self) -> None:
        self._loop.close()

    # In the loop's thread

    def _dialled(self, stream: socket.socket, meaning: tuple[_Grant, int]) -> None:
        grant, side = meaning
        grant.streams[side] = stream
        if len(grant.streams) == len(grant.nodes):
            self._join(grant)

    def _expire(self, grant: _Grant, tokens: list[bytes]) -> None:
        for token in tokens:
            self._gate.expected.pop(token, None)
        for stream in grant.streams.values():  # none, once they are joined
            self._loop.drop(stream)

    def _join(self, grant: _Grant) -> None:
        caller, callee = grant.streams.pop(CALLER), grant.streams.pop(CALLEE)
        if excess := self._excess(grant.nodes):
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, …: many do not fill the log
                log.warning("a stream from '%s' to '%s' is refused: %s", *grant.nodes, excess)
            self._loop.drop(caller)
            self._loop.drop(callee)
            return
        self._of_node.update(grant.nodes)
        self._joined.add(grant)
        grant.used_at = time.monotonic()

        def ended() -> None:
            self._of_node.subtract(grant.nodes)
            self._joined.discard(grant)

        from_caller, from_callee = (self._meter(node, grant) for node in grant.nodes)
        grant.join = self._loop.join(caller, callee, meters=(from_caller, from_callee), ended=ended)

    def _excess(self, nodes: tuple[str, str]) -> str:
        """The limit that another stream of these nodes would pass; empty if none."""
        if len(self._joined) >= self.limits.streams:
            return f"there are {self.limits.streams}, the most of all together"
        for node in nodes:
            if self._of_node[node] >= self.limits.node_streams:
                return f"'{node}' has {self.limits.node_streams}, the most of one node"
        return ""

    def _meter(self, node: str, grant: _Grant) -> Meter:
        everybody = self._buckets[""]
        own = self._buckets.setdefault(node, Bucket(self.limits.node_bytes_per_s))
        free = Bucket(FREE_BYTES_PER_S, FREE_BYTES / FREE_BYTES_PER_S)

        def meter(size: int) -> float:
            grant.used_at = now = time.monotonic()
            self._forwarded_bytes += size
            wait_s = max(everybody.take(size, now), own.take(size, now))
            return 0.0 if size <= FREE_BYTES and free.affords(size, now) else wait_s

        return meter

    def _close_idle(self) -> None:
        self._loop.after(self.limits.idle_s / LOOKS_PER_IDLE, self._close_idle)
        before = time.monotonic() - self.limits.idle_s
        for grant in [each for each in self._joined if each.used_at < before]:
            if grant.join is not None:
                grant.join.close()
