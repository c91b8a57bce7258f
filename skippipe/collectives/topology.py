"""The fastest schedule for the nodes of a stage: the order of a ring, or the pieces and trees of a direct exchange.

All of it is compiled, with numba where that is installed: the search of the planner asks some ten thousand times a
second how long a stage averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Protocol

import numpy as np

from skippipe.collectives.schedule import Averaging, Piece, run_schedule
from skippipe.jit import Floats, Ints, kernel

NEVER_NS = 10**15  # what a transfer takes over no link, and the most that any can; as in `cost_model`
SHARES = 2**16  # what the shares of a direct exchange add up to, about
LEAST_SHARE = 0.02  # of the largest: a node with less is no root, and only sends
DETOUR = 3.0  # times the bandwidth: from here on two links by way of a third node are better than a direct one
EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one
TURNS = 1_000  # tried on a larger ring


class LinkCosts(Protocol):
    """What a schedule asks the cost model for."""

    @property
    def gradient_bytes(self) -> tuple[int, ...]: ...
    @property
    def flight_ns(self) -> Ints: ...
    @property
    def bandwidth_bytes_per_s(self) -> Floats: ...


def transfer_times(costs: LinkCosts, stage: int, averaging: Averaging) -> tuple[Ints, Ints]:
    """[transfer]: transmit and flight time, by the numbers of the schedule."""
    schedule = averaging.schedule
    pieces, senders, receivers = schedule.columns
    nodes = np.array(averaging.order, np.int64)
    here, there = nodes[senders], nodes[receivers]
    sizes = np.array(schedule.piece_bytes(costs.gradient_bytes[stage]), np.int64)
    return transmit_ns(sizes[pieces], costs.bandwidth_bytes_per_s[here, there]), costs.flight_ns[here, there]


def transmit_ns(size_bytes: Ints, bandwidth: Floats) -> Ints:
    """Time for which messages of so many bytes keep links busy: a nanosecond at least; NEVER_NS where there is none."""
    with np.errstate(divide="ignore", over="ignore"):
        taken = np.where(bandwidth > 0, np.rint(size_bytes / bandwidth * 1e9), NEVER_NS)
    return taken.clip(1, NEVER_NS).astype(np.int64)


def averaged_ns(costs: LinkCosts, stage: int, averaging: Averaging, done_ns: Sequence[int]) -> int:
    """When all nodes of a stage have the sum; `done_ns`, by place, is when they have ended their last task."""
    if not averaging.order:
        return 0
    return averaging.schedule.run(np.array(done_ns, np.int64), *transfer_times(costs, stage, averaging))


def takes_ns(costs: LinkCosts, stage: int, averaging: Averaging) -> int:
    """The whole averaging of a stage whose nodes are done at the same time."""
    return averaged_ns(costs, stage, averaging, [0] * len(averaging.order))


def after_ns(costs: LinkCosts, stage: int, averaging: Averaging, last: int) -> int:
    """How long averaging goes on after this node is done, at least: the others were done long before."""
    long_before_ns = -takes_ns(costs, stage, averaging)
    done = [0 if node == last else long_before_ns for node in averaging.order]
    return averaged_ns(costs, stage, averaging, done)


def fastest(costs: LinkCosts, stage: int, nodes: Sequence[int], *, only_rings: bool = False) -> Averaging:
    """The fastest of the known kinds for nodes that are done at the same time, whatever order they are given in."""
    ring = Averaging(ring_order(costs, stage, nodes))
    if only_rings or len(ring.order) < 3:
        return ring
    return min((ring, direct_exchange(costs, ring.order)), key=lambda each: takes_ns(costs, stage, each))


# Direct exchange


def direct_exchange(costs: LinkCosts, order: Sequence[int]) -> Averaging:
    """Every node is the root of a piece, as large as its links are fast, and all others send straight to it; but by way
    of a third node where their link is missing or far slower."""
    members = np.array(order, np.int64)
    bandwidth = np.ascontiguousarray(costs.bandwidth_bytes_per_s)
    parents = np.empty((len(members), len(members)), np.int64)
    direct_parents(members, bandwidth, parents)
    shares = direct_shares(members, bandwidth, parents)
    pieces = []
    for at, share in enumerate(shares.tolist()):
        if share:
            via = tuple((order[i], order[to]) for i, to in enumerate(parents[at].tolist()) if to != at)
            pieces.append(Piece(order[at], share, via))
    return Averaging(tuple(order), tuple(pieces))


@kernel
def direct_parents(members: Ints, bandwidth: Floats, parents: Ints) -> bool:
    """Write [root, place]: the place to which a place sends, in a direct exchange. Whether all send to the roots."""
    size = len(members)
    straight = True
    for root in range(size):
        for place in range(size):
            parents[root, place] = root
    for root in range(size):
        for place in range(size):
            if place == root:
                continue
            a, b = members[place], members[root]
            best, rate = root, DETOUR * min(bandwidth[a, b], bandwidth[b, a])
            for third in range(size):
                c = members[third]
                if third in (place, root) or parents[root, third] != root:
                    continue
                other = min(min(bandwidth[a, c], bandwidth[c, a]), min(bandwidth[c, b], bandwidth[b, c]))
                if other > rate:
                    best, rate = third, other
            if best != root and not _is_parent(parents, root, place):
                parents[root, place] = best
                straight = False
    return straight


@kernel
def _is_parent(parents: Ints, root: int, place: int) -> bool:
    """Whether another place sends to this one on the way to the root."""
    senders = 0
    for other in range(parents.shape[1]):
        senders += other not in (place, root) and parents[root, other] == place
    return senders > 0


@kernel
def direct_shares(members: Ints, bandwidth: Floats, parents: Ints) -> Ints:
    """[root]: the share of its piece, in proportion to what its slowest links in and out carry together."""
    size = len(members)
    rates = np.zeros(size, np.float64)
    most = 0.0
    for root in range(size):
        slowest_in, slowest_out = np.inf, np.inf
        for place in range(size):
            if place != root:
                a, b = members[place], members[parents[root, place]]
                slowest_in = min(slowest_in, bandwidth[a, b])
                slowest_out = min(slowest_out, bandwidth[b, a])
        if slowest_in > 0 and slowest_out > 0:
            rates[root] = 1 / (1 / slowest_in + 1 / slowest_out)
            most = max(most, rates[root])
    shares = np.zeros(size, np.int64)
    for root in range(size):
        if most == 0 or rates[root] >= LEAST_SHARE * most:
            shares[root] = max(1, int(np.rint(SHARES * rates[root] / rates.sum()))) if most > 0 else 1
    return shares


@kernel
def direct_ns(done_ns: Ints, members: Ints, gradient_bytes: int, bandwidth: Floats, flight_ns: Ints) -> int:
    """When all nodes have the sum in a direct exchange: what its schedule takes, without events where all send straight
    to the roots."""
    size = len(members)
    parents = np.empty((size, size), np.int64)
    straight = direct_parents(members, bandwidth, parents)
    shares = direct_shares(members, bandwidth, parents)
    total = shares.sum()
    piece_bytes = np.empty(size, np.int64)
    for root in range(size):
        piece_bytes[root] = -(-gradient_bytes * shares[root] // total)
    if not straight:
        return _trees_ns(done_ns, members, shares, piece_bytes, parents, bandwidth, flight_ns)
    last_ns = done_ns.max()
    for root in range(size):
        if shares[root] == 0:
            continue
        here = members[root]
        summed_ns = done_ns[root]
        for place in range(size):
            if place != root:
                there = members[place]
                came_ns = done_ns[place] + link_ns(piece_bytes[root], bandwidth[there, here]) + flight_ns[there, here]
                summed_ns = max(summed_ns, came_ns)
        for place in range(size):
            if place != root:
                there = members[place]
                start_ns = summed_ns
                if shares[place] > 0:  # its own contribution went over this link before
                    start_ns = max(start_ns, done_ns[root] + link_ns(piece_bytes[place], bandwidth[here, there]))
                took_ns = link_ns(piece_bytes[root], bandwidth[here, there])
                last_ns = max(last_ns, start_ns + took_ns + flight_ns[here, there])
    return int(last_ns)


@kernel
def link_ns(size_bytes: int, bandwidth: float) -> int:
    """`transmit_ns` for one message."""
    if bandwidth <= 0:
        return NEVER_NS
    return int(max(1.0, min(float(NEVER_NS), np.rint(size_bytes / bandwidth * 1e9))))


@kernel
def _trees_ns(
    done_ns: Ints,
    members: Ints,
    shares: Ints,  # [root], as is the next; a root without a share has no piece
    piece_bytes: Ints,
    parents: Ints,  # [root, place]
    bandwidth: Floats,
    flight_ns: Ints,
) -> int:
    """The same for any trees, by the schedule that `Schedule.of` makes of them."""
    size = len(members)
    number = 2 * size * (size - 1)
    pieces, senders, receivers = np.empty(number, np.int64), np.empty(number, np.int64), np.empty(number, np.int64)
    transmit, flight = np.empty(number, np.int64), np.empty(number, np.int64)
    next_down = np.full(number, -1, np.int64)
    contributions = np.zeros((size, size), np.int64)
    up, first_down = np.full((size, size), -1, np.int64), np.full((size, size), -1, np.int64)
    heights, depths = np.zeros((size, size), np.int64), np.zeros((size, size), np.int64)
    levels = 0
    for root in range(size):
        for place in range(size):
            height, here = 0, place
            while here != root:
                height, here = height + 1, parents[root, here]
                heights[root, here] = max(heights[root, here], height)
            depths[root, place] = height
            levels = max(levels, height)
    found = 0
    for total in range(2):
        for level in range(levels):
            for root in range(size):
                if shares[root] == 0:
                    continue
                for sender in range(size):
                    for receiver in range(size):
                        if total:
                            links = receiver != root and parents[root, receiver] == sender
                            links = links and depths[root, sender] == level
                        else:
                            links = sender != root and parents[root, sender] == receiver
                            links = links and heights[root, sender] == level
                        if not links:
                            continue
                        a, b = members[sender], members[receiver]
                        pieces[found], senders[found], receivers[found] = root, sender, receiver
                        transmit[found] = link_ns(piece_bytes[root], bandwidth[a, b])
                        flight[found] = flight_ns[a, b]
                        if total:  # any order in the list is good: their ranks are their numbers
                            next_down[found] = first_down[root, sender]
                            first_down[root, sender] = found
                        else:
                            contributions[root, receiver] += 1
                            up[root, sender] = found
                        found += 1
    return run_schedule(
        done_ns,
        pieces[:found],
        senders[:found],
        receivers[:found],
        contributions,
        up,
        first_down,
        next_down[:found],
        transmit[:found],
        flight[:found],
        np.empty((0, 4), np.int64),
    )


# Rings


def ring_order(costs: LinkCosts, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The fastest order of few nodes; for many, one with a fast slowest edge, improved where that is easy."""
    nodes = tuple(sorted(nodes))
    if len(nodes) < 2:
        return nodes
    among = np.ix_(nodes, nodes)
    size_bytes = np.array(-(-costs.gradient_bytes[stage] // len(nodes)), np.int64)
    transmit = transmit_ns(size_bytes, costs.bandwidth_bytes_per_s[among])
    flight = costs.flight_ns[among]
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


@kernel
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
