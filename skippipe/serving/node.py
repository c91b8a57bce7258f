"""A node that serves: its configuration, its role, and its state machine, which computes the steps that the gateway
sends, and passes tensors on along their route.

It runs over the same sockets as the one that trains. The gateway says which sequences a step computes and by which
route; from other nodes come tensors only, and only those that a step foresees are taken.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from skippipe.codecs import CodecId, EncodedTensor
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.json_fields import exists
from skippipe.runtime.messages import (
    COORDINATOR,
    ControlMessage,
    EndSequences,
    Hello,
    Probe,
    Probed,
    Ready,
    RunStep,
    Sampled,
    StepFailed,
    Stop,
)
from skippipe.runtime.node.interfaces import ALL_DEVICES, SERVING, BaseNode, NodeEnv, Role, Roles
from skippipe.runtime.node.ops import op_name
from skippipe.runtime.state_source import StateSource
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    NodeInfo,
    SampleTokens,
    ServingWork,
    StepInput,
    StepRefused,
    parse_step,
)
from skippipe.toml_config import from_table
from skippipe.transport.message import PING, PONG, Message, ProbePiece, StepHop
from skippipe.value_ranges import HEARTBEAT_S, POSITIVE, THREADS

if TYPE_CHECKING:
    from skippipe.runtime.node.interfaces import JoinConfig
    from skippipe.serving.executor import ServingExecutor

log = logging.getLogger(__name__)
MAX_STEPS = 1024  # pending steps
PROBE_BODY = EncodedTensor("fp32", (1,), bytes(4))
MAX_EARLY, MAX_EARLY_BYTES = 256, 2**28  # tensors of each sender that are kept before their step is known


class EarlyTensors:
    """Tensors that arrive before the step that they belong to: a bounded number and size from each sender."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], Any]] = {}
        """Sender → step and position on its path → tensor, the oldest first."""

    def put(self, sender: int, key: tuple[int, int], body: Any) -> None:
        """The oldest tensors make room: their step may have been abandoned and never come."""
        kept = self._kept.setdefault(sender, {})
        kept.pop(key, None)
        kept[key] = body
        sizes = [getattr(each, "nbytes", 0) for each in kept.values()]
        while len(sizes) > 1 and (len(sizes) > MAX_EARLY or sum(sizes) > MAX_EARLY_BYTES):
            del kept[next(iter(kept))], sizes[0]

    def take(self, sender: int, key: tuple[int, int]) -> Any:
        """The tensor, or None if it has not arrived."""
        return self._kept.get(sender, {}).pop(key, None)

    def clear(self) -> None:
        self._kept.clear()


