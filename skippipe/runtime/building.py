"""What a node that trains is made of, from the brief: its state machine, and its computer with a stage of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.runtime.durations import planned_ns
from skippipe.runtime.node import Node
from skippipe.runtime.outside import Outside
from skippipe.runtime.posts import Post
from skippipe.runtime.tensors import Tensors
from skippipe.training.brief import Brief
from skippipe.transport.shaping import Link

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.runtime.member import Invitation
    from skippipe.text.sampler import Sampler


def training_post(said: dict[str, Any], invitation: Invitation, outside: Outside) -> Post:
    brief = Brief.from_json(said)
    plan = brief.plan
    number, stage = plan.cluster.number[invitation.name], plan.stage_of[plan.cluster.number[invitation.name]]
    others = {name: other for name, other in plan.cluster.number.items() if other != number}
    return Post(
        machine=Node(number, plan, outside, own_ring=brief.averaging == "ring"),
        build=lambda: build_computer(number, brief, invitation),
        numbers=dict(plan.cluster.number),
        heartbeat_s=brief.heartbeat_s,
        threads=brief.threads,
        pace=(lambda work: planned_ns(plan, stage, number, work)) if brief.emulated else None,
        links={name: _link(plan.cluster, number, other) for name, other in others.items()} if brief.emulated else {},
    )


def _link(cluster: Cluster, sender: int, receiver: int) -> Link:
    return Link(
        float(cluster.latency_s[sender, receiver]) + cluster.hop_overhead_s,
        float(cluster.bandwidth_bytes_per_s[sender, receiver]),
    )


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
