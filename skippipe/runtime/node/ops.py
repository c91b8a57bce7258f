"""Operations of a node's executor: what they are, the queue that they wait in, and the threads that run them.

The executor runs tasks of different microbatches side by side, one on each device of the node, and every other
operation alone. Each device has a thread of its own, so that receiving, sending and heartbeats go on meanwhile.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from skippipe import dispatch
from skippipe.collectives.schedule import Schedule
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.state_source import StateSlice, StateSource
from skippipe.stage_subset import StageHop
from skippipe.transport.message import Message

is_weights = python_version(dispatch.is_weights)
LEAST_VALUES = 2**12  # of a slice of state; one that comes too late is halved, but not below this


@dataclass(frozen=True)
class StageTask:
    """One step of one microbatch on this stage (see `dispatch`)."""

    iteration: int
    lane: int
    microbatch: int
    """The microbatch's number on its lane, from 0."""
    step: int
    length: int
    """The length of the lane's path as it was planned: places that were skipped since are included."""
    data: int
    """The place of the microbatch among all of the iteration, which determines its data."""
    given: Any = None
    """The tensor that the message brought; None for the first step of a microbatch, and for weight gradients."""
    hop: StageHop | None = None
    """Of a forward step: how the lane's path as it was planned goes on from the stage, if it leaves stages out."""
    counts: bool = True
    """Its weight gradients are added up; not if this node has added them before, and the microbatch comes again."""
    wire_dtype: str = ""
    """Codec of its result on the way to the next node; empty: that of the workload."""
    device: int = 0
    """The node's device that it runs on, of those that work side by side."""
    teacher_hidden: Any = None
    """What the whole model has made of the microbatch, if it learns from that: of a head before the final norm; of a
    backward pass, where hidden states teach, before this stage."""

    @property
    def is_weights(self) -> bool:
        """It computes the weight gradients that a split backward has left over."""
        return is_weights(self.step, self.length)


@dataclass(frozen=True)
class EvaluateSamples:
    """One forward step of held-out samples on this stage, or their loss; nothing is kept for a backward pass."""

    iteration: int
    """The last iteration whose step the weights have taken; with the epoch, it says which evaluation this is of."""
    epoch: int
    lane: int
    microbatch: int
    step: int
    length: int
    given: Any = None
    """The tensor that the message brought; None for the first step."""

    @property
    def is_head(self) -> bool:
        return self.step == self.length


@dataclass(frozen=True)
class TeacherForward:
    """One forward step of the whole model on this stage, for a microbatch that learns from it; nothing is kept for a
    backward pass."""

    iteration: int
    epoch: int
    """That in which its path was chosen."""
    lane: int
    microbatch: int
    step: int
    length: int
    data: int
    """As in `StageTask`, like the next."""
    given: Any = None
    wire_dtype: str = ""


class OpResult(NamedTuple):
    """The result of a forward or backward step."""

    payload: Any
    """The tensor for the next node on the path."""
    loss: Any = None
    """The loss of the microbatch, if the task was its head: a number, perhaps still on its way from a GPU."""
    tokens: int = 0
    """Tokens that a held-out loss is the mean of."""


class DeviceLost(NamedTuple):
    """The result of any operation in an iteration whose device has failed; the node goes on with its others."""

    device: int
    reason: str


@dataclass(frozen=True)
class DropMicrobatch:
    """Discard a microbatch on its way: it starts over, or takes another route."""

    lane: int
    microbatch: int


@dataclass(frozen=True)
class ClearGradients:
    """Discard all microbatches and the gradients of the iteration: it starts over."""


@dataclass(frozen=True)
class CheckFinite:
    """Check whether this node's sum of gradients is finite; if not, clear it. Gives True if it is finite."""


@dataclass(frozen=True)
class BeginAveraging:
    """Begin an attempt at averaging by a schedule (see `collectives.interface.Averager`, as for the next two)."""

    schedule: Schedule


@dataclass(frozen=True)
class ContributePiece:
    """Add this node's part of a piece to those that were `given`, in their order; gives the sum, encoded."""

    piece: int
    given: tuple[Any, ...]
    total: bool
    """This node is the root of the piece: the sum is over all nodes, and this one adopts it."""


@dataclass(frozen=True)
class AdoptPiece:
    """Take the total of a piece."""

    piece: int
    given: Any


@dataclass(frozen=True)
class GradNorm:
    """Turn the sum of gradients into their mean over the microbatches that came; gives its squared norm."""

    stage_microbatches: int
    alone: bool
    """The node is alone in its stage: its own sum is meant, instead of the sum over the stage."""


