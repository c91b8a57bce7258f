"""What a node asks its computer to do, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from skippipe.transport.message import Message


@dataclass(frozen=True)
class Task:
    """One step of one microbatch (see `dispatch`)."""

    iteration: int
    lane: int
    microbatch: int
    """Of the lane, from 0."""
    step: int
    length: int
    """Of the lane's path as it was planned: places that were skipped since are included."""
    data: int
    """The place of the microbatch among all of the iteration, which says what text it gets."""
    given: Any = None
    """What the message brought; None for a microbatch that sets out, and for weight gradients."""
    counts: bool = True
    """Its weight gradients are added up. Not if this node has added them before, and the microbatch comes again."""


class Outcome(NamedTuple):
    """Of a task."""

    payload: Any
    """For the next node on the path."""
    loss: Any = None
    """Of the microbatch, if the task was its head: a number, perhaps still on its way from a GPU."""


@dataclass(frozen=True)
class Drop:
    """Forget a microbatch on its way: it starts over, or goes another way."""

    lane: int
    microbatch: int


@dataclass(frozen=True)
class Clear:
    """Forget all microbatches and the gradients of the iteration: it starts over."""


@dataclass(frozen=True)
class Inspect:
    """Is all that this node has added up finite? If not, it is cleared."""


@dataclass(frozen=True)
class Pass:
    """One round of the gradient ring: take in what the neighbour sent in the round before, give what goes out now.

    What the node itself has added up stays as it is, so that a ring that breaks can be begun again.
    """

    round: int
    at: int
    """This node's place in the ring …"""
    size: int
    """… of so many."""
    given: Any = None


@dataclass(frozen=True)
class Reduce:
    """Sum the gradients of the stage over its nodes by other means than the ring."""


@dataclass(frozen=True)
class Measure:
    """From the sum of gradients to their mean over the microbatches that came; gives its squared norm."""

    visits: int
    alone: bool
    """Of this node's own sum, instead of what the ring has made."""


@dataclass(frozen=True)
class Step:
    """Follow the mean gradient, times `scale`; then gradients are zero again. A scale of 0 stands for no step."""

    rate: float
    scale: float


@dataclass(frozen=True)
class Show:
    """A piece of the weights, for whoever collects them; None past the last."""

    piece: int
    kept: bool = False
    """Of the copy that was kept, with the optimizer's state, instead of the weights as they are now."""
    collection: int = 0
    """What the piece is for (see `control.Collect`)."""


@dataclass(frozen=True)
class Keep:
    """Copy weights and optimizer state, for a checkpoint."""


@dataclass(frozen=True)
class Origin:
    """Where a node gets the state of its stage from."""

    kind: Literal["replica", "checkpoint", "neighbours", "backup"]
    """A backup is not the state of a stage: it is kept for another node (see `OpenBackup`)."""
    sources: tuple[int, ...]
    """Nodes to ask, the coordinator for a checkpoint."""
    stages: tuple[int, ...]
    """That they hold."""
    shares: tuple[float, ...]
    """Of each in the mean; they add up to 1."""
    steps: int
    """That the optimizer has taken on this stage."""
    backup: tuple[int, int] | None = None
    """For stage 0 from its neighbours: who keeps a copy of what they do not have, and after how many iterations it was
    made."""

    @property
    def lenders(self) -> tuple[int, ...]:
        """All who are asked."""
        return self.sources if self.backup is None else (*self.sources, self.backup[0])


@dataclass(frozen=True)
class Part:
    """Of a state: weights, means and squares one after another, as one flat sequence of numbers."""

    source: int
    first: int
    """There."""
    count: int
    at: int
    """Here."""
    share: float = 1.0
    """What comes is multiplied by this …"""
    added: bool = False
    """… and added to what is there, instead of taking its place."""
    backup: int = 0
    """Of the copy of stage 0's ends that its source made or keeps, of after so many iterations; 0: of its own state."""


@dataclass(frozen=True)
class Study:
    """What does it take to get the state? Gives a list of `Part`s; the optimizer's count is set at once."""

    origin: Origin


@dataclass(frozen=True)
class Lend:
    """Numbers of this node's state as it is now, for one that learns; gives a `Loan`."""

    first: int
    count: int
    to: int
    """Who asked."""
    assignment: int = 0
    """What it is for (see `control.Want`)."""
    backup: int = 0
    """Of the copy of stage 0's ends of after so many iterations, instead of the state."""


class Loan(NamedTuple):
    payload: Any
    """None if there are no such numbers."""
    digest: str
    """SHA-256 of its bytes."""


@dataclass(frozen=True)
class Load:
    """Take over what came; False if it does not have the digest."""

    part: Part
    given: Any
    digest: str = ""
    """Empty: it was checked where it comes from."""


@dataclass(frozen=True)
class CopyEnds:
    """Copy the weights of stage 0's ends (embedding, final norm, head), for a node of another stage to keep."""

    iterations: int
    """That are done by now."""


@dataclass(frozen=True)
class OpenBackup:
    """Make room for a copy of stage 0's ends beside the one that is kept; gives a list of `Part`s."""

    source: int
    iterations: int


@dataclass(frozen=True)
class StoreBackup:
    """A piece of that copy; False if it does not have the digest. With the last one it takes the older one's place."""

    part: Part
    given: Any
    digest: str


Work = (
    Task
    | Drop
    | Clear
    | Inspect
    | Pass
    | Reduce
    | Measure
    | Step
    | Show
    | Keep
    | Study
    | Lend
    | Load
    | CopyEnds
    | OpenBackup
    | StoreBackup
)


class Computer(Protocol):
    """Runs work, one at a time. Real tensors, or symbols under virtual time."""

    def run(self, work: Work) -> Any: ...

    def fits(self, message: Message, at: int, size: int) -> bool:
        """Is a tensor from another node what it should be? Of a ring, this node has a place among so many.

        Asked on another thread than `run`'s.
        """


def piece_sent(at: int, round_: int, size: int) -> int:
    """Which piece the node at a place of the ring passes on in a round: first its own, then what came last."""
    return (at - round_) % size
