"""Who takes part, in what standing, and when each was last heard of.

Who says that it cannot reach whom, and what that costs whoever says it.

That a link is down only its two ends can tell, and either may be wrong or lie. So a word about a link is believed, but
not for ever: whoever has work begun again over links to nodes that nobody else complains of is itself badly connected,
or worse. After a few such complaints it is the one that leaves, and it takes part again only after a while, which is
longer each time.

"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from skippipe.cluster import Cluster
from skippipe.plan import Plan


class MemberState(Enum):
    """A node rises from one to the next; one that moves to another stage begins again."""

    SPARE = "has no stage"
    BUILDING = "builds its stage"
    READY = "waits for the next iteration"
    LEARNING = "averages and steps with its stage, and fetches its state"
    ABLE = "takes microbatches"


@dataclass
class Member:
    standing: MemberState
    stage: int
    """That it holds or is about to; −1: none."""
    heard_ns: int
    doing: str = ""
    busy_s: float = 0.0
    """For how long it has had work all the time, as it said last."""
    sources: tuple[int, ...] = ()
    """The nodes that it learns from, or the coordinator; none: nobody yet."""
    assignment: int = 0
    """The number of what it was told last: to build its stage, or where to learn its state."""
    backup: int = 0
    """After how many iterations the copy of stage 0's ends was made that it keeps; 0: it keeps none."""


@dataclass
class Membership:
    cluster: Cluster
    peers: dict[int, Member] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """For what is answered later: no two of a run are the same."""

    def assign(self, node: int) -> int:
        """A node is told to build or to learn: answers to what it was told before do not count any more."""
        self.peers[node].assignment = next(self.numbers)
        return self.peers[node].assignment

    def add(self, node: int, standing: MemberState, stage: int, now_ns: int) -> None:
        self.peers[node] = Member(standing, stage, now_ns)

    def remove(self, node: int) -> None:
        del self.peers[node]

    def name(self, node: int) -> str:
        return self.cluster.nodes[node].name

    def __contains__(self, node: int) -> bool:
        return node in self.peers

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.peers))

    def __getitem__(self, node: int) -> Member:
        return self.peers[node]

    def of(self, *standings: MemberState) -> list[int]:
        return [node for node in self if self.peers[node].standing in standings]

    @property
    def able(self) -> list[int]:
        return self.of(MemberState.ABLE)

    @property
    def working(self) -> list[int]:
        """Those who average and step."""
        return self.of(MemberState.ABLE, MemberState.LEARNING)

    def members(self, plan: Plan) -> list[list[int]]:
        """Of each stage: those who average and step, in the order of the ring they are in."""
        working = self.working
        rings = [
            [node for node in stage.ring if node in working and self[node].stage == index]
            for index, stage in enumerate(plan.stages)
        ]
        for node in working:
            if node not in rings[self.peers[node].stage]:
                rings[self.peers[node].stage].append(node)
        return rings

    def expected(self, plan: Plan) -> list[list[int]]:
        """The same, with those who will before long."""
        rings = self.members(plan)
        for node in self.of(MemberState.BUILDING, MemberState.READY):
            rings[self.peers[node].stage].append(node)
        return rings

    def holders(self, plan: Plan) -> dict[int, int]:
        """Of each stage a node that has its state; empty if there is a stage that nobody has."""
        able = self.able
        found = {
            index: next((node for node in (*stage.ring, *able) if node in able and self[node].stage == index), -1)
            for index, stage in enumerate(plan.stages)
        }
        return {} if -1 in found.values() else found

    def empty(self, stages: int) -> list[int]:
        """Stages that nobody has the state of."""
        held = {self[node].stage for node in self.able}
        return [stage for stage in range(stages) if stage not in held]

    def silent(self, since_ns: int) -> list[int]:
        """Not heard of since then."""
        return [node for node in self if self[node].heard_ns < since_ns]

    def heard(self, node: int, now_ns: int) -> None:
        if node in self.peers:
            self.peers[node].heard_ns = now_ns


MOST_BELIEVED = 2  # complaints of one node that cost the others work; with the next it leaves
REMEMBERED_NS = 600 * 10**9  # how long a complaint counts
FIRST_BAR_NS = 60 * 10**9  # that a node is left out for
LONGEST_BAR_NS = 480 * 10**9  # less than a run waits for nodes to join


class LinkReports:
    def __init__(self) -> None:
        self._said: dict[tuple[int, int], int] = {}
        """Who complains of whom → when it last did."""
        self._cost: dict[tuple[int, int], int] = {}
        """The same → when that last cost the others work."""
        self._bars: dict[int, tuple[int, int]] = {}
        """Node → until when it is left out, and for how long it was."""

    def hear(self, accuser: int, accused: int, now_ns: int) -> None:
        self._said[accuser, accused] = now_ns

    def is_shared(self, accuser: int, accused: int, now_ns: int) -> bool:
        """Does anybody else complain of that node?"""
        return any(other != accuser for other, whom in self._recent(self._said, now_ns) if whom == accused)

    def charge(self, accuser: int, accused: int, now_ns: int) -> list[int]:
        """The others lose work if this is believed: of whom the accuser has complained at that price, and nobody
        else."""
        self._cost[accuser, accused] = now_ns
        charged = [whom for who, whom in self._recent(self._cost, now_ns) if who == accuser]
        return sorted(whom for whom in charged if not self.is_shared(accuser, whom, now_ns))

    def bar(self, node: int, now_ns: int) -> int:
        """Leave a node out for a while, and forget what it said; for how many nanoseconds."""
        _, span_ns = self._bars.get(node, (0, FIRST_BAR_NS // 2))
        span_ns = min(2 * span_ns, LONGEST_BAR_NS)
        self._bars[node] = now_ns + span_ns, span_ns
        for book in (self._said, self._cost):
            for pair in [pair for pair in book if pair[0] == node]:
                del book[pair]
        return span_ns

    def is_barred(self, node: int, now_ns: int) -> bool:
        return self._bars.get(node, (0, 0))[0] > now_ns

    @staticmethod
    def _recent(book: dict[tuple[int, int], int], now_ns: int) -> Iterator[tuple[int, int]]:
        return (pair for pair, at_ns in book.items() if at_ns + REMEMBERED_NS > now_ns)
