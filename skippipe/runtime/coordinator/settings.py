"""What a coordinator is waiting for.

How patient a coordinator is, and what it does when things go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Literal


class CoordinatorState(Enum):
    JOINING = "to join"
    PREPARING = "to be ready"
    TRAINING = "to average gradients"
    PAUSED = "to take the places of those who are gone"
    STEPPING = "to take the last step"
    COLLECTING = "to send its weights"
    REUNITING = "to come back to a coordinator that was started again"
    DONE = "for nothing"
    FAILED = "for nothing any more"


@dataclass(frozen=True)
class Deadlines:
    """How long the coordinator waits before it gives up and says for whom it waited."""

    join: timedelta = timedelta(minutes=10)
    """For the last node to join, or for somebody to take the place of those without whom nothing goes on."""
    ready: timedelta = timedelta(minutes=5)
    """For nodes to build their stage."""
    iteration: timedelta = timedelta(minutes=10)
    """For an iteration, whatever the plan promises."""
    collect: timedelta = timedelta(minutes=10)
    """For the weights of a stage."""
    early: timedelta = timedelta(seconds=4)
    """The same, if somebody wants to stop at once."""
    room: timedelta = timedelta(hours=1)
    """For room on the disk, if the model cannot be written in the end."""
    heartbeat: timedelta = timedelta(seconds=5)
    """For a sign of life of a node; then it counts as gone."""
    reunion: timedelta = timedelta(seconds=20)
    """For nodes to notice that the coordinator was started again."""


@dataclass(frozen=True)
class RecoverySettings:
    """What to do when things go wrong."""

    lost_stage: Literal["checkpoint", "neighbours"] = "checkpoint"
    """Where the state of a stage comes from that nobody holds any more; without a checkpoint, from its neighbours."""
    drift: float = 0.0
    """The plan is renewed when a task or a link takes this share more or less than planned; 0: never."""
    planning: timedelta = timedelta(milliseconds=500)
    """For the search for a better plan when one has to be repaired, for every 20 nodes; 0: the first that is found,
    always the same."""
    backup_every: int = 10
    """Iterations from one copy of what only stage 0 holds (embedding, final norm, head), on a node of another stage, to
    the next; 0: none are made."""
    survives: bool = True
    """Go on without lost nodes; no: a lost node ends the run."""
