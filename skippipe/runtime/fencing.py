"""Fencing: stale control messages are recognised by the incarnation of the node, the coordinator's term and a number.

A message can arrive late or twice: from a connection that was replaced, from a process that has ended since, from a
coordinator that another has replaced. So every control message between a node and its coordinator has a stamp, and each
side checks it in one place before the state machine sees the message. What a node accepts is from the newest
coordinator it knows of, meant for this incarnation of the node, in the order in which it was sent, and once. What a
coordinator accepts is from the incarnation that joined last, likewise in order and once.

A message that was true when it was sent, and is not any more when it arrives, is for the state machines to recognise:
by epochs, iterations and the ids of what it answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from skippipe.transport.message import LARGEST_COUNT, Message, Stamp

RETIRED = 64  # former incarnations of a node that are known, so that a late hello of one is not taken for a new one
IDS_PER_TERM = 2**16  # epochs and other ids that a coordinator has for itself before it meets its successor's


NO_STAMP = Stamp(0, 0, 0)
"""Between nodes: their messages to each other have the id of what they are for."""


def first_id(term: int) -> int:
    """The first id of a coordinator's term, so that no id means two things, whichever its predecessors used."""
    return term * IDS_PER_TERM % (LARGEST_COUNT + 1)


class Incarnation:
    """A node's side: stamps what it sends, and checks what it receives."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._newest = (0, 0)
        """Term and number of the newest message from a coordinator."""
        self._sent = 0

    def stamp(self) -> Stamp:
        self._sent += 1
        return Stamp(self.number, self._newest[0], self._sent)

    def accepts(self, stamp: Stamp) -> bool:
        """Is a message meant for this incarnation, and newer than all that have arrived?"""
        if stamp.incarnation != self.number or (stamp.term, stamp.number) <= self._newest:
            return False
        self._newest = stamp.term, stamp.number
        return True


def version_of(message: Message) -> tuple[int, int]:
    """The iteration and the epoch of a message; state has no epoch, a copy of stage 0's ends neither."""
    return getattr(message.header, "iteration", 0), getattr(message.header, "epoch", 0)


class EarlyMessages:
    """Messages of nodes that are ahead, kept until this node gets there."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Message, int]]] = {}
        """Sender → its messages, and when each has arrived."""

    def keep(self, sender: int, message: Message, now_ns: int, most: int) -> bool:
        """Keep a message; not if there are so many of its sender already."""
        early = self._kept.setdefault(sender, [])
        if len(early) < most:
            early.append((message, now_ns))
            return True
        return False

    def due(self, version: tuple[int, int]) -> list[tuple[int, Message, int]]:
        """Take those up to a version out: sender, message and when it has arrived."""
        kept, self._kept = self._kept, {}
        found = []
        for sender, messages in kept.items():
            for message, arrived_ns in messages:
                if version_of(message) <= version:
                    found.append((sender, message, arrived_ns))
                else:
                    self._kept.setdefault(sender, []).append((message, arrived_ns))
        return found


class Fence:
    """The coordinator's side, for all nodes."""

    def __init__(self, term: int = 0) -> None:
        self.term = term
        self._incarnations: dict[Hashable, int] = {}
        self._newest: dict[Hashable, int] = {}
        self._retired: dict[Hashable, deque[int]] = {}
        self._joined: set[Hashable] = set()
        self._sent = 0

    def stamp(self, node: Hashable, incarnation: int | None = None) -> Stamp:
        """The stamp of a message to a node: to the incarnation that is known, or to another."""
        self._sent += 1
        return Stamp(self._incarnations.get(node, 0) if incarnation is None else incarnation, self.term, self._sent)

    def accepts(self, node: Hashable, stamp: Stamp, *, hello: bool) -> bool:
        """Is a message from the current incarnation, and newer than all that have arrived? A hello makes its
        incarnation the current one."""
        known = self._incarnations.get(node)
        if stamp.incarnation == known and stamp.number <= self._newest[node]:
            return False
        if hello:
            retired = self._retired.setdefault(node, deque(maxlen=RETIRED))
            if stamp.incarnation in retired:
                return False
            if known not in (None, stamp.incarnation):
                retired.append(known)
            if stamp.term > self.term:  # it knows another coordinator, which is no more
                self.term = min(stamp.term + 1, LARGEST_COUNT)
        elif node in self._joined and stamp.incarnation != known:
            return False
        self._incarnations[node], self._newest[node] = stamp.incarnation, stamp.number
        return True

    def is_other_incarnation(self, node: Hashable, stamp: Stamp) -> bool:
        """Is a message from another incarnation than the one that joined? If that one still runs, it has to rejoin."""
        return node in self._joined and stamp.incarnation != self._incarnations.get(node)

    def joined(self, node: Hashable) -> None:
        """From now on only the incarnation that sent the hello is accepted."""
        self._joined.add(node)

    def left(self, node: Hashable) -> None:
        """The node is lost: any incarnation of it is accepted, and told to join again."""
        self._joined.discard(node)


def stamp_of(message: Message) -> Stamp:
    return message.header if isinstance(message.header, Stamp) else NO_STAMP
