"""Where a node gets state from, and which pieces of it: what messages, operations and recovery say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class MalformedWeights(Exception):
    """What a node has sent cannot be the weights of its stage."""


@dataclass(frozen=True)
class StateSource:
    """Where a node gets the state of its stage from."""

    kind: Literal["replica", "checkpoint", "neighbours", "backup"]
    """A backup is not the state of a stage: it is kept for another node (see `OpenBackup`)."""
    sources: tuple[int, ...]
    """Nodes to request it of; the coordinator for a checkpoint."""
    stages: tuple[int, ...]
    """The stage that each source holds."""
    shares: tuple[float, ...]
    """The weight of each source in the mean; they add up to 1."""
    steps: int
    """Steps that the optimizer has taken on this stage."""
    backup: tuple[int, int] | None = None
    """For stage 0 from its neighbours: the node that keeps a copy of what they do not have, and the iterations that
    were done when it was made."""
    iterations: int = 0
    """Iterations that are done: the receiver has the state that is needed then. A replica that has not taken the last
    step yet has another one."""

    def __post_init__(self) -> None:
        if not len(self.sources) == len(self.stages) == len(self.shares) > 0:
            raise ValueError("sources, stages and shares must be as many, and at least one")

    @property
    def all_sources(self) -> tuple[int, ...]:
        """All nodes that something is requested of."""
        return self.sources if self.backup is None else (*self.sources, self.backup[0])


@dataclass(frozen=True)
class StateSlice:
    """A slice of a state, which is one flat sequence of values: weights, means and squares one after another."""

    source: int
    first: int
    """The place of its first value in the source's state."""
    count: int
    at: int
    """The place of its first value in this node's state."""
    share: float = 1.0
    """The factor of the values."""
    added: bool = False
    """The values are added to those that are there, instead of taking their place."""
    backup: int = 0
    """The slice is of the copy of stage 0's ends that was made after so many iterations; 0: of the source's state."""


class StateChunk(NamedTuple):
    """The result of `ReadState`."""

    payload: Any
    """None if there are no such values."""
    digest: str
    """SHA-256 of the payload's bytes."""
