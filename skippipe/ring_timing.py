"""Gradient averaging inside a stage: a ring in which every node passes chunks on to the next.

With m nodes, each of the 2(m−1) steps moves one m-th of the gradient over every edge of the ring (reduce, then gather).
Nobody waits for the whole stage: a node sends the chunk of a step when it has the chunk of the step before and its own
last transmission is over. The order of the nodes in the ring is worth choosing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from skippipe.cost_model import NEVER_NS, CostModel
from skippipe.jit import kernel

Ints = NDArray[np.int64]

EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one
TURNS = 1_000  # tried on a larger ring


@dataclass(frozen=True)
class Rings:
    """The rings of all stages, one after another."""

    nodes: Ints
    transmit_ns: Ints
    """Of one chunk, from the node at this place of a ring to the next one there."""
    flight_ns: Ints
    ends: Ints
    """[stage]: where the next ring begins."""

    @classmethod
    def of(cls, costs: CostModel, rings: Sequence[Sequence[int]]) -> Rings:
        edges = [_edges(costs, stage, ring) for stage, ring in enumerate(rings)]
        return cls(
            nodes=np.array([node for ring in rings for node in ring], dtype=np.int64),
            transmit_ns=np.concatenate([transmit for transmit, _ in edges]),
            flight_ns=np.concatenate([flight for _, flight in edges]),
            ends=np.cumsum([len(ring) for ring in rings], dtype=np.int64),
        )


@kernel
def averaged_ns(done_ns: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
    """When a ring is through; all three by place in the ring, `done_ns` is when a node has ended its last task."""
    members = len(done_ns)
    has_ns = done_ns.copy()  # all that its next step needs
    sent_ns = done_ns.copy()
    for _ in range(2 * (members - 1)):
        for place in range(members):
            sent_ns[place] = max(has_ns[place], sent_ns[place]) + transmit_ns[place]
        for place in range(members):
            following = place + 1 if place + 1 < members else 0
            has_ns[following] = max(has_ns[following], sent_ns[place] + flight_ns[place])
    return int(has_ns.max())


@kernel
def averaging_spans(
    done_ns: Ints,  # [node]
    nodes: Ints,  # as in `Rings`, like the next three
    transmit_ns: Ints,
    flight_ns: Ints,
    ends: Ints,
    spans: Ints,  # out: [stage, (all its nodes are done, averaged)]
) -> None:
    begin = 0
    for stage in range(len(ends)):
        end = ends[stage]
        if end == begin:  # nobody holds it
            spans[stage] = 0
            continue
        done = done_ns[nodes[begin:end]]
        spans[stage, 0] = done.max()
        spans[stage, 1] = averaged_ns(done, transmit_ns[begin:end], flight_ns[begin:end])
        begin = end


def chunk_bytes(gradient_bytes: int, members: int) -> int:
    return -(-gradient_bytes // members)


def chunk_ns(costs: CostModel, stage: int, members: int) -> Ints:
    """[from, to]: for how long one chunk of a ring of so many nodes keeps that edge busy."""
    chunk = chunk_bytes(costs.gradient_bytes[stage], members)
    bandwidth = costs.bandwidth_bytes_per_s
    with np.errstate(divide="ignore", over="ignore"):
        transmit = np.where(bandwidth > 0, np.rint(chunk / bandwidth * 1e9), NEVER_NS)
    return np.minimum(transmit, NEVER_NS).astype(np.int64)


def _edges(costs: CostModel, stage: int, ring: Sequence[int]) -> tuple[Ints, Ints]:
    """Transmit and flight time by place in the ring."""
    here, there = list(ring), [*ring[1:], *ring[:1]]
    if not here:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return chunk_ns(costs, stage, len(ring))[here, there], costs.flight_ns[here, there]


def ring_ns(costs: CostModel, stage: int, ring: Sequence[int]) -> int:
    """The whole averaging of a stage whose nodes are done at the same time."""
    if not ring:
        return 0
    return int(averaged_ns(np.zeros(len(ring), np.int64), *_edges(costs, stage, ring)))


def ring_after_ns(costs: CostModel, stage: int, ring: Sequence[int], last: int) -> int:
    """How long averaging goes on after this node is done, at least: the others were done long before."""
    done_ns = np.full(len(ring), -ring_ns(costs, stage, ring), np.int64)
    done_ns[list(ring).index(last)] = 0
    return int(averaged_ns(done_ns, *_edges(costs, stage, ring)))


def best_ring(costs: CostModel, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The fastest order of few nodes; for many, one with a fast slowest edge, improved where that is easy."""
    nodes = tuple(sorted(nodes))
    if len(nodes) < 2:
        return nodes
    among = np.ix_(nodes, nodes)
    transmit_ns = chunk_ns(costs, stage, len(nodes))[among]
    flight_ns = costs.flight_ns[among]
    if len(nodes) <= EXACT_UP_TO:
        orders = _orders(len(nodes))
        order = orders[_fastest(orders, transmit_ns, flight_ns)]
    else:
        edges = transmit_ns + flight_ns
        order = np.array(_exchanged(edges, _nearest(edges)), dtype=np.int64)
        _turn_pieces(order, transmit_ns, flight_ns, TURNS)
    return tuple(nodes[index] for index in order)


@cache
def _orders(members: int) -> Ints:
    """Every ring once, from its first node on."""
    return np.array([(0, *rest) for rest in permutations(range(1, members))], dtype=np.int64)


@kernel
def _order_ns(order: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
    members = len(order)
    transmit = np.empty(members, np.int64)
    flight = np.empty(members, np.int64)
    for place in range(members):
        following = order[place + 1 if place + 1 < members else 0]
        transmit[place] = transmit_ns[order[place], following]
        flight[place] = flight_ns[order[place], following]
    return averaged_ns(np.zeros(members, np.int64), transmit, flight)


@kernel
def _fastest(orders: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
    fastest = 0
    least_ns = _order_ns(orders[0], transmit_ns, flight_ns)
    for index in range(1, len(orders)):
        order_ns = _order_ns(orders[index], transmit_ns, flight_ns)
        if order_ns < least_ns:
            fastest = index
            least_ns = order_ns
    return fastest


def _nearest(edges: Ints) -> list[int]:
    order = [0]
    left = set(range(1, len(edges)))
    while left:
        following = min(left, key=lambda node: (int(edges[order[-1], node]), node))
        left.remove(following)
        order.append(following)
    return order


def _exchanged(edges: Ints, order: list[int]) -> list[int]:
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


@kernel
def _turn_pieces(order: Ints, transmit_ns: Ints, flight_ns: Ints, turns: int) -> None:
    """The same for as long as the whole ring gets faster: a slow edge costs more, but every edge counts."""
    least_ns = _order_ns(order, transmit_ns, flight_ns)
    improved = True
    while improved:
        improved = False
        for start in range(1, len(order) - 1):
            for end in range(start + 2, len(order) + 1):
                if turns == 0:
                    return
                turns -= 1
                order[start:end] = order[start:end][::-1].copy()
                order_ns = _order_ns(order, transmit_ns, flight_ns)
                if order_ns < least_ns:
                    least_ns = order_ns
                    improved = True
                else:
                    order[start:end] = order[start:end][::-1].copy()
