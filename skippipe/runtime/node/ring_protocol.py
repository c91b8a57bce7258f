"""A node's part in the collective of its stage: what has come from the others, and what is passed on next."""

from __future__ import annotations

from typing import Any

from skippipe.collectives import Collective
from skippipe.runtime.node.ops import GradNorm, RingStep
from skippipe.transport.message import Message, MessageKind


class RingProtocol:
    """Of one attempt; if a member is lost, there is another with those who are left."""

    def __init__(self, number: int, stage: int, ring: tuple[int, ...], collective: Collective) -> None:
        self._collective = collective
        self.ring = ring
        self.last_sent: Message | None = None
        self._stage = stage
        self._at = ring.index(number)
        self._chunks: dict[int, Any] = {}
        self._next = 0
        self._passing = False

    def sender(self, round_: int) -> int:
        """The node whose message this one takes in."""
        return self.ring[self._collective.sender(self._at, round_, len(self.ring))]

    def receiver(self, round_: int) -> int:
        """The node that this one sends to."""
        return self.ring[self._collective.receiver(self._at, round_, len(self.ring))]

    @property
    def at(self) -> int:
        return self._at

    @property
    def count(self) -> int:
        return self._collective.rounds(len(self.ring)) if self._collective.in_messages else 0

    def begin(self) -> RingStep:
        self._passing = True
        return RingStep(0, self._at, len(self.ring))

    def foresees(self, sender: int, message: Message) -> bool:
        return (
            0 <= message.step < self.count
            and sender == self.sender(message.step)
            and (message.lane, message.microbatch) == (self._stage, 0)
        )

    def take(self, message: Message) -> bool:
        """A chunk that is foreseen; whether it is the first of its round."""
        if message.step in self._chunks or message.step < self._next - 1:
            return False
        self._chunks[message.step] = message.body
        return True

    def message(self, iteration: int, round_: int, payload: Any) -> Message | None:
        """What is to be sent on after a round; None after the last."""
        self._passing = False
        self._next = round_ + 1
        return None if round_ == self.count else Message(MessageKind.CHUNK, iteration, self._stage, 0, round_, payload)

    def next(self, visits: int) -> RingStep | GradNorm | None:
        """What to do next, if this node has done its part of the round and the neighbour's has come."""
        if self._next > self.count:
            return GradNorm(visits, alone=False)
        if self._passing or self._next == 0 or self._next - 1 not in self._chunks:
            return None
        self._passing = True
        return RingStep(self._next, self._at, len(self.ring), self._chunks.pop(self._next - 1))
