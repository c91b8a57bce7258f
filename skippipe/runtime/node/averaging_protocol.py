"""A node's part in the averaging schedules: which pieces have come, what can be computed, what goes to whom.

A node computes with the pieces of its own stage. Those that it forwards as a relay, for whichever stage, it passes on
as they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from skippipe.collectives.schedule import Averaging
from skippipe.runtime.node.ops import AdoptPiece, BeginAveraging, ContributePiece, GradNorm
from skippipe.transport.message import GradientPiece, Message

FIRST, LAST = -1, 2**31  # ranks of operations: before all that send something, and after them


class OutgoingPiece(NamedTuple):
    rank: tuple[bool, int, bool, int]
    """What goes first, as in the simulator: what is forwarded, an earlier round, contributions, a smaller level."""
    stage: int
    transfer: int
    receiver: int
    body: Any


class AveragingProtocol:
    """One attempt at averaging; if a node is lost, there is another attempt among the nodes that are left.

    Operations that are possible at the same time run in the order of the transfers that follow from them, as in the
    simulator, so pieces leave over each link in the order of their numbers.
    """

    def __init__(
        self,
        number: int,
        stage: int,
        averagings: Sequence[Averaging],
        *,
        in_messages: bool,
        shared: Collection[int] = (),
    ) -> None:
        """`averagings` are those of all stages. `in_messages`: nodes exchange pieces; if not, a library sums gradients
        when averaging begins. `shared` nodes have a download rate: they get pieces when they are done with their tasks,
        not before, so that activations go first."""
        self.averaging = averagings[stage]
        self.schedule = self.averaging.schedule
        self.unacknowledged: dict[tuple[int, int], tuple[int, Message]] = {}
        """Stage and number of a transfer → receiver and message, of all that was sent and may be lost if a connection
        breaks. None is acknowledged; but a contribution has arrived if the total of its piece has come. For
        as long as they are here, no operation writes to the memory that they refer to."""
        self._number = number
        self._stage = stage
        self.averagings = averagings
        self._alone = len(self.averaging.order) == 1
        self._in_messages = in_messages
        self._up: dict[int, int] = {}
        """Piece → the transfer of this node's contribution; none at the root."""
        self._totals: dict[int, list[int]] = {}
        """Piece → the transfers by which this node passes on a total, in order."""
        self._awaited: dict[int, int] = {}
        """Piece → the number of contributions that come here."""
        here = self.averaging.order.index(number)
        for at, each in enumerate(self.schedule.transfers):
            if each.sender == here and at not in self.schedule.forwarding:
                if each.total:
                    self._totals.setdefault(each.piece, []).append(at)
                else:
                    self._up[each.piece] = at
            elif each.receiver == here and not each.total and at not in self.schedule.forwarded:
                self._awaited[each.piece] = self._awaited.get(each.piece, 0) + 1
        pieces = range(self.schedule.pieces) if in_messages and not self._alone else range(0)
        self._given: dict[int, dict[int, Any]] = {piece: {} for piece in pieces}
        """Piece → contributions that have come, by the place of the node that made them, until this one adds its
        own."""
        self._contributed: set[int] = set()
        self._incomplete = set(pieces)
        """Pieces whose total this node does not have."""
        self._received: set[tuple[int, int]] = set()
        self._possible: list[tuple[int, int, BeginAveraging | ContributePiece | AdoptPiece]] = []
        """A heap of operations, by rank and piece."""
        self._begun = False
        self._outgoing: list[OutgoingPiece] = []
        self._shared = frozenset(shared)

    @property
    def peers(self) -> set[int]:
        """The nodes that this one exchanges pieces with."""
        links = [link for averaging in self.averagings for link in averaging.links if self._number in link]
        return {node for link in links for node in link} - {self._number} if self._in_messages else set()

    def begin(self) -> None:
        """This node has done all its tasks."""
        self._begun = True
        if not self._alone:
            heapq.heappush(self._possible, (FIRST, 0, BeginAveraging(self.schedule)))
        for piece in list(self._given):
            self._contribute_if_possible(piece)

    def expects(self, sender: int, header: GradientPiece) -> bool:
        """Does this piece come here, from there? A total comes only after this node has contributed to it."""
        if not self._in_messages or header.stage >= len(self.averagings):
            return False
        averaging = self.averagings[header.stage]
        if header.transfer >= len(averaging.schedule.transfers):
            return False
        each = averaging.schedule.transfers[header.transfer]
        if averaging.nodes[each.sender] != sender or averaging.nodes[each.receiver] != self._number:
            return False
        return self.is_relay(header) or not each.total or each.piece in self._contributed

    def is_relay(self, header: GradientPiece) -> bool:
        """Whether the receiver of a transfer only passes it on."""
        return header.transfer in self.averagings[header.stage].schedule.forwarded

    def take(self, _sender: int, message: Message, _arrived_ns: int) -> bool:
        """A piece that is expected; whether it is the first time that it comes."""
        header, body = message.header, message.body
        assert isinstance(header, GradientPiece)
        if (header.stage, header.transfer) in self._received:
            return False
        self._received.add((header.stage, header.transfer))
        if self.is_relay(header):
            self._pass_on(header.stage, self.averagings[header.stage].schedule.forwarded[header.transfer], body)
            return True
        each = self.schedule.transfers[header.transfer]
        if each.total:
            self.unacknowledged.pop((self._stage, self._up[each.piece]), None)
            totals = self._totals.get(each.piece)
            op = AdoptPiece(each.piece, body)
            heapq.heappush(self._possible, (totals[0] if totals else LAST, each.piece, op))
        else:
            self._given[each.piece][each.node] = body
            if self._begun:
                self._contribute_if_possible(each.piece)
        return True

    def next(self, stage_microbatches: int) -> BeginAveraging | ContributePiece | AdoptPiece | GradNorm | None:
        """The operation that goes next if none runs: one that is possible; the norm when all totals are there."""
        if self._possible:
            return heapq.heappop(self._possible)[2]
        return None if self._incomplete else GradNorm(stage_microbatches, alone=self._alone)

    def finished(self, op: ContributePiece | AdoptPiece, payload: Any) -> None:
        """An operation is done: what it gave, or took, goes to others."""
        self._contributed.add(op.piece)
        if isinstance(op, ContributePiece) and not op.total:
            numbers = [self._up[op.piece]]
        else:
            self._incomplete.remove(op.piece)
            numbers = self._totals.get(op.piece, [])
        for number in numbers:
            self._pass_on(self._stage, number, payload)
        if self.schedule.rounds > 1 and self._round_begins(op.piece + len(self.schedule.shares)):
            for piece in list(self._given):
                self._contribute_if_possible(piece)

    def _pass_on(self, stage: int, number: int, body: Any) -> None:
        averaging = self.averagings[stage]
        each = averaging.schedule.transfers[number]
        own = number not in averaging.schedule.forwarding
        rank = own, averaging.schedule.round_of(each.piece), each.total, each.level
        self._outgoing.append(OutgoingPiece(rank, stage, number, averaging.nodes[each.receiver], body))

    def take_outgoing(self, done: Collection[int]) -> list[OutgoingPiece]:
        """Remove the pieces that can leave now, and give them: this node is done, and so is the receiver if its
        download is shared; `done` are those that have said so."""
        if not self._begun:
            return []
        waits = self._shared.difference(done)
        found = [each for each in self._outgoing if each.receiver not in waits]
        self._outgoing = [each for each in self._outgoing if each.receiver in waits]
        return sorted(found, key=lambda each: each[:3])

    def _round_begins(self, piece: int) -> bool:
        """Whether this node has all totals of the rounds before that of a piece."""
        earlier = self.schedule.round_of(piece) * len(self.schedule.shares)
        return earlier == 0 or min(self._incomplete, default=earlier) >= earlier

    def _contribute_if_possible(self, piece: int) -> None:
        if len(self._given[piece]) < self._awaited.get(piece, 0) or not self._round_begins(piece):
            return
        given = self._given.pop(piece)
        up = self._up.get(piece)
        in_order = tuple(given[place] for place in sorted(given))  # so that sums do not depend on what came first
        op = ContributePiece(piece, in_order, total=up is None)
        heapq.heappush(self._possible, (self._totals[piece][0] if up is None else up, piece, op))
