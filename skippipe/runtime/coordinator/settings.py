"""What a coordinator is told about its run: how long it waits, how it recovers, and what the run consists of."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from skippipe.heartbeat import TIMEOUT_S
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.skip_schedule import PathLength, SkipSchedule


@dataclass(frozen=True)
class Deadlines:
    """How long the coordinator waits in each state before it gives up and names the nodes that it waited for."""

    join: timedelta = timedelta(minutes=10)
    """Time for the last node to join; then training begins without those that are missing."""
    enough: timedelta = timedelta(minutes=10)
    """Time for as many nodes to join as there are stages, and in a pause for nodes to take the places of lost ones."""
    ready: timedelta = timedelta(minutes=5)
    """Time for a node to build its stage."""
    iteration: timedelta = timedelta(minutes=10)
    """Time for a message that takes the iteration further, whatever the plan promises."""
    gather: timedelta = timedelta(minutes=10)
    """Time for the next piece of the final weights."""
    abort: timedelta = timedelta(seconds=4)
    """Time for the next piece of the final weights, and for disk space, if the run is to stop at once."""
    disk_space: timedelta = timedelta(hours=1)
    """Time for space on the disk, if the final weights cannot be written."""
    heartbeat: timedelta = timedelta(seconds=TIMEOUT_S)
    """Time without a heartbeat after which a node is declared dead."""
    rejoin: timedelta = timedelta(seconds=20)
    """Time for nodes to reconnect to a coordinator that was restarted."""


@dataclass(frozen=True)
class RecoverySettings:
    """How a run gets over lost nodes, slow ones and broken links."""

    lost_stage: Literal["checkpoint", "neighbours"] = "checkpoint"
    """Where the state of a stage comes from that no node holds any more; without a checkpoint, from its neighbours."""
    drift: float = 0.0
    """Share by which a task or a link may differ from the plan before the plan is renewed; 0: any."""
    planning: timedelta = timedelta(milliseconds=500)
    """Search time for a better plan when one is repaired, for every 20 nodes; 0: the first plan found, which is always
    the same."""
    backup_every: int = 10
    """Iterations from one backup of embedding, final norm and head to the next; 0: none are made."""
    fault_tolerant: bool = True
    """The run continues without lost nodes; no: a lost node ends it."""


@dataclass(frozen=True)
class RecordedIterations:
    """Every so many iterations, and the second and the last: so there is something to see early, and in short runs."""

    every: int
    """0: none."""
    iterations: int

    def __contains__(self, iteration: object) -> bool:
        if not isinstance(iteration, int) or not self.every:
            return False
        return iteration in (1, self.iterations - 1) or (iteration + 1) % self.every == 0


@dataclass(frozen=True)
class ValidationSettings:
    """When held-out samples are evaluated between two iterations, and what follows."""

    every: int = 0
    """Iterations from one evaluation to the next; there is one at the end too. 0: none."""
    microbatches: int = 1
    patience: int = 0
    """Evaluations in a row without a lower loss after which the run ends; 0: it goes on."""
    best: tuple[int, float] | None = None
    """Completed iterations and held-out loss of the best checkpoint that the run goes on with."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """All that a coordinator is told about a run, beside the plan that it starts with."""

    optim: OptimConfig
    iterations: int
    """Iterations of the whole run, counted from its very first; or until the model grows."""
    grows: bool = False
    """The model grows afterwards: the run ends with its last checkpoint, and nodes begin anew."""
    nodes_are_there: bool = False
    """The model has grown just now: nodes were there before, and begin anew."""
    resumed_from: int | None = None
    """Completed iterations of the checkpoint that nodes start from; None: they start from initial weights."""
    skip_schedule: SkipSchedule = field(default_factory=SkipSchedule)
    """How many stages the paths of each iteration visit."""
    plans: Mapping[PathLength, Plan] = field(default_factory=dict)
    """Path length → a plan for it on the same stages; one that is missing is made when it is needed."""
    recorded: Container[int] = frozenset()
    """Iterations of which nodes report every task."""
    checkpoint_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    deadlines: Deadlines = field(default_factory=Deadlines)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)

    @property
    def first_iteration(self) -> int:
        """Number of the iteration that the run starts with."""
        return self.resumed_from or 0
