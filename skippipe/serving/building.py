"""What a node that serves is made of, from the brief."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe.errors import UserError
from skippipe.jsonfile import exists
from skippipe.runtime.outside import Outside
from skippipe.runtime.posts import Post
from skippipe.serving.brief import ServingBrief
from skippipe.serving.feeding import Seat
from skippipe.serving.node import ServingNode

if TYPE_CHECKING:
    from skippipe.runtime.member import Invitation
    from skippipe.serving.tensors import ServingTensors


def serving_post(said: dict[str, Any], invitation: Invitation, outside: Outside) -> Post:
    brief = ServingBrief.from_json(said)
    number, stage = brief.number[invitation.name], brief.stage_of[invitation.name]
    seat = Seat(number, stage, len(brief.stage_of), brief.vocabulary, brief.lane_tokens)
    return Post(
        machine=ServingNode(seat, outside),
        build=lambda: build_computer(brief, stage, invitation),
        numbers=brief.number,
        heartbeat_s=brief.heartbeat_s,
        threads=brief.threads,
    )


def build_computer(brief: ServingBrief, stage: int, invitation: Invitation) -> ServingTensors:
    from skippipe.inference.loading import fingerprint, load_stage, outlined
    from skippipe.inference.stage import convert_stage
    from skippipe.serving.tensors import ServingTensors

    here = invitation.checkpoint or Path(brief.checkpoint)
    if not exists(here):
        raise UserError(f"{here}: no such folder on this machine; copy the model, or say with --checkpoint where it is")
    outline = outlined(here)
    if fingerprint(outline.place) != brief.fingerprint:
        raise UserError(f"{outline.place}: another model than the gateway's; copy that one here")
    model = load_stage(replace(outline, layers=brief.layers), stage, invitation.device or brief.device)
    convert_stage(model, "bf16" if brief.dtype == "bf16" else "fp32")
    return ServingTensors(stage, model, lane_tokens=brief.lane_tokens, wire_dtype=brief.wire_dtype, drive=brief.drive)
