"""How a node that came late gets the state of its stage: from a replica, a checkpoint, or the stages beside it.

What only stage 0 holds no other stage can give: it comes from a copy that is kept for that (`ends_backup`). Where there
is none, stage 0 is not made up: nothing goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe.runtime.apprentice import origin_to_json
from skippipe.runtime.control import COORDINATOR, Copied, Learn
from skippipe.runtime.ends_backup import ENDS, EndsBackup
from skippipe.runtime.measured import Measured
from skippipe.runtime.roster import Roster, Standing
from skippipe.runtime.settings import Survival
from skippipe.runtime.surroundings import Happened, Surroundings
from skippipe.runtime.work import Origin


@dataclass
class Trained:
    """How far the stages are."""

    steps: list[int]
    """That the optimizer has taken on each."""
    norms: list[float]
    """Squared, of each one's last gradient."""

    @classmethod
    def nothing(cls, stages: int) -> Trained:
        return cls([0] * stages, [0.0] * stages)

    def stepped(self, visits: list[int], norms: list[float]) -> None:
        """A stage that nobody visited takes no step."""
        self.steps = [steps + (count > 0) for steps, count in zip(self.steps, visits, strict=True)]
        self.norms = [norm if math.isfinite(norm) else 0.0 for norm in norms]


@dataclass
class Teaching:
    roster: Roster
    surroundings: Surroundings
    survival: Survival
    measured: Measured
    trained: Trained
    ends: EndsBackup
    happened: Happened

    def teach(self, node: int) -> bool:
        """Tell a node where to learn from; whether there is anybody."""
        peer = self.roster[node]
        peer.standing = Standing.LEARNING
        origin = self._origin(peer.stage, node)
        if origin is None:
            peer.sources = ()
            return bool(self.roster.able)  # somebody who cannot be reached now
        peer.sources = origin.lenders
        self.happened("learning", f"stage {peer.stage} {self._told(origin)}", node)
        self.surroundings.tell(node, Learn(origin_to_json(origin), self.roster.assign(node)))
        return True

    def teach_again(self) -> None:
        """Those who have lost their teacher, or found none, get another."""
        for node in self.roster.of(Standing.LEARNING):
            sources = self.roster[node].sources
            if not sources or not set(sources) <= {COORDINATOR, *self.roster.able}:
                self.teach(node)

    def copied(self, node: int, copied: Copied) -> None:
        """A copy of stage 0's ends is there. Whoever learns from an older one of that node has to ask for this one."""
        self.ends.copied(node, copied)
        for learner in self.roster.of(Standing.LEARNING):
            if self.roster[learner].stage == 0 and node in self.roster[learner].sources:
                self.teach(learner)

    def from_checkpoint(self, stage: int) -> Origin:
        keeper = self.surroundings.keeper
        assert keeper is not None
        self.trained.steps[stage] = keeper.steps(stage)
        return Origin("checkpoint", (COORDINATOR,), (stage,), (1.0,), self.trained.steps[stage])

    def _origin(self, stage: int, learner: int) -> Origin | None:
        now_ns = self.surroundings.now_ns()
        able = [node for node in self.roster.able if not self.measured.is_cut(node, learner, now_ns)]
        holders = [node for node in able if self.roster[node].stage == stage and node != learner]
        if holders:
            busy = [source for node in self.roster for source in self.roster[node].sources]
            lender = min(holders, key=lambda node: (busy.count(node), node))
            return Origin("replica", (lender,), (stage,), (1.0,), self.trained.steps[stage])
        learners = [node for node in self.roster.of(Standing.LEARNING) if node != learner]
        if any(self.roster[node].stage == stage and self.roster[node].sources for node in learners):
            return None  # one rebuilds the stage, the others learn from it: two that rebuild it would not be alike
        if self.survival.lost_stage == "checkpoint" and self.ends.has_checkpoint:
            return self.from_checkpoint(stage)
        backup = None
        if stage == 0 and self.ends.are_trained:
            holder = self.ends.holder(able)
            if holder is None:
                return self.from_checkpoint(stage) if self.ends.has_checkpoint else None
            backup = holder, self.roster[holder].backup
        held = {self.roster[node].stage: node for node in reversed(able)}
        below, above = sorted(each for each in held if each < stage), sorted(each for each in held if each > stage)
        near = [*below[-1:], *above[:1]]
        if not near:
            return None
        self.trained.steps[stage] = 0
        norms = [self.trained.norms[other] for other in near]
        total = sum(norms)
        shares = tuple(norm / total if total else 1 / len(near) for norm in norms)
        return Origin("neighbours", tuple(held[other] for other in near), tuple(near), shares, 0, backup)

    def _told(self, origin: Origin) -> str:
        if origin.kind == "replica":
            return f"from '{self.roster.name(origin.sources[0])}'"
        if origin.kind == "checkpoint":
            return "from the newest checkpoint, for nobody holds it any more"
        shares = " and ".join(f"{share:.2f} × stage {s}" for s, share in zip(origin.stages, origin.shares, strict=True))
        if origin.backup is None:
            return f"from its neighbours ({shares}), for nobody holds it any more"
        holder, iterations = origin.backup
        age = max(0, self.ends.done - iterations)
        kept = f"{ENDS} from the copy that '{self.roster.name(holder)}' keeps, {age} iterations old"
        return f"from its neighbours ({shares}), {kept}, for nobody holds it any more"
