"""A node's computer from the brief: its stage of the model, its text, its way to average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.errors import UserError
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.runtime.tensors import Tensors
from skippipe.training.brief import Brief

if TYPE_CHECKING:
    from skippipe.runtime.member import Invitation


def build_computer(number: int, brief: Brief, invitation: Invitation) -> Tensors:
    stage = brief.plan.stage_of[number]
    tasks = build_tasks(stage, brief, invitation.device or brief.device)
    sampler = brief.sampler(invitation.data_folder) if stage == 0 else None
    reduce = None
    if brief.averaging == "torch":
        from skippipe.runtime.collective import join_groups

        reduce = join_groups(number, brief, invitation.device or brief.device)
    return Tensors(number, brief.plan, tasks, sampler, reduce=reduce)


def build_tasks(stage: int, brief: Brief, device: str) -> StageTasks:
    """Only the layers of this stage."""
    check_device(device)
    plan = brief.plan
    layers = layer_ranges(plan.layers)[stage]
    return StageTasks(
        brief.blueprint(),
        layers,
        brief.learning,
        ends=stage == 0,
        device=device,
        compute_dtype=plan.workload.compute_dtype,
        recompute=plan.workload.activation_checkpointing,
        split_backward=plan.split_backward,
        compiled=brief.compiled,
    )


def check_device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UserError(f"device '{device}': expected cpu, cuda or cuda:N")
    if kind == "cuda":
        found = torch.cuda.device_count()
        if int(index or 0) >= found:
            raise UserError(f"device '{device}': this machine has {found} CUDA devices; use another, or cpu")
