"""What a coordinator sees of the world: those it can reach, those who watch, those who keep checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.messages import ControlMessage, StateRequest
from skippipe.runtime.node.ops import StateSource


class CoordinatorEnv(Protocol):
    """All that a coordinator can do to the world."""

    def now_ns(self) -> int: ...

    def meet(self, node: int, address: str) -> bool:
        """From now on the node can be told things, and the others know where it is; unless that is no address."""

    def tell(self, node: int, control: ControlMessage) -> None: ...

    def welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        """Have a node build its stage of the plan; and fetch its state from there, if that is said."""

    def replan(self, node: int, plan: Plan) -> None:
        """From its next iteration on, this is the plan."""

    def store(self, stage: int, number: int, piece: Any) -> None:
        """Keep a piece of a stage's weights; None after the last, and then they are on disk. A stage may begin again
        with its first piece. Unwritten if it is not on disk yet: the same call may be made again."""

    def note(self, record: dict[str, Any]) -> None:
        """Write down what has been decided; it is safe when this returns."""

    @property
    def keeper(self) -> CheckpointStore | None: ...

    def give(self, node: int, stage: int, want: StateRequest) -> None:
        """Send a node numbers of a checkpoint's state."""

    def part(self, node: int) -> None:
        """It is gone: nothing can be told to it any more."""


class WriteFailed(Exception):
    """What was to be stored could not be written; it is held meanwhile."""

    def __init__(self, what: str, ways: str) -> None:
        """`ways`: what can still be done if it is given up."""
        super().__init__(what)
        self.ways = ways


class Callback:
    """Whoever wants to know how it goes; what is of no interest is passed over."""

    def iteration_done(self, report: IterationReport) -> None:
        pass

    def happened(self, event: Event) -> None:
        pass

    def measured(self, cluster: Cluster) -> None:
        """What nodes and links really take by now; at checkpoints and at the end."""


class CheckpointStore(Protocol):
    """Whoever keeps checkpoints."""

    def save(self, stage: int, number: int, piece: Any) -> None:
        """A piece of a stage's state, in order; None after the last."""

    def saved(self, iterations: int, steps: Sequence[int]) -> None:
        """All stages were given: so many iterations are done, so many steps taken on each stage."""

    def abandon(self) -> None:
        """The checkpoint that is being made cannot be completed."""

    def state(self, stage: int, first: int, count: int) -> Any:
        """Numbers of the state to go on from."""

    def steps(self, stage: int) -> int:
        """That the optimizer had taken by then."""

    def lack(self) -> str:
        """Why what was given last is not on disk; empty if all is well. Waits for what is being written."""

    def move(self) -> None:
        """From now on checkpoints go to the rescue folder, if there is one."""

    def newest(self) -> int | None:
        """Go on from the newest checkpoint there is: after how many iterations it was made; None: there is none."""


EventKind = Literal[
    "gone",
    "rerouted",
    "restarted",
    "replanned",
    "joined",
    "learning",
    "able",
    "paused",
    "slow",
    "cut",
    "not-finite",
    "refused",
    "checkpoint",
    "recovered",
    "drill",
    "ending",
    "storage",
]

StopRequests = Callable[[], int]
"""How often somebody has asked for the end of the run. Once: this iteration is the last. Twice: it ends at once."""


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary."""

    kind: EventKind
    iteration: int
    text: str
    node: str = ""


class EventLogger(Protocol):
    """To say that something out of the ordinary has happened, perhaps to a node."""

    def __call__(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass(frozen=True)
class IterationReport:
    iteration: int
    loss: float
    """Mean over the microbatches."""
    norm: float
    """Of the whole model's gradient, before it is clipped."""
    rate: float
    seconds: float
    """Since the one before was done."""
    sent_bytes: dict[tuple[int, int], int]
    """Sender and receiver → tensors sent."""
    tasks: dict[int, list[list[int]]]
    """Node → its tasks, if they were recorded (see `Averaged`)."""
    visits: tuple[int, ...] = ()
    """How many microbatches are in each stage's gradient."""
    plan: Plan | None = None
    """Of this iteration; None in one process."""

    @property
    def promised_s(self) -> float | None:
        return self.plan.expected.iteration_s if self.plan and self.plan.expected else None
