"""The averaging schedule of a stage: which node sends which piece of the gradient to which, and when each has the sum.

The gradient is cut into pieces. Each piece is summed along a tree: a node adds the contributions that come to it to its
own and passes the result on, until the root has the sum. From there the sum is copied back along a tree. So each piece
is summed at one place and copied, and all replicas end up with the same bits. Every way to average that messages can
carry is such a schedule: a ring has as many pieces as nodes, and each tree is a chain round the ring; in a direct
exchange every node is the root of pieces and all others send straight to it. On its way from one node of the tree to
the next a message may be forwarded, unopened, by a third node, which need not hold the stage: a relay.

A transfer begins when its sender has done its last task and has all that it waits for, and when the link has sent what
was ready before; no node waits for the whole stage. Where a node's download is shared by all that comes to it, senders
wait until it is done, too: activations go first. docs/formats.md has the rule.
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
        return Averaging(left, pieces)

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
            return Schedule.of([1] * size, up, down, [{}] * size)
        place = {node: at for at, node in enumerate(self.nodes)}
        trees = [[place[piece.parent_of(node)] for node in self.order] for piece in self.pieces]
        relays = [{place[node]: place[relay] for node, relay in piece.relays} for piece in self.pieces]
        return Schedule.of([piece.share for piece in self.pieces], trees, trees, relays)

    def link_bytes(self, gradient_bytes: int) -> Counter[Link]:
        """(sender, receiver) → bytes of an iteration, of a gradient of so many."""
        sizes = self.schedule.piece_bytes(gradient_bytes)
        found: Counter[Link] = Counter()
        for each in self.schedule.transfers:
            found[self.nodes[each.sender], self.nodes[each.receiver]] += sizes[each.piece]
        return found

    @property
    def links(self) -> set[Link]:
        """(sender, receiver) of all messages."""
        return {(self.nodes[each.sender], self.nodes[each.receiver]) for each in self.schedule.transfers}


@dataclass(frozen=True, eq=False)
class Schedule:
    """All transfers of an averaging, by place. Their numbers are their ranks: of two that are ready for the same link
    at the same time, the one with the smaller number goes first."""

    shares: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    needs: tuple[tuple[int, ...], ...]
    """[transfer]: the numbers of those that bring to its sender what it passes on."""
    forwarded: dict[int, int]
    """Number of a transfer to a relay → that by which the relay passes it on."""

    @classmethod
    def of(
        cls,
        shares: Sequence[int],
        up: Sequence[Sequence[int]],
        down: Sequence[Sequence[int]],
        relays: Sequence[dict[int, int]],
    ) -> Schedule:
        """`up` and `down` are by [piece][place]: where a contribution goes to, where the total comes from; the root is
        its own. `relays` are by piece: place → the place that forwards, up and down."""
        found = []
        for piece, (to, since, by) in enumerate(zip(up, down, relays, strict=True)):
            heights, places = [0] * len(to), range(len(to))
            for at in places:
                height, here = 0, at
                while to[here] != here:
                    height, here = height + 1 + (here in by), to[here]
                    heights[here] = max(heights[here], height)
            for at in places:
                if to[at] == at:
                    continue
                depth, here = 0, since[at]
                while since[here] != here:
                    depth, here = depth + 1 + (here in by), since[here]
                here, there = since[at], to[at]
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
        return cls(tuple(shares), transfers, needs, {needs[at][0]: at for at in second})

    @cached_property
    def forwarding(self) -> frozenset[int]:
        """Numbers of the transfers that relays send."""
        return frozenset(self.forwarded.values())

    @cached_property
    def pairs(self) -> Ints:
        """[pair, (number, number)]: a transfer, and one that waits for it."""
        found = [(before, number) for number, each in enumerate(self.needs) for before in each]
        return np.array(found, np.int64).reshape(-1, 2)

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


def _columns(averaging: Averaging) -> tuple[Ints, ...]:
    """[transfer]: whether it is no relay's, total, level, piece, the nodes that send and receive, and how many it waits
    for."""
    schedule, nodes = averaging.schedule, np.array(averaging.nodes, np.int64)
    total, level, piece, sender, receiver, _ = np.array(schedule.transfers, np.int64).reshape(-1, 6).T
    missing = np.array([len(each) for each in schedule.needs], np.int64)
    own = np.array([number not in schedule.forwarding for number in range(len(total))], np.int64)
    return own, total, level, piece, nodes[sender], nodes[receiver], missing


class TransferTimes(NamedTuple):
    """[transfer]: times in nanoseconds."""

    transmit_ns: Ints
    """For which it keeps its link busy."""
    flight_ns: Ints
    """From leaving to arriving; other messages may follow at once."""
    notice_ns: Ints
    """After which the sender knows that the receiver is done, which counts where the receiver's download is shared."""
    upload_ns: Ints
    """For which it keeps the sender's upload busy; 0: it has no limit."""
    download_ns: Ints
    """The same of the receiver's download."""


class FreeLinks(NamedTuple):
    """When all that was sent before is over."""

    link_ns: Ints
    """[from, to]"""
    upload_ns: Ints
    """[node]"""
    download_ns: Ints


def free_links(nodes: int) -> FreeLinks:
    """All of them are free from the beginning."""
    return FreeLinks(np.zeros((nodes, nodes), np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))


