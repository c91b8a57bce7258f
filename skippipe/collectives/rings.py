"""Rings: the order in which the nodes of a stage average, and how long it takes; compiled, as `topology` is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from skippipe.collectives.schedule import Averaging
from skippipe.collectives.transfers import LinkCosts, transmit_ns
from skippipe.jit import Ints, inner_kernel, kernel

EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one
TURNS = 1_000  # tried on a larger ring


class RingEdges(NamedTuple):
    """The edges of a ring, by place: from the node there to the next one."""

    links: tuple[Ints, Ints]
    transmit_ns: Ints
    flight_ns: Ints

    def averaged_ns(self, done_ns: Ints) -> int:
        """When all nodes have the sum: what the ring's schedule takes if nothing else is on its links."""
        senders, _ = self.links
        return ring_ns(done_ns[senders], self.transmit_ns, self.flight_ns) if len(senders) else 0


def ring_edges(costs: LinkCosts, averagings: Sequence[Averaging]) -> list[RingEdges] | None:
    """The edges of all stages' rings; None if some stage averages otherwise, or in several rounds, or nodes have rates
    of their own."""
    if (
        any(each.pieces for each in averagings)
        or any(len(costs.gradient_rounds[stage]) > 1 for stage in range(len(averagings)))
        or not np.isinf(np.minimum(costs.upload_bytes_per_s, costs.download_bytes_per_s)).all()
    ):
        return None
    found = []
    for stage, each in enumerate(averagings):
        order = np.array(each.order, np.int64)
        links = order, np.roll(order, -1)
        size_bytes = np.array(-(-costs.gradient_bytes[stage] // max(1, len(order))), np.int64)
        transmit = transmit_ns(size_bytes, costs.bandwidth_bytes_per_s[links])
        found.append(RingEdges(links, transmit, costs.flight_ns[links]))
    return found


def ring_order(costs: LinkCosts, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The fastest order of few nodes; for many, one with a fast slowest edge, improved where that is easy."""
    nodes = tuple(sorted(nodes))
    if len(nodes) < 2:
        return nodes
    among = np.ix_(nodes, nodes)
    size_bytes = np.array(-(-costs.gradient_bytes[stage] // len(nodes)), np.int64)
    transmit = transmit_ns(size_bytes, costs.bandwidth_bytes_per_s[among])
    flight = costs.flight_ns[among] * len(costs.gradient_rounds[stage])
    if len(nodes) <= EXACT_UP_TO:
        orders = _orders(len(nodes))
        order = orders[_fastest_order(orders, transmit, flight)]
    else:
        edges = transmit + flight
        order = np.array(_exchanged(edges, _nearest(edges)), dtype=np.int64)
        _turn_pieces(order, transmit, flight, TURNS)
    return tuple(nodes[index] for index in order)


@kernel
def ring_ns(done_ns: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
    """When all nodes of a ring have the sum. All three are by place in the ring; a node is done after its last task."""
    members = len(done_ns)
    has_ns = done_ns.copy()  # when a node has all that its next round needs
    sent_ns = done_ns.copy()
    for _ in range(2 * (members - 1)):
        for place in range(members):
            sent_ns[place] = max(has_ns[place], sent_ns[place]) + transmit_ns[place]
        for place in range(members):
            following = place + 1 if place + 1 < members else 0
            has_ns[following] = max(has_ns[following], sent_ns[place] + flight_ns[place])
    return int(has_ns.max())


@cache
def _orders(members: int) -> Ints:
    """Every order of a ring once, from its first node on."""
    return np.array([(0, *rest) for rest in permutations(range(1, members))], dtype=np.int64)


@inner_kernel
def _order_ns(order: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
    members = len(order)
    transmit = np.empty(members, np.int64)
    flight = np.empty(members, np.int64)
    for place in range(members):
        following = order[place + 1 if place + 1 < members else 0]
        transmit[place] = transmit_ns[order[place], following]
        flight[place] = flight_ns[order[place], following]
    return ring_ns(np.zeros(members, np.int64), transmit, flight)


@kernel
def _fastest_order(orders: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
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
    """Reverse stretches of the ring for as long as the slowest edge gets faster."""

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
    """Reverse stretches for as long as the whole ring gets faster: a slow edge costs more, but every edge counts."""
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
