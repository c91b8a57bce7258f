"""The averaging schedule of a stage: which node sends which piece of the gradient to which, and when each has the sum.

The gradient is cut into pieces. Each piece is summed along a tree: a node adds the contributions that come to it to its
own and passes the result on, until the root has the sum. From there the sum is copied back along a tree. So each piece
is summed at one place and copied, and all replicas end up with the same bits. Every way to average that messages can
carry is such a schedule: a ring has as many pieces as nodes, and each tree is a chain round the ring; in a direct
exchange every node is the root of pieces and all others send straight to it. On its way from one node of the tree to
the next a message may be forwarded, unopened, by a third node, which need not hold the stage: a relay.

Gradients of low rank are averaged in two rounds, by the same trees: a node contributes to the second when it has all
sums of the first. The pieces of the second round are numbered on from those of the first.

A transfer begins when its sender has done its last task and has all that it waits for, and when the link has sent what
was ready before; no node waits for the whole stage. Where a node's download is shared by all that comes to it, senders
wait until it is done, too: activations go first. docs/formats.md has the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

Link: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A piece of a stage's gradient that is summed at its root, and copied back the way it came."""

    root: int
    share: int
    """Its part of the gradient: this share of the sum of all pieces' shares."""
    via: tuple[Link, ...] = ()
    """(node, next): nodes that send to another one on the way to the root; all others send straight to the root."""
    relays: tuple[Link, ...] = ()
    """(node, relay): nodes whose messages to the next one, and back, are forwarded by a third node."""

    def parent_of(self, node: int) -> int:
        """The node to which this one sends its contribution; of the root, itself."""
        return node if node == self.root else dict(self.via).get(node, self.root)


class Transfer(NamedTuple):
    """One message of a schedule over one link. Places are positions among the nodes that take part."""

    total: bool
    """It carries the sum on its way back from the root; False: a contribution on its way there."""
    level: int
    """Of a contribution, how many transfers lie before it at most; of a total, how many between it and the root."""
    piece: int
    sender: int
    receiver: int
    node: int
    """The place of the tree's node whose contribution it is, or for whom the total is: not that of a relay."""


