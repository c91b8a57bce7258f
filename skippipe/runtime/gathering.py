"""Everybody together before the first iteration: nodes that join, or that come back to a coordinator started again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from skippipe.runtime.apprentice import origin_to_json
from skippipe.runtime.control import Hello
from skippipe.runtime.fencing import first_number
from skippipe.runtime.memory import Memory
from skippipe.runtime.progress import Progress
from skippipe.runtime.replanning import Replanning
from skippipe.runtime.roster import Roster, Standing
from skippipe.runtime.surroundings import Surroundings
from skippipe.runtime.teaching import Teaching


class Reunion(NamedTuple):
    stepped: set[int]
    """Nodes that have taken the last step that was noted; others are told to."""
    strays: list[int]
    """Nodes that are in the middle of something else."""


@dataclass
class Gathering:
    memory: Memory
    resumed: bool
    """Nodes go on from a checkpoint."""
    roster: Roster
    surroundings: Surroundings
    replanning: Replanning
    teaching: Teaching
    progress: Progress
    _places: dict[int, Hello] = field(default_factory=dict)
    """Where nodes say they are, after a restart of the coordinator."""

    @property
    def missing(self) -> list[int]:
        """Nodes of the plan that are not here."""
        return [node for node in sorted(self.replanning.plan.stage_of) if node not in self.roster]

    def prepare(self) -> None:
        """All are here: they build their stages and, if there is a checkpoint to go on from, fetch their state."""
        self.replanning.begin(self.progress.now.number)
        for index, stage in enumerate(self.replanning.plan.stages):
            origin = origin_to_json(self.teaching.from_checkpoint(index)) if self.resumed else {}
            for node in stage.nodes:
                self.roster[node].standing, self.roster[node].stage = Standing.BUILDING, index
                self.surroundings.welcome(node, self.replanning.plan, origin, self.roster.assign(node))

    # Coming back

    def came_back(self, node: int, hello: Hello) -> None:
        self._places[node] = hello

    def lost(self, node: int) -> None:
        self._places.pop(node, None)

    def reunite(self) -> Reunion:
        """Whoever is where it should be takes part again, if need be after the last step that was noted."""
        places, self._places = self._places, {}
        memory, progress, stage_of = self.memory, self.progress, self.replanning.plan.stage_of
        seen = [hello.epoch for hello in places.values()]  # others may have seen more, but none of this term
        progress.epoch = max([progress.epoch, first_number(memory.term), *seen]) + 1
        stepped = set()
        for node, hello in places.items():
            behind = hello.iteration == memory.iteration and hello.phase == "AVERAGED"
            if node in stage_of and hello.phase and (behind or hello.iteration == progress.now.number):
                standing = Standing.LEARNING if node in memory.learning else Standing.ABLE
                self.roster.add(node, standing, stage_of[node], self.surroundings.now_ns())
                self.roster[node].backup = hello.backup if hello.backup <= progress.now.number else 0
                if behind:
                    self.surroundings.tell(node, memory.proceed)
                else:
                    stepped.add(node)
        return Reunion(stepped, [node for node in self.roster.of(Standing.SPARE) if places[node].phase])

    def rewind(self) -> bool:
        """Nobody has any state: whoever is here, or comes, begins where a checkpoint was made. Whether there is one."""
        keeper = self.surroundings.keeper
        done = keeper.newest() if keeper is not None else None
        if done is None:
            return False
        self.resumed = True
        for node in self.roster:
            self.roster.add(node, Standing.SPARE, -1, self.surroundings.now_ns())
        self.progress.open(done)
        return True
