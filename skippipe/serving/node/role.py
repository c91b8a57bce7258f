"""The configuration of a node that serves, and the role that is built from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.codecs import CODECS
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.json_fields import Fields, as_integer, exists
from skippipe.runtime.node.interfaces import SERVING, NodeEnv, Role, Roles
from skippipe.serving.node.state_machine import ServingNode
from skippipe.serving.step_protocol import NodeInfo
from skippipe.value_ranges import HEARTBEAT_S, POSITIVE, THREADS

if TYPE_CHECKING:
    from skippipe.runtime.node.interfaces import JoinConfig
    from skippipe.serving.node.executor import ServingExecutor


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
    dtype: str = "fp32"
    """Type that stages compute in."""
    wire_dtype: str = "bf16"
    """Type of hidden states between nodes."""
    cache_tokens: Annotated[int, POSITIVE] = 2**16
    """Tokens that the KV cache of a route has room for, on every node."""
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
    def from_json(cls, value: Any) -> ServingConfig:
        fields = Fields(value, "node_config", of=cls)
        fields.text("kind", (SERVING,))
        layers = tuple(as_integer(each, "node_config.layers") for each in fields.items("layers"))
        held = fields.take("stage_of")
        if not isinstance(held, dict) or not all(isinstance(s, int) and 0 <= s < len(layers) for s in held.values()):
            raise UserError("node_config.stage_of: expected names of nodes with their stages")
        node_config = cls(
            checkpoint=fields.text("checkpoint"),
            layers=layers,
            stage_of=held,
            vocabulary=fields.integer("vocabulary"),
            fingerprint=fields.text("fingerprint"),
            device=fields.text("device"),
            dtype=fields.text("dtype", ("fp32", "bf16")),
            wire_dtype=fields.text("wire_dtype", tuple(CODECS)),
            cache_tokens=fields.integer("cache_tokens"),
            threads=fields.integer("threads"),
            heartbeat_s=fields.number("heartbeat_s"),
        )
        fields.close()
        return node_config


def serving_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ServingConfig.from_json(config)
    number, stage = node_config.number[join_config.name], node_config.stage_of[join_config.name]
    info = NodeInfo(number, stage, len(node_config.stage_of), node_config.vocabulary, node_config.cache_tokens)
    return Role(
        machine=ServingNode(info, env),
        build=lambda: build_executor(node_config, stage, join_config),
        numbers=node_config.number,
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
    )


ROLES: Roles = {SERVING: serving_role}


def build_executor(node_config: ServingConfig, stage: int, join_config: JoinConfig) -> ServingExecutor:
    from skippipe.inference.cached_stage import convert_stage
    from skippipe.inference.checkpoint_loader import fingerprint, load_stage, read_outline
    from skippipe.serving.node.executor import ServingExecutor

    here = join_config.checkpoint or Path(node_config.checkpoint)
    if not exists(here):
        raise UserError(f"{here}: no such folder on this machine; copy the model, or name its folder with --checkpoint")
    outline = read_outline(here)
    if fingerprint(outline.place) != node_config.fingerprint:
        raise UserError(f"{outline.place}: another model than the gateway's; copy that one here")
    model = load_stage(replace(outline, layers=node_config.layers), stage, join_config.device or node_config.device)
    convert_stage(model, "bf16" if node_config.dtype == "bf16" else "fp32")
    return ServingExecutor(stage, model, cache_tokens=node_config.cache_tokens, wire_dtype=node_config.wire_dtype)