@dataclass(frozen=True)
class Averaging:
    """How the nodes of one stage average: round a ring, or piece by piece along trees."""

    order: tuple[int, ...]
    """The nodes that hold the stage; their order is that of the ring, and of the places in a schedule."""
    pieces: tuple[Piece, ...] = ()
    """Pieces with trees of their own; none: a ring."""
    rounds: int = 1
    """How often that happens, one after another."""

    def in_rounds(self, rounds: int) -> Averaging:
        return self if rounds == self.rounds else replace(self, rounds=rounds)

    @property
    def kind(self) -> str:
        """What it is, in a word for people."""
        if not self.pieces or len(self.order) < 2:
            return "ring"
        if any(piece.relays for piece in self.pieces):
            return "direct exchange with relays"
        if any(piece.via for piece in self.pieces):
            return "trees"
        return "direct exchange"

    def fault(self) -> str | None:
        """What is wrong with the pieces, for people; None: nothing."""
        for number, piece in enumerate(self.pieces):
            if piece.share < 1:
                return f"piece {number} has a share of {piece.share}; it must be 1 or more"
            via, relays = dict(piece.via), dict(piece.relays)
            if not {piece.root, *relays, *via, *via.values()} <= set(self.order):
                return f"piece {number} names a node that does not hold the stage"
            if len(via) < len(piece.via) or len(relays) < len(piece.relays) or piece.root in (*via, *relays):
                return f"piece {number} has two ways for one node, or one for its root"
            if any(relay in (node, piece.parent_of(node)) for node, relay in piece.relays):
                return f"piece {number} has a relay that is the sender or the receiver"
            for node in via:
                for _ in self.order:
                    node = piece.parent_of(node)
                if node != piece.root:
                    return f"piece {number} goes in a circle instead of to its root"
        return None

    def without(self, gone: Iterable[int]) -> Averaging:
        """The same among the nodes that are left. A lost root's piece is divided among the others; what went by way of
        a lost node goes to the next one on its way."""
        lost = set(gone).intersection(self.nodes)
        if not lost:
            return self
        left = tuple(node for node in self.order if node not in lost)

        def without_lost(piece: Piece) -> Piece:
            via, relays = [], []
            for node in left:
                parent = piece.parent_of(node)
                while parent in lost:
                    parent = piece.parent_of(parent)
                if parent not in (node, piece.root):
                    via.append((node, parent))
                relay = dict(piece.relays).get(node)
                if relay is not None and relay not in lost and relay != parent:
                    relays.append((node, relay))
            return Piece(piece.root, piece.share, tuple(via), tuple(relays))

        pieces = tuple(without_lost(piece) for piece in self.pieces if piece.root not in lost)
        if self.pieces and not pieces:
            pieces = tuple(Piece(node, 1) for node in left)
        return Averaging(left, pieces, self.rounds)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """All nodes that take part, by place: those that hold the stage, then the relays that do not."""
        relays = {relay for piece in self.pieces for _, relay in piece.relays}
        return self.order + tuple(sorted(relays - set(self.order)))

    @cached_property
    def schedule(self) -> Schedule:
        size = len(self.order)
        if not self.pieces:
            places = range(size)
            up = [[(at + 1) % size if at != (piece - 1) % size else at for at in places] for piece in places]
            down = [[(at - 1) % size if at != (piece - 1) % size else at for at in places] for piece in places]
            return Schedule.of(self.shares, up, down, [{}] * size, self.rounds)
        place = {node: at for at, node in enumerate(self.nodes)}
        trees = [[place[piece.parent_of(node)] for node in self.order] for piece in self.pieces]
        relays = [{place[node]: place[relay] for node, relay in piece.relays} for piece in self.pieces]
        return Schedule.of(self.shares, trees, trees, relays, self.rounds)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        return tuple(piece.share for piece in self.pieces) or (1,) * len(self.order)

    def piece_bytes(self, *round_bytes: int) -> tuple[int, ...]:
        """[piece]: bytes of one message, of a gradient of so many; if there are several rounds, in each of them."""
        total = sum(self.shares)
        return tuple(-(-size * share // total) for size in round_bytes for share in self.shares)

    def link_bytes(self, *round_bytes: int) -> Counter[Link]:
        """(sender, receiver) → bytes of an iteration, of a gradient of so many, as above."""
        sizes, found = self.piece_bytes(*round_bytes), Counter[Link]()
        count = len(self.shares)
        if not self.pieces and len(self.order) > 1:
            for edge in zip(self.order, self.order[1:] + self.order[:1], strict=True):
                found[edge] = 2 * (len(self.order) - 1) * sum(sizes[::count])
        for number, piece in enumerate(self.pieces):
            size = sum(sizes[number::count])
            next_on_way, relays = dict(piece.via), dict(piece.relays)
            for node in self.order:
                if node == piece.root:
                    continue
                parent, relay = next_on_way.get(node, piece.root), relays.get(node)
                for a, b in ((node, parent),) if relay is None else ((node, relay), (relay, parent)):
                    found[a, b] += size
                    found[b, a] += size
        return found

    @property
    def links(self) -> set[Link]:
        """(sender, receiver) of all messages."""
        return set(self.link_bytes(1))


@dataclass(frozen=True, eq=False)
class Schedule:
    """All transfers of an averaging, by place. Their numbers are their ranks: of two that are ready for the same link
    at the same time, the one with the smaller number goes first."""

    shares: tuple[int, ...]
    """Shares of the pieces of a round."""
    transfers: tuple[Transfer, ...]
    needs: tuple[tuple[int, ...], ...]
    """[transfer]: the numbers of those that bring to its sender what it passes on, or what it begins a round with."""
    forwarded: dict[int, int]
    """Number of a transfer to a relay → that by which the relay passes it on."""
    rounds: int = 1

    @classmethod
    def of(
        cls,
        shares: Sequence[int],
        up: Sequence[Sequence[int]],
        down: Sequence[Sequence[int]],
        relays: Sequence[dict[int, int]],
        rounds: int = 1,
    ) -> Schedule:
        """`up` and `down` are by [piece][place]: where a contribution goes to, where the total comes from; the root is
        its own. `relays` are by piece: place → the place that forwards, up and down."""
        found = []
        for piece, (to, since, by) in enumerate(zip(up, down, relays, strict=True)):
            heights, depths = _heights(to, by), _depths(since, by)
            for at in range(len(to)):
                if to[at] == at:
                    continue
                here, there = since[at], to[at]
                depth = depths[here]
                if at in by:
                    found.append(Transfer(False, heights[at], piece, at, by[at], at))
                    found.append(Transfer(False, heights[at] + 1, piece, by[at], there, at))
                    found.append(Transfer(True, depth, piece, here, by[at], at))
                    found.append(Transfer(True, depth + 1, piece, by[at], at, at))
                else:
                    found.append(Transfer(False, heights[at], piece, at, there, at))
                    found.append(Transfer(True, depth, piece, here, at, at))
        transfers = tuple(sorted(found))
        needs = tuple(_needs(transfers, up, relays))
        second = [at for at, each in enumerate(transfers) if each.sender == relays[each.piece].get(each.node)]
        forwarded = {needs[at][0]: at for at in second}
        return cls(tuple(shares), transfers, needs, forwarded)._repeated(up, rounds)

    def _repeated(self, up: Sequence[Sequence[int]], rounds: int) -> Schedule:
        """So many rounds of this one. What a node sends of its own waits for all sums of the round before."""
        if rounds == 1:
            return self
        ending: dict[int, list[int]] = {}  # place → those after which it has all sums
        for number, each in enumerate(self.transfers):
            if number not in self.forwarded and (each.total or up[each.piece][each.receiver] == each.receiver):
                ending.setdefault(each.receiver, []).append(number)
        pieces, size = len(self.shares), len(self.transfers)
        transfers, needs, forwarded = list(self.transfers), list(self.needs), dict(self.forwarded)
        for later in range(1, rounds):
            first = later * size
            for number, each in enumerate(self.transfers):
                transfers.append(each._replace(piece=each.piece + later * pieces))
                begins = number not in self.forwarding and (
                    not each.total or up[each.piece][each.sender] == each.sender
                )
                before = [at + first - size for at in ending[each.sender]] if begins else []
                needs.append((*before, *(at + first for at in self.needs[number])))
            forwarded |= {at + first: to + first for at, to in self.forwarded.items()}
        return Schedule(self.shares, tuple(transfers), tuple(needs), forwarded, rounds)

    @property
    def pieces(self) -> int:
        """The number of pieces of all rounds."""
        return self.rounds * len(self.shares)

    def round_of(self, piece: int) -> int:
        return piece // len(self.shares)

    @cached_property
    def forwarding(self) -> frozenset[int]:
        """Numbers of the transfers that relays send."""
        return frozenset(self.forwarded.values())

    def bounds(self, values: int) -> list[int]:
        """Where each piece of a round begins in so many values, and where the last one ends. Each has one value, and
        its share of the others."""
        total, others, so_far, found = sum(self.shares), values - len(self.shares), 0, [0]
        assert others >= 0, f"{len(self.shares)} pieces of {values} values"
        for number, share in enumerate(self.shares):
            so_far += share
            found.append(number + 1 + others * so_far // total)
        return found


def _depths(parents: Sequence[int], relays: Collection[int]) -> list[int]:
    """[place]: how many transfers lie between it and the root, which is its own parent. Places in `relays` send to a
    relay first."""
    depths = [0 if parent == at else -1 for at, parent in enumerate(parents)]
    for at in range(len(parents)):
        way = []
        while depths[at] < 0:
            way.append(at)
            at = parents[at]
        for here in reversed(way):
            depths[here] = depths[parents[here]] + 1 + (here in relays)
    return depths


def _heights(parents: Sequence[int], relays: Collection[int]) -> list[int]:
    """[place]: how many transfers lie before it at most; parents and relays as above."""
    heights, depths = [0] * len(parents), _depths(parents, relays)
    for at in sorted(range(len(parents)), key=depths.__getitem__, reverse=True):
        if depths[at]:
            heights[parents[at]] = max(heights[parents[at]], heights[at] + 1 + (at in relays))
    return heights


def _needs(
    transfers: Sequence[Transfer], up: Sequence[Sequence[int]], relays: Sequence[dict[int, int]]
) -> Iterable[tuple[int, ...]]:
    contributions: dict[tuple[int, int], list[int]] = {}  # (piece, place) → those that end there
    forwarded: dict[tuple[bool, int, int], int] = {}  # (total, piece, node) → that to its relay
    totals: dict[tuple[int, int], int] = {}  # (piece, place) → that which ends there
    for number, (total, _, piece, sender, receiver, node) in enumerate(transfers):
        if receiver == relays[piece].get(node) and sender != receiver:
            forwarded[total, piece, node] = number
        elif total:
            totals[piece, receiver] = number
        else:
            contributions.setdefault((piece, receiver), []).append(number)
    for total, _, piece, sender, _, node in transfers:
        if sender == relays[piece].get(node):
            yield (forwarded[total, piece, node],)
        elif total and up[piece][sender] != sender:
            yield (totals[piece, sender],)
        else:
            yield tuple(contributions.get((piece, sender), ()))
