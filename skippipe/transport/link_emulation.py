"""Emulated links: on one machine, the delays of machines that are far apart. And the pacing of an upload that is real.

The sender's `LinkEmulator` computes when a link of the given latency and bandwidth would have delivered the message;
the message carries that moment and is sent at once; the receiver keeps it in `DelayQueue` until then. So the true
transfer runs while the emulated one does, and only a link faster than the machine itself cannot be emulated. Where a
node's upload or download is shared by its links, the rule is that of docs/formats.md: the sender's `LinkEmulator`
counts with the upload, the receiver's `DelayQueue` with the download.

`UploadPacer` is for real links: messages to all peers leave one after another, as fast as the node's upload takes them,
instead of sharing it by chance.

Moments are nanoseconds of one clock, `time.monotonic_ns`: processes of one machine share it, two machines do not.
`DelayQueue` has no bound of its own: it holds what emulated links would have had in flight or still at the sender.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from skippipe.transport.message import Message, Received


@dataclass(frozen=True)
class EmulatedLink:
    """Latency and bandwidth of a link, in one direction."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bandwidth_bytes_per_s > 0):
            raise ValueError(f"no link has {self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s")


Send: TypeAlias = Callable[[str, Message, int], None]
"""Sends a message to a peer, with the moment at which it is due; 0: at once."""


class UploadPacer:
    """A real upload that all peers share: messages leave one after another, at its rate."""

    def __init__(self, bytes_per_s: float, send: Send, clock: Callable[[], int]) -> None:
        self._upload = Upload(bytes_per_s)
        self._send = send
        self._clock = clock
        self._waiting: deque[tuple[int, str, Message]] = deque()

    def send(self, peer: str, message: Message) -> None:
        """Send a message when its turn comes."""
        self._waiting.append((self._upload.leaves_ns(self._clock(), nbytes_of(message)), peer, message))
        self.flush()

    def flush(self) -> int | None:
        """Send those whose turn has come; gives the moment of the next, if there is any."""
        while self._waiting and self._waiting[0][0] <= self._clock():
            _, peer, message = self._waiting.popleft()
            self._send(peer, message, 0)
        return self._waiting[0][0] if self._waiting else None

    def notice_ns(self, peer: str) -> int:  # noqa: ARG002
        """When a message without a tensor is due there: it is not held up."""
        return 0


class LinkEmulator:
    """Sends messages at once, with the moment at which they would arrive. Transfers over one link queue; links share
    the node's upload, if it has a rate of its own, and do not disturb each other otherwise."""

    def __init__(
        self,
        links: Mapping[str, EmulatedLink],
        send: Send,
        clock: Callable[[], int],
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self._links = dict(links)
        self._send = send
        self._clock = clock
        self._free_ns = dict.fromkeys(links, 0)
        self._upload = Upload(upload_bytes_per_s) if upload_bytes_per_s else None

    def send(self, peer: str, message: Message) -> None:
        self._send(peer, message, self.due_ns(peer, nbytes_of(message)))

    def due_ns(self, peer: str, nbytes: int) -> int:
        """The moment this message would arrive if it were sent now; 0 for a peer whose link is left as it is."""
        link = self._links.get(peer)
        if link is None:
            return 0
        leaves_ns = self._clock() if self._upload is None else self._upload.leaves_ns(self._clock(), nbytes)
        start_ns = max(leaves_ns, self._free_ns[peer])
        end_ns = start_ns + round(nbytes / link.bandwidth_bytes_per_s * 1e9)
        self._free_ns[peer] = end_ns
        return end_ns + round(link.latency_s * 1e9)

    def flush(self) -> None:
        """Nothing waits here."""

    def notice_ns(self, peer: str) -> int:
        """The moment at which a message without a tensor would arrive there: it waits for none."""
        link = self._links.get(peer)
        return self._clock() + round(link.latency_s * 1e9) if link else 0


class Upload:
    """An upload that links share: messages go through it one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_ns = 0

    def leaves_ns(self, now_ns: int, nbytes: int) -> int:
        """The moment at which a message leaves that is ready now."""
        leaves_ns = max(now_ns, self._free_ns)
        self._free_ns = leaves_ns + round(nbytes / self._bytes_per_s * 1e9)
        return leaves_ns


def nbytes_of(message: Message) -> int:
    """Bytes of the tensor, which are what counts."""
    return int(getattr(message.body, "nbytes", 0))


class DelayQueue:
    """Messages that have arrived before their time. Those due at the same moment leave in the order they came.

    With a `download` rate they first go through that, one after another in the order in which their first bytes would
    come; `links` are those from the senders here.
    """

    def __init__(
        self,
        links: Mapping[str, EmulatedLink] | None = None,
        download: float | None = None,
        before: DelayQueue | None = None,
    ) -> None:
        """A queue that goes on with what is left in the queue `before`."""
        self._heap: list[tuple[int, int, Received]] = list(before._heap) if before else []
        self._coming: list[tuple[int, int, Received]] = []
        """Messages whose first byte has not come yet, by the moment at which it does."""
        self._count: int = before._count if before else 0
        self._links = links or {}
        self._download = download
        self._free_ns = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._coming)

    def put(self, received: Received) -> None:
        link = self._links.get(received.peer)
        if self._download is None or link is None or not received.due_ns:
            heapq.heappush(self._heap, (received.due_ns, self._count, received))
        else:
            first_ns = received.due_ns - self._transmit_ns(received, link.bandwidth_bytes_per_s)
            heapq.heappush(self._coming, (first_ns, self._count, received))
        self._count += 1

    def _transmit_ns(self, received: Received, bytes_per_s: float) -> int:
        return round(nbytes_of(received.message) / bytes_per_s * 1e9)

    def next_due_ns(self) -> int | None:
        return min((heap[0][0] for heap in (self._heap, self._coming) if heap), default=None)

    def ready(self, now_ns: int) -> list[Received]:
        """Remove the messages that are due, and give them."""
        while self._coming and self._coming[0][0] <= now_ns:
            first_ns, number, received = heapq.heappop(self._coming)
            assert self._download is not None
            start_ns = max(first_ns, self._free_ns)
            self._free_ns = start_ns + self._transmit_ns(received, self._download)
            heapq.heappush(self._heap, (received.due_ns + start_ns - first_ns, number, received))
        due = []
        while self._heap and self._heap[0][0] <= now_ns:
            due.append(heapq.heappop(self._heap)[2])
        return due
