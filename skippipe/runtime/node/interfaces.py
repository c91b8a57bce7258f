"""Interfaces of a node: what its state machine sees of the world, what the agent sees of a state machine, what those of
all roles have in common, and roles."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from skippipe.runtime.messages import COORDINATOR, ControlMessage, Hello, Stop
from skippipe.runtime.state_source import StateSource
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_emulation import EmulatedLink
from skippipe.transport.mailbox import Security
from skippipe.transport.message import Message

log = logging.getLogger(__name__)


class NodeEnv(Protocol):
    """The world as a node's state machine sees it: clock, network and executor."""

    def now_ns(self) -> int: ...

    def send(self, receiver: int, message: Message) -> None: ...

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None: ...

    def start(self, op: Any) -> None:
        """Have an operation run; `finished` follows. Tasks of different devices at the same time, others alone."""

    def fits(self, message: Message, expected: Any) -> bool:
        """Has the message's tensor the shape and type that it should have? `expected` is what the role's executor needs
        to know for that: of a training node the averaging schedule, of one that serves the number of tokens."""

    def prefetch(self, given: Any, device: int) -> Any:
        """What a hop has brought, on its way to one of the node's devices before its task begins."""


class TensorReceiver(Protocol):
    """The part of a node that tensors of one kind of message are for."""

    def expects(self, sender: int, header: Any) -> bool:
        """Does a message come here, from there?"""

    def take(self, sender: int, message: Message, arrived_ns: int) -> bool:
        """A message that is expected; whether it is the first of its kind."""


class NodePhase(Enum):
    """How far a node is in an iteration; the value is for people."""

    WAITING = "waiting for the coordinator to begin"
    RUNNING = "running tasks"
    DRAINING = "finishing what is left"
    DRAINED = "waiting for the coordinator to have gradients averaged"
    AVERAGING = "averaging gradients"
    AVERAGED = "waiting for the coordinator's step"
    STEPPING = "taking the optimizer step"
    RESTARTING = "waiting for the iteration to begin again without a device that failed"


IN_ITERATION = (NodePhase.RUNNING, NodePhase.DRAINING, NodePhase.DRAINED, NodePhase.AVERAGING, NodePhase.AVERAGED)
BETWEEN_ITERATIONS = (NodePhase.STEPPING, NodePhase.WAITING)


ALL_DEVICES = "all"  # that are there, of the kind that the job names
TRAINING, SERVING, PROFILING = "training", "serving", "profiling"
"""A node's role: the `kind` of the configuration that it gets; TRAINING where it has none."""


class StateMachine(Protocol):
    """A node's state machine, in any role."""

    stopped: Stop | None
    """The coordinator's order to end."""

    @property
    def doing(self) -> str:
        """The operation that runs, or what the node waits for, in words for people."""

    epoch: int
    """The newest epoch that the node knows of; 0 in roles without epochs."""

    def executor_ready(self, origin: StateSource | None, assignment: int) -> None:
        """The executor is built; the node gets its state from there, or keeps what the seed gives."""

    def hello(self, address: str, version: str) -> Hello:
        """The announcement to a coordinator, which may be another than the one before."""

    def handle_control(self, control: ControlMessage) -> None:
        """A control message of the coordinator."""

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        """A control message of another node."""

    def receive(self, sender: int, message: Message) -> None:
        """A tensor from another node or, if it is state, from the coordinator."""

    def finished(self, op: Any, result: Any) -> None:
        """An operation that was started is done."""

    def decide(self) -> None:
        """Start the operation that goes next, if none runs."""

    def active_peers(self) -> set[int]:
        """Nodes that this one exchanges messages with now."""

    def reconnected(self, peer: int) -> None:
        """The connection to a peer was broken and is up again: what was sent last may be lost."""

    def retry_requests(self, timeout_ns: int) -> None:
        """Send requests again that got no answer in that time."""


class BaseNode:
    """What the state machines of all roles have in common: messages that are not expected are dropped and counted."""

    epoch = 0

    def __init__(self, number: int, env: NodeEnv) -> None:
        self.number = number
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → number of messages that were not taken."""
        self._env = env

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        self.drop(sender, type(control).__name__)

    def reconnected(self, _peer: int) -> None:
        """Nothing is sent again: whoever asked for it notices what was lost with the connection."""

    def retry_requests(self, _timeout_ns: int) -> None:
        """A node without a plan has no requests of its own."""

    def drop(self, sender: int, what: str) -> None:
        """Count a message that is of no use; the first of its kind goes to the log."""
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            name = "the coordinator" if sender == COORDINATOR else self._name_of(sender)
            log.warning("dropped a message of %s: %s (later ones are only counted)", name, what)

    def _name_of(self, node: int) -> str:
        return f"node {node}"


@dataclass(frozen=True)
class Role:
    """What a node does in a run: its state machine, its executor, and how they are run."""

    machine: StateMachine
    build: Callable[[], Any]
    """Makes the executor, which may take long."""
    numbers: dict[str, int]
    """Name → number of every node."""
    heartbeat_s: float
    threads: int
    devices: int = 1
    """Devices of the executor that run tasks side by side."""
    pace: Callable[[Any], int] | None = None
    """The least ns that an operation takes: an emulated node is no faster than the plan says."""
    links: Mapping[str, EmulatedLink] = field(default_factory=dict)
    """Name → emulated link to that node."""
    links_here: Mapping[str, EmulatedLink] = field(default_factory=dict)
    """Name → emulated link from that node to this one."""
    upload_bytes_per_s: float | None = None
    """What all links carry from here together, emulated or real; None: no limit, as is the next."""
    download_bytes_per_s: float | None = None


@dataclass(frozen=True)
class JoinConfig:
    """How a node reaches its coordinator, and what is particular to its machine."""

    name: str
    coordinator: str
    """host:port; several, with commas between them, of both kinds or if the coordinator may come back elsewhere."""
    keys: KeyPair | None = None
    coordinator_public: str | None = None
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    address: str | None = None
    """The addresses at which other nodes reach this one, with commas; none: those that it listens on."""
    data_folder: Path | None = None
    """The folder of the data on this machine; none: the same path as on the coordinator's."""
    checkpoint: Path | None = None
    """The folder of the model that is served, on this machine; none: the same path as on the gateway's."""
    devices: str | None = None
    """The devices that this machine computes on, as `parse_devices` reads them, or `ALL_DEVICES`; none: the job's."""
    coordinator_timeout: timedelta = timedelta(minutes=15)
    """How long to wait for the coordinator, before training starts and whenever it is gone."""


def node_devices(asked: str | None, of_job: str, planned: int, before: int = 0) -> list[str]:
    """The devices of one node, which work side by side: those that it was `asked` to use, else the job's.

    Where no number is given there are as many as `planned`, or all GPUs of a machine that was asked for them. Nodes
    that a job starts on one machine take its GPUs in turn: those `before` this one have so many."""
    text = of_job if asked in (None, ALL_DEVICES) else asked
    if text == "cpu":
        return ["cpu"] * planned
    from skippipe.model.model_spec import parse_devices

    found = parse_devices(text)
    if asked is not None or text != "cuda":
        return found
    first = before % len(found)
    return [*found[first:], *found[:first]][:planned]


RoleBuilder = Callable[[dict[str, Any], JoinConfig, NodeEnv], Role]
"""Makes a node's role from the configuration that the coordinator sent, as JSON."""
Roles = Mapping[str, RoleBuilder]
"""The roles that a process can take as a node, by the kind of the configuration."""
