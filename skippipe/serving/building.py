"""What a node that serves is made of, from the brief."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skippipe.runtime.outside import Outside
from skippipe.runtime.posts import Post
from skippipe.serving.brief import ServingBrief
from skippipe.serving.node import ServingNode

if TYPE_CHECKING:
    from skippipe.runtime.member import Invitation
    from skippipe.serving.tensors import ServingTensors


def serving_post(said: dict[str, Any], invitation: Invitation, outside: Outside) -> Post:
    brief = ServingBrief.from_json(said)
    stage = brief.stage_of[invitation.name]
    return Post(
        machine=ServingNode(brief.number[invitation.name], stage, outside),
        build=lambda: build_computer(brief, stage, invitation),
        numbers=brief.number,
        heartbeat_s=brief.heartbeat_s,
        threads=brief.threads,
    )


def build_computer(brief: ServingBrief, stage: int, invitation: Invitation) -> ServingTensors:
    from skippipe.inference.loading import load
    from skippipe.inference.stage import convert
    from skippipe.serving.tensors import ServingTensors

    cut = ",".join(map(str, brief.layers)) if len(brief.layers) > 1 else None
    staged = load(brief.place(invitation.data_folder), cut, invitation.device or brief.device)
    convert(staged, "bf16" if brief.dtype == "bf16" else "fp32")
    return ServingTensors(
        stage,
        staged.stages[stage],
        lane_tokens=brief.lane_tokens,
        wire_dtype=brief.wire_dtype,
        drive=brief.drive,
    )
