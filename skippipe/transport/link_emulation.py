"""Emulated links: on one machine, the delays of machines that are far apart.

The sender's `LinkEmulator` computes when a link of the given latency and bandwidth would have delivered the message;
the message carries that moment and is sent at once; the receiver keeps it in `DelayQueue` until then. So the true
transfer runs while the emulated one does, and only a link faster than the machine itself cannot be emulated.

Moments are nanoseconds of one clock, `time.monotonic_ns`: processes of one machine share it, two machines do not.
`DelayQueue` has no bound of its own: it holds what emulated links would have had in flight or still at the sender.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skippipe.transport.message import Received


@dataclass(frozen=True)
class EmulatedLink:
    """Latency and bandwidth of a link, in one direction."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bandwidth_bytes_per_s > 0):
            raise ValueError(f"no link has {self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s")


class LinkEmulator:
    """Computes when messages would arrive. Transfers over one link queue; links do not disturb each other."""

    def __init__(self, links: Mapping[str, EmulatedLink], clock: Callable[[], int]) -> None:
        self._links = dict(links)
        self._clock = clock
        self._free_ns = dict.fromkeys(links, 0)

    def due_ns(self, peer: str, nbytes: int) -> int:
        """The moment this message would arrive if it were sent now; 0 for a peer whose link is left as it is."""
        link = self._links.get(peer)
        if link is None:
            return 0
        start_ns = max(self._clock(), self._free_ns[peer])
        end_ns = start_ns + round(nbytes / link.bandwidth_bytes_per_s * 1e9)
        self._free_ns[peer] = end_ns
        return end_ns + round(link.latency_s * 1e9)


class DelayQueue:
    """Messages that have arrived before their time. Those due at the same moment leave in the order they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Received]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, received: Received) -> None:
        heapq.heappush(self._heap, (received.due_ns, self._count, received))
        self._count += 1

    def next_due_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def ready(self, now_ns: int) -> list[Received]:
        """Remove the messages that are due, and give them."""
        due = []
        while self._heap and self._heap[0][0] <= now_ns:
            due.append(heapq.heappop(self._heap)[2])
        return due