@dataclass(frozen=True)
class OptimizerStep:
    """Follow the mean gradient, times `scale`; then gradients are zero again. A scale of 0 stands for no step."""

    rate: float
    scale: float


@dataclass(frozen=True)
class ReadWeights:
    """Give a piece of the weights, for the coordinator; None past the last."""

    piece: int
    from_snapshot: bool = False
    """A piece of the snapshot, with the optimizer's state, instead of the weights as they are now."""
    collection: int = 0
    """The number of the gathering that the piece is for (see `messages.GatherState`)."""


@dataclass(frozen=True)
class SnapshotState:
    """Copy weights and optimizer state, for a checkpoint."""


@dataclass(frozen=True)
class PlanTransfer:
    """Give the list of `StateSlice`s that make up the state; the optimizer's number of steps is set at once."""

    origin: StateSource


@dataclass(frozen=True)
class ReadState:
    """Give values of this node's state as it is now, for a node that recovers, as a `StateChunk`."""

    first: int
    count: int
    to: int
    """The node that requested them."""
    assignment: int = 0
    """What they are for (see `messages.StateRequest`)."""
    backup: int = 0
    """Values of the copy of stage 0's ends that was made after so many iterations, instead of the state; 0: state."""


@dataclass(frozen=True)
class WriteState:
    """Write received values into the state; gives False if they do not have the digest."""

    part: StateSlice
    given: Any
    digest: str = ""
    """Empty for values from the coordinator, which has checked them."""


@dataclass(frozen=True)
class CopyBackup:
    """Copy embedding, final norm and head, for a node of another stage to keep."""

    iterations: int
    """Iterations that are done by now."""


@dataclass(frozen=True)
class OpenBackup:
    """Allocate a copy of embedding, final norm and head beside the one that is kept; gives its `StateSlice`s."""

    source: int
    iterations: int


@dataclass(frozen=True)
class StoreBackup:
    """Write a piece of that copy; gives False if it does not have the digest. With the last piece, the copy takes the
    older one's place."""

    part: StateSlice
    given: Any
    digest: str


Op = (
    StageTask
    | EvaluateSamples
    | TeacherForward
    | DropMicrobatch
    | ClearGradients
    | CheckFinite
    | BeginAveraging
    | ContributePiece
    | AdoptPiece
    | GradNorm
    | OptimizerStep
    | ReadWeights
    | SnapshotState
    | PlanTransfer
    | ReadState
    | WriteState
    | CopyBackup
    | OpenBackup
    | StoreBackup
)

OPS_OF_AVERAGING = (BeginAveraging, ContributePiece, AdoptPiece, GradNorm, CheckFinite)
OPS_OF_TRANSFER = (ReadState, PlanTransfer, WriteState, CopyBackup, OpenBackup, StoreBackup)
OPS_OF_ITERATION = (StageTask, TeacherForward, DropMicrobatch, *OPS_OF_AVERAGING)


class Executor(Protocol):
    """Runs operations, with real tensors, or with symbols under virtual time: tasks of different devices at the same
    time, each on its own thread, and all others alone."""

    def run(self, op: Op) -> Any: ...

    def fits(self, message: Message, expected: Any) -> bool:
        """Has the message's tensor the shape and type that it should have? `expected` is the schedule by which the
        stage averages. Called on another thread than `run`."""

    def prefetch(self, given: Any, device: int) -> Any:
        """What a hop has brought, on its way to the device whose task is likely to need it; any other can take it, too.
        Called on another thread than `run`."""


class OpQueue:
    """Operations that wait, in order. One that runs cannot be interrupted: if it is cancelled, its result is unused.

    Tasks do not wait here and may run side by side; what waits runs alone, when they are done."""

    def __init__(self, start: Callable[[Op], None]) -> None:
        self.running: list[Op] = []
        self._cancelled: list[Op] = []
        """Operations that run, and whose results are unused."""
        self._start = start
        self._waiting: deque[Op] = deque()

    def add(self, op: Op) -> None:
        self._waiting.append(op)

    def start(self, op: Op) -> None:
        self.running.append(op)
        self._start(op)

    def start_next(self) -> bool:
        """Start the next operation if none runs; whether there is one, which others have to wait for."""
        if not self._waiting:
            return False
        if not self.running:
            self.start(self._waiting.popleft())
        return True

    @property
    def cancelled(self) -> bool:
        """Was an operation cancelled that runs?"""
        return bool(self._cancelled)

    def cancel(self, *kinds: type[Op]) -> None:
        """Cancel operations of some kinds, whether they wait or run."""
        self._waiting = deque(each for each in self._waiting if not isinstance(each, kinds))
        self.cancel_running([each for each in self.running if isinstance(each, kinds)])

    def cancel_running(self, ops: Sequence[Op]) -> None:
        self._cancelled += ops

    def finished(self, op: Op) -> bool:
        """An operation runs no more; whether its result is of use."""
        useful = not any(each is op for each in self._cancelled)
        self.running = [each for each in self.running if each is not op]
        self._cancelled = [each for each in self._cancelled if each is not op]
        return useful


