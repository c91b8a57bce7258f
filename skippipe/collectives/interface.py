"""What a collective is: how the nodes of a stage sum their gradients, as simulator, planner and runtime see it.

A collective is one file of this package. It says in which order the nodes stand, how many rounds there are, and which
place sends to which in each. From that follow its time, its bytes and what a node waits for. Its averager, on real
tensors, is what a node computes in each round. Importing a collective must not import torch; making an averager may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from skippipe.jit import Ints

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.codecs import EncodedTensor

Link: TypeAlias = tuple[int, int]
Spans: TypeAlias = tuple[tuple[int, int], ...]


class LinkCosts(Protocol):
    """What a collective asks the cost model for."""

    @property
    def gradient_bytes(self) -> tuple[int, ...]: ...
    @property
    def flight_ns(self) -> Ints: ...
    def transmit_of(self, size_bytes: int) -> Ints: ...


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


@dataclass(frozen=True)
class ScheduleTrace:
    """When each node of a stage has what, round by round: [round][place], in nanoseconds. Row 0 is the beginning."""

    has_ns: list[list[int]]
    """When a node has all that its next round needs."""
    sent_ns: list[list[int]]
    """When a node's own message of the round before has left."""


class Collective(ABC):
    """One way to sum gradients over the nodes of a stage. Places are positions in the order of its nodes, from 0."""

    id: ClassVar[str]
    """Its name in job files (averaging.engine) and plans; it never changes."""
    elastic: ClassVar[bool]
    """Whether the other nodes can go on when one is lost, and nodes of other machines can join."""
    in_messages: ClassVar[bool] = True
    """Whether nodes exchange gradients in messages of their own, encoded and encrypted. If not, a library moves them as
    fp32, after the nodes have met at the rendezvous."""
    timed_as_ring: ClassVar[bool] = False
    """Whether its time is the ring's, which the compiled kernels of the search and the lower bound know. For any other
    collective the search goes by the ring's time, the lower bound leaves averaging out, and the simulator decides."""

    # The schedule

    @abstractmethod
    def rounds(self, size: int) -> int:
        """In how many rounds each of `size` nodes sends one message."""

    @abstractmethod
    def receiver(self, at: int, round_: int, size: int) -> int:
        """The place that the node at this place sends to in a round. No two send to the same place in one round."""

    @abstractmethod
    def sender(self, at: int, round_: int, size: int) -> int:
        """The place whose message the node at this place waits for in a round."""

    @abstractmethod
    def message_bytes(self, gradient_bytes: int, size: int) -> int:
        """Bytes of one message, of a gradient of so many."""

    # What planner and simulator ask

    def order(self, costs: LinkCosts, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002
        """A good order for these nodes, whatever order they are given in."""
        return tuple(sorted(nodes))

    def message_ns(self, costs: LinkCosts, stage: int, size: int) -> Ints:
        """[from, to]: time for which one message of a stage with `size` nodes keeps that link busy."""
        return costs.transmit_of(self.message_bytes(costs.gradient_bytes[stage], size))

    def trace(self, costs: LinkCosts, stage: int, order: Sequence[int], done_ns: Sequence[int]) -> ScheduleTrace:
        """A node sends when it has the message of the round before and its own last transmission is over; `done_ns`,
        by place, is when it has ended its last task. No node waits for the whole stage."""
        size = len(order)
        transmit_ns = self.message_ns(costs, stage, size)
        has_ns, sent_ns = [[int(ns) for ns in done_ns]], [[int(ns) for ns in done_ns]]
        for round_ in range(self.rounds(size)):
            has, sent = list(has_ns[-1]), list(sent_ns[-1])
            for at in range(size):
                there = self.receiver(at, round_, size)
                link = order[at], order[there]
                sent[at] = max(has_ns[-1][at], sent[at]) + int(transmit_ns[link])
                has[there] = max(has_ns[-1][there], sent[at] + int(costs.flight_ns[link]))
            has_ns.append(has)
            sent_ns.append(sent)
        return ScheduleTrace(has_ns, sent_ns)

    def averaged_ns(self, costs: LinkCosts, stage: int, order: Sequence[int], done_ns: Sequence[int]) -> int:
        """When all nodes have the sum."""
        return max(self.trace(costs, stage, order, done_ns).has_ns[-1])

    def takes_ns(self, costs: LinkCosts, stage: int, order: Sequence[int]) -> int:
        """The whole averaging of a stage whose nodes are done at the same time."""
        return self.averaged_ns(costs, stage, order, [0] * len(order)) if order else 0

    def after_ns(self, costs: LinkCosts, stage: int, order: Sequence[int], last: int) -> int:
        """How long averaging goes on after this node is done, at least: the others were done long before."""
        long_before_ns = -self.takes_ns(costs, stage, order)
        return self.averaged_ns(costs, stage, order, [0 if node == last else long_before_ns for node in order])

    def spans(self, costs: LinkCosts, orders: Sequence[Sequence[int]]) -> Callable[[Ints], Spans]:
        """A function from when each node is done to when each stage averages: from its last node to its sum."""

        def of(done_ns: Ints) -> Spans:
            found = []
            for stage, order in enumerate(orders):
                done = [int(done_ns[node]) for node in order]
                found.append((max(done), self.averaged_ns(costs, stage, order, done)) if done else (0, 0))
            return tuple(found)

        return of

    def link_messages(self, order: Sequence[int]) -> Counter[Link]:
        """How many messages each link carries in an iteration: (sender, receiver) → number."""
        size = len(order)
        places = ((at, round_) for round_ in range(self.rounds(size)) for at in range(size))
        return Counter((order[at], order[self.receiver(at, round_, size)]) for at, round_ in places)

    # What a node asks

    @abstractmethod
    def join(self, group: GroupConfig) -> MakeAverager:
        """Get ready to average with the other nodes, before the stage is built. Gives the function that makes the
        averager of a gradient whose messages are encoded by a codec."""
