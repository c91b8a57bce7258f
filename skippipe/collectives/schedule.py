"""The averaging schedule of a stage: which node sends which piece of the gradient to which, and when each has the sum.

The gradient is cut into pieces. Each piece is summed along a tree: a node adds the contributions that come to it to its
own and passes the result on, until the root has the sum. From there the sum is copied back along a tree. So each piece
is summed at one place and copied, and all replicas end up with the same bits. Every way to average that messages can
carry is such a schedule: a ring has as many pieces as nodes, and each tree is a chain round the ring; in a direct
exchange every node is the root of a piece and all others send straight to it; two levels and a single tree have roots
and trees of their own.

A transfer begins when its sender has done its last task and has all that it waits for, and when the link has sent what
was ready before; no node waits for the whole stage. docs/formats.md has the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from skippipe.event_loop import drop_first, push
from skippipe.jit import Ints, kernel

Link: TypeAlias = tuple[int, int]
NO_RECORD = np.empty((0, 4), np.int64)


@dataclass(frozen=True)
class Piece:
    """A piece of a stage's gradient that is summed at its root, and copied back the way it came."""

    root: int
    share: int
    """Its part of the gradient, of the sum of all pieces' shares."""
    via: tuple[Link, ...] = ()
    """(node, next): nodes that send to another one on the way to the root; all others send straight to the root."""

    def parent_of(self, node: int) -> int:
        """The node to which this one sends its contribution; of the root, itself."""
        return node if node == self.root else dict(self.via).get(node, self.root)


class Transfer(NamedTuple):
    """One message of a schedule. Places are positions in the order of the stage's nodes."""

    total: bool
    """It carries the sum on its way back from the root; False: a contribution on its way there."""
    level: int
    """Of a contribution, how many transfers lie before it at most; of a total, how many between it and the root."""
    piece: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Averaging:
    """How the nodes of one stage average: round a ring, or piece by piece along trees."""

    order: tuple[int, ...]
    """The nodes; their order is that of the ring, and of the places in a schedule."""
    pieces: tuple[Piece, ...] = ()
    """Pieces with trees of their own; none: a ring."""

    @property
    def kind(self) -> str:
        """What it is, in a word for people."""
        if not self.pieces or len(self.order) < 2:
            return "ring"
        if any(piece.via for piece in self.pieces):
            return "trees"
        return "direct exchange" if len(self.pieces) > 1 else "star"

    def fault(self) -> str | None:
        """What is wrong with the pieces, for people; None: nothing."""
        for number, piece in enumerate(self.pieces):
            if piece.share < 1:
                return f"piece {number} has a share of {piece.share}; it must be 1 or more"
            nodes = [piece.root, *(node for link in piece.via for node in link)]
            if not set(nodes) <= set(self.order):
                return f"piece {number} names a node that does not hold the stage"
            if len(dict(piece.via)) < len(piece.via) or piece.root in dict(piece.via):
                return f"piece {number} has two ways for one node, or one for its root"
            for node in dict(piece.via):
                for _ in self.order:
                    node = piece.parent_of(node)
                if node != piece.root:
                    return f"piece {number} goes in a circle instead of to its root"
        return None

    def without(self, gone: Iterable[int]) -> Averaging:
        """The same among the nodes that are left. A lost root's piece is divided among the others; what went by way of
        a lost node goes to the next one on its way."""
        lost = set(gone).intersection(self.order)
        if not lost:
            return self
        left = tuple(node for node in self.order if node not in lost)

        def next_left(piece: Piece, node: int) -> int:
            node = piece.parent_of(node)
            while node in lost:
                node = piece.parent_of(node)
            return node

        pieces = tuple(
            Piece(
                piece.root,
                piece.share,
                tuple(
                    (node, parent)
                    for node, _ in piece.via
                    if node not in lost and (parent := next_left(piece, node)) != piece.root
                ),
            )
            for piece in self.pieces
            if piece.root not in lost
        )
        if self.pieces and not pieces and left:
            pieces = tuple(Piece(node, 1) for node in left)
        return Averaging(left, pieces)

    @cached_property
    def schedule(self) -> Schedule:
        size = len(self.order)
        if not self.pieces:
            places = range(size)
            up = [[(at + 1) % size if at != (piece - 1) % size else at for at in places] for piece in places]
            down = [[(at - 1) % size if at != (piece - 1) % size else at for at in places] for piece in places]
            return Schedule.of([1] * size, up, down)
        place = {node: at for at, node in enumerate(self.order)}
        trees = [[place[piece.parent_of(node)] for node in self.order] for piece in self.pieces]
        return Schedule.of([piece.share for piece in self.pieces], trees, trees)

    def link_bytes(self, gradient_bytes: int) -> Counter[Link]:
        """(sender, receiver) → bytes of an iteration, of a gradient of so many."""
        sizes = self.schedule.piece_bytes(gradient_bytes)
        found: Counter[Link] = Counter()
        for each in self.schedule.transfers:
            found[self.order[each.sender], self.order[each.receiver]] += sizes[each.piece]
        return found

    @property
    def links(self) -> set[Link]:
        """(sender, receiver) of all messages."""
        return {(self.order[each.sender], self.order[each.receiver]) for each in self.schedule.transfers}


