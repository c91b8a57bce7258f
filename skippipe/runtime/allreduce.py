"""Gradient averaging on real tensors: what a node does in each round of its stage's ring.

Every piece is summed by passing it once around, then the sums are passed around once more. A sum is packed for the
wire by one node, and everybody, that node too, takes the packed values, so all replicas end up with the same bits.
Sums lie beside the gradient, which stays as it is: a ring that broke can be begun again, with other members. Every
piece of the sum is written on the way, so nothing is copied at the start or zeroed at the end.

With a low-precision wire, what rounding took away from a piece is kept and added to it in the next iteration (error
feedback): a node packs each piece exactly once in a ring, whatever its size, so one remainder of the gradient's size is
enough.


Gradient averaging by torch.distributed, for machines that trust their network: gloo on CPUs, NCCL on GPUs.

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

from skippipe.codecs import EncodedTensor, decode, encode
from skippipe.runtime.node.ops import piece_sent
from skippipe.runtime.node_config import NodeConfig


class GradientRing:
    def __init__(self, gradient: Tensor, dtype: str) -> None:
        self._gradient = gradient
        self._dtype = dtype
        self._sum: Tensor | None = None
        self._lost = torch.zeros_like(gradient) if dtype != "fp32" else None
        self._turned: tuple[int, int, int] | None = None
        """The last round of the iteration, with this node's place and the ring's size."""
        self._whole = False

    def turn(self, round_: int, at: int, size: int, given: EncodedTensor | None) -> EncodedTensor | None:
        """Take in what came in the round before; what goes out in this one. Round 0 begins, whatever was before."""
        if round_ == 0:
            self._begin()
        else:
            assert self._turned == (round_ - 1, at, size), f"round {round_} at {at} of {size} after {self._turned}"
        self._turned = round_, at, size
        if self._sum is None:
            self._sum = torch.empty_like(self._gradient)
        number = piece_sent(at, round_, size)
        own, total = (_piece(whole, number, size) for whole in (self._gradient, self._sum))
        came = self._unpacked(given, own) if round_ else None
        last_sum = size - 1
        self._whole = round_ == 2 * last_sum
        if round_ <= last_sum:
            return self._packed(number, size, own, came, total, adopt=round_ == last_sum)
        assert came is not None
        total.copy_(came)
        return None if self._whole else given  # passed on as it came

    def fits(self, given: EncodedTensor, round_: int, at: int, size: int) -> bool:
        """Is it what a round takes in?"""
        piece = _piece(self._gradient, piece_sent(at, round_, size), size)
        return given.shape == piece.shape and given.dtype == self._dtype

    @property
    def summed(self) -> Tensor:
        """What the ring has made."""
        assert self._sum is not None and self._whole, f"the ring is not complete: {self._turned}"
        return self._sum

    def close(self, *, followed: bool) -> None:
        """The iteration is over, or starts over."""
        if not followed and self._turned is not None:
            self._drop_remainder()  # of sums that nobody followed, perhaps for not being finite
        self._turned = None
        self._whole = False

    def _begin(self) -> None:
        if self._turned is not None:
            self._drop_remainder()  # it has gone into sums that were given up; what it was before is not known
        self._whole = False

    def _drop_remainder(self) -> None:
        if self._lost is not None:
            self._lost.zero_()

    def _unpacked(self, given: EncodedTensor | None, piece: Tensor) -> Tensor:
        if given is None or given.shape != piece.shape or given.dtype != self._dtype:
            came = "nothing" if given is None else f"a {given.dtype} piece of shape {list(given.shape)}"
            raise ValueError(f"{came} came instead of {self._dtype} {list(piece.shape)}")
        return decode(given, piece.device)

    def _packed(
        self, number: int, size: int, own: Tensor, came: Tensor | None, total: Tensor, *, adopt: bool
    ) -> EncodedTensor:
        so_far = own if came is None else torch.add(own, came, out=total)
        if self._lost is None:
            return encode(so_far, self._dtype)
        lost = _piece(self._lost, number, size)
        torch.add(so_far, lost, out=total)
        packed = encode(total, self._dtype)
        kept = decode(packed, total.device)
        torch.sub(total, kept, out=lost)
        if adopt:
            total.copy_(kept)
        return packed


def _piece(whole: Tensor, number: int, size: int) -> Tensor:
    step = -(-whole.numel() // size)
    return whole[number * step : (number + 1) * step]


TIMEOUT = timedelta(minutes=5)


def join_groups(number: int, node_config: NodeConfig, device: str) -> Callable[[Tensor], None]:
    """A function that sums a tensor over the nodes of this one's stage, in place."""
    members = sorted(node_config.plan.stage_of)
    assert node_config.rendezvous is not None
    host, port = node_config.rendezvous.rsplit(":", 1)
    store = TCPStore(host, int(port), len(members), is_master=members.index(number) == 0, timeout=TIMEOUT)
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=members.index(number), world_size=len(members), timeout=TIMEOUT)
    mine = None
    for stage in node_config.plan.stages:
        if len(stage.nodes) > 1:
            group = dist.new_group([members.index(node) for node in stage.ring], timeout=TIMEOUT)
            if number in stage.nodes:
                mine = group

    def summed(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=mine)

    return summed
