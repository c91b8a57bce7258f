"""Where a node that joins late gets the state of its stage from: a replica, a checkpoint, or the neighbouring stages.

Embedding, final norm and head, which only stage 0 holds, come from their backup (`EmbeddingBackup`). Where there is
none, stage 0 is not made up: training does not go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.coordinator.cluster_estimator import ClusterEstimator
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, EventLogger
from skippipe.runtime.coordinator.membership import Member, Membership, MemberState
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.messages import COORDINATOR, BackupStored, FetchBackup, MakeBackup, Recover
from skippipe.runtime.state_source import StateSource

BACKUPS = 2  # that a node has memory for: the one that is stored, and the next one while it arrives
BACKED_UP = "embedding, final norm and head"
LOST = f"stage 0 is lost: no node has its {BACKED_UP} any more, neither a data node, nor a backup, nor a checkpoint"


@dataclass(frozen=True)
class Transfer:
    """A backup on its way from the data node that made it to the node that will store it."""

    source: int
    target: int
    iterations: int
    members: tuple[Member, Member]
    """The two as they were in the membership when it began: one that has left and rejoined has nothing of it."""


@dataclass
class EmbeddingBackup:
    """Embedding, final norm and head, which only stage 0 holds, stored a second time while training.

    After CheckFree+ (Blagoev, Ersoy and Chen, "All is not lost: LLM recovery without checkpoints", 2025): the layers of
    a lost stage can be rebuilt from its neighbours, embedding and head cannot. So every few iterations a data node
    takes a snapshot of these weights after a step, and a node of another stage fetches it piece by piece while training
    goes on. It keeps the previous backup until the new one is complete. The membership says which node stores which
    backup, and nodes tell it to a coordinator that is restarted.

    Only a node with memory to spare stores a backup, preferably over a link that carries no microbatches: then the
    plan's slots and its promise hold as they are.
    """

    every: int
    """Iterations from one backup to the next; 0: none are made."""
    membership: Membership
    env: CoordinatorEnv
    estimator: ClusterEstimator
    completed: int = 0
    """Iterations that are completed by now."""
    _transfer: Transfer | None = field(init=False, default=None)

    def committed(self, plan: Plan) -> None:
        """All nodes were told to step: if a backup is due, it is made after that step."""
        holders, now_ns = self._holders(), self.env.now_ns()
        newest = max((self.membership[node].backup for node in holders), default=0)
        if not self.every or self._in_transfer() or (newest and self.completed - newest < self.every):
            return
        pair = best_pair(
            plan,
            [node for node in self.membership.active if self.membership[node].stage == plan.stage_of.get(node)],
            usable=lambda source, target: not self.estimator.is_down(source, target, now_ns),
            preferred=holders,  # one that stores a backup stores the next one too
        )
        if pair is not None:
            source, target = pair
            members = self.membership[source], self.membership[target]
            self._transfer = Transfer(source, target, self.completed, members)
            self.env.send(source, MakeBackup(self.completed))

    def stored(self, node: int, stored: BackupStored) -> None:
        """The data node has made the snapshot, or the other node has all of it, perhaps after the loss of the first."""
        transfer, member = self._transfer, self.membership[node]
        if transfer is not None and (node, stored.iterations) == (transfer.source, transfer.iterations):
            if self._in_transfer():
                self.env.send(transfer.target, FetchBackup(node, stored.iterations))
        elif member.state is MemberState.ACTIVE and member.stage != 0 and stored.iterations <= self.completed:
            member.backup = stored.iterations
            if transfer is not None and (node, stored.iterations) == (transfer.target, transfer.iterations):
                self._transfer = None

    def holder(self, reachable: Collection[int]) -> int | None:
        """The node with the newest backup, of those that can be reached."""
        holders = [node for node in self._holders() if node in reachable]
        return max(holders, key=lambda node: (self.membership[node].backup, -node), default=None)

    @property
    def needed(self) -> list[int]:
        """Nodes that must stay on their stage, because they store a backup and no node holds stage 0."""
        return [] if self._is_held else self._holders()

    @property
    def is_lost(self) -> bool:
        """Are the trained weights lost: no data node, no backup, no checkpoint?"""
        return not (self._is_held or self._holders() or self.has_checkpoint) and self.is_trained

    @property
    def is_trained(self) -> bool:
        """Do the weights differ from the initial ones? Steps do not tell: a stage that is rebuilt counts anew."""
        return self.completed > 0

    @property
    def has_checkpoint(self) -> bool:
        store = self.env.checkpoint_store
        return store is not None and store.newest() is not None

    @property
    def _is_held(self) -> bool:
        return any(self.membership[node].stage == 0 for node in self.membership.active)

    def _holders(self) -> list[int]:
        return [node for node in self.membership.active if self.membership[node].backup]

    def _in_transfer(self) -> bool:
        """Is a backup on its way, with both nodes there and a link between them?"""
        transfer, active = self._transfer, self.membership.active
        if transfer is None:
            return False
        nodes = (transfer.source, transfer.target)
        there = all(
            node in active and self.membership[node] is member
            for node, member in zip(nodes, transfer.members, strict=True)
        )
        return there and not self.estimator.is_down(*nodes, self.env.now_ns())


def best_pair(
    plan: Plan,
    nodes: Collection[int],
    *,
    usable: Callable[[int, int], bool] = lambda source, target: True,
    preferred: Collection[int] = (),
) -> tuple[int, int] | None:
    """A data node and a node of another stage with memory for a backup, and the best link between them; None if
    there is none, or if only adapters are trained: then what stage 0 alone holds lies beside the checkpoints."""
    if plan.workload.adapter_parameters:
        return None
    hops = {pair for lane in plan.lanes for a, b in circle(lane.path) for pair in ((a, b), (b, a))}
    backup_bytes = plan.workload.backup_bytes

    def spare_bytes(node: int) -> int:
        stage, memory_bytes = plan.stage_of[node], plan.cluster.nodes[node].memory_bytes
        return plan.workload.spare_bytes(memory_bytes, stage, plan.layers[stage], plan.microbatches)

    sources = [node for node in nodes if plan.stage_of[node] == 0 and spare_bytes(node) >= backup_bytes]
    targets = [node for node in nodes if plan.stage_of[node] != 0 and spare_bytes(node) >= BACKUPS * backup_bytes]
    bandwidth = plan.costs.bandwidth_bytes_per_s
    pairs = [
        (target not in preferred, (source, target) in hops, -float(bandwidth[source, target]), source, target)
        for source in sources
        for target in targets
        if usable(source, target) and bandwidth[source, target] > 0 and bandwidth[target, source] > 0
    ]
    best = min(pairs, default=None)
    return None if best is None else best[3:]


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

    def stepped(self, stage_microbatches: list[int], norms: list[float]) -> None:
        """A step was taken on every stage that a microbatch has visited."""
        self.steps = [steps + (count > 0) for steps, count in zip(self.steps, stage_microbatches, strict=True)]
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
        self.log_event("recovering", f"stage {member.stage} {self._describe(source)}", node)
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
