"""Plans for those who are there: who moves where, which stage a newcomer gets, which ways microbatches take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runtime.lengths import Lengths
from skippipe.runtime.measured import Measured
from skippipe.runtime.roster import Roster, Standing
from skippipe.runtime.settings import Survival

USUAL_NODES = 20  # that the time for planning is meant for


@dataclass
class Replanning:
    roster: Roster
    measured: Measured
    survival: Survival
    lengths: Lengths
    unfit: dict[int, str] = field(default_factory=dict)
    """Nodes that are too small for any stage, and what is missing."""

    def plan(self, old: Plan, iteration: int, now_ns: int) -> Plan | None:
        """For those who average and step from this iteration on; None if nothing can go on with them."""
        roster = self.roster
        members = [
            [*ring, *(node for node in roster.of(Standing.READY) if roster[node].stage == stage)]
            for stage, ring in enumerate(roster.members(old))
        ]
        cluster = self.measured.cluster(now_ns, speeds=self.survival.drift > 0) or old.cluster
        length = self.lengths.at(iteration)
        found = self._repaired(old, length, members, roster.able, cluster)
        if found is not None:
            self.lengths.renew(length, found)
        return found

    def turned(self, plan: Plan, iteration: int, able: Collection[int]) -> Plan | None:
        """The plan for the same nodes with paths of another length, if it is time for that; None: all stays."""
        length = self.lengths.at(iteration)
        if length == self.lengths.now:
            return None
        if not self.lengths.ready(length):
            members = [stage.nodes for stage in plan.stages]
            self.lengths.add(length, self._repaired(plan, length, members, able, plan.cluster) or plan)
        self.lengths.now = length
        return self.lengths.plans[length]

    def _repaired(
        self,
        plan: Plan,
        length: int,
        members: Sequence[Collection[int]],
        able: Collection[int],
        cluster: Cluster,
    ) -> Plan | None:
        from skippipe.planner.repair import repaired

        return repaired(
            self.lengths.plans.get(length, plan),
            members,
            able,
            cluster=cluster,
            budget_s=self.survival.planning.total_seconds() * max(1.0, len(able) / USUAL_NODES),
            visited=length,
        )

    def mover(self, plan: Plan, *, finishing: bool) -> tuple[int, int] | None:
        """A node that had better move to a stage that ran short, and that stage."""
        from skippipe.planner.staffing import move_for

        roster = self.roster
        if roster.of(Standing.SPARE):
            return None
        found = move_for(plan, roster.expected(plan), roster.able)
        if found is not None and finishing:  # nobody may take the last copy of a stage's weights away
            kept = [node for node in roster.able if roster[node].stage == roster[found[0]].stage]
            found = found if len(kept) > 1 else None
        return found

    def stage_for(self, plan: Plan, node: int, now_ns: int) -> int | None:
        """Where a newcomer helps most; None if it is too small, or cannot reach the others there now."""
        from skippipe.planner.staffing import stage_for

        members = self.roster.expected(plan)
        try:
            stage = stage_for(plan, members, node)
        except UserError as error:
            self.unfit[node] = str(error)
            return None
        reachable = not any(self.measured.is_cut(node, other, now_ns) for other in members[stage])
        return stage if reachable else None


def with_node(plan: Plan, node: int, stage: int) -> Plan:
    """A node on a stage: enough to build it from. It gets another plan before it takes a microbatch."""
    stages = []
    for index, each in enumerate(plan.stages):
        ring = tuple(other for other in each.ring if other != node)
        ring = (*ring, node) if index == stage else ring
        stages.append(replace(each, nodes=ring, ring=ring))
    return replace(plan, stages=tuple(stages), expected=None)
