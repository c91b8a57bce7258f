"""The plan in use, renewed for those who are there: who has which stage, and which ways microbatches take.

It is noted before anybody is told (`memory`).


How many stages paths visit, iteration by iteration, and the plans for that.

A plan that was made for a length is used again whenever its turn comes, as long as nobody comes or goes. Then all of
them are out of date; one whose turn comes is where the search for its successor begins.

"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import TYPE_CHECKING

from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.coordinator.ends_backup import EndsBackup
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, EventLogger
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.recovery import StageProgress
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.wal_records import plan_record
from skippipe.runtime.task_timing import ClusterEstimator
from skippipe.skip_schedule import SkipSchedule

if TYPE_CHECKING:
    from skippipe.planner.repair.stage_assignment import Reassignment, StageAssignment


USUAL_NODES = 20  # that the time for planning is meant for
AT_ONCE = 3  # nodes that get another stage between two iterations, beside those for stages that nobody holds

Cuts = frozenset[frozenset[int]]
Holding = tuple[frozenset[tuple[int, int]], Cuts]
"""Who holds which stage or will before long, and which links are cut."""


@dataclass
class Replanner:
    plan: Plan
    """In use."""
    lengths: PathLengths
    measured: ClusterEstimator
    survival: RecoverySettings
    membership: Membership
    trained: StageProgress
    harvest: CheckpointGather
    ends: EndsBackup
    env: CoordinatorEnv
    happened: EventLogger
    changed: bool = False
    """Somebody came or went: the plan is to be renewed."""
    _settled: tuple[frozenset[int], Cuts] | None = field(init=False)
    """Who had a stage, and which links were cut, when it was last decided who moves; None: to be decided anew."""
    _no_help: dict[int, Holding | None] = field(default_factory=dict)
    """Spares → where they were of no help: they are not looked at again until that changes; None: speeds have."""
    _leaving: list[int] = field(default_factory=list)
    """Nodes that are to build another stage when the plan without them is noted."""

    def __post_init__(self) -> None:
        self._settled = frozenset(self.plan.stage_of), self.measured.cuts(self.env.now_ns())

    # Plans

    def begin(self, iteration: int) -> None:
        """Everybody of the plan is there; the first iteration may have paths of another length."""
        self._turned(iteration, self.plan.stage_of)
        self._note()

    def turn(self, iteration: int) -> bool:
        """Take the plan for paths of another length, if the recipe has them from this iteration on; whether it has."""
        if not self._turned(iteration, self.membership.able):
            return False
        self._note()
        return True

    def renew(self, iteration: int, *, finishing: bool = False) -> bool:
        """Make a plan for those who are there, from this iteration on; whether that is possible."""
        began_ns = self.env.now_ns()
        self._reassign(iteration, finishing=finishing)
        length = self.lengths.at(iteration)
        found = self._for_those_there(length, began_ns)
        if found is not None:
            self.plan = found
            self.changed = False
            self.lengths.renew(length, found)
            self.measured.planned(found)
            took_s = (self.env.now_ns() - began_ns) / 1e9
            self._note()
            self.happened(
                "replanned", f"{len(self.membership.able)} nodes take microbatches; planned in {took_s:.2f} s"
            )
        for node in self._leaving:
            self._build(node)
        self._leaving.clear()
        return found is not None

    def is_outdated(self, iteration: int) -> bool:
        """Has somebody come or gone, or does something take much more or less time than planned?

        Spares that have come to be of use get a stage on the way, from this iteration on, and nodes that help more
        elsewhere leave theirs.
        """
        drift = self.measured.drift(self.survival.drift) if self.survival.drift and not self.changed else ""
        if drift:
            self.happened("slow", drift)
            self._settled = None
            self._no_help = dict.fromkeys(self._no_help)
        elif not self.changed:
            self._reassign(iteration)
        return self.changed or bool(drift)

    def _for_those_there(self, length: int, now_ns: int) -> Plan | None:
        """Who average and step; None if nothing can go on with them."""
        membership = self.membership
        members = [
            [*ring, *(node for node in membership.of(MemberState.READY) if membership[node].stage == stage)]
            for stage, ring in enumerate(membership.members(self.plan))
        ]
        spent_s = (self.env.now_ns() - now_ns) / 1e9
        return self._repaired(length, members, membership.able, self._cluster(now_ns), spent_s)

    def _cluster(self, now_ns: int) -> Cluster:
        """As it is known to be by now."""
        return self.measured.cluster(now_ns, speeds=self.survival.drift > 0) or self.plan.cluster

    def _turned(self, iteration: int, able: Collection[int]) -> bool:
        length = self.lengths.at(iteration)
        if length == self.lengths.now:
            return False
        if not self.lengths.ready(length):
            members = [stage.nodes for stage in self.plan.stages]
            self.lengths.add(length, self._repaired(length, members, able, self.plan.cluster) or self.plan)
        self.lengths.now = length
        self.plan = self.lengths.plans[length]
        return True

    def _repaired(
        self,
        length: int,
        members: Sequence[Collection[int]],
        able: Collection[int],
        cluster: Cluster,
        spent_s: float = 0.0,
    ) -> Plan | None:
        """The time for it is what is left when so many seconds are spent, but half of all of it at least."""
        from skippipe.planner.repair.repair import repaired

        whole_s = self.survival.planning.total_seconds() * max(1.0, len(able) / USUAL_NODES)
        return repaired(
            self.lengths.plans.get(length, self.plan),
            members,
            able,
            cluster=cluster,
            budget_s=max(whole_s - spent_s, whole_s / 2),
            visited=length,
        )

    def _note(self) -> None:
        """In full once; later its name will do, as long as nobody comes or goes."""
        length = self.lengths.now
        if length in self.lengths.noted:
            self.env.note({"turn": length})
            return
        self.lengths.noted.add(length)
        learning = self.membership.of(MemberState.READY, MemberState.LEARNING)
        self.env.note(plan_record(self.plan, learning, self.trained, length))

    # Stages

    def place(self, node: int, iteration: int) -> None:
        """A newcomer gets the stage where it helps most; if it is of no help, it stays a spare, and that is said."""
        now_ns = self.env.now_ns()
        if self.measured.accusations.is_barred(node, now_ns):
            return
        staff = self._staff(iteration)
        self._no_help.pop(node, None)
        found = staff.filling([node])
        if found is not None and found.node != node:
            return  # a better one moves there when the iteration is done
        found = found or staff.using([node])
        if found is not None and (found.helps or not staff.members[found.stage]):
            self._give(found, now_ns)
        else:
            self._spare(node, found, now_ns)

    def _reassign(self, iteration: int, *, finishing: bool = False) -> None:
        """Decide who holds which stage from now on, until no change makes the plan better or a few have changed.

        A stage that nobody holds is filled at once. Beside that, nodes move only if somebody came or went since it was
        last decided, or links or speeds have changed; so after the last of these all stay where they are.
        """
        membership, now_ns = self.membership, self.env.now_ns()
        empty = not all(membership.expected(self.plan))
        if not empty and not self._news(now_ns) and self._settled == self._taking_part(now_ns):
            return
        staff = self._staff(iteration)
        while found := staff.filling(self._spares(now_ns), last=not finishing):
            self._give(found, now_ns)
            staff.carry_out(found)
        if finishing:
            return
        for _ in range(AT_ONCE):
            found = self._best(staff, iteration, now_ns)
            if found is None:
                break
            self._give(found, now_ns)
            staff.carry_out(found)
        self._settled = self._taking_part(now_ns)

    def _best(self, staff: StageAssignment, iteration: int, now_ns: int) -> Reassignment | None:
        """The next spare to get a stage, or else the next node to move."""
        if spares := self._news(now_ns):
            found = staff.using(spares)
            if found is not None and found.helps:
                return found
            for node in spares:
                self._spare(node, found if staff.open_to(node) else None, now_ns)
        if self._settled == self._taking_part(now_ns):
            return None
        return staff.moving(self.lengths.iterations - iteration)

    def _staff(self, iteration: int) -> StageAssignment:
        from skippipe.planner.repair.stage_assignment import StageAssignment

        membership, now_ns, length = self.membership, self.env.now_ns(), self.lengths.at(iteration)
        plan, cluster = self.lengths.plans.get(length, self.plan), self._cluster(now_ns)
        stay = membership.able if self.ends.is_lost else self.ends.needed
        takes_part = membership.of(MemberState.READY, MemberState.LEARNING, MemberState.ABLE)
        return StageAssignment(
            plan if plan.cluster is cluster else replace(plan, cluster=cluster, expected=None, lower_bound_ns=None),
            length,
            [set(nodes) for nodes in membership.expected(self.plan)],
            membership.able,
            [node for node in takes_part if node not in stay],
            lambda a, b: self.measured.is_cut(a, b, now_ns),
        )

    def _give(self, found: Reassignment, now_ns: int) -> None:
        """A node its stage: a spare builds it at once, one that has another when the plan without it is noted."""
        node, stage = found.node, found.stage
        spare = self.membership[node].standing is MemberState.SPARE
        empty = all(peer.stage != stage for peer in self.membership.peers.values())
        why = ", which nobody holds" if empty else f": {_seconds(found.after_s)} instead of {_seconds(found.before_s)}"
        why += ", and its state is held a second time" if found.seconds else ""
        self.happened("replanned", f"{'takes' if spare else 'moves to'} stage {stage}{why}", node)
        self.membership.add(node, MemberState.BUILDING, stage, now_ns)
        self._no_help.pop(node, None)
        if spare:
            self._build(node)
        else:
            self.harvest.lost(node)
            self._leaving.append(node)
            self.changed = True

    def _build(self, node: int) -> None:
        plan = _with_node(self.plan, node, self.membership[node].stage)
        self.env.welcome(node, plan, None, self.membership.assign(node))

    def _spare(self, node: int, found: Reassignment | None, now_ns: int) -> None:
        """It is of no help now, which is said once."""
        known = node in self._no_help
        self._no_help[node] = self._holding(now_ns)
        if known:
            return
        if found is not None and isinf(found.before_s):
            why = "there is no plan for those who are here, and none with it either"
        elif found is not None:
            whom = "it" if found.node == node else f"'{self.membership.name(found.node)}'"  # which would help more
            why = f"with {whom} an iteration takes {_seconds(found.after_s)}, without {_seconds(found.before_s)}"
        elif not self.plan.costs.slots[:, node].any():
            why = f"'{self.membership.name(node)}' has too little memory for any stage and one microbatch: leave it out"
        else:
            why = "it cannot reach those who hold the stages that it has the memory for"
        self.happened("refused", f"stays a spare: {why}", node)

    def _news(self, now_ns: int) -> list[int]:
        """Spares that are new, or for which something has changed since they were of no help."""
        spares = self._spares(now_ns)
        return [node for node in spares if self._no_help.get(node) != self._holding(now_ns)] if spares else []

    def _spares(self, now_ns: int) -> list[int]:
        """Those that may get a stage now."""
        barred = self.measured.accusations.is_barred
        return [node for node in self.membership.of(MemberState.SPARE) if not barred(node, now_ns)]

    def _holding(self, now_ns: int) -> Holding:
        held = frozenset((node, peer.stage) for node, peer in self.membership.peers.items() if peer.stage >= 0)
        return held, self.measured.cuts(now_ns)

    def _taking_part(self, now_ns: int) -> tuple[frozenset[int], Cuts]:
        held, cuts = self._holding(now_ns)
        return frozenset(node for node, _ in held), cuts


def _seconds(iteration_s: float) -> str:
    return "for ever" if isinf(iteration_s) else f"{iteration_s:.3g} s"


def _with_node(plan: Plan, node: int, stage: int) -> Plan:
    """A node on a stage: enough to build it from. It gets another plan before it takes a microbatch."""
    stages = []
    for index, each in enumerate(plan.stages):
        ring = tuple(other for other in each.ring if other != node)
        ring = (*ring, node) if index == stage else ring
        stages.append(replace(each, nodes=ring, ring=ring))
    return replace(plan, stages=tuple(stages), expected=None, lower_bound_ns=None)


@dataclass
class PathLengths:
    recipe: SkipSchedule
    iterations: int
    """Of the whole run, from its very first."""
    now: int
    """That the plan in use was made for; while stages are missing, its paths may be shorter."""
    plans: dict[int, Plan]
    """Length → the last plan for it; the one in use is among them."""
    usual: int = field(init=False)
    """All along, where the recipe says nothing."""
    noted: set[int] = field(init=False, default_factory=set)
    """Lengths whose plans are in the journal as they are."""
    _sound: set[int] = field(init=False)
    """Lengths whose plans are for those who are there."""

    def __post_init__(self) -> None:
        self.usual = self.now
        used = self.plans[self.now]
        self._sound = {
            length for length, plan in self.plans.items() if plan.stages == used.stages and plan.cluster == used.cluster
        }

    def at(self, iteration: int) -> int:
        return self.recipe.visited(iteration, self.iterations, len(self.plans[self.now].stages), self.usual)

    def ready(self, length: int) -> bool:
        """Is there a plan for those who are there?"""
        return length in self._sound

    def add(self, length: int, plan: Plan) -> None:
        self.plans[length] = plan
        self._sound.add(length)

    def renew(self, length: int, plan: Plan) -> None:
        """Somebody came or went: this is in use from now on, and the others are out of date."""
        self.now = length
        self._sound.clear()
        self.noted.clear()
        self.add(length, plan)
