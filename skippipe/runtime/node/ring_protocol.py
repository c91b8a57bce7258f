"""A node's part in the collective of its stage: pieces that have come from the others, and what is passed on next."""

from __future__ import annotations

from collections import deque
from typing import Any

from skippipe.collectives import Collective
from skippipe.runtime.node.ops import GradNorm, RingStep
from skippipe.transport.message import Message, RingPiece


class RingProtocol:
    """One attempt at averaging; if a member is lost, there is another attempt with the members that are left."""

    def __init__(self, number: int, stage: int, ring: tuple[int, ...], collective: Collective) -> None:
        self._collective = collective
        self.ring = ring
        self.at = ring.index(number)
        """This node's place in the ring."""
        self.unacknowledged: deque[tuple[int, Message]] = deque(maxlen=len(ring))
        """Receivers and messages that may be lost if a connection breaks. None acknowledges them; but a piece that has
        come around the ring has passed through the hands of the next node, which by then had all that was sent before
        the last m messages. For as long as they are here, no step writes to the memory that they refer to."""
        self._stage = stage
        self._pieces: dict[int, Any] = {}
        self._next = 0
        self._passing = False

    def sender(self, round_: int) -> int:
        """The node whose piece this one takes in."""
        return self.ring[self._collective.sender(self.at, round_, len(self.ring))]

    def receiver(self, round_: int) -> int:
        """The node that this one sends to."""
        return self.ring[self._collective.receiver(self.at, round_, len(self.ring))]

    @property
    def _rounds(self) -> int:
        return self._collective.rounds(len(self.ring)) if self._collective.in_messages else 0

    def begin(self) -> RingStep:
        self._passing = True
        return RingStep(0, self.at, len(self.ring))

    def expects(self, sender: int, piece: RingPiece) -> bool:
        """Does this piece come here, from there?"""
        return piece.stage == self._stage and piece.round < self._rounds and sender == self.sender(piece.round)

    def take(self, round_: int, body: Any) -> bool:
        """A piece that is expected; whether it is the first of its round."""
        if round_ in self._pieces or round_ < self._next - 1:
            return False
        self._pieces[round_] = body
        return True

    def round_done(self, round_: int) -> bool:
        """This node has done its part of a round; whether it has something to send on, as after all but the last."""
        self._passing = False
        self._next = round_ + 1
        return round_ < self._rounds

    def next(self, visits: int) -> RingStep | GradNorm | None:
        """The next operation, if this node has done its part of the round and the neighbour's piece has come."""
        if self._next > self._rounds:
            return GradNorm(visits, alone=False)
        if self._passing or self._next == 0 or self._next - 1 not in self._pieces:
            return None
        self._passing = True
        return RingStep(self._next, self.at, len(self.ring), self._pieces.pop(self._next - 1))