class ServingNode(BaseNode):
    """A node of a route; `epoch` is constant, as plans do not change here."""

    def __init__(self, info: NodeInfo, env: NodeEnv) -> None:
        super().__init__(info.number, env)
        self._info = info
        self._pending: dict[tuple[int, int], StepInput] = {}
        """Step and position on its path → the step, until its tensor arrives."""
        self._early = EarlyTensors()
        self._probes: dict[int, tuple[int, int]] = {}
        """Peer → the probe of the link to it, until the answer comes, and when it was sent, in ns."""
        self._ready: deque[ServingWork] = deque()
        self._running: ServingWork | None = None

    def hello(self, address: str, version: str) -> Hello:
        """The greeting to a new gateway, which waits for none of the steps of the one before."""
        self._pending.clear()
        self._early.clear()
        self._probes.clear()
        self._ready.clear()
        return Hello(address, version)

    def executor_ready(self, _origin: StateSource | None, _assignment: int) -> None:
        self._env.send_control(Ready())

    # Messages

    def handle_control(self, control: ControlMessage) -> None:
        """Takes a message of the gateway."""
        match control:
            case RunStep():
                self._add_step(control)
            case EndSequences():
                for key in [key for key, step in self._pending.items() if step.route == control.lane]:
                    del self._pending[key]
                waiting = (
                    work for work in self._ready if isinstance(work, FreeSlots) or work.step.route != control.lane
                )
                self._ready = deque([*waiting, FreeSlots(control.lane)])
            case Probe() if control.peer in range(len(self._info.stage_of)) and control.peer != self.number:
                self._send_probe(control.peer, control.probe)
            case Stop():
                self.stopped = control
            case _:
                self.drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        header = message.header
        if isinstance(header, ProbePiece):
            self._receive_probe(sender, header)
        elif not isinstance(header, StepHop) or message.body is None:
            self.drop(sender, message.kind.label)
        elif (key := (header.step, header.place)) in self._pending:
            self._take(key, sender, message.body)
        else:
            self._early.put(sender, key, message.body)

    # Probes

    def reconnected(self, peer: int) -> None:
        """A probe that was on its way may be lost."""
        if peer in self._probes:
            self._send_probe(peer, self._probes[peer][0])

    def _send_probe(self, peer: int, probe: int) -> None:
        self._probes[peer] = probe, self._env.now_ns()
        self._env.send(peer, Message(ProbePiece(probe, PING, 0), PROBE_BODY))

    def _receive_probe(self, sender: int, header: ProbePiece) -> None:
        """Answers a probe, or reports the answer to one."""
        probe, sent_ns = self._probes.get(sender, (None, 0))
        if header.direction == PING:
            self._env.send(sender, Message(ProbePiece(header.probe, PONG, header.step), PROBE_BODY))
        elif header.probe == probe:
            del self._probes[sender]
            took_s = (self._env.now_ns() - sent_ns) / 1e9
            self._env.send_control(Probed(header.probe, [[float(PROBE_BODY.nbytes), took_s]]))
        else:
            self.drop(sender, "an answer to no probe")

    # Work

    def finished(self, work: ServingWork, result: Any) -> None:
        assert self._running is work
        self._running = None
        if isinstance(work, FreeSlots):
            return
        step, position = work.step, work.position
        if isinstance(result, StepRefused):
            at_fault = step.path[position - 1] if result.bad_input else self.number
            self._env.send_control(StepFailed(step.step, at_fault, result.reason))
            return
        if isinstance(work, SampleTokens):
            pairs = [[[float(token), value] for token, value in row] for row in result.logprobs]
            self._env.send_control(Sampled(step.step, list(result.tokens), pairs if any(pairs) else []))
            return
        after = position + 1
        message = Message(StepHop(step.step, step.route, after), result)
        receiver = step.path[after % len(step.path)]
        if receiver == self.number:  # the only stage of the route
            self.receive(receiver, message)
        else:
            self._env.send(receiver, message)

    def decide(self) -> None:
        if self._running is None and self._ready:
            self._running = self._ready.popleft()
            self._env.start(self._running)

    @property
    def doing(self) -> str:
        return "serving" if self._running is None else f"serving, {op_name(self._running)}"

    def active_peers(self) -> set[int]:
        """The nodes that come next on the paths of pending steps."""
        near = {step.path[(position + 1) % len(step.path)] for (_, position), step in self._pending.items()}
        return near - {self.number}

    def _add_step(self, message: RunStep) -> None:
        """The node has a position on the step's path; the first node has another one at the end."""
        if len(self._pending) >= MAX_STEPS:
            self.drop(COORDINATOR, "more steps than are ever in flight")
            return
        try:
            step = parse_step(message, self._info)
        except UserError as error:
            self.drop(COORDINATOR, str(error))
            return
        position = step.path.index(self.number)
        if position == 0:
            self._ready.append(ForwardStep(step, 0, step.tokens))
            position = len(step.path)
        key = step.step, position
        self._pending[key] = step
        before = step.path[position - 1]
        if (body := self._early.take(before, key)) is not None:
            self._take(key, before, body)

    def _take(self, key: tuple[int, int], sender: int, body: Any) -> None:
        step, position = self._pending[key], key[1]
        if sender != step.path[position - 1]:
            self.drop(sender, "a tensor of a step that does not come from this sender")
            return
        message = Message(StepHop(step.step, step.route, position), body)
        if not self._env.fits(message, step.num_tokens):
            self.drop(sender, "a tensor of another shape or type")
            return
        del self._pending[key]
        at_the_end = position == len(step.path)
        self._ready.append(SampleTokens(step, body) if at_the_end else ForwardStep(step, position, body))


