"""Which nodes take part, in what state each is, when it was last heard, and which links nodes report to be down.

Only the two ends of a link can tell that it is down, and either may be wrong or lie. So a report is believed, but not
without limit: a node whose reports cost the others work, over links to nodes of which no other node complains, is
itself badly connected, or worse. After a few such reports it is the one that is evicted, and it is banned for a while,
longer each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.relay_pool import RelayInfo


class MemberState(Enum):
    """A node goes from one state to the next; one that moves to another stage begins again at BUILDING."""

    SPARE = "has no stage"
    BUILDING = "builds its stage"
    READY = "waits for the next iteration"
    RECOVERING = "averages and steps with its stage, and fetches its state"
    ACTIVE = "takes microbatches"


@dataclass
class Member:
    """A connected node."""

    state: MemberState
    stage: int
    """The stage that it holds or is about to hold; −1: none."""
    last_seen_ns: int
    activity: str = ""
    """What it was computing, by its last heartbeat."""
    busy_s: float = 0.0
    """Seconds for which it has had work without a break, by its last heartbeat."""
    sources: tuple[int, ...] = ()
    """Nodes that it fetches its state from, or the coordinator; empty: none was found yet."""
    assignment: int = 0
    """Id of its last order to build a stage or to fetch a state; only the answer to this one counts."""
    backup: int = 0
    """Completed iterations of the embedding backup that it stores; 0: it stores none."""


@dataclass
class Membership:
    cluster: Cluster
    members: dict[int, Member] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    """Ids for orders that are answered later: no two of a run are the same."""
    out_only: dict[int, str] = field(default_factory=dict)
    """Members that call others and cannot be called; with the site of each, at which others of that site can call it,
    or empty."""
    relay_only_pairs: set[frozenset[int]] = field(default_factory=set)
    """Other pairs of members of which neither can call the other."""
    relays: dict[str, RelayInfo] = field(default_factory=dict)
    """Relays at which all of these meet."""
    relay_since_ns: int = 0
    """When the last relay came."""
    may_relay: bool = False
    """There are relays that may join, or have joined."""

    @property
    def lacks_relay(self) -> bool:
        return self.may_relay and not self.relays

    def assign(self, node: int) -> int:
        """A new assignment id: answers to earlier orders of this node do not count any more."""
        self.members[node].assignment = next(self.ids)
        return self.members[node].assignment

    def add(self, node: int, state: MemberState, stage: int, now_ns: int) -> None:
        self.members[node] = Member(state, stage, now_ns)

    def remove(self, node: int) -> None:
        del self.members[node]
        self.out_only.pop(node, None)
        self.relay_only_pairs -= {pair for pair in self.relay_only_pairs if node in pair}

    def name(self, node: int) -> str:
        return self.cluster.nodes[node].name

    def __contains__(self, node: int) -> bool:
        return node in self.members

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.members))

    def __getitem__(self, node: int) -> Member:
        return self.members[node]

    def in_state(self, *states: MemberState) -> list[int]:
        return [node for node in self if self.members[node].state in states]

    @property
    def active(self) -> list[int]:
        return self.in_state(MemberState.ACTIVE)

    @property
    def stepping(self) -> list[int]:
        """Nodes that average and step."""
        return self.in_state(MemberState.ACTIVE, MemberState.RECOVERING)

    def rings(self, plan: Plan) -> list[list[int]]:
        """The nodes of each stage that average and step, in the order of the plan's ring."""
        stepping = self.stepping
        rings = [
            [node for node in stage.ring if node in stepping and self[node].stage == index]
            for index, stage in enumerate(plan.stages)
        ]
        for node in stepping:
            if node not in rings[self.members[node].stage]:
                rings[self.members[node].stage].append(node)
        return rings

    def future_rings(self, plan: Plan) -> list[list[int]]:
        """The rings with the nodes that will join them before long."""
        rings = self.rings(plan)
        for node in self.in_state(MemberState.BUILDING, MemberState.READY):
            rings[self.members[node].stage].append(node)
        return rings

    def holders(self, plan: Plan) -> dict[int, int]:
        """Stage → a node that has its state; empty if there is a stage that no node holds."""
        active = self.active
        found = {
            index: next((node for node in (*stage.ring, *active) if node in active and self[node].stage == index), -1)
            for index, stage in enumerate(plan.stages)
        }
        return {} if -1 in found.values() else found

    def lost_stages(self, stages: int) -> list[int]:
        """Stages whose state no node has."""
        held = {self[node].stage for node in self.active}
        return [stage for stage in range(stages) if stage not in held]

    def silent(self, since_ns: int) -> list[int]:
        """Nodes that were last heard before a moment."""
        return [node for node in self if self[node].last_seen_ns < since_ns]

    def seen(self, node: int, now_ns: int) -> None:
        """A message of a node has arrived."""
        if node in self.members:
            self.members[node].last_seen_ns = now_ns


MAX_COSTLY_REPORTS = 2  # of one node; with the next it is evicted
REPORT_LIFETIME_NS = 600 * 10**9
FIRST_BAN_NS = 60 * 10**9
LONGEST_BAN_NS = 480 * 10**9  # less than a run waits for nodes to join


class LinkReports:
    """Which nodes report links to which others to be down, and what believing them has cost."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], int] = {}
        """Reporter and unreachable node → time of the last report."""
        self._costly: dict[tuple[int, int], int] = {}
        """Reporter and unreachable node → when a report last cost the others work."""
        self._bans: dict[int, tuple[int, int]] = {}
        """Node → the end of its ban, and the length of it."""

    def add(self, reporter: int, peer: int, now_ns: int) -> None:
        self._reported[reporter, peer] = now_ns

    def is_corroborated(self, reporter: int, peer: int, now_ns: int) -> bool:
        """Does another node report the same peer?"""
        return any(by != reporter for by, of in self._recent(self._reported, now_ns) if of == peer)

    def add_costly(self, reporter: int, peer: int, now_ns: int) -> list[int]:
        """The others lose work by this report: all peers that the reporter, and no other node, has reported at such a
        cost."""
        self._costly[reporter, peer] = now_ns
        reported = [of for by, of in self._recent(self._costly, now_ns) if by == reporter]
        return sorted(each for each in reported if not self.is_corroborated(reporter, each, now_ns))

    def ban(self, node: int, now_ns: int) -> int:
        """Ban a node for a while and forget its reports; gives the nanoseconds."""
        _, span_ns = self._bans.get(node, (0, FIRST_BAN_NS // 2))
        span_ns = min(2 * span_ns, LONGEST_BAN_NS)
        self._bans[node] = now_ns + span_ns, span_ns
        for reports in (self._reported, self._costly):
            for pair in [pair for pair in reports if pair[0] == node]:
                del reports[pair]
        return span_ns

    def is_banned(self, node: int, now_ns: int) -> bool:
        return self._bans.get(node, (0, 0))[0] > now_ns

    @staticmethod
    def _recent(reports: dict[tuple[int, int], int], now_ns: int) -> Iterator[tuple[int, int]]:
        return (pair for pair, at_ns in reports.items() if at_ns + REPORT_LIFETIME_NS > now_ns)
