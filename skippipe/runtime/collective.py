"""Gradient averaging by torch.distributed, for machines that trust their network: gloo on CPUs, NCCL on GPUs.

Every node is a rank; every stage with more than one node has a group. The first node's process serves the store at
which the others find each other.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from skippipe.training.brief import Brief

TIMEOUT = timedelta(minutes=5)


def join_groups(number: int, brief: Brief, device: str) -> Callable[[Tensor], None]:
    """A function that sums a tensor over the nodes of this one's stage, in place."""
    members = sorted(brief.plan.stage_of)
    assert brief.rendezvous is not None
    host, port = brief.rendezvous.rsplit(":", 1)
    store = TCPStore(host, int(port), len(members), is_master=members.index(number) == 0, timeout=TIMEOUT)
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=members.index(number), world_size=len(members), timeout=TIMEOUT)
    mine = None
    for stage in brief.plan.stages:
        if len(stage.nodes) > 1:
            group = dist.new_group([members.index(node) for node in stage.ring], timeout=TIMEOUT)
            if number in stage.nodes:
                mine = group

    def summed(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=mine)

    return summed
