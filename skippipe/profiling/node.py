"""A node that is measured: its configuration, its role, and its state machine, which first computes, then probes links
to other nodes and answers their probes.

The state machine is one like that of training, over the same sockets: what it sends are tensors along a path, as far as
the transport can tell. Every one is answered at once by a small one; both carry the number of the probe and of the
message, so that a late answer is not taken for another one.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.cluster import Cluster
from skippipe.codecs import EncodedTensor
from skippipe.heartbeat import TIMEOUT_S
from skippipe.profiling.estimators import SMALL_BYTES, LinkProbe, ProbeSettings
from skippipe.runtime.messages import COORDINATOR, Computed, ControlMessage, Hello, Probe, Probed, Stop
from skippipe.runtime.node.interfaces import PROFILING, NodeEnv, Role, Roles
from skippipe.runtime.state_source import StateSource
from skippipe.toml_config import from_table
from skippipe.transport.link_emulation import EmulatedLink
from skippipe.transport.message import Message, ProbePiece
from skippipe.value_ranges import HEARTBEAT_S, THREADS, WAIT_S
from skippipe.workload import Workload

if TYPE_CHECKING:
    from skippipe.profiling.compute_bench import ComputeBench
    from skippipe.runtime.node.interfaces import JoinConfig

log = logging.getLogger(__name__)
PING, PONG = 0, 1  # the direction of a message that measures a link


@dataclass(frozen=True)
class ProfilingConfig:
    names: tuple[str, ...]
    """All nodes; a node's number is its place here."""
    config: dict[str, Any]
    """The model's configuration, as Hugging Face writes it."""
    workload: Workload
    """The size of a microbatch, and how it is computed."""
    device: str = "cpu"
    compiled: bool = False
    threads: Annotated[int, THREADS] = 1
    compute_s: Annotated[float, WAIT_S] = 1.0
    """Seconds for the passes that are measured; the one that runs then is the last."""
    effort: ProbeSettings = field(default_factory=ProbeSettings)
    emulated: Cluster | None = None
    """Links are emulated as in this cluster of the same nodes; none: they are as they are."""
    heartbeat_s: Annotated[float, HEARTBEAT_S] = TIMEOUT_S
    """Seconds without a heartbeat after which a node is declared dead."""

    @property
    def number(self) -> dict[str, int]:
        """Node → its number."""
        return {name: number for number, name in enumerate(self.names)}

    @property
    def work(self) -> str:
        """What nodes compute, in words: their speed depends on it."""
        work = self.workload
        how = [work.compute_dtype] + ["recomputed"] * work.activation_checkpointing + ["compiled"] * self.compiled
        return f"{work.model.name}, {work.samples_per_microbatch} × {work.sequence_tokens} tokens, {', '.join(how)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": PROFILING,
            **vars(self),
            "names": list(self.names),
            "workload": self.workload.to_json(),
            "effort": asdict(self.effort),
            "emulated": self.emulated.to_json() if self.emulated else None,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProfilingConfig:
        return from_table(cls, {name: each for name, each in value.items() if name != "kind"}, "node_config")


@dataclass(frozen=True)
class RunPasses:
    """What its executor is asked to do, once (see `compute_bench`)."""


class ProfilingNode:
    epoch = 0

    def __init__(self, number: int, nodes: int, effort: ProbeSettings, env: NodeEnv) -> None:
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → how many such messages were dropped."""
        self._number = number
        self._nodes = nodes
        self._effort = effort
        self._env = env
        self._probe: Probe | None = None
        self._probing = LinkProbe(effort)
        self._step = 0
        self._sent_ns = 0
        self._prober: int | None = None
        """The node that probes the link to this one, or was the last to do so."""
        self._computes = False

    @property
    def doing(self) -> str:
        if self._probe is not None:
            return f"measuring the link to node {self._probe.peer}"
        return "computing" if self._computes else "waiting to be measured"

    def hello(self, address: str, version: str) -> Hello:
        """Greet a new coordinator, which does not wait for the result of an earlier probe."""
        self._probe = None
        return Hello(address, version)

    def executor_ready(self, _origin: StateSource | None, _assignment: int) -> None:
        self._computes = True
        self._env.start(RunPasses())

    def finished(self, _work: Any, result: Computed) -> None:
        self._computes = False
        self._env.send_control(result)

    # Input

    def handle_control(self, control: ControlMessage) -> None:
        match control:
            case Probe() if 0 <= control.peer < self._nodes and control.peer != self._number:
                self._probe, self._probing, self._step = control, LinkProbe(self._effort), 0
                self._send_next()
            case Stop():
                self.stopped = control
            case _:
                self._drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        header = message.header
        if not isinstance(header, ProbePiece) or message.body is None:
            self._drop(sender, message.kind.label)
        elif header.direction == PING:
            self._prober = sender
            self._env.send(sender, _message(header.probe, PONG, header.step, SMALL_BYTES))
        elif self._probe and (sender, header.probe, header.step) == (self._probe.peer, self._probe.probe, self._step):
            self._probing.took((self._env.now_ns() - self._sent_ns) / 1e9)
            self._step += 1
            self._send_next()
        else:
            self._drop(sender, "a late answer")

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        self._drop(sender, type(control).__name__)

    # Actions

    def decide(self) -> None:
        """Report what there is when an answer has not come in time."""
        if self._probe and self._env.now_ns() - self._sent_ns > 1e9 * self._effort.answer_timeout_s:
            self._report(self._probe)

    def active_peers(self) -> set[int]:
        """The node whose link it probes, and the one that it answers."""
        measured = self._probe.peer if self._probe else None
        return {each for each in (measured, self._prober) if each is not None}

    def reconnected(self, _peer: int) -> None:
        """A connection broke and came back: a message that was on its way may be lost, and its answer is then late."""

    def retry_requests(self, _timeout_ns: int) -> None:
        """Nothing is repeated."""

    def _send_next(self) -> None:
        assert self._probe is not None
        size = self._probing.next_bytes()
        if size is None:
            self._report(self._probe)
            return
        message = _message(self._probe.probe, PING, self._step, size)
        self._sent_ns = self._env.now_ns()
        self._env.send(self._probe.peer, message)

    def _report(self, probe: Probe) -> None:
        self._probe = None
        self._env.send_control(Probed(probe.probe, [[float(size), took_s] for size, took_s in self._probing.samples]))

    def _drop(self, sender: int, what: str) -> None:
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            log.warning("dropped from %s: %s (later ones are only counted)", sender, what)


def _message(probe: int, direction: int, step: int, size: int) -> Message:
    return Message(ProbePiece(probe, direction, step), EncodedTensor("fp32", (size // 4,), bytes(size)))


def profiling_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ProfilingConfig.from_json(config)

    def build_bench() -> ComputeBench:
        from skippipe.profiling.compute_bench import ComputeBench

        device = join_config.device or node_config.device
        return ComputeBench(
            node_config.config, node_config.workload, device, node_config.compute_s, node_config.compiled
        )

    return Role(
        machine=ProfilingNode(node_config.number[join_config.name], len(node_config.names), node_config.effort, env),
        build=build_bench,
        numbers=node_config.number,
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
        links=_links(node_config, join_config.name),
    )


ROLES: Roles = {PROFILING: profiling_role}


def _links(node_config: ProfilingConfig, name: str) -> dict[str, EmulatedLink]:
    like = node_config.emulated
    if like is None:
        return {}
    own = like.number[name]
    return {
        other: EmulatedLink(float(like.latency_s[own, at]), float(like.bandwidth_bytes_per_s[own, at]))
        for other, at in like.number.items()
        if other != name
    }
