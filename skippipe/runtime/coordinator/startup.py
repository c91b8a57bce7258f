"""Everybody together before the first iteration: nodes that join, or that come back to a coordinator started again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from skippipe.runtime.coordinator.commit_loop import CommitLoop
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.recovery import RecoverySourceSelector
from skippipe.runtime.coordinator.replanner import Replanner
from skippipe.runtime.coordinator.wal_records import RecoveredLog
from skippipe.runtime.fencing import first_number
from skippipe.runtime.messages import Hello


class RejoinCheck(NamedTuple):
    stepped: set[int]
    """Nodes that have taken the last step that was noted; others are told to."""
    strays: list[int]
    """Nodes that are in the middle of something else."""


@dataclass
class Startup:
    memory: RecoveredLog
    resumed: bool
    """Nodes go on from a checkpoint."""
    membership: Membership
    env: CoordinatorEnv
    replanning: Replanner
    teaching: RecoverySourceSelector
    progress: CommitLoop
    _places: dict[int, Hello] = field(default_factory=dict)
    """Where nodes say they are, after a restart of the coordinator."""

    @property
    def missing(self) -> list[int]:
        """Nodes of the plan that are not here."""
        return [node for node in sorted(self.replanning.plan.stage_of) if node not in self.membership]

    def prepare(self) -> None:
        """All are here: they build their stages and, if there is a checkpoint to go on from, fetch their state."""
        self.replanning.begin(self.progress.now.number)
        for index, stage in enumerate(self.replanning.plan.stages):
            origin = self.teaching.from_checkpoint(index) if self.resumed else None
            for node in stage.nodes:
                self.membership[node].standing, self.membership[node].stage = MemberState.BUILDING, index
                self.env.welcome(node, self.replanning.plan, origin, self.membership.assign(node))

    # Coming back

    def came_back(self, node: int, hello: Hello) -> None:
        self._places[node] = hello

    def lost(self, node: int) -> None:
        self._places.pop(node, None)

    def reunite(self) -> RejoinCheck:
        """Whoever is where it should be takes part again, if need be after the last step that was noted."""
        places, self._places = self._places, {}
        memory, progress, stage_of = self.memory, self.progress, self.replanning.plan.stage_of
        seen = [hello.epoch for hello in places.values()]  # others may have seen more, but none of this term
        progress.epoch = max([progress.epoch, first_number(memory.term), *seen]) + 1
        stepped = set()
        for node, hello in places.items():
            behind = hello.iteration == memory.iteration and hello.phase == "AVERAGED"
            if node in stage_of and hello.phase and (behind or hello.iteration == progress.now.number):
                standing = MemberState.LEARNING if node in memory.learning else MemberState.ABLE
                self.membership.add(node, standing, stage_of[node], self.env.now_ns())
                self.membership[node].backup = hello.backup if hello.backup <= progress.now.number else 0
                if behind:
                    self.env.tell(node, memory.proceed)
                else:
                    stepped.add(node)
        return RejoinCheck(stepped, [node for node in self.membership.of(MemberState.SPARE) if places[node].phase])

    def rewind(self) -> bool:
        """Nobody has any state: whoever is here, or comes, begins where a checkpoint was made. Whether there is one."""
        keeper = self.env.keeper
        done = keeper.newest() if keeper is not None else None
        if done is None:
            return False
        self.resumed = True
        for node in self.membership:
            self.membership.add(node, MemberState.SPARE, -1, self.env.now_ns())
        self.progress.open(done)
        return True
