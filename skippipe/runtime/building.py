"""A node's computer from the brief: its stage of the model, its text, its way to average."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skippipe.errors import UserError
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.runtime.tensors import Tensors
from skippipe.training.brief import Brief

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.runtime.member import Invitation
    from skippipe.text.sampler import Sampler


def build_computer(number: int, brief: Brief, invitation: Invitation) -> Tensors:
    stage = brief.plan.stage_of[number]
    device = invitation.device or brief.device
    check_device(device)  # before others wait for this node
    sampler = brief.sampler(invitation.data_folder) if stage == 0 else None
    reduce = None
    if brief.averaging == "torch":
        from skippipe.runtime.collective import join_groups

        reduce = join_groups(number, brief, device)
    return build_tensors(stage, brief, device, sampler, reduce=reduce)


def build_tensors(
    stage: int,
    brief: Brief,
    device: str,
    sampler: Sampler | None,
    *,
    packing: bool = True,
    reduce: Callable[[Tensor], None] | None = None,
) -> Tensors:
    """Only the layers of this stage are made."""
    check_device(device)
    blueprint, plan = brief.blueprint(), brief.plan
    tasks = StageTasks(
        blueprint,
        layer_ranges(plan.layers)[stage],
        brief.learning,
        ends=stage == 0,
        device=device,
        compute_dtype=plan.workload.compute_dtype,
        recompute=plan.workload.activation_checkpointing,
        split_backward=plan.split_backward,
        compiled=brief.compiled,
    )
    return Tensors(
        stage,
        plan.layers,
        plan.workload,
        blueprint,
        tasks,
        sampler,
        recipe=brief.recipe,
        packing=packing,
        reduce=reduce,
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
