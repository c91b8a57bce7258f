"""What a node must know to serve: which model, cut how, who holds which stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from skippipe.errors import UserError
from skippipe.jsonfile import Fields, as_integer
from skippipe.ranges import DRIVE, HEARTBEAT_S, POSITIVE, THREADS
from skippipe.runtime.posts import SERVING


@dataclass(frozen=True)
class ServingBrief:
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
    def from_json(cls, value: Any) -> ServingBrief:
        fields = Fields(value, "brief", of=cls)
        fields.text("kind", (SERVING,))
        layers = tuple(as_integer(each, "brief.layers") for each in fields.items("layers"))
        held = fields.take("stage_of")
        if not isinstance(held, dict) or not all(isinstance(s, int) and 0 <= s < len(layers) for s in held.values()):
            raise UserError("brief.stage_of: expected names of nodes with their stages")
        brief = cls(
            checkpoint=fields.text("checkpoint"),
            layers=layers,
            stage_of=held,
            vocabulary=fields.integer("vocabulary"),
            fingerprint=fields.text("fingerprint"),
            device=fields.text("device"),
            dtype=fields.text("dtype", ("fp32", "bf16")),
            wire_dtype=fields.text("wire_dtype", ("fp32", "bf16", "int8")),
            lane_tokens=fields.integer("lane_tokens"),
            drive=fields.number("drive"),
            threads=fields.integer("threads"),
            heartbeat_s=fields.number("heartbeat_s"),
        )
        fields.close()
        return brief
