"""A node's part in its stage's averaging schedule: which pieces have come, what can be computed, what goes to whom."""

from __future__ import annotations

import heapq
from typing import Any

from skippipe.collectives.schedule import Averaging
from skippipe.runtime.node.ops import AdoptPiece, BeginAveraging, ContributePiece, GradNorm
from skippipe.transport.message import GradientPiece, Message

FIRST, LAST = -1, 2**31  # ranks of operations: before all that send something, and after them


class AveragingProtocol:
    """One attempt at averaging; if a node is lost, there is another attempt among the nodes that are left.

    Operations that are possible at the same time run in the order of the transfers that follow from them, as in the
    simulator, so pieces leave over each link in the order of their numbers.
    """

    def __init__(self, number: int, stage: int, averaging: Averaging, *, in_messages: bool) -> None:
        """`in_messages`: nodes exchange pieces; if not, a library sums gradients when averaging begins."""
        self.averaging = averaging
        self.schedule = averaging.schedule
        self.unacknowledged: dict[int, tuple[int, Message]] = {}
        """By the number of the transfer, receiver and message of all that was sent and may be lost if a connection
        breaks. None is acknowledged; but a contribution has arrived if the total of its piece has come. For as long as
        they are here, no operation writes to the memory that they refer to."""
        self._stage = stage
        self._place = averaging.order.index(number)
        self._alone = len(averaging.order) == 1
        self._in_messages = in_messages and not self._alone
        pieces = range(len(self.schedule.shares)) if self._in_messages else range(0)
        self._given: dict[int, dict[int, Any]] = {piece: {} for piece in pieces}
        """Piece → contributions that have come, by the place of their sender, until this node adds its own."""
        self._contributed: set[int] = set()
        self._incomplete = set(pieces)
        """Pieces whose total this node does not have."""
        self._received: set[int] = set()
        self._possible: list[tuple[int, int, BeginAveraging | ContributePiece | AdoptPiece]] = []
        """A heap of operations, by rank and piece."""
        self._begun = False

    @property
    def peers(self) -> set[int]:
        """The nodes that this one exchanges pieces with."""
        here = self.averaging.order[self._place]
        return {node for link in self.averaging.links if here in link for node in link} - {here}

    def begin(self) -> None:
        """This node has done all its tasks."""
        self._begun = True
        if not self._alone:
            heapq.heappush(self._possible, (FIRST, 0, BeginAveraging(self.schedule)))
        for piece in list(self._given):
            self._contribute_if_possible(piece)

    def expects(self, sender: int, header: GradientPiece) -> bool:
        """Does this piece come here, from there? A total comes only after this node has contributed to it."""
        transfers = self.schedule.transfers
        if not self._in_messages or header.stage != self._stage or header.transfer >= len(transfers):
            return False
        each = transfers[header.transfer]
        here = self.averaging.order[each.sender] == sender and each.receiver == self._place
        return here and (not each.total or each.piece in self._contributed)

    def take(self, transfer: int, body: Any) -> bool:
        """A piece that is expected; whether it is the first time that it comes."""
        if transfer in self._received:
            return False
        self._received.add(transfer)
        each = self.schedule.transfers[transfer]
        if each.total:
            self.unacknowledged.pop(self._upwards(each.piece), None)
            totals = self._totals(each.piece)
            op = AdoptPiece(each.piece, body)
            heapq.heappush(self._possible, (totals[0] if totals else LAST, each.piece, op))
        else:
            self._given[each.piece][each.sender] = body
            if self._begun:
                self._contribute_if_possible(each.piece)
        return True

    def next(self, visits: int) -> BeginAveraging | ContributePiece | AdoptPiece | GradNorm | None:
        """The operation that goes next if none runs: one that is possible; the norm when all totals are there."""
        if self._possible:
            return heapq.heappop(self._possible)[2]
        return None if self._incomplete else GradNorm(visits, alone=self._alone)

    def finished(self, op: ContributePiece | AdoptPiece) -> list[tuple[int, int]]:
        """An operation is done: the transfers that follow, each with the node that it goes to."""
        self._contributed.add(op.piece)
        if isinstance(op, ContributePiece) and not op.total:
            numbers = [self._upwards(op.piece)]
        else:
            self._incomplete.remove(op.piece)
            numbers = self._totals(op.piece)
        return [(number, self.averaging.order[self.schedule.transfers[number].receiver]) for number in numbers]

    def _contribute_if_possible(self, piece: int) -> None:
        if len(self._given[piece]) < self.schedule.contributions[piece, self._place]:
            return
        given = self._given.pop(piece)
        up = self._upwards(piece)
        in_order = tuple(given[place] for place in sorted(given))  # so that sums do not depend on what came first
        op = ContributePiece(piece, in_order, total=up < 0)
        heapq.heappush(self._possible, (up if up >= 0 else self._totals(piece)[0], piece, op))

    def _upwards(self, piece: int) -> int:
        """The transfer of this node's contribution; −1 at the root."""
        return int(self.schedule.up[piece, self._place])

    def _totals(self, piece: int) -> list[int]:
        """The transfers by which this node passes on a total, in order: numbers in a row."""
        found, number = [], int(self.schedule.first_down[piece, self._place])
        while number >= 0:
            found.append(number)
            number = int(self.schedule.next_down[number])
        return found
