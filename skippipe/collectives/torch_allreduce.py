"""All-reduce by torch.distributed, for machines that trust their network: gloo on CPUs, NCCL on GPUs.

Every node is a rank; every stage with more than one node has a group. The first node's process serves the store at
which the others find each other. Both backends pass large tensors round a ring, so a plan reckons with the ring's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Never

from skippipe.collectives.interface import GroupConfig, MakeAverager
from skippipe.collectives.peer_to_peer import Ring

if TYPE_CHECKING:
    from torch import Tensor

    from skippipe.codecs import EncodedTensor
    from skippipe.collectives.schedule import Schedule

TIMEOUT = timedelta(minutes=5)


class TorchAllReduce(Ring):
    id = "torch"
    elastic = False  # torch.distributed does not get over a lost rank
    in_messages = False

    def join(self, group: GroupConfig) -> MakeAverager:
        all_reduce = _join_groups(group)
        return lambda gradient, codec, offload: InPlaceAverager(gradient, all_reduce)


@dataclass
class InPlaceAverager:
    """A library sums the gradient where it lies, at once and without messages of ours."""

    gradient: Tensor
    all_reduce: Callable[[Tensor], None]
    summed: None = None

    def begin(self, schedule: Schedule) -> None:  # noqa: ARG002
        self.all_reduce(self.gradient)

    def contribute(self, piece: int, given: Sequence[EncodedTensor], *, total: bool) -> Never:
        raise AssertionError(f"there is no piece {piece}: {given}, {total}")

    def adopt(self, piece: int, given: EncodedTensor) -> Never:
        raise AssertionError(f"there is no piece {piece}: {given}")

    def fits(self, given: EncodedTensor, schedule: Schedule, piece: int) -> bool:  # noqa: ARG002
        return False

    def close(self, *, followed: bool) -> None:
        pass


def _join_groups(config: GroupConfig) -> Callable[[Tensor], None]:
    """A function that sums a tensor over the nodes of this one's stage, in place."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    members = sorted(node for order in config.orders for node in order)
    rank = members.index(config.number)
    assert config.rendezvous is not None
    host, port = config.rendezvous.replace("[", "").replace("]", "").rsplit(":", 1)  # of IPv6, without brackets
    store = TCPStore(host, int(port), len(members), is_master=rank == 0, timeout=TIMEOUT)
    backend = "nccl" if torch.device(config.device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(members), timeout=TIMEOUT)
    own_group = None
    for order in config.orders:
        if len(order) > 1:
            group = dist.new_group([members.index(node) for node in order], timeout=TIMEOUT)
            if config.number in order:
                own_group = group

    def all_reduce(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=own_group)

    return all_reduce
