"""The plan in use, renewed for the nodes that are there: the stage of each node, and the paths of microbatches.

Every plan is logged before a node is told (`wal_records`). If the skip schedule changes the length of paths, each
length has a plan of its own, which is used again whenever its turn comes, as long as no node joins or leaves. Then all
of them are out of date; one whose turn comes is where the search for its successor begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import TYPE_CHECKING

from skippipe.cluster import Cluster
from skippipe.plan import Plan, Stage
from skippipe.runtime.coordinator.cluster_estimator import ClusterEstimator
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, EventLogger
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.recovery import EmbeddingBackup, StageProgress
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.wal_records import plan_record
from skippipe.skip_schedule import PathLength, SkipSchedule, parts_of
from skippipe.whole_paths import find_teacher_paths, links_in_use, planned_teacher_paths

if TYPE_CHECKING:
    from skippipe.planner.repair.stage_assignment import Reassignment, StageAssignment


NODES_PER_BUDGET = 20  # that the time for planning is meant for
MAX_MOVES = 3  # nodes that get another stage between two iterations, beside those for stages that no node holds

DownLinks = frozenset[frozenset[int]]
StageHolders = tuple[frozenset[tuple[int, int]], DownLinks]
"""Nodes and the stages that they hold or will before long, and the links that are down."""


@dataclass
class Replanner:
    plan: Plan
    """The plan in use."""
    lengths: PathLengths
    estimator: ClusterEstimator
    settings: RecoverySettings
    membership: Membership
    progress: StageProgress
    gather: CheckpointGather
    backup: EmbeddingBackup
    env: CoordinatorEnv
    log_event: EventLogger
    changed: bool = False
    """A node has joined or left: the plan is to be renewed."""
    _settled: tuple[frozenset[int], DownLinks] | None = field(init=False)
    """Nodes with a stage, and links that were down, when it was last decided which nodes move; None: decide anew."""
    _rejected: dict[int, StageHolders | None] = field(default_factory=dict)
    """Spare → the placement in which it was of no help: it is not considered again until that changes; None: speeds
    have changed."""
    _moving: list[int] = field(default_factory=list)
    """Nodes that are to build another stage when the plan without them is logged."""

    def __post_init__(self) -> None:
        self._settled = frozenset(self.plan.stage_of), self.estimator.down_links(self.env.now_ns())

    # Plans

    def begin(self, iteration: int) -> None:
        """All nodes of the plan are there; the first iteration may have paths of another length."""
        self._select_length(iteration, self.plan.stage_of)
        self._log_plan()

    def needs_unreachable_pair(self) -> bool:
        """Does the plan need two nodes to meet that cannot?"""
        return bool(self.estimator.unreachable_pairs() & _links(self.plan))

    def plan_around_unreachable(self, iteration: int) -> list[str]:
        """Before the first iteration: make a plan in which no two nodes need each other that cannot meet. If there is
        none, gives the names of two that hinder it."""
        needed = sorted(map(sorted, self.estimator.unreachable_pairs() & _links(self.plan)))
        if not needed:
            return []
        length, members = self.lengths.at(iteration), self.plan.placement
        found = self._repair(length, members, self.plan.stage_of, self._cluster(self.env.now_ns()))
        if found is None or self.estimator.unreachable_pairs() & _links(found):
            return [self.membership.name(node) for node in needed[0]]
        self.plan = found
        self.lengths.renew(length, found)
        self.estimator.replanned(found)
        names = ", ".join(
            f"'{self.membership.name(node)}'" for node in sorted({node for pair in needed for node in pair})
        )
        self.log_event("replanned", f"{names} only call out, and cannot reach each other: the plan does without")
        return []

    def switch_length(self, iteration: int) -> bool:
        """Take the plan for another path length, if the schedule has one from this iteration on; whether it has."""
        if not self._select_length(iteration, self.membership.active):
            return False
        self._log_plan()
        return True

    def renew(self, iteration: int, *, finishing: bool = False) -> bool:
        """Make a plan for the nodes that are there, from this iteration on; whether that is possible."""
        began_ns = self.env.now_ns()
        self._reassign(iteration, finishing=finishing)
        length = self.lengths.at(iteration)
        found = self._repair_for_members(length, began_ns)
        if finishing and found is not None and (found.stages, found.lanes) == (self.plan.stages, self.plan.lanes):
            self.changed = False  # asked for again and again while a node is waited for that holds a lost stage
        elif found is not None:
            self.plan = found
            self.changed = False
            self.lengths.renew(length, found)
            self.estimator.replanned(found)
            took_s = (self.env.now_ns() - began_ns) / 1e9
            self._log_plan()
            self.log_event(
                "replanned", f"{len(self.membership.active)} nodes take microbatches; planned in {took_s:.2f} s"
            )
        for node in self._moving:
            self._build(node)
        self._moving.clear()
        return found is not None

    def is_outdated(self, iteration: int) -> bool:
        """Has a node joined or left, or does something take much more or less time than planned?

        Spares that have come to be of use get a stage on the way, from this iteration on, and nodes that help more
        elsewhere leave theirs.
        """
        drift = self.estimator.drift(self.settings.drift) if self.settings.drift and not self.changed else ""
        if drift:
            self.log_event("slow", drift)
            self._settled = None
            self._rejected = dict.fromkeys(self._rejected)
        elif not self.changed:
            self._reassign(iteration)
        return self.changed or bool(drift)

    def _repair_for_members(self, length: PathLength, now_ns: int) -> Plan | None:
        """A plan for the nodes that average and step; None if training cannot go on with them."""
        membership = self.membership
        members = [
            [*ring, *(node for node in membership.in_state(MemberState.READY) if membership[node].stage == stage)]
            for stage, ring in enumerate(membership.rings(self.plan))
        ]
        spent_s = (self.env.now_ns() - now_ns) / 1e9
        return self._repair(length, members, membership.active, self._cluster(now_ns), spent_s)

    def _cluster(self, now_ns: int) -> Cluster:
        """The cluster as it is known to be by now."""
        return self.estimator.cluster(now_ns, speeds=self.settings.drift > 0) or self.plan.cluster

    def _select_length(self, iteration: int, active: Collection[int]) -> bool:
        length = self.lengths.at(iteration)
        if length == self.lengths.current:
            return False
        if length not in self.lengths.up_to_date:
            members = self.plan.placement
            self.lengths.add(length, self._repair(length, members, active, self.plan.cluster) or self.plan)
        self.lengths.current = length
        self.plan = self.lengths.plans[length]
        return True

    def _repair(
        self,
        length: PathLength,
        members: Sequence[Collection[int]],
        active: Collection[int],
        cluster: Cluster,
        spent_s: float = 0.0,
    ) -> Plan | None:
        """The search time is what is left when so many seconds are spent, but half of all of it at least."""
        from skippipe.planner.repair.repair import repaired

        whole_s = self.settings.planning.total_seconds() * max(1.0, len(active) / NODES_PER_BUDGET)
        found = repaired(
            self.lengths.plans.get(length, self.plan),
            members,
            active,
            cluster=cluster,
            budget_s=max(whole_s - spent_s, whole_s / 2),
            visited=length,
        )
        return None if found is None or find_teacher_paths(found) is None else found

    def _log_plan(self) -> None:
        """The plan in full once; later its length will do, as long as no node joins or leaves."""
        length = self.lengths.current
        if length in self.lengths.logged:
            self.env.append_wal({"turn": length})
            return
        self.lengths.logged.add(length)
        recovering = self.membership.in_state(MemberState.READY, MemberState.RECOVERING)
        self.env.append_wal(plan_record(self.plan, recovering, self.progress, length))

    # Stages

    def place(self, node: int, iteration: int) -> None:
        """Give a node that joins the stage where it helps most; one that is of no help stays a spare."""
        now_ns = self.env.now_ns()
        if self.estimator.link_reports.is_banned(node, now_ns):
            return
        assignment = self._assignment(iteration)
        self._rejected.pop(node, None)
        found = assignment.filling([node])
        if found is not None and found.node != node:
            return  # a better one moves there when the iteration is done
        found = found or assignment.using([node])
        if found is not None and (found.helps or not assignment.members[found.stage]):
            self._assign(found, now_ns)
        else:
            self._reject(node, found, now_ns)

    def _reassign(self, iteration: int, *, finishing: bool = False) -> None:
        """Decide which node holds which stage from now on, until no move makes the plan better or a few have moved.

        A stage that no node holds is filled at once. Beside that, nodes move only if a node has joined or left since it
        was last decided, or links or speeds have changed; so after the last of these all stay where they are.
        """
        membership, now_ns = self.membership, self.env.now_ns()
        empty = not all(membership.future_rings(self.plan))
        if not empty and not self._new_spares(now_ns) and self._settled == self._members_and_down_links(now_ns):
            return
        assignment = self._assignment(iteration)
        while found := assignment.filling(self._eligible_spares(now_ns), last=not finishing):
            self._assign(found, now_ns)
            assignment.carry_out(found)
        if finishing:
            return
        for _ in range(MAX_MOVES):
            found = self._next_move(assignment, iteration, now_ns)
            if found is None:
                break
            self._assign(found, now_ns)
            assignment.carry_out(found)
        self._settled = self._members_and_down_links(now_ns)

    def _next_move(self, assignment: StageAssignment, iteration: int, now_ns: int) -> Reassignment | None:
        """The next spare to get a stage, or else the next node to move."""
        if spares := self._new_spares(now_ns):
            found = assignment.using(spares)
            if found is not None and found.helps:
                return found
            for node in spares:
                self._reject(node, found if assignment.open_to(node) else None, now_ns)
        if self._settled == self._members_and_down_links(now_ns):
            return None
        return assignment.moving(self.lengths.iterations - iteration)

    def _assignment(self, iteration: int) -> StageAssignment:
        from skippipe.planner.repair.stage_assignment import StageAssignment

        membership, now_ns, length = self.membership, self.env.now_ns(), self.lengths.at(iteration)
        plan, cluster = self.lengths.plans.get(length, self.plan), self._cluster(now_ns)
        stay = membership.active if self.backup.is_lost else self.backup.needed
        takes_part = membership.in_state(MemberState.READY, MemberState.RECOVERING, MemberState.ACTIVE)
        return StageAssignment(
            plan if plan.cluster is cluster else plan.edited(cluster=cluster),
            length,
            [set(nodes) for nodes in membership.future_rings(self.plan)],
            membership.active,
            [node for node in takes_part if node not in stay],
            lambda a, b: self.estimator.is_down(a, b, now_ns),
        )

    def _assign(self, found: Reassignment, now_ns: int) -> None:
        """Give a node its stage: a spare builds it at once, one that has another when the plan without it is logged."""
        node, stage = found.node, found.stage
        spare = self.membership[node].state is MemberState.SPARE
        empty = all(member.stage != stage for member in self.membership.members.values())
        why = ", which no node holds" if empty else f": {_seconds(found.after_s)} instead of {_seconds(found.before_s)}"
        why += ", and its state is held a second time" if found.seconds else ""
        self.log_event("replanned", f"{'takes' if spare else 'moves to'} stage {stage}{why}", node)
        self.membership.add(node, MemberState.BUILDING, stage, now_ns)
        self._rejected.pop(node, None)
        if spare:
            self._build(node)
        else:
            self.gather.lost(node)
            self._moving.append(node)
            self.changed = True

    def _build(self, node: int) -> None:
        plan = with_node(self.plan, node, self.membership[node].stage)
        self.env.send_welcome(node, plan, None, self.membership.assign(node))

    def _reject(self, node: int, found: Reassignment | None, now_ns: int) -> None:
        """A node is of no help now, which is reported once."""
        known = node in self._rejected
        self._rejected[node] = self._stage_holders(now_ns)
        if known:
            return
        if found is not None and isinf(found.before_s):
            why = "there is no plan for the nodes that are here, and none with it either"
        elif found is not None:
            whom = "it" if found.node == node else f"'{self.membership.name(found.node)}'"  # which would help more
            why = f"with {whom} an iteration takes {_seconds(found.after_s)}, without {_seconds(found.before_s)}"
        elif not self.plan.costs.slots[:, node].any():
            why = f"'{self.membership.name(node)}' has too little memory for any stage and one microbatch: leave it out"
        else:
            why = "it cannot reach the nodes that hold the stages that it has the memory for"
        self.log_event("refused", f"stays a spare: {why}", node)

    def _new_spares(self, now_ns: int) -> list[int]:
        """Spares that are new, or for which something has changed since they were rejected."""
        spares = self._eligible_spares(now_ns)
        return [node for node in spares if self._rejected.get(node) != self._stage_holders(now_ns)] if spares else []

    def _eligible_spares(self, now_ns: int) -> list[int]:
        """Spares that may get a stage now."""
        banned = self.estimator.link_reports.is_banned
        return [node for node in self.membership.in_state(MemberState.SPARE) if not banned(node, now_ns)]

    def _stage_holders(self, now_ns: int) -> StageHolders:
        held = frozenset((node, member.stage) for node, member in self.membership.members.items() if member.stage >= 0)
        return held, self.estimator.down_links(now_ns)

    def _members_and_down_links(self, now_ns: int) -> tuple[frozenset[int], DownLinks]:
        held, down = self._stage_holders(now_ns)
        return frozenset(node for node, _ in held), down


def _links(plan: Plan) -> frozenset[frozenset[int]]:
    """Pairs of nodes that send each other something."""
    return frozenset(frozenset(link) for link in links_in_use(plan, planned_teacher_paths(plan)))


def _seconds(iteration_s: float) -> str:
    return "for ever" if isinf(iteration_s) else f"{iteration_s:.3g} s"


def with_node(plan: Plan, node: int, stage: int) -> Plan:
    """The plan with a node on a stage: enough to build it. The node gets another plan before it takes a microbatch."""
    stages = []
    for index, each in enumerate(plan.stages):
        left = each.averaging.without({node})
        if index == stage:
            left = replace(left, order=(*left.order, node))
        stages.append(Stage.of(each.layers, left))
    return plan.edited(stages=tuple(stages))


@dataclass
class PathLengths:
    """How many stages paths visit, iteration by iteration, and the plans for that."""

    schedule: SkipSchedule
    iterations: int
    """Iterations of the whole run, from its very first."""
    current: PathLength
    """The length that the plan in use was made for; while stages are missing, its paths may be shorter."""
    plans: dict[PathLength, Plan]
    """Length → the last plan for it; the one in use is among them."""
    usual: int = field(init=False)
    """The length where the schedule says nothing."""
    logged: set[PathLength] = field(init=False, default_factory=set)
    """Lengths whose plans are in the write-ahead log as they are."""
    up_to_date: set[PathLength] = field(init=False)
    """Lengths whose plans are for the nodes that are there."""

    def __post_init__(self) -> None:
        self.usual = max(parts_of(self.current))
        used = self.plans[self.current]
        self.up_to_date = {
            length for length, plan in self.plans.items() if plan.stages == used.stages and plan.cluster == used.cluster
        }

    def at(self, iteration: int) -> PathLength:
        return self.schedule.visited(iteration, self.iterations, len(self.plans[self.current].stages), self.usual)

    def add(self, length: PathLength, plan: Plan) -> None:
        self.plans[length] = plan
        self.up_to_date.add(length)

    def renew(self, length: PathLength, plan: Plan) -> None:
        """A node has joined or left: this plan is in use from now on, and the others are out of date."""
        self.current = length
        self.up_to_date.clear()
        self.logged.clear()
        self.add(length, plan)