FORMER_S = 300.0  # for a thread that was stopped to end: as long as a stage may take to build


class OpThreads:
    """Builds its executor and runs operations, one after another on a thread for each device. It wakes the owner, who
    finds that it is `built`, what is `done`, or the `failure`.

    `least_ns` gives the least time that an operation takes: an emulated node is no faster than the plan says. The
    `former` threads end before these build, so that there is no need for memory for both.
    """

    def __init__(
        self,
        build: Callable[[], Executor],
        wake: Callable[[], None],
        least_ns: Callable[[Op], int] | None,
        former: OpThreads | None = None,
        devices: int = 1,
    ) -> None:
        self.built = False
        self.done: deque[tuple[Op, Any]] = deque()
        self.failure: Exception | None = None
        self._build = build
        self._former = former
        self._executor: Executor | None = None
        self._wake = wake
        self._least_ns = least_ns
        self._queues: list[SimpleQueue[tuple[Op, int] | None]] = [SimpleQueue() for _ in range(devices)]
        self._threads: list[threading.Thread] = []
        self._start_thread("compute", self._build_and_run)

    def start(self, op: Op) -> None:
        """An operation that is no task is started when no other runs."""
        device = op.device if isinstance(op, StageTask) else 0
        self._queues[device].put((op, time.monotonic_ns()))

    def fits(self, message: Message, expected: Any) -> bool:
        return self._executor is not None and self._executor.fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        return given if self._executor is None else self._executor.prefetch(given, device)

    def stop(self) -> None:
        """End after the operations that run now."""
        for queue in self._queues:
            queue.put(None)

    def join(self, within_s: float) -> None:
        """Wait for the end: a thread that is inside torch when the interpreter ends aborts the process (SIGABRT)."""
        deadline = time.monotonic() + within_s
        for thread in self._threads:  # the first one starts the others
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def _build_and_run(self) -> None:
        try:
            if self._former is not None:
                self._former.join(FORMER_S)
                self._former = None
            executor = self._executor = self._build()
            for device in range(1, len(self._queues)):
                self._start_thread(f"compute-{device}", partial(self._run, executor, device))
            self.built = True
            self._wake()
        except Exception as error:
            self.failure = error
            self._wake()
            return
        self._run(executor, 0)

    def _run(self, executor: Executor, device: int) -> None:
        try:
            while (job := self._queues[device].get()) is not None:
                op, started_ns = job
                result = executor.run(op)
                if self._least_ns is not None:
                    left_ns = started_ns + self._least_ns(op) - time.monotonic_ns()
                    if left_ns > 0:
                        time.sleep(left_ns / 1e9)
                self.done.append((op, result))
                del job, op, result  # or the tensors would live on until the next operation
                self._wake()
        except Exception as error:
            self.failure = error
            self._wake()
        finally:
            self._executor = None


def op_name(op: object) -> str:
    """`OptimizerStep` → optimizer step: for people."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(op).__name__.strip("_")).lower()


def planned_ns(plan: Plan, stage: int, node: int, work: Op) -> int:
    """How long an operation takes by the plan; 0 for one that is not in it. The node may be new on the stage.

    This is what virtual time uses, and what emulated nodes are held to.
    """
    costs = plan.costs
    if isinstance(work, OptimizerStep):
        return int(costs.optimizer_ns[stage, node])
    if isinstance(work, EvaluateSamples):
        return int(costs.head_ns[node] if work.is_head else costs.forward_ns[stage, node])
    if isinstance(work, TeacherForward):
        return int(costs.forward_ns[stage, node])
    if not isinstance(work, StageTask):
        return 0
    length = work.length
    if work.step < length:
        return int(costs.forward_ns[stage, node])
    if work.step == length:
        return int(costs.head_ns[node])
    if work.is_weights:
        return int(costs.weight_ns[stage, node])
    return int((costs.input_ns if plan.split_backward else costs.backward_ns)[stage, node])
