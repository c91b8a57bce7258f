"""Iterations under jitter, where nodes and links are not always equally fast.

A plan promises what an iteration takes if everything takes what it should. Here the same iteration is simulated again
and again, each time with other factors: one for every node, on all that it computes, and two for every directed link,
on its latency and on the time that a byte takes. Factors are lognormal with a mean of 1 and a given standard deviation,
all independent, and hold for one iteration. A draw is the same for all plans of a cluster, so plans can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

import numpy as np

from skippipe.cost_model import NEVER_NS, CostModel, seconds
from skippipe.errors import UserError
from skippipe.jit import Floats, Ints
from skippipe.plan import LONGEST_NS, Plan
from skippipe.simulator import PlacementCosts, lane_arrays, simulated_times
from skippipe.timeline import Timing
from skippipe.whole_paths import links_in_use, planned_teacher_paths

DRAWS = 200
TAIL = 0.95
MOST = 2.0  # standard deviation; what lies beyond is not jitter


@dataclass(frozen=True)
class Jitter:
    spread: float
    """Standard deviation of every factor."""
    draws: int = DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= MOST:
            raise UserError(f"jitter: {self.spread:g} must lie between 0 and {MOST:g}; 0.2 is 20%")


@dataclass(frozen=True)
class Spread:
    """The distribution of a plan's iterations."""

    iterations_ns: tuple[int, ...]
    """Nanoseconds of every simulated iteration, from the shortest to the longest."""

    def reached_ns(self, share: float) -> int:
        """The quantile: nanoseconds that this share of the iterations does not exceed."""
        return self.iterations_ns[max(0, ceil(share * len(self.iterations_ns)) - 1)]

    @property
    def tail_ns(self) -> int:
        return self.reached_ns(TAIL)

    def to_json(self) -> dict[str, float]:
        return {
            "draws": len(self.iterations_ns),
            "mean_s": fmean(self.iterations_ns) / 1e9,
            "median_s": seconds(self.reached_ns(0.5)),
            "p95_s": seconds(self.tail_ns),
            "worst_s": seconds(self.reached_ns(1)),
        }

    def __str__(self) -> str:
        figures = self.to_json()
        return (
            f"mean {figures['mean_s']:.3f} s, median {figures['median_s']:.3f} s, 95th percentile "
            f"{figures['p95_s']:.3f} s, worst of {figures['draws']} {figures['worst_s']:.3f} s"
        )


def spread_of(plan: Plan, timing: Timing, jitter: Jitter) -> Spread:
    """Simulate the plan once for every draw."""
    if simulated_times(plan, timing).iteration_ns > LONGEST_NS:
        raise UserError("jitter: an iteration of this plan takes over forty-eight days without any")
    lanes, teacher = lane_arrays(plan), planned_teacher_paths(plan)
    senders, receivers = np.array(sorted(links_in_use(plan, teacher)), dtype=np.int64).T
    found = []
    for number in range(jitter.draws):
        costs = _jittered(plan.costs, jitter.spread, np.random.default_rng([jitter.seed, number]), (senders, receivers))
        found.append(PlacementCosts.of_plan(plan, timing, costs).run_iteration(*lanes, teacher=teacher).iteration_ns)
    return Spread(tuple(sorted(found)))


def _jittered(costs: CostModel, spread: float, rng: np.random.Generator, links: tuple[Ints, Ints]) -> CostModel:
    """The costs as they come out in one iteration, on the links in use."""
    compute = _factors(spread, rng.standard_normal(costs.nodes))
    latency = _factors(spread, rng.standard_normal((costs.nodes, costs.nodes))[links])
    per_byte = _factors(spread, rng.standard_normal((costs.nodes, costs.nodes))[links])
    flight_ns, transmit_ns = costs.flight_ns.copy(), costs.transmit_ns.copy()
    bandwidth = costs.bandwidth_bytes_per_s.copy()
    flight_ns[links] = _times(flight_ns[links], latency)
    transmit_ns[:, *links] = _times(transmit_ns[:, *links], per_byte)
    bandwidth[links] /= per_byte
    return replace(
        costs,
        forward_ns=_times(costs.forward_ns, compute),
        backward_ns=_times(costs.backward_ns, compute),
        weight_ns=_times(costs.weight_ns, compute),
        optimizer_ns=_times(costs.optimizer_ns, compute),
        head_ns=_times(costs.head_ns, compute),
        flight_ns=flight_ns,
        transmit_ns=transmit_ns,
        bandwidth_bytes_per_s=bandwidth,
    )


def _factors(spread: float, normal: Floats) -> Floats:
    variance = np.log1p(spread**2)  # of the logarithm
    factors: Floats = np.exp(np.sqrt(variance) * normal - variance / 2)
    return factors


def _times(taken_ns: Ints, factors: Floats) -> Ints:
    """Times multiplied by factors: a task still takes a nanosecond at least, and an unreachable node stays so."""
    jittered = np.rint(taken_ns * factors).clip(np.minimum(taken_ns, 1), NEVER_NS).astype(np.int64)
    return np.where(taken_ns == NEVER_NS, NEVER_NS, jittered)
