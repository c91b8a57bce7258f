"""The plan in use, renewed for those who are there: who has which stage, and which ways microbatches take.

It is noted before anybody is told (`memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runtime.collecting import Harvest
from skippipe.runtime.ends_backup import EndsBackup
from skippipe.runtime.lengths import Lengths
from skippipe.runtime.measured import Measured
from skippipe.runtime.memory import plan_record
from skippipe.runtime.roster import Roster, Standing
from skippipe.runtime.settings import Survival
from skippipe.runtime.surroundings import Happened, Surroundings
from skippipe.runtime.teaching import Trained

USUAL_NODES = 20  # that the time for planning is meant for


@dataclass
class Replanning:
    plan: Plan
    """In use."""
    lengths: Lengths
    measured: Measured
    survival: Survival
    roster: Roster
    trained: Trained
    harvest: Harvest
    ends: EndsBackup
    surroundings: Surroundings
    happened: Happened
    changed: bool = False
    """Somebody came or went: the plan is to be renewed."""
    _unfit: dict[int, str] = field(default_factory=dict)
    """Nodes that are too small for any stage, and what is missing."""

    # Plans

    def begin(self, iteration: int) -> None:
        """Everybody of the plan is there; the first iteration may have paths of another length."""
        self._turned(iteration, self.plan.stage_of)
        self._note()

    def turn(self, iteration: int) -> bool:
        """Take the plan for paths of another length, if the recipe has them from this iteration on; whether it has."""
        if not self._turned(iteration, self.roster.able):
            return False
        self._note()
        return True

    def renew(self, iteration: int, *, finishing: bool = False) -> bool:
        """Make a plan for those who are there, from this iteration on; whether that is possible."""
        began_ns = self.surroundings.now_ns()
        mover = self._freed(began_ns, finishing=finishing) if self.changed else None
        length = self.lengths.at(iteration)
        found = self._for_those_there(length, began_ns)
        if found is not None:
            self.plan = found
            self.changed = False
            self.lengths.renew(length, found)
            self.measured.planned(found)
            took_s = (self.surroundings.now_ns() - began_ns) / 1e9
            self._note()
            self.happened("replanned", f"{len(self.roster.able)} nodes take microbatches; planned in {took_s:.2f} s")
        if mover is not None:
            self.place(mover)
        return found is not None

    def is_outdated(self) -> bool:
        """Has somebody come or gone, or does something take much more or less time than planned?"""
        drift = self.measured.drift(self.survival.drift) if self.survival.drift and not self.changed else ""
        if drift:
            self.happened("slow", drift)
        return self.changed or bool(drift)

    def _for_those_there(self, length: int, now_ns: int) -> Plan | None:
        """Who average and step; None if nothing can go on with them."""
        roster = self.roster
        members = [
            [*ring, *(node for node in roster.of(Standing.READY) if roster[node].stage == stage)]
            for stage, ring in enumerate(roster.members(self.plan))
        ]
        cluster = self.measured.cluster(now_ns, speeds=self.survival.drift > 0) or self.plan.cluster
        return self._repaired(length, members, roster.able, cluster)

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
        self, length: int, members: Sequence[Collection[int]], able: Collection[int], cluster: Cluster
    ) -> Plan | None:
        from skippipe.planner.repair import repaired

        return repaired(
            self.lengths.plans.get(length, self.plan),
            members,
            able,
            cluster=cluster,
            budget_s=self.survival.planning.total_seconds() * max(1.0, len(able) / USUAL_NODES),
            visited=length,
        )

    def _note(self) -> None:
        """In full once; later its name will do, as long as nobody comes or goes."""
        length = self.lengths.now
        if length in self.lengths.noted:
            self.surroundings.note({"turn": length})
            return
        self.lengths.noted.add(length)
        learning = self.roster.of(Standing.READY, Standing.LEARNING)
        self.surroundings.note(plan_record(self.plan, learning, self.trained, length))

    # Stages

    def place_spares(self) -> None:
        for node in self.roster.of(Standing.SPARE):
            self.place(node)

    def place(self, node: int) -> None:
        """Give a node a stage, and have it built; if that cannot be now, it stays a spare."""
        now_ns = self.surroundings.now_ns()
        known = node in self._unfit
        stage = self._stage_for(node, now_ns)
        if stage is not None:
            self.roster.add(node, Standing.BUILDING, stage, now_ns)
            self.surroundings.welcome(node, _with_node(self.plan, node, stage), {}, self.roster.assign(node))
        elif node in self._unfit and not known:
            self.happened("refused", f"stays a spare: {self._unfit[node]}", node)

    def _freed(self, now_ns: int, *, finishing: bool) -> int | None:
        """A node that had better move to a stage that ran short leaves its own."""
        from skippipe.planner.staffing import move_for

        roster = self.roster
        barred = self.measured.accusations.is_barred
        if self.ends.is_lost or any(not barred(spare, now_ns) for spare in roster.of(Standing.SPARE)):
            return None
        found = move_for(self.plan, roster.expected(self.plan), roster.able, staying=self.ends.needed)
        if found is None:
            return None
        node, stage = found
        if node in self.ends.needed:
            return None
        holders = [other for other in roster.able if roster[other].stage == roster[node].stage]
        if finishing and len(holders) <= 1:  # nobody may take the last copy of a stage's weights away
            return None
        self.happened("replanned", f"moves to stage {stage}, which ran short", node)
        roster.add(node, Standing.SPARE, -1, now_ns)
        self.harvest.lost(node)
        return node

    def _stage_for(self, node: int, now_ns: int) -> int | None:
        """Where a newcomer helps most; None if it is too small, or cannot reach the others there now."""
        from skippipe.planner.staffing import stage_for

        if self.measured.accusations.is_barred(node, now_ns):
            return None
        members = self.roster.expected(self.plan)
        try:
            stage = stage_for(self.plan, members, node)
        except UserError as error:
            self._unfit[node] = str(error)
            return None
        reachable = not any(self.measured.is_cut(node, other, now_ns) for other in members[stage])
        return stage if reachable else None


def _with_node(plan: Plan, node: int, stage: int) -> Plan:
    """A node on a stage: enough to build it from. It gets another plan before it takes a microbatch."""
    stages = []
    for index, each in enumerate(plan.stages):
        ring = tuple(other for other in each.ring if other != node)
        ring = (*ring, node) if index == stage else ring
        stages.append(replace(each, nodes=ring, ring=ring))
    return replace(plan, stages=tuple(stages), expected=None, lower_bound_ns=None)
