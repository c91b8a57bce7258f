"""How a node that came late gets the state of its stage: from a replica, a checkpoint, or the stages beside it.

What only stage 0 holds no other stage can give: it comes from a copy that is kept for that (`ends_backup`). Where there
is none, stage 0 is not made up: nothing goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe.runtime.coordinator.ends_backup import ENDS, EndsBackup
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, EventLogger
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.messages import COORDINATOR, BackupStored, Recover
from skippipe.runtime.node.ops import StateSource
from skippipe.runtime.task_timing import ClusterEstimator


@dataclass
class StageProgress:
    """How far the stages are."""

    steps: list[int]
    """That the optimizer has taken on each."""
    norms: list[float]
    """Squared, of each one's last gradient."""

    @classmethod
    def nothing(cls, stages: int) -> StageProgress:
        return cls([0] * stages, [0.0] * stages)

    def stepped(self, visits: list[int], norms: list[float]) -> None:
        """A stage that nobody visited takes no step."""
        self.steps = [steps + (count > 0) for steps, count in zip(self.steps, visits, strict=True)]
        self.norms = [norm if math.isfinite(norm) else 0.0 for norm in norms]


@dataclass
class RecoverySourceSelector:
    membership: Membership
    env: CoordinatorEnv
    survival: RecoverySettings
    measured: ClusterEstimator
    trained: StageProgress
    ends: EndsBackup
    happened: EventLogger

    def teach(self, node: int) -> bool:
        """Tell a node where to learn from; whether there is anybody."""
        peer = self.membership[node]
        peer.standing = MemberState.LEARNING
        origin = self._origin(peer.stage, node)
        if origin is None:
            peer.sources = ()
            return bool(self.membership.able)  # somebody who cannot be reached now
        peer.sources = origin.all_sources
        self.happened("learning", f"stage {peer.stage} {self._told(origin)}", node)
        self.env.tell(node, Recover(origin, self.membership.assign(node)))
        return True

    def teach_again(self) -> None:
        """Those who have lost their teacher, or found none, get another."""
        for node in self.membership.of(MemberState.LEARNING):
            sources = self.membership[node].sources
            if not sources or not set(sources) <= {COORDINATOR, *self.membership.able}:
                self.teach(node)

    def copied(self, node: int, copied: BackupStored) -> None:
        """A copy of stage 0's ends is there. Whoever learns from an older one of that node has to ask for this one."""
        self.ends.copied(node, copied)
        for learner in self.membership.of(MemberState.LEARNING):
            if self.membership[learner].stage == 0 and node in self.membership[learner].sources:
                self.teach(learner)

    def from_checkpoint(self, stage: int) -> StateSource:
        keeper = self.env.keeper
        assert keeper is not None
        self.trained.steps[stage] = keeper.steps(stage)
        return StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), self.trained.steps[stage])

    def _origin(self, stage: int, learner: int) -> StateSource | None:
        now_ns = self.env.now_ns()
        able = [node for node in self.membership.able if not self.measured.is_cut(node, learner, now_ns)]
        holders = [node for node in able if self.membership[node].stage == stage and node != learner]
        if holders:
            busy = [source for node in self.membership for source in self.membership[node].sources]
            lender = min(holders, key=lambda node: (busy.count(node), node))
            return StateSource("replica", (lender,), (stage,), (1.0,), self.trained.steps[stage])
        learners = [node for node in self.membership.of(MemberState.LEARNING) if node != learner]
        if any(self.membership[node].stage == stage and self.membership[node].sources for node in learners):
            return None  # one rebuilds the stage, the others learn from it: two that rebuild it would not be alike
        if self.survival.lost_stage == "checkpoint" and self.ends.has_checkpoint:
            return self.from_checkpoint(stage)
        backup = None
        if stage == 0 and self.ends.are_trained:
            holder = self.ends.holder(able)
            if holder is None:
                return self.from_checkpoint(stage) if self.ends.has_checkpoint else None
            backup = holder, self.membership[holder].backup
        held = {self.membership[node].stage: node for node in reversed(able)}
        below, above = sorted(each for each in held if each < stage), sorted(each for each in held if each > stage)
        near = [*below[-1:], *above[:1]]
        if not near:
            return None
        self.trained.steps[stage] = 0
        norms = [self.trained.norms[other] for other in near]
        total = sum(norms)
        shares = tuple(norm / total if total else 1 / len(near) for norm in norms)
        return StateSource("neighbours", tuple(held[other] for other in near), tuple(near), shares, 0, backup)

    def _told(self, origin: StateSource) -> str:
        if origin.kind == "replica":
            return f"from '{self.membership.name(origin.sources[0])}'"
        if origin.kind == "checkpoint":
            return "from the newest checkpoint, for nobody holds it any more"
        shares = " and ".join(f"{share:.2f} × stage {s}" for s, share in zip(origin.stages, origin.shares, strict=True))
        if origin.backup is None:
            return f"from its neighbours ({shares}), for nobody holds it any more"
        holder, iterations = origin.backup
        age = max(0, self.ends.done - iterations)
        kept = f"{ENDS} from the copy that '{self.membership.name(holder)}' keeps, {age} iterations old"
        return f"from its neighbours ({shares}), {kept}, for nobody holds it any more"
