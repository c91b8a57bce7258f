"""The ring: every node passes pieces of the gradient on to the next.

With m nodes, each of the 2(m−1) rounds moves one m-th of the gradient over every edge of the ring: first every piece is
summed by passing it once around, then the sums are passed around once more. A node sends the piece of a round when it
has the piece of the round before and its own last transmission is over; no node waits for the whole stage. The order of
the nodes in the ring is worth choosing.

The time of a ring is compiled, with numba where that is installed: the search of the planner calls `averaged_ns` and
`averaging_spans` from kernels of its own, some ten thousand times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.collectives.interface import Collective, GroupConfig, LinkCosts, MakeAverager, Spans
from skippipe.jit import Ints, kernel

if TYPE_CHECKING:
    from torch import Tensor

EXACT_UP_TO = 8  # nodes: 7! rings are tried one by one
TURNS = 1_000  # tried on a larger ring


class Ring(Collective):
    id = "ring"
    elastic = True
    timed_as_ring = True

    def rounds(self, size: int) -> int:
        return 2 * (size - 1)

    def receiver(self, at: int, round_: int, size: int) -> int:  # noqa: ARG002
        return (at + 1) % size

    def sender(self, at: int, round_: int, size: int) -> int:  # noqa: ARG002
        return (at - 1) % size

    def message_bytes(self, gradient_bytes: int, size: int) -> int:
        return -(-gradient_bytes // max(1, size))

    def order(self, costs: LinkCosts, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
        """The fastest order of few nodes; for many, one with a fast slowest edge, improved where that is easy."""
        nodes = tuple(sorted(nodes))
        if len(nodes) < 2:
            return nodes
        among = np.ix_(nodes, nodes)
        transmit_ns = self.message_ns(costs, stage, len(nodes))[among]
        flight_ns = costs.flight_ns[among]
        if len(nodes) <= EXACT_UP_TO:
            orders = _orders(len(nodes))
            order = orders[_fastest(orders, transmit_ns, flight_ns)]
        else:
            edges = transmit_ns + flight_ns
            order = np.array(_exchanged(edges, _nearest(edges)), dtype=np.int64)
            _turn_pieces(order, transmit_ns, flight_ns, TURNS)
        return tuple(nodes[index] for index in order)

    def averaged_ns(self, costs: LinkCosts, stage: int, order: Sequence[int], done_ns: Sequence[int]) -> int:
        return int(averaged_ns(np.array(done_ns, np.int64), *self.edges(costs, stage, order)))

    def edges(self, costs: LinkCosts, stage: int, order: Sequence[int]) -> tuple[Ints, Ints]:
        """Transmit and flight time of one piece, by place: from the node there to the next one."""
        here, there = list(order), [*order[1:], *order[:1]]
        if not here:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return self.message_ns(costs, stage, len(order))[here, there], costs.flight_ns[here, there]

    def spans(self, costs: LinkCosts, orders: Sequence[Sequence[int]]) -> Callable[[Ints], Spans]:
        rings = Rings.of(costs, orders)

        def of(done_ns: Ints) -> Spans:
            found = np.empty((len(rings.ends), 2), np.int64)
            averaging_spans(done_ns, rings.nodes, rings.transmit_ns, rings.flight_ns, rings.ends, found)
            return tuple((start, end) for start, end in found.tolist())

        return of

    def join(self, group: GroupConfig) -> MakeAverager:  # noqa: ARG002
        return GradientRing


RING = Ring()


@dataclass(frozen=True)
class Rings:
    """The rings of all stages one after another, for kernels."""

    nodes: Ints
    transmit_ns: Ints
    """Transmit time of one piece, from the node at this place of a ring to the next one."""
    flight_ns: Ints
    ends: Ints
    """[stage]: the place at which the next ring begins."""

    @classmethod
    def of(cls, costs: LinkCosts, rings: Sequence[Sequence[int]]) -> Rings:
        edges = [RING.edges(costs, stage, ring) for stage, ring in enumerate(rings)]
        return cls(
            nodes=np.array([node for ring in rings for node in ring], dtype=np.int64),
            transmit_ns=np.concatenate([transmit for transmit, _ in edges]),
            flight_ns=np.concatenate([flight for _, flight in edges]),
            ends=np.cumsum([len(ring) for ring in rings], dtype=np.int64),
        )


@kernel
def averaged_ns(done_ns: Ints, transmit_ns: Ints, flight_ns: Ints) -> int:
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


@kernel
def averaging_spans(
    done_ns: Ints,  # [node]
    nodes: Ints,  # as in `Rings`, like the next three
    transmit_ns: Ints,
    flight_ns: Ints,
    ends: Ints,
    spans: Ints,  # out: [stage, (all its nodes are done, averaged)]
) -> None:
    """When each stage averages."""
    begin = 0
    for stage in range(len(ends)):
        end = ends[stage]
        if end == begin:  # no node holds this stage
            spans[stage] = 0
            continue
        done = done_ns[nodes[begin:end]]
        spans[stage, 0] = done.max()
        spans[stage, 1] = averaged_ns(done, transmit_ns[begin:end], flight_ns[begin:end])
        begin = end


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


def piece_sent(at: int, round_: int, size: int) -> int:
    """Which piece the node at a place of the ring passes on in a round: first its own, then what came last."""
    return (at - round_) % size


class GradientRing:
    """What a node computes in each round of its stage's ring.

    A sum is encoded by one node, and all nodes, that one too, take the decoded values, so all replicas end up with the
    same bits. Sums lie beside the gradient, which stays as it is: a ring that broke can be begun again, with other
    members. Every piece of the sum is written on the way, so nothing is copied at the start or zeroed at the end.

    If the codec asks for error feedback, what encoding took away from a piece is kept and added to it in the next
    iteration. A node encodes each piece exactly once in a ring, whatever its size, so one remainder of the gradient's
    size is enough.
    """

    def __init__(self, gradient: Tensor, codec: str) -> None:
        self._gradient = gradient
        self._codec = codec
        self._sum: Tensor | None = None
        self._remainder = gradient.new_zeros(gradient.shape) if CODECS[codec].error_feedback else None
        self._turned: tuple[int, int, int] | None = None
        """The last round of the iteration, with this node's place and the ring's size."""
        self._complete = False

    def turn(self, round_: int, at: int, size: int, given: EncodedTensor | None) -> EncodedTensor | None:
        if round_ == 0:
            self._begin()
        else:
            assert self._turned == (round_ - 1, at, size), f"round {round_} at {at} of {size} after {self._turned}"
        self._turned = round_, at, size
        if self._sum is None:
            self._sum = self._gradient.new_empty(self._gradient.shape)
        number = piece_sent(at, round_, size)
        own, total = (_piece(tensor, number, size) for tensor in (self._gradient, self._sum))
        came = self._decoded(given, own) if round_ else None
        last_sum = size - 1
        self._complete = round_ == 2 * last_sum
        if round_ <= last_sum:
            return self._encoded(number, size, own, came, total, adopt=round_ == last_sum)
        assert came is not None
        total.copy_(came)
        return None if self._complete else given  # passed on as it came

    def fits(self, given: EncodedTensor, round_: int, at: int, size: int) -> bool:
        piece = _piece(self._gradient, piece_sent(at, round_, size), size)
        return given.shape == piece.shape and given.dtype == self._codec

    @property
    def summed(self) -> Tensor:
        assert self._sum is not None and self._complete, f"the ring is not complete: {self._turned}"
        return self._sum

    def close(self, *, followed: bool) -> None:
        if not followed and self._turned is not None:
            self._drop_remainder()  # of sums that the optimizer did not follow, perhaps for not being finite
        self._turned = None
        self._complete = False

    def _begin(self) -> None:
        if self._turned is not None:
            self._drop_remainder()  # it has gone into sums that were given up; what it was before is not known
        self._complete = False

    def _drop_remainder(self) -> None:
        if self._remainder is not None:
            self._remainder.zero_()

    def _decoded(self, given: EncodedTensor | None, piece: Tensor) -> Tensor:
        if given is None or given.shape != piece.shape or given.dtype != self._codec:
            came = "nothing" if given is None else f"a {given.dtype} piece of shape {list(given.shape)}"
            raise ValueError(f"{came} came instead of {self._codec} {list(piece.shape)}")
        return decode(given, piece.device)

    def _encoded(
        self, number: int, size: int, own: Tensor, came: Tensor | None, total: Tensor, *, adopt: bool
    ) -> EncodedTensor:
        import torch

        so_far = own if came is None else torch.add(own, came, out=total)
        remainder = None if self._remainder is None else _piece(self._remainder, number, size)
        if remainder is not None:
            so_far = torch.add(so_far, remainder, out=total)
        encoded = encode(so_far, self._codec)
        if CODECS[self._codec].lossless:
            return encoded
        kept = decode(encoded, total.device)
        if remainder is not None:
            torch.sub(so_far, kept, out=remainder)
        if adopt:
            total.copy_(kept)
        return encoded


def _piece(tensor: Tensor, number: int, size: int) -> Tensor:
    step = -(-tensor.numel() // size)
    return tensor[number * step : (number + 1) * step]
