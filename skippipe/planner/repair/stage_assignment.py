"""Stage assignment when nodes come and go: one decision for spares and for nodes that might change stages.

A reassignment gives one node another stage: a spare, which has none, or a node of a stage that can do without it. What
decides is the iteration of a real plan before and after it, averaging included, made by the same repair and the same
simulator as the plan in use, in a fixed number of changes. Nodes that still build or fetch their state count as if they
could work already, so the answer does not change while they get there.

Which reassignments are worth such a plan is estimated from loads: the time in which the nodes of a stage together get
through an iteration's microbatches. Stage 0 sees all of them, every other stage that has nodes an even share of the
visits (CC3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from skippipe.plan import Plan
from skippipe.planner.repair.repair import repaired, task_ns
from skippipe.skip_schedule import PathLength

SPARE_GAIN = 0.02  # by which an iteration must become shorter, or a spare stays one, where two hold the stage already
MOVE_GAIN = 0.1  # by which it must, or no node moves: one that does is idle until it has fetched its state
CHANGES = 3_072  # of the search for each plan that is compared, with USUAL_NODES or fewer; fewer with more nodes
USUAL_NODES = 20
PLANNED = 3  # candidates that a plan is made for, of those with the best loads
ESTIMATED = 12  # candidates whose averaging is looked at, of those with the best loads

Members = Sequence[Collection[int]]


@dataclass(frozen=True)
class Reassignment:
    """A node that gets a stage, and the iteration without and with that; infinite: there is no plan."""

    node: int
    stage: int
    leaves: int
    """The stage that the node holds now; −1: it is a spare."""
    before_s: float
    after_s: float
    works: bool
    """Lanes of the new plan use the node."""
    seconds: bool = False
    """Without it only one node holds the stage, and the state of the stage would be lost with that node."""

    @property
    def gain(self) -> float:
        """The share of an iteration that is saved; less than 0: it takes longer."""
        if math.isinf(self.before_s):
            return 0.0 if math.isinf(self.after_s) else 1.0
        return 1 - self.after_s / self.before_s

    @property
    def helps(self) -> bool:
        if self.leaves >= 0:
            return self.works and self.gain >= MOVE_GAIN
        return self.works and self.gain >= (0.0 if self.seconds else SPARE_GAIN)


@dataclass
class StageAssignment:
    """The nodes that hold each stage or will before long, and decisions on changing that."""

    plan: Plan
    """The plan that repairs begin with, with current figures."""
    visited: PathLength
    """Stages on a path."""
    members: list[set[int]]
    able: Collection[int]
    """Nodes that have the state of their stage."""
    movable: Collection[int]
    """Nodes that can be given another stage."""
    are_cut: Callable[[int, int], bool] = lambda a, b: False
    """Whether two nodes cannot reach each other."""
    _plans: dict[tuple[frozenset[int], ...], Plan | None] = field(init=False, default_factory=dict)
    _averaging_ns: dict[tuple[int, frozenset[int]], int] = field(init=False, default_factory=dict)

    # The decision

    def filling(self, spares: Collection[int], *, last: bool = True) -> Reassignment | None:
        """A node for a stage without any: the spare or the node from elsewhere with the shortest iteration.

        No stage gives its last able node, except, with `last`, to stage 0, without which nothing runs.
        """
        for stage in (stage for stage, nodes in enumerate(self.members) if not nodes):
            ranked = sorted(self._offers(stage, spares, last=last and stage == 0))
            found = [self._planned(node, stage) for *_, node in ranked[:PLANNED]]
            if found:
                return min(found, key=lambda each: each.after_s * (1 if each.leaves < 0 else 1 + MOVE_GAIN))
        return None

    def using(self, spares: Collection[int]) -> Reassignment | None:
        """The spare and the stage where it helps most, whether or not it does; None: no spare can hold any stage."""
        pairs = [(node, stage) for node in sorted(spares) for stage in self.open_to(node)]
        if math.isfinite(self._promise_s(self.members)):
            pairs = self._likeliest(pairs)
        found = [self._planned(node, stage) for node, stage in pairs]
        return max(found, key=lambda each: (each.helps, each.gain), default=None)

    def moving(self, iterations: int) -> Reassignment | None:
        """A node that should hold another stage for so many iterations; None: all should stay.

        No stage gives its last able node. What the node saves must be more than the time to fetch its state.
        """
        found = []
        for node, stage in self._likeliest(self._moves()):
            move = self._planned(node, stage)
            if move.helps and (move.before_s - move.after_s) * iterations > self._fetching_s(node, stage):
                found.append(move)
        return max(found, key=lambda move: move.gain, default=None)

    def open_to(self, node: int) -> list[int]:
        """Stages that a node could hold."""
        return [stage for stage in range(len(self.members)) if self._could_hold(node, stage)]

    def carry_out(self, reassignment: Reassignment) -> None:
        """Apply a reassignment: the node has yet to build its stage."""
        node = reassignment.node
        self.members = _moved(self.members, node, reassignment.stage)
        self.able, self.movable = set(self.able) - {node}, set(self.movable) - {node}

    # Real plans

    def _planned(self, node: int, stage: int) -> Reassignment:
        leaves = next((at for at, nodes in enumerate(self.members) if node in nodes), -1)
        after = _moved(self.members, node, stage)
        plan = self._plan_for(after)
        works = plan is not None and any(node in lane.path for lane in plan.lanes)
        seconds = len(self.members[stage]) == 1
        return Reassignment(node, stage, leaves, self._promise_s(self.members), self._promise_s(after), works, seconds)

    def _promise_s(self, members: Members) -> float:
        plan = self._plan_for(members)
        return plan.expected.iteration_s if plan is not None and plan.expected is not None else math.inf

    def _plan_for(self, members: Members) -> Plan | None:
        which = tuple(frozenset(nodes) for nodes in members)
        if which not in self._plans:
            all_nodes = frozenset().union(*which)
            changes = CHANGES * USUAL_NODES // max(USUAL_NODES, len(all_nodes))
            self._plans[which] = repaired(
                self.plan, which, all_nodes, budget_s=math.inf, changes=changes, visited=self.visited
            )
        return self._plans[which]

    def _fetching_s(self, node: int, stage: int) -> float:
        """Seconds to fetch the state of the stage from the nearest node that has it."""
        cluster, work = self.plan.cluster, self.plan.workload
        sent_bytes = work.state_bytes(stage, self.plan.layers[stage])
        links = [(other, node) for other in self.members[stage] if other in self.able]
        return min(
            (
                float(cluster.latency_s[link]) + sent_bytes / float(cluster.bandwidth_bytes_per_s[link])
                for link in links
                if cluster.bandwidth_bytes_per_s[link] > 0
            ),
            default=0.0,
        )

    # Estimates

    def _could_hold(self, node: int, stage: int) -> bool:
        """Whether the node has the memory, and reaches all nodes of the stage."""
        reaches = not any(self.are_cut(node, other) for other in self.members[stage] if other != node)
        return bool(self.plan.costs.slots[stage, node] > 0) and reaches

    def _moves(self) -> list[tuple[int, int]]:
        """Nodes and other stages for which, by the estimate, the longest time of any stage falls clearly.

        A stage is too long by its load, or by its averaging: a ring is as slow as its slowest link, and when a node is
        lost the others may be left with a bad one.
        """
        longest_ns = (1 - MOVE_GAIN) * self._longest_ns(self.members)
        pairs = [
            (node, stage)
            for leaves, nodes in enumerate(self.members)
            for node in sorted(nodes)
            if node in self.movable and self._able_beside(leaves, node)
            for stage, others in enumerate(self.members)
            if stage != leaves and others and self._could_hold(node, stage)
        ]
        spans = self._spans(self.members)
        worst = max(range(len(spans)), key=lambda stage: spans[stage])
        relieving = [(node, stage) for node, stage in pairs if node in self.members[worst]]
        helping = [(node, stage) for node, stage in pairs if stage == worst]
        return [
            (node, stage)
            for node, stage in (*self._by_load(relieving), *self._by_load(helping))
            if self._longest_ns(_moved(self.members, node, stage)) <= longest_ns
        ]

    def _likeliest(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The few pairs that a plan is made for: of each node the best stage, and then other stages."""
        spans = {pair: self._longest_ns(_moved(self.members, *pair)) for pair in self._by_load(pairs)}
        ranked = sorted(spans, key=lambda pair: spans[pair])
        first = dict(reversed(ranked))
        return sorted(ranked, key=lambda pair: first[pair[0]] != pair[1])[:PLANNED]

    def _by_load(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The few pairs after which the longest stages are shortest, averaging apart."""

        def longest(pair: tuple[int, int]) -> list[float]:
            return sorted(self._loads(_moved(self.members, *pair)), reverse=True)

        return sorted(pairs, key=longest)[:ESTIMATED]

    def _offers(self, stage: int, spares: Collection[int], *, last: bool) -> Iterator[tuple[bool, float, float, int]]:
        """Nodes for a stage without any, as sort keys: whether it is the last of its stage, the time that stage then
        takes, the load.

        With `last`, a stage other than 0 may give its last able node if it is not the last of all of them.
        """
        beyond_0 = {node for nodes in self.members[1:] for node in nodes if node in self.able}
        for node in sorted(spares):
            if self.plan.costs.slots[stage, node] > 0:
                yield False, 0.0, self._loads(_moved(self.members, node, stage))[stage], node
        for leaves, nodes in enumerate(self.members):
            for node in sorted(nodes):
                alone = not self._able_beside(leaves, node)
                if node not in self.movable or (alone and not (last and beyond_0 - {node})):
                    continue
                if self.plan.costs.slots[stage, node] > 0:
                    after = _moved(self.members, node, stage)
                    yield alone, self._spans(after)[leaves], self._loads(after)[stage], node

    def _able_beside(self, stage: int, node: int) -> bool:
        """Whether the stage has able nodes beside this one."""
        return any(other in self.able and other != node for other in self.members[stage])

    def _longest_ns(self, members: Members) -> float:
        return max(self._spans(members))

    def _spans(self, members: Members) -> list[float]:
        """Nanoseconds of every stage: its load, and its averaging after that."""
        return [load + self._ring_ns(stage, members[stage]) for stage, load in enumerate(self._loads(members))]

    def _ring_ns(self, stage: int, nodes: Collection[int]) -> int:
        which = stage, frozenset(nodes)
        if which not in self._averaging_ns:
            costs = self.plan.costs
            self._averaging_ns[which] = costs.averaging_ns(stage, costs.averaging(stage, sorted(nodes)))
        return self._averaging_ns[which]

    def _loads(self, members: Members) -> list[float]:
        """Load of every stage in nanoseconds; 0 for one without nodes."""
        plan = self.plan
        held = sum(bool(nodes) for nodes in members[1:])
        share = sum(plan.exposure[1:]) / max(1, held)
        loads = []
        for stage, nodes in enumerate(members):
            rate = sum(1 / task_ns(plan.costs, stage, node) for node in nodes)
            demand = plan.microbatches if stage == 0 else share
            loads.append(demand / rate if nodes else 0.0)
        return loads


def _moved(members: Members, node: int, stage: int) -> list[set[int]]:
    after = [set(nodes) - {node} for nodes in members]
    after[stage].add(node)
    return after
