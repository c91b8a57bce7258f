"""What a node asks its computer to do, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Task:
    """One step of one microbatch (see `dispatch`)."""

    iteration: int
    lane: int
    microbatch: int
    """Of the lane, from 0."""
    step: int
    given: Any = None
    """What the message brought; None for a microbatch that sets out, and for weight gradients."""


class Outcome(NamedTuple):
    """Of a task."""

    payload: Any
    """For the next node on the path."""
    loss: Any = None
    """Of the microbatch, if the task was its head: a number, perhaps still on its way from a GPU."""


@dataclass(frozen=True)
class Pass:
    """One round of the gradient ring: take in what the neighbour sent in the round before, give what goes out now."""

    round: int
    given: Any = None


@dataclass(frozen=True)
class Reduce:
    """Sum the gradients of the stage over its nodes by other means than the ring."""


@dataclass(frozen=True)
class Measure:
    """From the sum of gradients to their mean over the microbatches that came; gives its squared norm."""

    visits: int


@dataclass(frozen=True)
class Step:
    """Follow the gradient, times `scale`."""

    rate: float
    scale: float


@dataclass(frozen=True)
class Show:
    """A piece of the weights, for whoever collects them; None past the last."""

    piece: int
    kept: bool = False
    """Of the copy that was kept, with the optimizer's state, instead of the weights as they are now."""


@dataclass(frozen=True)
class Keep:
    """Copy weights and optimizer state, for a checkpoint."""


@dataclass(frozen=True)
class Load:
    """Take over a piece of a checkpoint's state."""

    piece: int
    given: Any
    """None when all has come."""
    steps: int = 0
    """That the optimizer had taken by then; said when all has come."""


Work = Task | Pass | Reduce | Measure | Step | Show | Keep | Load


class Computer(Protocol):
    """Runs work, one at a time. Real tensors, or symbols under virtual time."""

    def run(self, work: Work) -> Any: ...


def piece_sent(at: int, round_: int, size: int) -> int:
    """Which piece the node at a place of the ring passes on in a round: first its own, then what came last."""
    return (at - round_) % size
