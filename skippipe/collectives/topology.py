"""The fastest schedule for the nodes of a stage: the order of a ring, or the pieces and relays of a direct exchange.

All of it is compiled, with numba where that is installed: the search of the planner asks some ten thousand times a
second how long a stage averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from skippipe.collectives.schedule import Averaging, Piece
from skippipe.collectives.transfers import FreeLinks, LinkCosts, free_links, link_ns, takes_ns, transmit_ns
from skippipe.jit import Floats, Ints, kernel

PIECE_BYTES = 2**23  # of an exchange, about: smaller pieces are forwarded sooner, and are more messages
MOST_PIECES = 192
FEW_PIECES = 24  # where many placements are compared
RELAYED_UP_TO = 16  # nodes of a stage: more have enough links of their own
SHARES = 2**16  # what shares add up to in an estimate, about
LEAST_SHARE = 0.02  # of the largest: a node with less is no root, and only sends
PAIR = 1.3  # two nodes alone do not use all ways at once: by so much their rate is less
EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one
TURNS = 1_000  # tried on a larger ring


def fastest(costs: LinkCosts, stage: int, nodes: Sequence[int], *, only_rings: bool = False) -> Averaging:
    """The fastest of the known kinds for nodes that are done at the same time, whatever order they are given in."""
    if len(nodes) > RELAYED_UP_TO and not only_rings:
        return exchange(costs, stage, sorted(nodes), free_links(len(costs.flight_ns)), most_pieces=FEW_PIECES)
    ring = Averaging(ring_order(costs, stage, nodes))
    if only_rings or len(ring.order) < 3:
        return ring
    direct = exchange(costs, stage, ring.order, free_links(len(costs.flight_ns)), most_pieces=FEW_PIECES)
    return min((ring, direct), key=lambda each: takes_ns(costs, stage, each))


# Exchange by way of relays


def exchange(
    costs: LinkCosts,
    stage: int,
    order: Sequence[int],
    free_ns: FreeLinks,
    relays: Sequence[int] = (),
    most_pieces: int = MOST_PIECES,
) -> Averaging:
    """Every node is the root of pieces, and all others send straight to it or by way of a relay. `free_ns` is when
    links are free; it is changed by what this adds."""
    by_bytes = -(-costs.gradient_bytes[stage] // PIECE_BYTES)
    pieces = min(most_pieces, max(by_bytes, min(2 * len(order), most_pieces // 2)))
    relays = relays if len(order) <= RELAYED_UP_TO else ()
    roots, ways = np.empty(pieces, np.int64), np.empty((pieces, len(order)), np.int64)
    divide_exchange(
        np.array(order, np.int64),
        np.array(sorted({*relays, *order}), np.int64),
        costs.gradient_bytes[stage],
        Links(
            np.ascontiguousarray(costs.bandwidth_bytes_per_s),
            costs.flight_ns,
            costs.upload_bytes_per_s,
            costs.download_bytes_per_s,
            *free_ns,
        ),
        roots,
        ways,
    )
    found = []
    for root, by in zip(roots.tolist(), ways.tolist(), strict=True):
        forwarded = tuple((order[at], relay) for at, relay in enumerate(by) if at != root and relay >= 0)
        found.append(Piece(order[root], 1, (), forwarded))
    return Averaging(tuple(order), tuple(found))


class Links(NamedTuple):
    """What `divide_exchange` knows of links and nodes, and when they are free."""

    bandwidth: Floats
    """[from, to], as are flight and link_free."""
    flight_ns: Ints
    upload: Floats
    """[node], as are the next, and when they are free: infinite without a limit."""
    download: Floats
    link_free_ns: Ints
    upload_free_ns: Ints
    download_free_ns: Ints


@kernel
def divide_exchange(
    members: Ints,
    relays: Ints,  # nodes that may forward; the members can be among them
    gradient_bytes: int,
    links: Links,  # their times are changed
    roots: Ints,  # out: [piece]: the place of its root
    ways: Ints,  # out: [piece, place]: the relay; −1: straight to the root
) -> None:
    """Divide the gradient into equal pieces, and choose for one after another the root and the ways by which it is
    there and back soonest."""
    size, pieces = len(members), len(roots)
    piece_bytes = -(-gradient_bytes // pieces)
    trial = np.empty(size, np.int64)
    for piece in range(pieces):
        best_ns, best_root = -1, 0
        for root in range(size):
            longest_ns = 0
            for place in range(size):
                if place == root:
                    continue
                here, there = members[place], members[root]
                free_ns, taken_ns = _there_and_back_ns(here, there, piece_bytes, links)
                soonest_ns = free_ns + taken_ns
                trial[place] = -1
                for relay in relays:
                    if relay in (here, there):
                        continue
                    free_ns, taken_ns = _there_and_back_ns(here, relay, piece_bytes, links)
                    if free_ns + taken_ns >= soonest_ns:
                        continue
                    then_free_ns, then_taken_ns = _there_and_back_ns(relay, there, piece_bytes, links)
                    by_relay_ns = max(free_ns, then_free_ns) + taken_ns + then_taken_ns
                    if by_relay_ns < soonest_ns:
                        soonest_ns = by_relay_ns
                        trial[place] = relay
                longest_ns = max(longest_ns, soonest_ns)
                if 0 <= best_ns <= longest_ns:
                    break
            if best_ns < 0 or longest_ns < best_ns:
                best_ns, best_root = longest_ns, root
                for place in range(size):
                    ways[piece, place] = trial[place]
        roots[piece] = best_root
        for place in range(size):
            if place != best_root:
                relay = ways[piece, place]
                if relay < 0:
                    _use(members[place], members[best_root], piece_bytes, links)
                else:
                    _use(members[place], relay, piece_bytes, links)
                    _use(relay, members[best_root], piece_bytes, links)


@kernel
def _there_and_back_ns(here: int, there: int, piece_bytes: int, links: Links) -> tuple[int, int]:
    """When the links between two nodes are free for a piece, and how long it takes there and back."""
    free_ns = max(links.link_free_ns[here, there], links.link_free_ns[there, here])
    if links.upload[here] < np.inf:
        free_ns = max(free_ns, links.upload_free_ns[here])
    if links.upload[there] < np.inf:
        free_ns = max(free_ns, links.upload_free_ns[there])
    if links.download[here] < np.inf:
        free_ns = max(free_ns, links.download_free_ns[here])
    if links.download[there] < np.inf:
        free_ns = max(free_ns, links.download_free_ns[there])
    taken_ns = link_ns(piece_bytes, links.bandwidth[here, there]) + link_ns(piece_bytes, links.bandwidth[there, here])
    return free_ns, taken_ns + links.flight_ns[here, there] + links.flight_ns[there, here]


@kernel
def _use(here: int, there: int, piece_bytes: int, links: Links) -> None:
    """A piece goes there and back."""
    for a, b in ((here, there), (there, here)):
        links.link_free_ns[a, b] += link_ns(piece_bytes, links.bandwidth[a, b])
        if links.upload[a] < np.inf:
            links.upload_free_ns[a] += link_ns(piece_bytes, links.upload[a])
        if links.download[b] < np.inf:
            links.download_free_ns[b] += link_ns(piece_bytes, links.download[b])


def both_ways(bandwidth: Floats) -> Floats:
    """[node, node]: the harmonic mean of both directions: a piece goes there as a contribution, and back as a sum."""
    with np.errstate(divide="ignore"):
        return 2 / (1 / bandwidth + 1 / bandwidth.T)


def relay_rates(costs: LinkCosts) -> Floats:
    """[relay, node]: what a relay carries from and to a node; 0 of a relay whose own rates are limited, as it has
    others to serve."""
    rate = both_ways(costs.bandwidth_bytes_per_s)
    np.fill_diagonal(rate, 0)
    rate[np.isfinite(np.minimum(costs.upload_bytes_per_s, costs.download_bytes_per_s))] = 0
    return rate


@kernel
def all_relays(relayed: Floats) -> Floats:
    """[node, node]: what all relays together carry between two nodes."""
    nodes = len(relayed)
    together = np.zeros((nodes, nodes), np.float64)
    for by in range(nodes):
        for here in range(nodes):
            for there in range(here):
                together[here, there] += min(relayed[by, here], relayed[by, there])
    return together + together.T


@kernel
def exchange_estimate_ns(
    done_ns: Ints,  # by place, as is the next
    members: Ints,
    gradient_bytes: int,
    bandwidth: Floats,  # [from, to], as are the next two
    flight_ns: Ints,
    relayed: Floats,  # see `relay_rates`
    relayed_by_all: Floats,  # see `all_relays`
    stage_of: Ints,  # [node]: below 0 if it holds no stage, and forwards nothing
    upload: Floats,  # [node], as is the next: infinite without a limit
    download: Floats,
) -> int:
    """About when all nodes have the sum in an exchange: every node is the root of one piece, and all ways to it are one
    link. Between regions the schedule of `exchange` takes mostly within a third of it; where links are of very unequal
    rates it can be several times off."""
    size, idle = len(members), np.flatnonzero(stage_of < 0)
    rate = np.empty((size, size), np.float64)
    flight = np.empty((size, size), np.int64)
    roots = np.empty(size, np.float64)
    for place in range(size):
        here = members[place]
        slowest = np.inf
        for other in range(size):
            if other == place:
                continue
            there = members[other]
            straight = 0.0
            if bandwidth[here, there] > 0 and bandwidth[there, here] > 0:
                straight = 2 / (1 / bandwidth[here, there] + 1 / bandwidth[there, here])
            by_relay = 0.0
            if size <= RELAYED_UP_TO:
                by_relay = relayed_by_all[here, there]
                for by in idle:
                    by_relay -= min(relayed[by, here], relayed[by, there])
                by_relay /= max(size - 1, PAIR)
            rate[place, other], flight[place, other] = bandwidth[here, there], flight_ns[here, there]
            if by_relay >= straight:
                straight += by_relay
                rate[place, other], flight[place, other] = straight, 2 * flight_ns[here, there]
            shared = min(upload[here], download[there]) / (size - 1)
            rate[place, other] = min(rate[place, other], shared)
            slowest = min(slowest, straight, shared, min(upload[there], download[here]) / (size - 1))
        roots[place] = slowest
    most = roots.max()
    total = 0
    shares = np.zeros(size, np.int64)
    for root in range(size):
        if roots[root] >= LEAST_SHARE * most:
            shares[root] = max(1, round(SHARES * roots[root] / roots.sum()) if most > 0 else 1)
        total += shares[root]
    last_ns = done_ns.max()
    for root in range(size):
        if shares[root] == 0:
            continue
        piece_bytes = -(-gradient_bytes * shares[root] // total)
        summed_ns = done_ns[root]
        for place in range(size):
            if place != root:
                came_ns = done_ns[place] + link_ns(piece_bytes, rate[place, root]) + flight[place, root]
                summed_ns = max(summed_ns, came_ns)
        for place in range(size):
            if place != root:
                start_ns = summed_ns
                if shares[place] > 0:  # its own contribution went over this link before
                    other_bytes = -(-gradient_bytes * shares[place] // total)
                    start_ns = max(start_ns, done_ns[root] + link_ns(other_bytes, rate[root, place]))
                last_ns = max(last_ns, start_ns + link_ns(piece_bytes, rate[root, place]) + flight[root, place])
    return int(last_ns)


# Rings


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
    """The edges of all stages' rings; None if some stage averages otherwise, or nodes have rates of their own."""
    if (
        any(each.pieces for each in averagings)
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
