"""The fastest schedule for the nodes of a stage: a ring, or the pieces and relays of a direct exchange.

All of it is compiled, with numba where that is installed: the search of the planner asks some ten thousand times a
second how long a stage averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from skippipe.collectives.rings import ring_order
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.collectives.transfers import FreeLinks, LinkCosts, free_links, link_ns, takes_ns, transmit_ns
from skippipe.jit import Floats, Ints, inner_kernel, kernel

PIECE_BYTES = 2**23  # of an exchange, about: smaller pieces are forwarded sooner, and are more messages
SMALLEST_PIECE_BYTES = 2**20  # where those would be few: more of them are divided more evenly over links and relays
MOST_PIECES = 192
FEW_PIECES = 24  # where many placements are compared
RINGS_UP_TO = 16  # nodes of a stage: on more, a ring is too long to be the fastest
RELAYED_UP_TO = 6_400  # nodes of a stage times nodes of the cluster: beyond, to choose among all ways takes minutes
SHARES = 2**16  # what shares add up to in an estimate, about
LEAST_SHARE = 0.02  # of the largest: a node with less is no root, and only sends
PAIR = 1.3  # two nodes alone do not use all ways at once: by so much their rate is less


def fastest(costs: LinkCosts, stage: int, nodes: Sequence[int], *, only_rings: bool = False) -> Averaging:
    """The fastest of the known kinds for nodes that are done at the same time, whatever order they are given in."""
    if len(nodes) > RINGS_UP_TO and not only_rings:
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
    all_done_ns: int = 0,
) -> Averaging:
    """Every node is the root of pieces, and all others send straight to it or by way of a relay. `free_ns` is when
    links are free; it is changed by what this adds. No sum is there before `all_done_ns`, when the last node is done.
    """
    large, small = (-(-costs.gradient_bytes[stage] // each) for each in (PIECE_BYTES, SMALLEST_PIECE_BYTES))
    pieces = min(most_pieces, max(large, min(max(small, 2 * len(order)), most_pieces // 2)))
    nodes = len(costs.flight_ns)
    forwarding = {*relays, *order} if may_relay(order, costs) else ()
    piece_bytes = np.array(-(-costs.gradient_bytes[stage] // pieces), np.int64)
    upload, download = costs.upload_bytes_per_s, costs.download_bytes_per_s
    forwarded, late = free_links(nodes), free_links(nodes)
    links = Links(
        transmit_ns(piece_bytes, costs.bandwidth_bytes_per_s),
        costs.flight_ns * len(costs.gradient_rounds[stage]),
        transmit_ns(piece_bytes, upload) * np.isfinite(upload),
        transmit_ns(piece_bytes, download) * np.isfinite(download),
        *free_ns,
        *forwarded,
        *late,
    )
    members = np.array(order, np.int64)
    roots, ways = np.empty(pieces, np.int64), np.empty((pieces, len(order)), np.int64)
    divide_exchange(members, np.array(sorted(forwarding), np.int64), all_done_ns, links, roots, ways)
    for free, more in zip(free_ns, late, strict=True):
        free += more
    found = []
    for root, by in zip(roots.tolist(), ways.tolist(), strict=True):
        relayed = tuple((order[at], relay) for at, relay in enumerate(by) if at != root and relay >= 0)
        found.append(Piece(order[root], 1, (), relayed))
    return Averaging(tuple(order), tuple(found))


def may_relay(order: Sequence[int], costs: LinkCosts) -> bool:
    """Whether nodes forward for each other in an exchange of these."""
    return len(order) * len(costs.flight_ns) <= RELAYED_UP_TO


class Links(NamedTuple):
    """What `divide_exchange` knows of links and nodes: how long a piece takes, and how busy they are."""

    transmit_ns: Ints
    """[from, to], as is the next."""
    flight_ns: Ints
    upload_ns: Ints
    """[node], as is the next: for how long a piece keeps it busy; 0 without a limit."""
    download_ns: Ints
    link_free_ns: Ints
    """[from, to]: when the sender's own contributions are over; this and all that follow are changed."""
    upload_free_ns: Ints
    download_free_ns: Ints
    link_forwarded_ns: Ints
    """When contributions that it forwards are over."""
    upload_forwarded_ns: Ints
    download_forwarded_ns: Ints
    link_late_ns: Ints
    """For how long it is busy with what is ready only when all nodes are done: sums, and contributions forwarded then.
    """
    upload_late_ns: Ints
    download_late_ns: Ints


