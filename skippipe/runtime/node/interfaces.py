"""What a node sees of the world, and how far it is in an iteration.

What a member is to do: the state machine it runs, and the computer that works for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from skippipe.runtime.messages import COORDINATOR, ControlMessage, Hello, Stop
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_emulation import EmulatedLink
from skippipe.transport.mailbox import Security
from skippipe.transport.message import Message


class NodeEnv(Protocol):
    """All that a node can do to the world."""

    def now_ns(self) -> int: ...

    def send(self, receiver: int, message: Message) -> None: ...

    def say(self, control: ControlMessage, to: int = COORDINATOR) -> None: ...

    def start(self, work: Any) -> None:
        """Have it run; `finished` follows. One work at a time."""

    def fits(self, message: Message, at: int, size: int) -> bool:
        """Is a tensor what it should be? (See `work.Computer`.)"""


class NodePhase(Enum):
    WAITING = "waiting for the coordinator to begin"
    RUNNING = "running tasks"
    SETTLING = "finishing what is left"
    SETTLED = "waiting for the coordinator to have gradients averaged"
    AVERAGING = "averaging gradients"
    AVERAGED = "waiting for the coordinator's step"
    STEPPING = "taking the optimizer step"


IN_ITERATION = (NodePhase.RUNNING, NodePhase.SETTLING, NodePhase.SETTLED, NodePhase.AVERAGING, NodePhase.AVERAGED)


TRAINING, SERVING, PROFILING = "training", "serving", "profiling"
"""What a node is asked to do: the `kind` of the configuration that it gets; TRAINING where it has none."""


class StateMachine(Protocol):
    """A node's state machine, whatever it is for."""

    stopped: Stop | None
    """It was told to end."""

    @property
    def doing(self) -> str:
        """For people."""

    epoch: int
    """The newest that it knows of; where there are none, 0."""

    def welcomed(self, origin: dict[str, Any], assignment: int) -> None:
        """Its computer is there."""

    def hello(self, address: str, version: str) -> Hello:
        """To a coordinator, which may be another than the one before."""

    def hear(self, control: ControlMessage) -> None:
        """From the coordinator."""

    def asked(self, sender: int, control: ControlMessage) -> None:
        """By another node."""

    def receive(self, sender: int, message: Message) -> None: ...

    def restore(self, message: Message) -> None:
        """State, from the coordinator."""

    def finished(self, work: Any, result: Any) -> None: ...

    def decide(self) -> None:
        """Start what goes next, if nothing runs."""

    def talks_to(self) -> set[int]:
        """Nodes that it sends to."""

    def lost(self, peer: int) -> None:
        """A connection was broken and is there again."""

    def remind(self, patience_ns: int) -> None:
        """Say again what may have been lost."""


@dataclass(frozen=True)
class Role:
    machine: StateMachine
    build: Callable[[], Any]
    """Makes the computer, which may take long."""
    numbers: dict[str, int]
    """Of all nodes."""
    heartbeat_s: float
    threads: int
    pace: Callable[[Any], int] | None = None
    """How long a work takes at least, in ns: an emulated node is no faster than the plan says."""
    links: Mapping[str, EmulatedLink] = field(default_factory=dict)
    """To other nodes, if they are emulated."""


@dataclass(frozen=True)
class JoinConfig:
    """How a node finds its way in."""

    name: str
    coordinator: str
    """host:port; several, with commas between them, if the coordinator may come back elsewhere."""
    keys: KeyPair | None = None
    coordinator_public: str | None = None
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    address: str | None = None
    """Where others reach this node; none: where it listens."""
    data_folder: Path | None = None
    """Where this machine keeps the text; none: where the coordinator does."""
    checkpoint: Path | None = None
    """Where this machine keeps the model that is served; none: where the gateway does."""
    device: str | None = None
    """What this machine computes on; none: what the job says."""
    patience: timedelta = timedelta(minutes=15)
    """How long to wait for the coordinator, before training starts and whenever it is gone."""


RoleBuilder = Callable[[dict[str, Any], JoinConfig, NodeEnv], Role]
"""Makes a node's role from the configuration that the coordinator sent, as JSON."""
Roles = Mapping[str, RoleBuilder]
"""What a process can do as a node, by the kind of the configuration."""
