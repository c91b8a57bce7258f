"""What a node asks its computer to do, one thing at a time.

What a node's computer does: one thing at a time.

The thread that builds a stage and computes, so that receiving, sending and signs of life go on meanwhile.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol

from skippipe.transport.message import Message


@dataclass(frozen=True)
class StageTask:
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


class OpResult(NamedTuple):
    """Of a task."""

    payload: Any
    """For the next node on the path."""
    loss: Any = None
    """Of the microbatch, if the task was its head: a number, perhaps still on its way from a GPU."""


@dataclass(frozen=True)
class DropMicrobatch:
    """Forget a microbatch on its way: it starts over, or goes another way."""

    lane: int
    microbatch: int


@dataclass(frozen=True)
class ClearGradients:
    """Forget all microbatches and the gradients of the iteration: it starts over."""


@dataclass(frozen=True)
class CheckFinite:
    """Is all that this node has added up finite? If not, it is cleared."""


@dataclass(frozen=True)
class RingStep:
    """One round of the stage's collective: take in what came in the round before, give what goes out now (see
    `collectives.interface.Averager`)."""

    round: int
    at: int
    """This node's place among the nodes that average …"""
    size: int
    """… of so many."""
    given: Any = None


@dataclass(frozen=True)
class GradNorm:
    """From the sum of gradients to their mean over the microbatches that came; gives its squared norm."""

    visits: int
    alone: bool
    """Of this node's own sum, instead of the sum over the stage."""


@dataclass(frozen=True)
class OptimizerStep:
    """Follow the mean gradient, times `scale`; then gradients are zero again. A scale of 0 stands for no step."""

    rate: float
    scale: float


@dataclass(frozen=True)
class ReadWeights:
    """A piece of the weights, for whoever collects them; None past the last."""

    piece: int
    kept: bool = False
    """Of the copy that was kept, with the optimizer's state, instead of the weights as they are now."""
    collection: int = 0
    """What the piece is for (see `control.Collect`)."""


@dataclass(frozen=True)
class SnapshotState:
    """Copy weights and optimizer state, for a checkpoint."""


@dataclass(frozen=True)
class StateSource:
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
class StateSlice:
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
class PlanTransfer:
    """What does it take to get the state? Gives a list of `StateSlice`s; the optimizer's count is set at once."""

    origin: StateSource


@dataclass(frozen=True)
class ReadState:
    """Numbers of this node's state as it is now, for one that learns; gives a `StateChunk`."""

    first: int
    count: int
    to: int
    """Who asked."""
    assignment: int = 0
    """What it is for (see `control.Want`)."""
    backup: int = 0
    """Of the copy of stage 0's ends of after so many iterations, instead of the state."""


class StateChunk(NamedTuple):
    payload: Any
    """None if there are no such numbers."""
    digest: str
    """SHA-256 of its bytes."""


@dataclass(frozen=True)
class WriteState:
    """Take over what came; False if it does not have the digest."""

    part: StateSlice
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
    """Make room for a copy of stage 0's ends beside the one that is kept; gives a list of `StateSlice`s."""

    source: int
    iterations: int


@dataclass(frozen=True)
class StoreBackup:
    """A piece of that copy; False if it does not have the digest. With the last one it takes the older one's place."""

    part: StateSlice
    given: Any
    digest: str


Op = (
    StageTask
    | DropMicrobatch
    | ClearGradients
    | CheckFinite
    | RingStep
    | GradNorm
    | OptimizerStep
    | ReadWeights
    | SnapshotState
    | PlanTransfer
    | ReadState
    | WriteState
    | CopyEnds
    | OpenBackup
    | StoreBackup
)


class Executor(Protocol):
    """Runs work, one at a time. Real tensors, or symbols under virtual time."""

    def run(self, work: Op) -> Any: ...

    def fits(self, message: Message, at: int, size: int) -> bool:
        """Is a tensor from another node what it should be? Of a ring, this node has a place among so many.

        Asked on another thread than `run`'s.
        """


class OpQueue:
    """Chores wait in a row. Nothing that runs can be called back: if it is given up, its result is of no use."""

    def __init__(self, start: Callable[[Op], None]) -> None:
        self.doing: Op | None = None
        self.void = False
        """What runs was given up."""
        self._start = start
        self._chores: deque[Op] = deque()

    def add(self, chore: Op) -> None:
        self._chores.append(chore)

    def start(self, work: Op) -> None:
        self.doing = work
        self._start(work)

    def start_chore(self) -> bool:
        """The next one, if there is one; whether there is."""
        if not self._chores:
            return False
        self.start(self._chores.popleft())
        return True

    def give_up(self, *kinds: type[Op]) -> None:
        """Work of some kinds, whether it waits or runs."""
        self._chores = deque(each for each in self._chores if not isinstance(each, kinds))
        self.void = self.void or isinstance(self.doing, kinds)

    def finished(self) -> bool:
        """Nothing runs any more; whether what ran is of use."""
        void, self.void, self.doing = self.void, False, None
        return not void


FORMER_S = 300.0  # for one that is told to stop: as long as a stage may take to build


class OpThread:
    """Builds its computer and runs one work after another, on its own thread. It wakes the owner, who finds that it is
    `built`, what is `done`, or the `failure`.

    `least_ns` says how long a work takes at least: an emulated node is no faster than the plan says. The `former` one
    ends before this one builds, so that there is no need for memory for both.
    """

    def __init__(
        self,
        build: Callable[[], Executor],
        wake: Callable[[], None],
        least_ns: Callable[[Op], int] | None,
        former: OpThread | None = None,
    ) -> None:
        self.built = False
        self.done: deque[tuple[Op, Any]] = deque()
        self.failure: Exception | None = None
        self._build = build
        self._former = former
        self._executor: Executor | None = None
        self._wake = wake
        self._least_ns = least_ns
        self._queue: SimpleQueue[tuple[Op, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def start(self, work: Op) -> None:
        self._queue.put((work, time.monotonic_ns()))

    def fits(self, message: Message, at: int, size: int) -> bool:
        return self._executor is not None and self._executor.fits(message, at, size)

    def stop(self) -> None:
        """After what runs now."""
        self._queue.put(None)

    def join(self, within_s: float) -> None:
        """A thread that is inside torch when the interpreter ends takes the process down with SIGABRT."""
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.join(FORMER_S)
                self._former = None
            executor = self._executor = self._build()
            self.built = True
            self._wake()
            while (job := self._queue.get()) is not None:
                work, started_ns = job
                result = executor.run(work)
                if self._least_ns is not None:
                    left_ns = started_ns + self._least_ns(work) - time.monotonic_ns()
                    if left_ns > 0:
                        time.sleep(left_ns / 1e9)
                self.done.append((work, result))
                del job, work, result  # or the tensors would live on until there is other work
                self._wake()
        except Exception as error:
            self.failure = error
            self._wake()
        finally:
            self._executor = None


def op_name(op: object) -> str:
    """`OptimizerStep` → optimizer step: for people."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(op).__name__.strip("_")).lower()
