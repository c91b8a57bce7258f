"""Speed of nodes and links, estimated from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from skippipe.profiling.link_probe import SMALL_BYTES
from skippipe.workload import Workload

STEADY = 0.25
"""Spread of repeats above which an estimate is not reliable."""
LEAST_PASS_S = 1e-9  # no layer takes less
LEAST_SHARE = 0.001  # of a transfer's time that is the link's own, whatever the round trips took


@dataclass(frozen=True)
class LinkEstimate:
    latency_s: float
    """One way, taken to be half of the way there and back."""
    bandwidth_bytes_per_s: float
    spread: float = 0.0
    """How far repeated measurements of the bandwidth lie apart (see `spread`)."""

    @property
    def is_steady(self) -> bool:
        return self.spread <= STEADY


@dataclass(frozen=True)
class NodeEstimate:
    location: str
    memory_bytes: int
    flops_per_s: float
    forward_s: float = 0.0
    """Seconds of one layer with one microbatch; 0: not known."""
    backward_s: float = 0.0
    """Likewise."""
    spread: float = 0.0
    """How far repeated measurements of both lie apart."""

    @property
    def is_steady(self) -> bool:
        return self.spread <= STEADY


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