@kernel
def divide_exchange(
    members: Ints,
    relays: Ints,  # nodes that may forward; the members can be among them
    all_done_ns: int,  # when the last of the members is done: no sum is sent before
    links: Links,  # their times are changed
    roots: Ints,  # out: [piece]: the place of its root
    ways: Ints,  # out: [piece, place]: the relay; −1: straight to the root
) -> None:
    """Choose for one equal piece of the gradient after another the root and the ways by which it is there and back
    soonest. Nodes send their own contributions first. What they forward before the last node is done goes as it comes;
    from then on sums and what is forwarded are ready nearly at once, and only how much there is counts."""
    size = len(members)
    for piece in range(len(roots)):
        best_ns, best_root = -1, 0
        for root in range(size):
            longest_ns = 0
            for place in range(size):
                if place != root:
                    back_ns, _ = _soonest(members[place], members[root], relays, all_done_ns, links)
                    longest_ns = max(longest_ns, back_ns)
                    if 0 <= best_ns <= longest_ns:
                        break
            if best_ns < 0 or longest_ns < best_ns:
                best_ns, best_root = longest_ns, root
        roots[piece] = best_root
        there = members[best_root]
        for place in range(size):
            if place != best_root:
                here = members[place]
                _, relay = _soonest(here, there, relays, all_done_ns, links)  # others of this piece may be on its way
                ways[piece, place] = relay
                if relay < 0:
                    came_ns = _send(here, there, links)
                    _forward(there, here, max(came_ns, all_done_ns), all_done_ns, links)
                else:
                    came_ns = _send(here, relay, links)
                    came_ns = _forward(relay, there, came_ns, all_done_ns, links)
                    came_ns = _forward(there, relay, max(came_ns, all_done_ns), all_done_ns, links)
                    _forward(relay, here, came_ns, all_done_ns, links)


@inner_kernel
def _soonest(here: int, there: int, relays: Ints, all_done_ns: int, links: Links) -> tuple[int, int]:
    """When a piece is there and back at the soonest, and by way of which relay; −1: straight."""
    came_ns = _sent_ns(here, there, links)
    soonest_ns = _forwarded_ns(there, here, max(came_ns, all_done_ns), all_done_ns, links)
    by = -1
    for relay in relays:
        if relay in (here, there) or _forwarded_ns(relay, here, all_done_ns, all_done_ns, links) >= soonest_ns:
            continue
        came_ns = _sent_ns(here, relay, links)
        if came_ns >= soonest_ns:
            continue
        came_ns = _forwarded_ns(relay, there, came_ns, all_done_ns, links)
        came_ns = _forwarded_ns(there, relay, max(came_ns, all_done_ns), all_done_ns, links)
        came_ns = _forwarded_ns(relay, here, came_ns, all_done_ns, links)
        if came_ns < soonest_ns:
            soonest_ns, by = came_ns, relay
    return soonest_ns, by


@inner_kernel
def _sent_ns(here: int, there: int, links: Links) -> int:
    """When a node's own contribution arrives: it is ready when the node is done."""
    start_ns = links.link_free_ns[here, there]
    if links.upload_ns[here] > 0:
        start_ns = max(start_ns, links.upload_free_ns[here])
    if links.download_ns[there] > 0:
        start_ns = max(start_ns, links.download_free_ns[there])
    return int(start_ns + links.transmit_ns[here, there] + links.flight_ns[here, there])


@inner_kernel
def _forwarded_ns(here: int, there: int, ready_ns: int, all_done_ns: int, links: Links) -> int:
    """When what came from elsewhere and is ready here arrives there."""
    link = here, there
    start_ns = _starts_ns(
        ready_ns, all_done_ns, links.link_free_ns[link], links.link_forwarded_ns[link], links.link_late_ns[link]
    )
    if links.upload_ns[here] > 0:
        start_ns = _starts_ns(
            start_ns,
            all_done_ns,
            links.upload_free_ns[here],
            links.upload_forwarded_ns[here],
            links.upload_late_ns[here],
        )
    if links.download_ns[there] > 0:
        start_ns = _starts_ns(
            start_ns,
            all_done_ns,
            links.download_free_ns[there],
            links.download_forwarded_ns[there],
            links.download_late_ns[there],
        )
    return int(start_ns + links.transmit_ns[link] + links.flight_ns[link])


@inner_kernel
def _starts_ns(ready_ns: int, all_done_ns: int, free_ns: int, forwarded_ns: int, late_ns: int) -> int:
    if ready_ns >= all_done_ns:
        return max(ready_ns, max(all_done_ns, free_ns) + late_ns)
    return max(ready_ns, free_ns, forwarded_ns)


