"""How links are probed, and the speed of nodes and links, estimated from samples.

A node measures the link to another with small round trips, then with transfers that grow until one takes long enough,
then with more of that size. A probe says what to send next and is told how long that took; it has no clock.

What a node's links carry at once is measured with streams of chunks to several peers, or from them. If that is clearly
less than the links carry one at a time, they share something: the node's upload or download has a rate of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Annotated

from skippipe.cluster import Node
from skippipe.value_ranges import COUNT, DEVICES, WAIT_S, range_of
from skippipe.workload import Workload

SMALL_BYTES = 4  # of a message that takes nothing but latency
FIRST_BYTES = 2**14
GROWTH = 8.0  # from one amount to the next, at most
FEWEST = 3  # round trips, where each takes long
MOST = 5  # times as many as usual, where all of them together …
LITTLE_S = 0.3  # … take less than this
ENOUGH = 0.8  # of the time that a transfer is to take
STEADY = 0.25
"""Spread of repeats above which an estimate is not reliable."""
LEAST_PASS_S = 1e-9  # no layer takes less
LEAST_SHARE = 0.001  # of a transfer's time that is the link's own, whatever the round trips took
CHUNKS = 10  # of a stream, in the time of a transfer
LEAST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 2**12, 2**22
QUEUED_CHUNKS = 3  # of a stream, beside those that its latency keeps on the way: so the link never runs dry
MOST_CHUNKS = 64  # of a stream, on the way at once
WINDOW = 4  # times as long as a transfer: in which the bytes of all streams are counted
CLEARLY_LESS = 0.85
"""Share of what links carry one at a time; those that carry less than that at once share a rate."""


@dataclass(frozen=True)
class ProbeSettings:
    """How thoroughly a link is measured, in one direction."""

    round_trips: int = 10
    transfers: int = 5
    """Transfers of the size that takes long enough."""
    transfer_s: float = 0.25
    """Seconds that one of them should take, beside the round trip."""
    most_bytes: int = 2**26
    """The largest transfer."""
    most_s: float = 15.0
    """Seconds for the whole probe; the transfer that runs then is the last."""
    answer_timeout_s: float = 20.0
    """Seconds to wait for one answer."""


@dataclass
class LinkProbe:
    effort: ProbeSettings
    samples: list[tuple[int, float]] = field(default_factory=list)
    """Bytes there and seconds there and back, of every message that was answered except the first."""
    _connected: bool = False
    _bytes: int = FIRST_BYTES
    _transfers_done: int = 0
    """Transfers of the final size."""
    _spent_s: float = 0.0

    def next_bytes(self) -> int | None:
        """Bytes to send next; None: the probe is over."""
        if self._more_round_trips:
            return SMALL_BYTES
        late = self._spent_s > self.effort.most_s
        return None if self._transfers_done >= (1 if late else self.effort.transfers) else self._bytes

    @property
    def _more_round_trips(self) -> bool:
        """Are more round trips needed? More of them where they are short: there, a small disturbance counts much."""
        trips, effort = len(self.samples), self.effort
        if trips and self.samples[-1][0] != SMALL_BYTES:
            return False
        least = FEWEST if 2 * self._spent_s > effort.most_s else effort.round_trips
        return trips < least or (trips < MOST * effort.round_trips and self._spent_s < LITTLE_S)

    def took(self, seconds: float) -> None:
        """The answer to what was sent came after so many seconds."""
        sent = self.next_bytes()
        self._spent_s += seconds
        if not self._connected:  # it waited for the connection
            self._connected = True
            self._spent_s = 0.0
        elif sent is not None:
            self.samples.append((sent, seconds))
            if sent != SMALL_BYTES:
                self._grow(seconds)

    def _grow(self, seconds: float) -> None:
        effort = self.effort
        beyond_s = seconds - min(each for sent, each in self.samples if sent == SMALL_BYTES)
        if self._transfers_done or self._bytes >= effort.most_bytes or beyond_s >= ENOUGH * effort.transfer_s:
            self._transfers_done += 1
            return
        factor = min(GROWTH, 1.2 * effort.transfer_s / max(beyond_s, 1e-9))
        self._bytes = min(effort.most_bytes, int(self._bytes * factor) // 4 * 4)


@dataclass(frozen=True)
class Stream:
    """Chunks that go over one link, one after another."""

    chunk_bytes: int
    on_the_way: int
    """Chunks that are sent before the first is confirmed."""
    round_trip_us: int
    """From the sender to the receiver and back, when the link is empty."""


@dataclass
class RateProbe:
    """Counts what several streams carry at once, while all of them flow.

    Where chunks wait for each other is the upload of the node that measures, or its download. They pass an upload a
    round trip before they are confirmed, and this differs from link to link: it is taken off.
    """

    effort: ProbeSettings
    streams: Mapping[int, Stream]
    """Peer → the stream to it, or from it."""
    receiving: bool = False
    over: bool = False
    """All streams have flowed for long enough."""
    _full_s: float | None = None
    """When every stream had confirmed the chunks that it began with."""

    def __post_init__(self) -> None:
        self._passed_s: dict[int, list[float]] = {peer: [] for peer in self.streams}
        """Peer → when each of its chunks has passed the upload or the download."""

    def confirmed(self, peer: int, at_s: float) -> None:
        """A chunk of a stream has come to its end, at this time."""
        self._passed_s[peer].append(at_s - (0 if self.receiving else self.streams[peer].round_trip_us / 1e6))
        if self._full_s is not None:
            self.over = at_s - self._full_s >= WINDOW * self.effort.transfer_s
        elif all(len(self._passed_s[each]) >= stream.on_the_way for each, stream in self.streams.items()):
            self._full_s = at_s

    @property
    def samples(self) -> list[tuple[int, float]]:
        """Bytes of all streams, and the seconds of that; empty if there was no time in which all flowed."""
        if self._full_s is None:
            return []
        start_s = max(self._passed_s[peer][stream.on_the_way - 1] for peer, stream in self.streams.items())
        end_s = min(passed_s[-1] for passed_s in self._passed_s.values())
        counted = sum(
            stream.chunk_bytes * sum(start_s < each <= end_s for each in self._passed_s[peer])
            for peer, stream in self.streams.items()
        )
        return [(counted, end_s - start_s)] if end_s > start_s else []


@dataclass(frozen=True)
class LinkEstimate:
    latency_s: float
    """One way, taken to be half of the way there and back."""
    bandwidth_bytes_per_s: float
    spread: float = 0.0
    """How far repeated measurements of the bandwidth lie apart (see `spread`)."""


@dataclass(frozen=True)
class NodeEstimate:
    location: str
    memory_bytes: Annotated[int, range_of(Node, "memory_bytes")]
    flops_per_s: Annotated[float, range_of(Node, "flops_per_s")]
    forward_s: Annotated[float, WAIT_S] = 0.0
    """Seconds of one layer with one microbatch; 0: not known."""
    backward_s: Annotated[float, WAIT_S] = 0.0
    """Likewise."""
    spread: Annotated[float, COUNT] = 0.0
    """How far repeated measurements of both lie apart."""
    upload_bytes_per_s: float | None = None
    """What its links carry from it at once; infinite: as much as they do one at a time; None: not measured."""
    download_bytes_per_s: float | None = None
    """The same towards it."""
    devices: Annotated[int, DEVICES] = 1
    """Alike devices of the node; speed and memory are those of one."""


def estimate_link(rows: Sequence[Sequence[float]]) -> LinkEstimate | None:
    """From pairs of bytes there and seconds there and back; None if there are too few.

    Latency is half the least round trip, because what made others longer is not the link's. Bandwidth is the
    median over the transfers of the largest amount, the least round trip taken off each.
    """
    samples = [row for row in rows if len(row) == 2 and all(math.isfinite(each) and each > 0 for each in row)]
    trips_s = [took_s for sent, took_s in samples if sent <= SMALL_BYTES]
    largest = max((sent for sent, _ in samples), default=0)
    if not trips_s or largest <= SMALL_BYTES:
        return None
    least_s = min(trips_s)
    beyond_s = [max(took_s - least_s, LEAST_SHARE * took_s) for sent, took_s in samples if sent == largest]
    speeds = [(largest - SMALL_BYTES) / each for each in beyond_s]
    estimate = LinkEstimate(least_s / 2, median(speeds), spread(speeds))
    return estimate if all(map(math.isfinite, vars(estimate).values())) else None


def stream_over(link: LinkEstimate, effort: ProbeSettings) -> Stream:
    """The stream that keeps a link busy."""
    wanted = int(link.bandwidth_bytes_per_s * effort.transfer_s / CHUNKS) // 4 * 4
    chunk_bytes = min(max(wanted, LEAST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    in_flight = 2 * link.latency_s * link.bandwidth_bytes_per_s / chunk_bytes
    on_the_way = min(QUEUED_CHUNKS + math.ceil(in_flight), MOST_CHUNKS)
    return Stream(chunk_bytes, on_the_way, round(2e6 * link.latency_s))


def estimate_rate(rows: Sequence[Sequence[float]], alone_bytes_per_s: float) -> float | None:
    """Bytes a second that links carry at once, from pairs of bytes and seconds; infinite if that is about as much as
    they carry one at a time, None if there are no samples."""
    speeds = [row[0] / row[1] for row in rows if len(row) == 2 and all(0 < each < math.inf for each in row)]
    if not speeds:
        return None
    together = median(speeds)
    return max(1.0, together) if together < CLEARLY_LESS * alone_bytes_per_s else math.inf


def estimate_node(rows: Sequence[Sequence[float]], location: str, memory_bytes: int, work: Workload) -> NodeEstimate:
    """From pairs of seconds, of forward and backward passes of one layer with one microbatch.

    Operations a second are such that both together take in the planner's arithmetic what they took here.
    """
    passes = [(row[0], row[1]) for row in rows if len(row) == 2 and all(0 < each < math.inf for each in row)]
    both_s = [forward_s + backward_s for forward_s, backward_s in passes]
    if not passes or min(both_s) < LEAST_PASS_S:
        raise ValueError("the seconds of its passes are impossible")
    return NodeEstimate(
        location=location,
        memory_bytes=memory_bytes,
        flops_per_s=(work.forward_flops(1) + work.backward_flops(1)) / median(both_s),
        forward_s=median(forward_s for forward_s, _ in passes),
        backward_s=median(backward_s for _, backward_s in passes),
        spread=spread(both_s),
    )


def spread(values: Sequence[float]) -> float:
    """From the first quartile to the third, over the median: one repeat that was disturbed does not show."""
    if len(values) < 2:
        return 0.0
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return (third - first) / middle
