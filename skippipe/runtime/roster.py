"""Who takes part, in what standing, and when each was last heard of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from skippipe.cluster import Cluster
from skippipe.plan import Plan


class Standing(Enum):
    """A node rises from one to the next; one that moves to another stage begins again."""

    SPARE = "has no stage"
    BUILDING = "builds its stage"
    READY = "waits for the next iteration"
    LEARNING = "averages and steps with its stage, and fetches its state"
    ABLE = "takes microbatches"


@dataclass
class Peer:
    standing: Standing
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
class Roster:
    cluster: Cluster
    peers: dict[int, Peer] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """For what is answered later: no two of a run are the same."""

    def assign(self, node: int) -> int:
        """A node is told to build or to learn: answers to what it was told before do not count any more."""
        self.peers[node].assignment = next(self.numbers)
        return self.peers[node].assignment

    def add(self, node: int, standing: Standing, stage: int, now_ns: int) -> None:
        self.peers[node] = Peer(standing, stage, now_ns)

    def remove(self, node: int) -> None:
        del self.peers[node]

    def name(self, node: int) -> str:
        return self.cluster.nodes[node].name

    def __contains__(self, node: int) -> bool:
        return node in self.peers

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.peers))

    def __getitem__(self, node: int) -> Peer:
        return self.peers[node]

    def of(self, *standings: Standing) -> list[int]:
        return [node for node in self if self.peers[node].standing in standings]

    @property
    def able(self) -> list[int]:
        return self.of(Standing.ABLE)

    @property
    def working(self) -> list[int]:
        """Those who average and step."""
        return self.of(Standing.ABLE, Standing.LEARNING)

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
        for node in self.of(Standing.BUILDING, Standing.READY):
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
