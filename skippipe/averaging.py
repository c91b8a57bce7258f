"""Gradient averaging inside a stage: a ring in which every node passes chunks on to the next.

With m nodes, each of the 2(m−1) steps moves one m-th of the gradient over every edge of the ring at once (reduce, then
gather), so the slowest edge sets the pace. The order of the nodes in the ring is therefore worth choosing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from skippipe.costs import NEVER_NS, Costs
from skippipe.rules import circle

EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one


def chunk_bytes(gradient_bytes: int, members: int) -> int:
    return -(-gradient_bytes // members)


def edge_ns(costs: Costs, stage: int, members: int) -> NDArray[np.int64]:
    """[from, to]: one step of a ring of so many nodes over that edge."""
    chunk = chunk_bytes(costs.gradient_bytes[stage], members)
    bandwidth = costs.bandwidth_bytes_per_s
    with np.errstate(divide="ignore", over="ignore"):
        transmit = np.where(bandwidth > 0, np.rint(chunk / bandwidth * 1e9), NEVER_NS)
    return np.minimum(transmit, NEVER_NS).astype(np.int64) + costs.flight_ns


def ring_ns(costs: Costs, stage: int, ring: Sequence[int]) -> int:
    """The whole averaging of a stage."""
    if len(ring) < 2:
        return 0
    edges = edge_ns(costs, stage, len(ring))
    slowest = max(int(edges[a, b]) for a, b in circle(ring))
    return 2 * (len(ring) - 1) * slowest


def best_ring(costs: Costs, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """An order with the fastest slowest edge: exact for few nodes, nearest neighbour and two-exchanges for many."""
    nodes = tuple(sorted(nodes))
    if len(nodes) < 4:
        return min(nodes, (*nodes[:1], *nodes[:0:-1]), key=lambda order: ring_ns(costs, stage, order))
    edges = edge_ns(costs, stage, len(nodes))[np.ix_(nodes, nodes)]
    if len(nodes) <= EXACT_UP_TO:
        orders_of_rest = np.array(list(permutations(range(1, len(nodes)))))
        orders = np.hstack([np.zeros((len(orders_of_rest), 1), np.int64), orders_of_rest])
        slowest = edges[orders, np.roll(orders, -1, axis=1)].max(axis=1)
        return tuple(nodes[i] for i in orders[int(slowest.argmin())])
    return tuple(nodes[i] for i in _exchanged(edges, _nearest(edges)))


def _nearest(edges: NDArray[np.int64]) -> list[int]:
    order = [0]
    left = set(range(1, len(edges)))
    while left:
        following = min(left, key=lambda node: (int(edges[order[-1], node]), node))
        left.remove(following)
        order.append(following)
    return order


def _exchanged(edges: NDArray[np.int64], order: list[int]) -> list[int]:
    """Turn around pieces of the ring for as long as the slowest edge gets faster."""

    def slowest(ring: list[int]) -> int:
        return int(edges[ring, [*ring[1:], ring[0]]].max())

    best = slowest(order)
    improved = True
    while improved:
        improved = False
        worst = int(np.argmax(edges[order, [*order[1:], order[0]]]))
        order = [*order[worst + 1 :], *order[: worst + 1]]  # the slowest edge now closes the ring
        for end in range(2, len(order)):
            turned = [*reversed(order[:end]), *order[end:]]
            if slowest(turned) < best:
                order, best, improved = turned, slowest(turned), True
                break
    return order
