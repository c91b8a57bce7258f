"""What a collective is: how the nodes of a stage sum their gradients, as simulator, planner and runtime see it.

A collective is one file of this package. Which node sends what to which, and in which order, is the schedule of the
stage (see `schedule`); its time, its bytes and what a node waits for follow from that. An averager, on real tensors, is
what a node computes of it. Importing a collective must not import torch; making an averager may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.codecs import EncodedTensor
    from skippipe.collectives.schedule import Schedule


class Averager(Protocol):
    """The gradient of one node on its way through a schedule. What other nodes contribute should not be written to a
    node's own gradient before the step, so that averaging that failed can begin again with other nodes."""

    def begin(self, schedule: Schedule) -> None:
        """Begin an attempt, whatever was before. A library that sums gradients by itself does it here; there are no
        pieces then."""

    def contribute(self, piece: int, given: Sequence[EncodedTensor], *, total: bool) -> EncodedTensor:
        """This node's part of a piece and those of others that were `given`, added up in this order. `total`: that is
        the sum over the stage, and this node adopts it as it is encoded."""

    def adopt(self, piece: int, given: EncodedTensor) -> None:
        """Take the total of a piece."""

    def fits(self, given: EncodedTensor, schedule: Schedule, piece: int) -> bool:
        """Whether a message has the shape and codec of a piece. Called on another thread than the others."""

    @property
    def summed(self) -> Tensor | None:
        """The sum over the stage when all pieces are there; None: the node's own gradient was summed in place."""

    def close(self, *, followed: bool) -> None:
        """The iteration is over: the optimizer followed the sum; or it did not, because the node was alone in the end,
        or the gradient was dropped."""


MakeAverager: TypeAlias = "Callable[[Tensor, str, bool], Averager]"
"""Makes an averager from a gradient, the codec of messages, and whether sums are kept in host memory."""


@dataclass(frozen=True)
class GroupConfig:
    """What a node is told to join the groups of a communication library."""

    number: int
    """This node."""
    orders: tuple[tuple[int, ...], ...]
    """The nodes of every stage, in the order in which they average."""
    rendezvous: str | None
    """host:port at which all nodes meet."""
    device: str


class Collective(ABC):
    """One way to sum gradients over the nodes of a stage."""

    id: ClassVar[str]
    """Its name in job files (averaging.engine) and plans; it never changes."""
    elastic: ClassVar[bool]
    """Whether the other nodes can go on when one is lost, and nodes of other machines can join."""
    in_messages: ClassVar[bool] = True
    """Whether nodes exchange gradients in messages of their own, encoded and encrypted. If not, a library moves them as
    fp32, after the nodes have met at the rendezvous."""
    only_rings: ClassVar[bool] = True
    """Whether all stages average round a ring; False: in the way that the plan has for each (see `topology`)."""

    # What a node asks

    @abstractmethod
    def join(self, group: GroupConfig) -> MakeAverager:
        """Get ready to average with the other nodes, before the stage is built. Gives the function that makes the
        averager of a gradient whose messages are encoded by a codec."""
