"""Figures from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from skippipe.profiling.link_probe import SMALL_BYTES
from skippipe.workload import Workload

STEADY = 0.25
"""Repeats that lie further apart than by this share are not to be relied on."""
SOONEST_S = 1e-9  # no layer is passed sooner
LEAST = 0.001  # of the time of a transfer is the link's own, whatever a round trip was said to take


@dataclass(frozen=True)
class LinkEstimate:
    latency_s: float
    """One way, taken to be half of the way there and back."""
    bandwidth_bytes_per_s: float
    spread: float = 0.0
    """How far the repeats of the bandwidth lie apart (see `spread`)."""

    @property
    def is_steady(self) -> bool:
        return self.spread <= STEADY


@dataclass(frozen=True)
class NodeEstimate:
    location: str
    memory_bytes: int
    flops_per_s: float
    forward_s: float = 0.0
    """Of one layer with one microbatch; 0: not known."""
    backward_s: float = 0.0
    spread: float = 0.0
    """How far the repeats of both lie apart."""

    @property
    def is_steady(self) -> bool:
        return self.spread <= STEADY


def estimate_link(rows: Sequence[Sequence[float]]) -> LinkEstimate | None:
    """From bytes there and seconds there and back; None if that is not enough.

    Latency is half the least round trip, because whatever made another one longer is not the link's. Bandwidth is the
    median over the transfers of the largest amount, the least round trip taken off each.
    """
    samples = [row for row in rows if len(row) == 2 and all(math.isfinite(each) and each > 0 for each in row)]
    trips_s = [took_s for sent, took_s in samples if sent <= SMALL_BYTES]
    largest = max((sent for sent, _ in samples), default=0)
    if not trips_s or largest <= SMALL_BYTES:
        return None
    least_s = min(trips_s)
    beyond_s = [max(took_s - least_s, LEAST * took_s) for sent, took_s in samples if sent == largest]
    speeds = [(largest - SMALL_BYTES) / each for each in beyond_s]
    figures = LinkEstimate(least_s / 2, median(speeds), spread(speeds))
    return figures if all(map(math.isfinite, vars(figures).values())) else None


def estimate_node(rows: Sequence[Sequence[float]], location: str, memory_bytes: int, work: Workload) -> NodeEstimate:
    """From seconds of forward and backward passes of one layer with one microbatch.

    Operations a second are such that both together take in the planner's arithmetic what they took here.
    """
    passes = [(row[0], row[1]) for row in rows if len(row) == 2 and all(0 < each < math.inf for each in row)]
    both_s = [forward_s + backward_s for forward_s, backward_s in passes]
    if not passes or min(both_s) < SOONEST_S:
        raise ValueError("what it says of its passes cannot be")
    return NodeEstimate(
        location=location,
        memory_bytes=memory_bytes,
        flops_per_s=(1 + work.backward_ratio) * work.forward_flops(1) / median(both_s),
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
