"""What a node must know to serve: which model, cut how, who holds which stage.

What a node that serves is made of, from the brief.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.codecs import CODECS
from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_integer, exists
from skippipe.runtime.node.interfaces import SERVING, NodeEnv, Role, Roles
from skippipe.serving.node.state_machine import ServingNode
from skippipe.serving.step_protocol import NodeInfo
from skippipe.value_ranges import DRIVE, HEARTBEAT_S, POSITIVE, THREADS

if TYPE_CHECKING:
    from skippipe.runtime.node.interfaces import JoinConfig
    from skippipe.serving.node.executor import ServingExecutor


@dataclass(frozen=True)
class ServingConfig:
    checkpoint: str
    """As it is called on the gateway's machine."""
    layers: tuple[int, ...]
    """Of each stage."""
    stage_of: dict[str, int]
    """Name of a node → the stage it holds."""
    vocabulary: Annotated[int, POSITIVE]
    """Tokens that the model knows: ids are below it."""
    fingerprint: str
    """Of the checkpoint."""
    device: str = "cpu"
    dtype: str = "fp32"
    """What stages compute in."""
    wire_dtype: str = "bf16"
    """Of hidden states between nodes."""
    lane_tokens: Annotated[int, POSITIVE] = 2**16
    """That the cache of a lane has room for, on every node."""
    drive: Annotated[float, DRIVE] = 1.0
    """By what stages count while others are missing."""
    threads: Annotated[int, THREADS] = 1
    heartbeat_s: Annotated[float, HEARTBEAT_S] = 5.0
    """Within which a node gives several signs of life."""

    @property
    def number(self) -> dict[str, int]:
        """Of each node."""
        return {name: number for number, name in enumerate(self.stage_of)}

    def to_json(self) -> dict[str, Any]:
        return {"kind": SERVING, **vars(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, value: Any) -> ServingConfig:
        fields = Fields(value, "brief", of=cls)
        fields.text("kind", (SERVING,))
        layers = tuple(as_integer(each, "brief.layers") for each in fields.items("layers"))
        held = fields.take("stage_of")
        if not isinstance(held, dict) or not all(isinstance(s, int) and 0 <= s < len(layers) for s in held.values()):
            raise UserError("brief.stage_of: expected names of nodes with their stages")
        node_config = cls(
            checkpoint=fields.text("checkpoint"),
            layers=layers,
            stage_of=held,
            vocabulary=fields.integer("vocabulary"),
            fingerprint=fields.text("fingerprint"),
            device=fields.text("device"),
            dtype=fields.text("dtype", ("fp32", "bf16")),
            wire_dtype=fields.text("wire_dtype", tuple(CODECS)),
            lane_tokens=fields.integer("lane_tokens"),
            drive=fields.number("drive"),
            threads=fields.integer("threads"),
            heartbeat_s=fields.number("heartbeat_s"),
        )
        fields.close()
        return node_config


def serving_role(said: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ServingConfig.from_json(said)
    number, stage = node_config.number[join_config.name], node_config.stage_of[join_config.name]
    seat = NodeInfo(number, stage, len(node_config.stage_of), node_config.vocabulary, node_config.lane_tokens)
    return Role(
        machine=ServingNode(seat, env),
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
        raise UserError(f"{here}: no such folder on this machine; copy the model, or say with --checkpoint where it is")
    outline = read_outline(here)
    if fingerprint(outline.place) != node_config.fingerprint:
        raise UserError(f"{outline.place}: another model than the gateway's; copy that one here")
    model = load_stage(replace(outline, layers=node_config.layers), stage, join_config.device or node_config.device)
    convert_stage(model, "bf16" if node_config.dtype == "bf16" else "fp32")
    return ServingExecutor(
        stage, model, lane_tokens=node_config.lane_tokens, wire_dtype=node_config.wire_dtype, drive=node_config.drive
    )
