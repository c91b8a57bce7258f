"""Where a node that joins late gets the state of its stage from: a replica, a checkpoint, or the neighbouring stages.

Embedding, final norm and head, which only stage 0 holds, come from their backup (`embedding_backup`). Where there is
none, stage 0 is not made up: training does not go on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe.runtime.coordinator.cluster_estimator import ClusterEstimator
from skippipe.runtime.coordinator.embedding_backup import BACKED_UP, EmbeddingBackup
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, EventLogger
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.messages import COORDINATOR, BackupStored, Recover
from skippipe.runtime.state_source import StateSource


@dataclass
class StageProgress:
    """How far each stage is trained."""

    steps: list[int]
    """Optimizer steps taken."""
    norms: list[float]
    """Squared norm of the last gradient."""

    @classmethod
    def nothing(cls, stages: int) -> StageProgress:
        return cls([0] * stages, [0.0] * stages)

    def stepped(self, visits: list[int], norms: list[float]) -> None:
        """A step was taken on every stage that a microbatch has visited."""
        self.steps = [steps + (count > 0) for steps, count in zip(self.steps, visits, strict=True)]
        self.norms = [norm if math.isfinite(norm) else 0.0 for norm in norms]


@dataclass
class RecoverySourceSelector:
    membership: Membership
    env: CoordinatorEnv
    settings: RecoverySettings
    estimator: ClusterEstimator
    progress: StageProgress
    backup: EmbeddingBackup
    log_event: EventLogger

    @property
    def is_initial(self) -> bool:
        """Is every stage as the seed has it, so that a node that has built one needs no state from elsewhere?"""
        return not self.backup.is_trained and not self.backup.has_checkpoint

    def start(self, node: int) -> bool:
        """Have a node fetch the state of its stage; False if there is no node to fetch anything from."""
        member = self.membership[node]
        member.state = MemberState.RECOVERING
        source = self._source(member.stage, node)
        if source is None:
            member.sources = ()
            return bool(self.membership.active)  # one that cannot be reached now
        member.sources = source.all_sources
        self.log_event("learning", f"stage {member.stage} {self._describe(source)}", node)
        self.env.send(node, Recover(source, self.membership.assign(node)))
        return True

    def replace_lost_sources(self) -> None:
        """Give another source to nodes that have lost theirs, or have found none."""
        for node in self.membership.in_state(MemberState.RECOVERING):
            sources = self.membership[node].sources
            if not sources or not set(sources) <= {COORDINATOR, *self.membership.active}:
                self.start(node)

    def backup_stored(self, node: int, stored: BackupStored) -> None:
        """A node has a new embedding backup: nodes that fetch its old one have to ask for this one."""
        self.backup.stored(node, stored)
        for other in self.membership.in_state(MemberState.RECOVERING):
            if self.membership[other].stage == 0 and node in self.membership[other].sources:
                self.start(other)

    def from_checkpoint(self, stage: int) -> StateSource:
        store = self.env.checkpoint_store
        assert store is not None
        self.progress.steps[stage] = store.steps(stage)
        steps, completed = self.progress.steps[stage], self.backup.completed
        return StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), steps, iterations=completed)

    def _source(self, stage: int, receiver: int) -> StateSource | None:
        now_ns, membership = self.env.now_ns(), self.membership
        reachable = [node for node in membership.active if not self.estimator.is_down(node, receiver, now_ns)]
        held = [node for node in membership.active if membership[node].stage == stage and node != receiver]
        replicas = [node for node in held if node in reachable]
        if replicas:
            busy = [source for node in membership for source in membership[node].sources]
            replica = min(replicas, key=lambda node: (busy.count(node), node))
            steps, completed = self.progress.steps[stage], self.backup.completed
            return StateSource("replica", (replica,), (stage,), (1.0,), steps, iterations=completed)
        others = [membership[node] for node in membership.in_state(MemberState.RECOVERING) if node != receiver]
        if held or any(other.stage == stage and other.sources for other in others):
            return None  # a stage is rebuilt once, and only if no node holds it: or its replicas would differ
        if self.settings.lost_stage == "checkpoint" and self.backup.has_checkpoint:
            return self.from_checkpoint(stage)
        backup = None
        if stage == 0 and self.backup.is_trained:
            holder = self.backup.holder(reachable)
            if holder is None:
                return self.from_checkpoint(stage) if self.backup.has_checkpoint else None
            backup = holder, membership[holder].backup
        nearest = {membership[node].stage: node for node in reversed(reachable)}
        below, above = (each for each in nearest if each < stage), (each for each in nearest if each > stage)
        neighbours = [*sorted(below)[-1:], *sorted(above)[:1]]
        if not neighbours:
            return None
        self.progress.steps[stage] = 0
        norms = [self.progress.norms[other] for other in neighbours]
        total = sum(norms)
        shares = tuple(norm / total if total else 1 / len(neighbours) for norm in norms)
        nodes = tuple(nearest[other] for other in neighbours)
        return StateSource("neighbours", nodes, tuple(neighbours), shares, 0, backup, self.backup.completed)

    def _describe(self, source: StateSource) -> str:
        if source.kind == "replica":
            return f"from '{self.membership.name(source.sources[0])}'"
        if source.kind == "checkpoint":
            return "from the newest checkpoint, for no node holds it any more"
        shares = " and ".join(f"{share:.2f} × stage {s}" for s, share in zip(source.stages, source.shares, strict=True))
        if source.backup is None:
            return f"from its neighbours ({shares}), for no node holds it any more"
        holder, iterations = source.backup
        age = max(0, self.backup.completed - iterations)
        backup = f"{BACKED_UP} from the backup on '{self.membership.name(holder)}', {age} iterations old"
        return f"from its neighbours ({shares}), {backup}, for no node holds it any more"