@dataclass(frozen=True)
class ServingConfig:
    """What the gateway tells every node: the model, how it is cut, which node holds which stage."""

    checkpoint: str
    """The model's folder on the gateway's machine."""
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    stage_of: dict[str, int]
    """Name of a node → the stage that it holds."""
    vocabulary: Annotated[int, POSITIVE]
    """Number of the model's tokens: ids are below it."""
    fingerprint: str
    """Fingerprint of the checkpoint."""
    device: str = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type that stages compute in."""
    wire_dtype: CodecId = "bf16"
    """Type of hidden states between nodes."""
    cache_tokens: Annotated[int, POSITIVE] = 2**16
    """Tokens that the KV cache of a route has room for, on every node; where a stage takes the place of others, its
    cache for each such turn has room for as many."""
    threads: Annotated[int, THREADS] = 1
    heartbeat_s: Annotated[float, HEARTBEAT_S] = TIMEOUT_S
    """Seconds without a heartbeat after which a node is declared dead."""

    @property
    def number(self) -> dict[str, int]:
        """Name of a node → its number."""
        return {name: number for number, name in enumerate(self.stage_of)}

    def to_json(self) -> dict[str, Any]:
        return {"kind": SERVING, **vars(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ServingConfig:
        found = from_table(cls, {name: each for name, each in value.items() if name != "kind"}, "node_config")
        if not all(0 <= stage < len(found.layers) for stage in found.stage_of.values()):
            raise UserError("node_config.stage_of: expected names of nodes with their stages")
        return found


def serving_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ServingConfig.from_json(config)
    number, stage = node_config.number[join_config.name], node_config.stage_of[join_config.name]
    stage_of = tuple(node_config.stage_of.values())
    info = NodeInfo(number, len(node_config.layers), stage_of, node_config.vocabulary, node_config.cache_tokens)
    return Role(
        machine=ServingNode(info, env),
        build=lambda: build_executor(node_config, stage, join_config),
        numbers=node_config.number,
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
    )


ROLES: Roles = {SERVING: serving_role}


def build_executor(node_config: ServingConfig, stage: int, join_config: JoinConfig) -> ServingExecutor:
    from skippipe.checkpoint.locate import built_in
    from skippipe.inference.cached_stage import convert_stage
    from skippipe.inference.checkpoint_loader import fingerprint, load_stage, read_outline
    from skippipe.model.spread_layers import SpreadLayers, inference_devices, weight_bytes
    from skippipe.serving.executor import ServingExecutor

    here = built_in(join_config.checkpoint or Path(node_config.checkpoint))
    if not exists(here):
        raise UserError(f"{here}: no such folder on this machine; copy the model, or name its folder with --checkpoint")
    outline = read_outline(here)
    if fingerprint(outline.place) != node_config.fingerprint:
        raise UserError(f"{outline.place}: another model than the gateway's; copy that one here")
    model = load_stage(replace(outline, layers=node_config.layers), stage)
    convert_stage(model, node_config.dtype)
    asked = node_config.device if join_config.devices in (None, ALL_DEVICES) else join_config.devices
    whole_bytes, shape = weight_bytes(model), outline.spec.shape
    turns = outline.stand_ins.turns(stage) if outline.stand_ins else 1  # which stages will be missing is not known yet
    values = 2 * turns * len(model.layers) * shape.kv_heads * shape.head_dim
    cache_bytes = node_config.cache_tokens * values * next(model.parameters()).element_size()
    here_alone = join_config.devices is not None  # else the gateway has started it, with others, on its own machine
    first = 0 if here_alone else node_config.number[join_config.name]
    devices = inference_devices(asked, whole_bytes + cache_bytes, first)
    if len(devices) > 1:
        log.info(
            "stage %d is spread over %d devices: %.2f GiB of weights, and %.2f of KV cache for a route",
            stage,
            len(devices),
            whole_bytes / 2**30,
            cache_bytes / 2**30,
        )
    SpreadLayers(devices, whole_bytes).place(model)
    return ServingExecutor(stage, model, cache_tokens=node_config.cache_tokens, wire_dtype=node_config.wire_dtype)
