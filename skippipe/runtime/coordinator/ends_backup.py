"""What only stage 0 holds, kept a second time while training: embedding, final norm and head, the ends of the model.

After CheckFree+ (Blagoev, Ersoy and Chen, "All is not lost: LLM recovery without checkpoints", 2025): the layers of a
lost stage can be rebuilt from its neighbours, the ends cannot. So every few iterations a data node copies their weights
as they are after a step, and a node of another stage fetches that copy piece by piece while the others go on. It keeps
the copy before until the new one is whole. Who keeps which copy is in the roster, and nodes say it to a coordinator
that is started again.

Only a node with memory to spare keeps a copy, preferably over a link that carries no microbatches: then the plan's
slots and its promise hold as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from skippipe.constraints import circle
from skippipe.cost_model import NEVER_NS
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv
from skippipe.runtime.coordinator.membership import Member, Membership, MemberState
from skippipe.runtime.messages import Backup, BackupStored, Snapshot
from skippipe.runtime.task_timing import ClusterEstimator

COPIES = 2  # that a node makes room for: the one that is kept, and the next one while it comes
ENDS = "embedding, final norm and head"
LOST = f"stage 0 is lost: nobody has its {ENDS} any more, neither a data node, nor as a copy, nor in a checkpoint"


@dataclass(frozen=True)
class Transfer:
    """Of a copy, from the data node that makes it to the node that will keep it."""

    source: int
    target: int
    iterations: int
    peers: tuple[Member, Member]
    """As they were in the roster when it began: one that has left and come back has nothing of it."""


@dataclass
class EndsBackup:
    every: int
    """Iterations from one copy to the next; 0: none are made."""
    membership: Membership
    env: CoordinatorEnv
    measured: ClusterEstimator
    done: int = 0
    """Iterations, by now."""
    _transfer: Transfer | None = field(init=False, default=None)

    def committed(self, plan: Plan) -> None:
        """To be called when all were told to step: a copy that is due is made after that step."""
        newest = max((self.membership[node].backup for node in self._holders()), default=0)
        if not self.every or self._goes_on() or (newest and self.done - newest < self.every):
            return
        pair = self._pair(plan)
        if pair is not None:
            source, target = pair
            self._transfer = Transfer(source, target, self.done, (self.membership[source], self.membership[target]))
            self.env.tell(source, Snapshot(self.done))

    def copied(self, node: int, copied: BackupStored) -> None:
        """The data node has made the copy, or the other has all of it: also if the data node was lost meanwhile."""
        transfer, peer = self._transfer, self.membership[node]
        if transfer is not None and (node, copied.iterations) == (transfer.source, transfer.iterations):
            if self._goes_on():
                self.env.tell(transfer.target, Backup(node, copied.iterations))
        elif peer.standing is MemberState.ABLE and peer.stage != 0 and copied.iterations <= self.done:
            peer.backup = copied.iterations
            if transfer is not None and (node, copied.iterations) == (transfer.target, transfer.iterations):
                self._transfer = None

    def holder(self, reachable: Collection[int]) -> int | None:
        """Who of these keeps the newest copy."""
        holders = [node for node in self._holders() if node in reachable]
        return max(holders, key=lambda node: (self.membership[node].backup, -node), default=None)

    @property
    def needed(self) -> list[int]:
        """Nodes that must stay where they are: nobody holds stage 0, and they keep a copy of its ends."""
        return [] if self._is_held else self._holders()

    @property
    def is_lost(self) -> bool:
        """Has nobody what only stage 0 holds, though something was learned?"""
        return not (self._is_held or self._holders() or self.has_checkpoint) and self.are_trained

    @property
    def are_trained(self) -> bool:
        """Are they other than the seed has them? Steps do not tell: a stage that is rebuilt counts anew."""
        return self.done > 0

    @property
    def has_checkpoint(self) -> bool:
        keeper = self.env.keeper
        return keeper is not None and keeper.newest() is not None

    @property
    def _is_held(self) -> bool:
        return any(self.membership[node].stage == 0 for node in self.membership.able)

    def _holders(self) -> list[int]:
        return [node for node in self.membership.able if self.membership[node].backup]

    def _goes_on(self) -> bool:
        """Is a copy on its way, with both nodes there and a link between them?"""
        transfer, able = self._transfer, self.membership.able
        if transfer is None:
            return False
        nodes = (transfer.source, transfer.target)
        there = all(
            node in able and self.membership[node] is peer for node, peer in zip(nodes, transfer.peers, strict=True)
        )
        return there and not self.measured.is_cut(*nodes, self.env.now_ns())

    def _pair(self, plan: Plan) -> tuple[int, int] | None:
        """Who copies and who keeps; the one who has a copy keeps the next one too."""
        now_ns, able = self.env.now_ns(), self.membership.able
        return best_pair(
            plan,
            [node for node in able if self.membership[node].stage == plan.stage_of.get(node)],
            usable=lambda source, target: not self.measured.is_cut(source, target, now_ns),
            keeps=[node for node in able if self.membership[node].backup],
        )


def best_pair(
    plan: Plan,
    nodes: Collection[int],
    *,
    usable: Callable[[int, int], bool] = lambda source, target: True,
    keeps: Collection[int] = (),
) -> tuple[int, int] | None:
    """A data node and a node of another stage, of these, with memory for a copy and the best link between them."""
    hops = {pair for lane in plan.lanes for a, b in circle(lane.path) for pair in ((a, b), (b, a))}
    copy_bytes = plan.workload.backup_bytes

    def spare_bytes(node: int) -> int:
        stage, memory_bytes = plan.stage_of[node], plan.cluster.nodes[node].memory_bytes
        return plan.workload.spare_bytes(memory_bytes, stage, plan.layers[stage], plan.microbatches)

    sources = [node for node in nodes if plan.stage_of[node] == 0 and spare_bytes(node) >= copy_bytes]
    targets = [node for node in nodes if plan.stage_of[node] != 0 and spare_bytes(node) >= COPIES * copy_bytes]
    pairs = [
        (target not in keeps, (source, target) in hops, int(plan.costs.transmit_ns[source, target]), source, target)
        for source in sources
        for target in targets
        if usable(source, target)
    ]
    best = min(pairs, default=None)
    return None if best is None or best[2] >= NEVER_NS else best[3:]
