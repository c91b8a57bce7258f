"""A node that is measured: its configuration, its role, and its state machine, which first computes, then probes links
to other nodes, one at a time and several at once, and answers their probes.

The state machine is one like that of training, over the same sockets: what it sends are tensors along a path, as far as
the transport can tell. Every one is answered at once by one of the size that it asks for, mostly a small one; both
carry the number of the probe and of the message, so that a late answer is not taken for another one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.cluster import Cluster
from skippipe.codecs import EncodedTensor
from skippipe.heartbeat import TIMEOUT_S
from skippipe.profiling.estimators import (
    LARGEST_CHUNK_BYTES,
    MOST_CHUNKS,
    SMALL_BYTES,
    LinkProbe,
    ProbeSettings,
    RateProbe,
    Stream,
)
from skippipe.runtime.messages import COORDINATOR, Computed, ControlMessage, Hello, Probe, Probed, ProbeRate, Stop
from skippipe.runtime.node.interfaces import PROFILING, BaseNode, NodeEnv, Role, Roles, node_devices
from skippipe.runtime.state_source import StateSource
from skippipe.toml_config import from_table
from skippipe.transport.link_emulation import EmulatedLink
from skippipe.transport.message import PING, PONG, Message, ProbePiece
from skippipe.value_ranges import HEARTBEAT_S, THREADS, WAIT_S
from skippipe.workload import Workload

if TYPE_CHECKING:
    from skippipe.profiling.compute_bench import ComputeBench
    from skippipe.runtime.node.interfaces import JoinConfig

LATE = "a late answer"


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


class ProfilingNode(BaseNode):
    def __init__(self, number: int, nodes: int, effort: ProbeSettings, env: NodeEnv) -> None:
        super().__init__(number, env)
        self._nodes = nodes
        self._effort = effort
        self._probe: Probe | ProbeRate | None = None
        self._probing = LinkProbe(effort)
        self._rate_probing = RateProbe(effort, {})
        self._unconfirmed: Counter[int] = Counter()
        """Peer → chunks of its stream that are on the way."""
        self._step = 0
        self._began_ns = 0
        """When the probe of several links began."""
        self._sent_ns = 0
        """When the last message of a probe was sent."""
        self._prober: int | None = None
        """The node that probes the link to this one, or was the last to do so."""
        self._computes = False

    @property
    def doing(self) -> str:
        match self._probe:
            case Probe(peer=peer):
                return f"measuring the link to node {peer}"
            case ProbeRate(receiving=receiving):
                return f"measuring what it {'receives from' if receiving else 'sends to'} several nodes at once"
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
            case Probe() if self._is_peer(control.peer):
                self._probe, self._probing, self._step = control, LinkProbe(self._effort), 0
                self._send_next()
            case ProbeRate() if all(self._is_stream(row) for row in control.streams):
                self._probe = control
                self._start_streams(control)
            case Stop():
                self.stopped = control
            case _:
                self.drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        header = message.header
        if not isinstance(header, ProbePiece) or message.body is None:
            self.drop(sender, message.kind.label)
        elif header.direction == PING:
            self._prober = sender
            size = min(max(header.answer_bytes // 4 * 4, SMALL_BYTES), self._effort.most_bytes)
            self._env.send(sender, _message(ProbePiece(header.probe, PONG, header.step), size))
        elif self._probe is None or self._probe.probe != header.probe:
            self.drop(sender, LATE)
        elif isinstance(self._probe, ProbeRate):
            self._take_chunk(self._probe, sender)
        elif (sender, header.step) == (self._probe.peer, self._step):
            self._probing.took((self._env.now_ns() - self._sent_ns) / 1e9)
            self._step += 1
            self._send_next()
        else:
            self.drop(sender, LATE)

    # Actions

    def decide(self) -> None:
        """Report what there is when an answer has not come in time."""
        if self._probe is None:
            return
        waits_since_ns, limit_s = self._sent_ns, self._effort.answer_timeout_s
        if isinstance(self._probe, ProbeRate):
            waits_since_ns, limit_s = self._began_ns, self._effort.most_s + limit_s
        if self._env.now_ns() - waits_since_ns > 1e9 * limit_s:
            self._report(self._probe)

    def active_peers(self) -> set[int]:
        """The nodes whose links it probes, and the one that it answers."""
        match self._probe:
            case Probe(peer=peer):
                measured = {peer}
            case ProbeRate():
                measured = set(self._rate_probing.streams)
            case None:
                measured = set()
        return measured if self._prober is None else measured | {self._prober}

    def _send_next(self) -> None:
        assert isinstance(self._probe, Probe)
        size = self._probing.next_bytes()
        if size is None:
            self._report(self._probe)
            return
        message = _message(ProbePiece(self._probe.probe, PING, self._step), size)
        self._sent_ns = self._env.now_ns()
        self._env.send(self._probe.peer, message)

    def _start_streams(self, probe: ProbeRate) -> None:
        streams = {peer: Stream(*stream) for peer, *stream in probe.streams}
        self._rate_probing = RateProbe(self._effort, streams, probe.receiving)
        self._unconfirmed.clear()
        self._began_ns = self._env.now_ns()
        for turn in range(max((stream.on_the_way for stream in streams.values()), default=0)):
            for peer, stream in streams.items():
                if turn < stream.on_the_way:
                    self._send_chunk(probe, peer)

    def _send_chunk(self, probe: ProbeRate, peer: int) -> None:
        """A chunk, or the request for one."""
        size = self._rate_probing.streams[peer].chunk_bytes
        self._unconfirmed[peer] += 1
        header = ProbePiece(probe.probe, PING, 0, size if probe.receiving else 0)
        self._env.send(peer, _message(header, SMALL_BYTES if probe.receiving else size))

    def _take_chunk(self, probe: ProbeRate, peer: int) -> None:
        """A chunk is confirmed, or has come. The next follows; in the end, all that is on the way is waited for, so
        that it does not disturb what is measured next."""
        if not self._unconfirmed[peer]:
            self.drop(peer, LATE)
            return
        self._unconfirmed[peer] -= 1
        spent_s = (self._env.now_ns() - self._began_ns) / 1e9
        self._rate_probing.confirmed(peer, spent_s)
        if not self._rate_probing.over and spent_s < self._effort.most_s:
            self._send_chunk(probe, peer)
        elif not self._unconfirmed.total():
            self._report(probe)

    def _is_peer(self, number: int) -> bool:
        return 0 <= number < self._nodes and number != self.number

    def _is_stream(self, row: list[int]) -> bool:
        return (
            len(row) == 4
            and self._is_peer(row[0])
            and SMALL_BYTES <= row[1] <= min(LARGEST_CHUNK_BYTES, self._effort.most_bytes)
            and row[1] % 4 == 0
            and 1 <= row[2] <= MOST_CHUNKS
        )

    def _report(self, probe: Probe | ProbeRate) -> None:
        self._probe = None
        samples = self._probing.samples if isinstance(probe, Probe) else self._rate_probing.samples
        self._env.send_control(Probed(probe.probe, [[float(size), took_s] for size, took_s in samples]))


def _message(header: ProbePiece, size: int) -> Message:
    return Message(header, EncodedTensor("fp32", (size // 4,), bytes(size)))


def profiling_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ProfilingConfig.from_json(config)

    def build_bench() -> ComputeBench:
        from skippipe.profiling.compute_bench import ComputeBench

        devices = node_devices(join_config.devices, node_config.device, 1)
        return ComputeBench(
            node_config.config,
            node_config.workload,
            devices[0],
            node_config.compute_s,
            node_config.compiled,
            len(devices),
        )

    like, name = node_config.emulated, join_config.name
    emulated = [each.name for each in like.nodes if each.name != name] if like else []
    return Role(
        machine=ProfilingNode(node_config.number[name], len(node_config.names), node_config.effort, env),
        build=build_bench,
        numbers=node_config.number,
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
        links={other: EmulatedLink(*like.hop(name, other)) for other in emulated} if like else {},
        links_here={other: EmulatedLink(*like.hop(other, name)) for other in emulated} if like else {},
        upload_bytes_per_s=like.nodes[like.number[name]].upload_bytes_per_s if like else None,
        download_bytes_per_s=like.nodes[like.number[name]].download_bytes_per_s if like else None,
    )


ROLES: Roles = {PROFILING: profiling_role}
