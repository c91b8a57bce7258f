"""What makes a control message of the past harmless: who sent it, in which life, and which of its words it was.

A message can come late or twice: from a connection that was replaced, from a process that has ended since, from a
coordinator whose place another has taken. So every word between a node and its coordinator has a stamp, and each side
has one place that looks at it before the state machine hears the word. What a node hears is from the newest
coordinator it knows of, meant for this life of the node, in the order in which it was said, and once. What a
coordinator hears is from the life that said hello last, likewise in order and once.

What was still true when it was said, and is not any more when it comes, the state machines have to tell themselves:
by epochs, iterations and the numbers of what is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from skippipe.transport.message import LARGEST_COUNT, Message, Stamp

RETIRED = 64  # former lives of a node that are remembered, so that a late hello of one is not taken for a new one
NUMBERS_A_TERM = 2**16  # epochs and other numbers that a coordinator has for itself before it meets its successor's


NO_STAMP = Stamp(0, 0, 0)
"""Between nodes: what they say to each other has the number of what it is for."""


def first_number(term: int) -> int:
    """From which a coordinator numbers, so that no number means two things, whoever of its predecessors used some."""
    return term * NUMBERS_A_TERM % (LARGEST_COUNT + 1)


class Life:
    """A node's side: what it says, and what it listens to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._heard = (0, 0)
        self._said = 0

    def stamp(self) -> Stamp:
        self._said += 1
        return Stamp(self.number, self._heard[0], self._said)

    def takes(self, stamp: Stamp) -> bool:
        """Is it meant for this life, and newer than all that has come?"""
        if stamp.life != self.number or (stamp.term, stamp.number) <= self._heard:
            return False
        self._heard = stamp.term, stamp.number
        return True


class Fence:
    """The coordinator's side, for all nodes."""

    def __init__(self, term: int = 0) -> None:
        self.term = term
        self._lives: dict[Hashable, int] = {}
        self._heard: dict[Hashable, int] = {}
        self._retired: dict[Hashable, deque[int]] = {}
        self._there: set[Hashable] = set()
        self._said = 0

    def stamp(self, node: Hashable, life: int | None = None) -> Stamp:
        """For a word to a node; to the life that is known, or to another."""
        self._said += 1
        return Stamp(self._lives.get(node, 0) if life is None else life, self.term, self._said)

    def takes(self, node: Hashable, stamp: Stamp, *, hello: bool) -> bool:
        """Is it of the life that counts, and newer than all that has come? With a hello, a new life begins to count."""
        known = self._lives.get(node)
        if stamp.life == known and stamp.number <= self._heard[node]:
            return False
        if hello:
            retired = self._retired.setdefault(node, deque(maxlen=RETIRED))
            if stamp.life in retired:
                return False
            if known not in (None, stamp.life):
                retired.append(known)
            if stamp.term > self.term:  # it knows another of us, who is no more
                self.term = min(stamp.term + 1, LARGEST_COUNT)
        elif node in self._there and stamp.life != known:
            return False
        self._lives[node], self._heard[node] = stamp.life, stamp.number
        return True

    def is_ghost(self, node: Hashable, stamp: Stamp) -> bool:
        """Does one speak who does not count? It is told to say hello; if it is dead, nobody hears that."""
        return node in self._there and stamp.life != self._lives.get(node)

    def met(self, node: Hashable) -> None:
        """From now on only the life that said hello is heard."""
        self._there.add(node)

    def parted(self, node: Hashable) -> None:
        """It counts as gone: whoever speaks in its name is heard, and told to say hello."""
        self._there.discard(node)


def stamped(body: dict[str, Any], stamp: Stamp) -> Message:
    return Message(stamp, body)


def stamp_of(message: Message) -> Stamp:
    return message.header if isinstance(message.header, Stamp) else NO_STAMP