@dataclass(frozen=True, eq=False)
class MergedSchedule:
    """The schedules of all stages as arrays for `run_schedule`: their transfers share links, and ranks are over all."""

    number: int
    """Of the stages."""
    stages: Ints
    """[transfer], as are the next five: its stage."""
    numbers: Ints
    """Its number in the stage's schedule."""
    pieces: Ints
    senders: Ints
    """The node that sends, as in the plan, like the next."""
    receivers: Ints
    missing: Ints
    """How many transfers it waits for."""
    first_after: Ints
    """The place in `after` at which those begin that wait for it; one more entry than transfers."""
    after: Ints
    """Transfers that wait for one."""

    @classmethod
    def of(cls, averagings: Sequence[Averaging]) -> MergedSchedule:
        sizes = [len(averaging.schedule.transfers) for averaging in averagings]
        first = np.cumsum([0, *sizes], dtype=np.int64)
        own, total, level, piece, sender, receiver, missing = (
            np.concatenate(column) for column in zip(*(_columns(each) for each in averagings), strict=True)
        )
        of_stage = np.repeat(np.arange(len(averagings)), sizes)
        numbers = np.arange(len(total)) - first[of_stage]
        order = np.lexsort((numbers, of_stage, level, total, own))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        pairs = [each.schedule.pairs + first[stage] for stage, each in enumerate(averagings)]
        needed, needing = rank[np.concatenate(pairs)].reshape(-1, 2).T
        by_needed = np.argsort(needed, kind="stable")
        ends = np.searchsorted(needed[by_needed], np.arange(len(order) + 1))
        return cls(
            number=len(averagings),
            stages=of_stage[order],
            numbers=numbers[order],
            pieces=piece[order],
            senders=sender[order],
            receivers=receiver[order],
            missing=missing[order],
            first_after=ends,
            after=needing[by_needed],
        )

    def run(self, done_ns: Ints, times: TransferTimes, free_ns: FreeLinks, record: Ints = NO_RECORD) -> Ints:
        """[stage]: when its last transfer has arrived; 0 if it has none. See `run_schedule`."""
        ends_ns = np.zeros(self.number, np.int64)
        run_schedule(
            done_ns,
            self.stages,
            self.senders,
            self.receivers,
            self.missing,
            self.first_after,
            self.after,
            *times,
            *free_ns,
            ends_ns,
            record,
        )
        return ends_ns


@kernel
def run_schedule(
    done_ns: Ints,  # [node]: end of its last task
    stages: Ints,  # as in `MergedSchedule`, like the next five
    senders: Ints,
    receivers: Ints,
    missing: Ints,
    first_after: Ints,
    after: Ints,
    transmit_ns: Ints,  # as in `TransferTimes`, like the next four
    flight_ns: Ints,
    notice_ns: Ints,
    upload_ns: Ints,
    download_ns: Ints,
    link_free_ns: Ints,  # in, out: as in `FreeLinks`, like the next two
    upload_free_ns: Ints,
    download_free_ns: Ints,
    ends_ns: Ints,  # in, out: [stage]: when its last transfer has arrived
    record: Ints,  # out: [transfer, (ready, start, sent, arrived)]; no rows: do not record
) -> None:
    """Let all transfers happen, in the order in which they are ready."""
    transfers = len(senders)
    recording = len(record) > 0
    waits = missing.copy()
    ready_ns = np.empty(transfers, np.int64)
    starts_ns = np.empty(transfers, np.int64)
    times, numbers = np.empty(transfers, np.int64), np.empty(transfers, np.int64)
    queued = 0
    for number in range(transfers):
        ready_ns[number] = done_ns[senders[number]]
        if download_ns[number] > 0:
            ready_ns[number] = max(ready_ns[number], done_ns[receivers[number]] + notice_ns[number])
        if waits[number] == 0:
            queued = push(times, numbers, queued, ready_ns[number], number)
    while queued > 0:
        now_ns, number = times[0], numbers[0]
        queued = drop_first(times, numbers, queued)
        if number < transfers:
            sender, receiver = senders[number], receivers[number]
            start_ns = now_ns
            if upload_ns[number] > 0:
                start_ns = max(now_ns, upload_free_ns[sender])
                upload_free_ns[sender] = start_ns + upload_ns[number]
            start_ns = max(start_ns, link_free_ns[sender, receiver])
            starts_ns[number] = start_ns
            link_free_ns[sender, receiver] = start_ns + transmit_ns[number]
            if recording:
                record[number, 0], record[number, 1] = now_ns, start_ns
            if download_ns[number] > 0:  # there messages of several senders meet
                queued = push(times, numbers, queued, start_ns + flight_ns[number], transfers + number)
                continue
            late_ns = 0
        else:
            number -= transfers
            receiver = receivers[number]
            start_ns = max(now_ns, download_free_ns[receiver])
            download_free_ns[receiver] = start_ns + download_ns[number]
            late_ns = start_ns - now_ns
        arrived_ns = starts_ns[number] + transmit_ns[number] + flight_ns[number] + late_ns
        ends_ns[stages[number]] = max(ends_ns[stages[number]], arrived_ns)
        if recording:
            record[number, 2], record[number, 3] = starts_ns[number] + transmit_ns[number], arrived_ns
        for at in range(first_after[number], first_after[number + 1]):
            following = after[at]
            ready_ns[following] = max(ready_ns[following], arrived_ns)
            waits[following] -= 1
            if waits[following] == 0:
                queued = push(times, numbers, queued, ready_ns[following], following)