@inner_kernel
def _send(here: int, there: int, links: Links) -> int:
    """`_sent_ns`, and from now on the link is busy with it."""
    arrives_ns = _sent_ns(here, there, links)
    links.link_free_ns[here, there] += links.transmit_ns[here, there]
    links.upload_free_ns[here] += links.upload_ns[here]
    links.download_free_ns[there] += links.download_ns[there]
    return arrives_ns


@inner_kernel
def _forward(here: int, there: int, ready_ns: int, all_done_ns: int, links: Links) -> int:
    """`_forwarded_ns`, and from now on the link is busy with it."""
    arrives_ns = _forwarded_ns(here, there, ready_ns, all_done_ns, links)
    if ready_ns >= all_done_ns:
        links.link_late_ns[here, there] += links.transmit_ns[here, there]
        links.upload_late_ns[here] += links.upload_ns[here]
        links.download_late_ns[there] += links.download_ns[there]
    else:
        start_ns = arrives_ns - links.transmit_ns[here, there] - links.flight_ns[here, there]
        links.link_forwarded_ns[here, there] = start_ns + links.transmit_ns[here, there]
        links.upload_forwarded_ns[here] = start_ns + links.upload_ns[here]
        links.download_forwarded_ns[there] = start_ns + links.download_ns[there]
    return arrives_ns


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
def estimate_exchange(
    members: Ints,
    gradient_bytes: int,
    bandwidth: Floats,  # [from, to], as are the next two
    flight_ns: Ints,
    relayed: Floats,  # see `relay_rates`
    relayed_by_all: Floats,  # see `all_relays`
    idle: Ints,  # nodes that hold no stage, and forward nothing
    upload: Floats,  # [node], as is the next: infinite without a limit
    download: Floats,
    sent_ns: Ints,  # out: [place, root]: transmission of a contribution; below 0: the root has none. [root, root]: in
    # how many pieces
    back_ns: Ints,  # out: [root, place]: the same of a sum
    flown_ns: Ints,  # out: [from, to]
) -> None:
    """About how long transfers of an exchange take: every node is the root of one share of the gradient, and all ways
    to it are one link. The schedule of `exchange` takes mostly within a tenth of it between regions; where links are of
    very unequal rates it can be several times off."""
    size = len(members)
    rate = np.empty((size, size), np.float64)
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
            if size * len(relayed) <= RELAYED_UP_TO:
                by_relay = relayed_by_all[here, there]
                for by in idle:
                    by_relay -= min(relayed[by, here], relayed[by, there])
                by_relay /= max(size - 1, PAIR)
            rate[place, other], flown_ns[place, other] = bandwidth[here, there], flight_ns[here, there]
            if by_relay >= straight:
                straight += by_relay
                rate[place, other], flown_ns[place, other] = straight, 2 * flight_ns[here, there]
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
    for root in range(size):
        piece_bytes = -(-gradient_bytes * shares[root] // total)
        sent_ns[root, root] = max(1, MOST_PIECES * shares[root] // total)
        for place in range(size):
            if place != root:
                sent_ns[place, root] = link_ns(piece_bytes, rate[place, root]) if shares[root] > 0 else -1
                back_ns[root, place] = link_ns(piece_bytes, rate[root, place])


@kernel
def exchange_ns(done_ns: Ints, sent_ns: Ints, back_ns: Ints, flown_ns: Ints) -> int:
    """When all nodes have the sum. Transfers are as in `estimate_exchange`; nodes, by place, are done at `done_ns`."""
    size = len(done_ns)
    last_ns = done_ns.max()
    for root in range(size):
        pieces = sent_ns[root, root]
        first_ns = summed_ns = done_ns[root]
        has_piece = False
        for place in range(size):
            if place != root and sent_ns[place, root] >= 0:
                has_piece = True
                came_ns = done_ns[place] + flown_ns[place, root]
                first_ns = max(first_ns, came_ns + sent_ns[place, root] // pieces)
                summed_ns = max(summed_ns, came_ns + sent_ns[place, root])
        if not has_piece:
            continue
        for place in range(size):
            if place != root:
                start_ns = first_ns
                if sent_ns[root, place] >= 0:  # its own contribution went over this link before
                    start_ns = max(start_ns, done_ns[root] + sent_ns[root, place])
                back = back_ns[root, place]
                ended_ns = max(start_ns + back, summed_ns + back // pieces)
                last_ns = max(last_ns, ended_ns + flown_ns[root, place])
    return int(last_ns)
