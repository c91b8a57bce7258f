"""What a collective is: how the nodes of a stage sum their gradients, as simulator, planner and runtime see it.

A collective is one file of this package. It says in which order the nodes stand, how many rounds there are, and which
place sends to which in each. From that follow its time, its bytes and what a node waits for. Its averager, on real
tensors, is what a node computes in each round. Importing a collective must not import torch; making an averager may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.codecs import EncodedTensor


class Averager(Protocol):
    """The gradient of one node on its way through a collective. A node's own gradient should stay as it is until the
    step, so that averaging that failed can begin again with other members."""

    def turn(self, round_: int, at: int, size: int, given: EncodedTensor | None) -> EncodedTensor | None:
        """Take in what came in the round before, and give what goes out in this one: as the node at a place among so
        many. Round 0 begins anew, whatever was before; the last one, past all that send, gives nothing."""

    def fits(self, given: EncodedTensor, round_: int, at: int, size: int) -> bool:
        """Whether a message has the shape and codec of what a round takes in. Called on another thread than `turn`."""

    @property
    def summed(self) -> Tensor | None:
        """The sum over the stage after the last round; None: the node's own gradient was summed in place."""

    def close(self, *, followed: bool) -> None:
        """The iteration is over: the optimizer followed the sum, or the gradient was dropped."""


MakeAverager: TypeAlias = "Callable[[Tensor, str], Averager]"


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
    """One way to sum gradients over the nodes of a stage. Places are positions in the order of its nodes, from 0."""

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
