"""What a coordinator needs from its environment: a network, a write-ahead log, a checkpoint store, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from skippipe.cluster import Cluster
from skippipe.plan import Plan
from skippipe.runtime.messages import ControlMessage, StateRequest
from skippipe.runtime.state_source import StateSource


class CoordinatorState(Enum):
    """What the coordinator does; the value completes the sentence "waited for nodes …"."""

    JOINING = "to join"
    PREPARING = "to be ready"
    TRAINING = "to average gradients"
    PAUSED = "to take the places of lost ones"
    VALIDATING = "to evaluate held-out samples"
    STEPPING = "to take the last step"
    GATHERING = "to send its weights"
    REJOINING = "to reconnect to the restarted coordinator"
    DONE = "for nothing"
    FAILED = "for nothing any more"


class CoordinatorEnv(Protocol):
    """Every effect that a coordinator has on the outside."""

    def now_ns(self) -> int: ...

    def connect(self, node: int, address: str) -> bool:
        """Make a node reachable, and tell the other nodes its address; False if it is no valid address."""

    def send(self, node: int, control: ControlMessage) -> None: ...

    def send_welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        """Have a node build its stage of the plan, and fetch its state from an origin, if one is given."""

    def send_plan(self, node: int, plan: Plan) -> None:
        """Give a node the plan that holds from its next iteration on."""

    def store_weights(self, stage: int, number: int, piece: Any) -> None:
        """Store a piece of a stage's final weights; None after the last, and then they are on disk. A stage may begin
        again with its first piece. Raises WriteFailed if it is not on disk yet: the same call may be repeated."""

    def append_wal(self, record: dict[str, Any]) -> None:
        """Append a decision to the write-ahead log; it is durable when this returns."""

    @property
    def checkpoint_store(self) -> CheckpointStore | None: ...

    def send_checkpoint_state(self, node: int, stage: int, request: StateRequest) -> None:
        """Send a node a slice of a stage's state from the checkpoint."""

    def is_called(self, node: int) -> bool:
        """Is it still being found out whether a connected node can be reached?"""

    def disconnect(self, node: int) -> None:
        """Drop the connection to a node that is lost."""


class WriteFailed(Exception):
    """Weights could not be written; they are held in memory meanwhile."""

    def __init__(self, what: str, ways: str) -> None:
        """`ways`: what the user can still do if the run gives up."""
        super().__init__(what)
        self.ways = ways


class Callback:
    """Receives the progress of a run; a subclass overrides what it is interested in."""

    def iteration_done(self, report: IterationReport) -> None:
        pass

    def validated(self, report: ValidationReport) -> None:
        pass

    def happened(self, event: Event) -> None:
        pass

    def measured(self, cluster: Cluster) -> None:
        """Measured speeds of nodes and links, at checkpoints and at the end of the run."""

    def close(self) -> None:
        """Nothing more comes."""


class CheckpointStore(Protocol):
    """Writes checkpoints, and reads the state of the newest one."""

    def save(self, stage: int, number: int, piece: Any) -> None:
        """Take a piece of a stage's state, in order; None after the last."""

    def saved(self, iterations: int, steps: Sequence[int], validation_loss: float | None = None) -> None:
        """All stages were given: so many iterations are completed, so many optimizer steps taken on each stage; the
        held-out loss of these weights, if it was evaluated."""

    def abandon(self) -> None:
        """Drop the checkpoint that is being made: it cannot be completed."""

    def state(self, stage: int, first: int, count: int) -> Any:
        """A slice of a stage's state in the checkpoint that the run continues from."""

    def steps(self, stage: int) -> int:
        """Optimizer steps that a stage had taken when the checkpoint was made."""

    def lack(self) -> str:
        """Why the last checkpoint is not on disk; empty if it is. Waits for what is being written."""

    def move(self) -> None:
        """Write checkpoints to the rescue folder from now on, if there is one."""

    def newest(self) -> int | None:
        """Continue from the newest checkpoint there is: its completed iterations; None: there is none."""


EventKind = Literal[
    "lost",
    "rerouted",
    "restarted",
    "replanned",
    "joined",
    "recovering",
    "recovered",
    "paused",
    "slow",
    "link-down",
    "not-finite",
    "refused",
    "checkpoint",
    "validation",
    "coordinator-restarted",
    "drill",
    "ending",
    "storage",
    "admitted",
    "revoked",
    "checked",
    "grown",
]

StopRequests = Callable[[], int]
"""How often the user has asked for the end of the run. Once: this iteration is the last. Twice: it ends at once."""


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary in a run, as a line of `events.jsonl`."""

    kind: EventKind
    iteration: int
    text: str
    node: str = ""


class EventLogger(Protocol):
    """Reports an event, perhaps of one node."""

    def __call__(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass(frozen=True)
class ValidationReport:
    """The held-out loss after an iteration."""

    iteration: int
    loss: float
    """Mean over the tokens that count."""
    is_best: bool
    """It is the lowest so far."""
    seconds: float
    """How long training waited for it."""


@dataclass(frozen=True)
class IterationReport:
    """What is known about a committed iteration."""

    iteration: int
    loss: float
    """Mean over the microbatches."""
    norm: float
    """Norm of the whole model's gradient, before clipping."""
    rate: float
    """Learning rate."""
    seconds: float
    """Seconds since the iteration before was committed."""
    sent_bytes: dict[tuple[int, int], int]
    """Sender and receiver → bytes of tensors."""
    tasks: dict[int, list[list[int]]]
    """Node → its tasks, if they were recorded (see `Averaged`)."""
    stage_microbatches: tuple[int, ...] = ()
    """Microbatches in the gradient of each stage."""
    plan: Plan | None = None
    """The plan of this iteration; None in one process."""
    closing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Node → when it began and ended to average, and how long its step took, if they were recorded (see `Averaged`)."""
    copies: dict[int, list[list[int]]] = field(default_factory=dict)
    """Node → its copies between host and device, if they were recorded (see `Averaged`)."""

    @property
    def promised_s(self) -> float | None:
        return self.plan.expected.iteration_s if self.plan and self.plan.expected else None