@dataclass(frozen=True, eq=False)
class Schedule:
    """All transfers of an averaging, by place. Their numbers are their ranks: of two that are ready for the same link
    at the same time, the one with the smaller number goes first."""

    size: int
    shares: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    contributions: Ints
    """[piece, place]: contributions that the place waits for."""
    up: Ints
    """[piece, place]: the number of the transfer of its contribution; −1 at the root."""
    first_down: Ints
    """[piece, place]: the number of the first transfer by which it passes on the total; −1: none."""
    next_down: Ints
    """[transfer]: the next one of the same piece and sender; −1: none."""

    @classmethod
    def of(cls, shares: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> Schedule:
        """`up` and `down` are by [piece][place]: where a contribution goes to, where the total comes from. The root is
        its own."""
        pieces, size = len(shares), len(up[0]) if up else 0
        found = []
        for piece in range(pieces):
            heights = [0] * size
            for at in range(size):
                height, here = 0, at
                while up[piece][here] != here:
                    height, here = height + 1, up[piece][here]
                    heights[here] = max(heights[here], height)
            for at in range(size):
                if up[piece][at] != at:
                    found.append(Transfer(False, heights[at], piece, at, up[piece][at]))
                    depth, here = 0, down[piece][at]
                    while down[piece][here] != here:
                        depth, here = depth + 1, down[piece][here]
                    found.append(Transfer(True, depth, piece, down[piece][at], at))
        transfers = tuple(sorted(found))
        contributions, ups, first = (np.full((pieces, size), start, np.int64) for start in (0, -1, -1))
        following = np.full(len(transfers), -1, np.int64)
        for number in range(len(transfers) - 1, -1, -1):
            each = transfers[number]
            if each.total:
                following[number] = first[each.piece, each.sender]
                first[each.piece, each.sender] = number
            else:
                contributions[each.piece, each.receiver] += 1
                ups[each.piece, each.sender] = number
        return cls(size, tuple(shares), transfers, contributions, ups, first, following)

    @cached_property
    def columns(self) -> tuple[Ints, Ints, Ints]:
        """[transfer]: piece, sender, receiver."""
        rows = np.array([each[2:] for each in self.transfers], np.int64).reshape(-1, 3)
        return rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy()

    def piece_bytes(self, gradient_bytes: int) -> tuple[int, ...]:
        """[piece]: bytes of one message, of a gradient of so many."""
        total = sum(self.shares)
        return tuple(-(-gradient_bytes * share // total) for share in self.shares)

    def bounds(self, values: int) -> list[int]:
        """Where each piece begins in a gradient of so many values, and where the last one ends. Each has one value, and
        its share of the others."""
        total, others, so_far, found = sum(self.shares), values - len(self.shares), 0, [0]
        assert others >= 0, f"{len(self.shares)} pieces of {values} values"
        for number, share in enumerate(self.shares):
            so_far += share
            found.append(number + 1 + others * so_far // total)
        return found

    def needed_for(self, number: int) -> list[int]:
        """Numbers of the transfers that bring to its sender what this one passes on."""
        each = self.transfers[number]
        at_root = self.up[each.piece, each.sender] < 0
        total = each.total and not at_root
        return [
            other
            for other, before in enumerate(self.transfers)
            if (before.total, before.piece, before.receiver) == (total, each.piece, each.sender)
        ]

    def run(self, done_ns: Ints, transmit_ns: Ints, flight_ns: Ints, record: Ints = NO_RECORD) -> int:
        """See `run_schedule`; times of links are by transfer."""
        arrays = self.contributions, self.up, self.first_down, self.next_down
        return int(run_schedule(done_ns, *self.columns, *arrays, transmit_ns, flight_ns, record))


@kernel
def run_schedule(
    done_ns: Ints,  # [place]: end of its last task
    pieces: Ints,  # [transfer], as are the next two
    senders: Ints,
    receivers: Ints,
    contributions: Ints,  # as in `Schedule`, like the next three
    up: Ints,
    first_down: Ints,
    next_down: Ints,
    transmit_ns: Ints,  # [transfer], as is the next
    flight_ns: Ints,
    record: Ints,  # out: [transfer, (ready, start, sent, arrived)]; no rows: do not record
) -> int:
    """When all nodes have the sum."""
    size, transfers = len(done_ns), len(pieces)
    recording = len(record) > 0
    missing = contributions.copy()
    has_ns = np.empty(contributions.shape, np.int64)
    link_free_ns = np.zeros((size, size), np.int64)
    times, numbers = np.empty(transfers, np.int64), np.empty(transfers, np.int64)
    waiting = 0
    last_ns = done_ns.max()
    for piece in range(len(contributions)):
        for place in range(size):
            has_ns[piece, place] = done_ns[place]
            if missing[piece, place] == 0 and up[piece, place] >= 0:
                waiting = push(times, numbers, waiting, done_ns[place], up[piece, place])
    while waiting > 0:
        ready_ns, number = times[0], numbers[0]
        waiting = drop_first(times, numbers, waiting)
        piece, sender, receiver = pieces[number], senders[number], receivers[number]
        start_ns = max(ready_ns, link_free_ns[sender, receiver])
        sent_ns = start_ns + transmit_ns[number]
        link_free_ns[sender, receiver] = sent_ns
        arrived_ns = sent_ns + flight_ns[number]
        if recording:
            record[number, 0], record[number, 1] = ready_ns, start_ns
            record[number, 2], record[number, 3] = sent_ns, arrived_ns
        last_ns = max(last_ns, arrived_ns)
        following = -1
        if number == up[piece, sender]:
            has_ns[piece, receiver] = max(has_ns[piece, receiver], arrived_ns)
            missing[piece, receiver] -= 1
            if missing[piece, receiver] > 0:
                continue
            if up[piece, receiver] >= 0:
                waiting = push(times, numbers, waiting, has_ns[piece, receiver], up[piece, receiver])
                continue
            arrived_ns = has_ns[piece, receiver]
        following = first_down[piece, receiver]
        while following >= 0:
            waiting = push(times, numbers, waiting, arrived_ns, following)
            following = next_down[following]
    return int(last_ns)
