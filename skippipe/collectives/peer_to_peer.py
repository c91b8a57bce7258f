"""Averaging in messages between the nodes of a stage: round a ring, or as the plan has it for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skippipe.codecs import CODECS, EncodedTensor, decode, encode_and_decode
from skippipe.collectives.interface import Collective, GroupConfig, MakeAverager
from skippipe.collectives.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor


class Ring(Collective):
    id = "ring"
    elastic = True

    def join(self, group: GroupConfig) -> MakeAverager:  # noqa: ARG002
        return GradientAverager


class Auto(Ring):
    """The way that is fastest for each stage, by simulation."""

    id = "auto"
    only_rings = False


class GradientAverager:
    """What a node computes of its stage's schedule, on tensors.

    The total of a piece is encoded by one node, its root, and all nodes, that one too, take the decoded values, so all
    replicas end up with the same bits. Sums lie beside the gradient, which stays as it is: averaging that was given up
    can begin again, with other nodes. Every piece of the sum is written on the way, so nothing is copied at the start
    or zeroed at the end.

    If the codec asks for error feedback, what encoding took away from a value is kept and added to the node's gradient
    when the first attempt of the next iteration begins. From then on it is part of the gradient: an attempt that is
    given up loses nothing of it, and a node that is left alone steps along it. A node encodes each piece exactly once
    in an attempt, however the gradient is cut, so one remainder of the gradient's size is enough; what an attempt that
    was given up has left in it is overwritten by the next, or dropped.
    """

    def __init__(self, gradient: Tensor, codec: str, offload: bool = False) -> None:
        """`offload`: sums and remainders are kept, and added up, in host memory, through which messages go anyway."""
        self._gradient = gradient
        self._offload = offload and gradient.is_cuda
        self._codec = codec
        self._sum: Tensor | None = None
        self.remainder = self._empty(len(gradient) if CODECS[codec].error_feedback else 0).zero_()
        """What encoding took away in the iteration before; without error feedback, no values."""
        self._bounds: list[int] | None = None
        """Where the pieces of the attempt begin and end; None: no attempt was made in this iteration."""
        self._encoded: set[int] = set()
        self._adopted: set[int] = set()

    def begin(self, schedule: Schedule) -> None:
        if self._bounds is None and len(self.remainder):
            self._gradient.add_(self.remainder.to(self._gradient.device))
        self._bounds = schedule.bounds(self._gradient.numel())
        self._encoded, self._adopted = set(), set()
        if self._sum is None:
            self._sum = self._empty(len(self._gradient))

    def contribute(self, piece: int, given: Sequence[EncodedTensor], *, total: bool) -> EncodedTensor:
        import torch

        assert piece not in self._encoded, f"piece {piece} was encoded before in this attempt"
        self._encoded.add(piece)
        summed = self._piece(self._sum, piece)
        so_far = self._piece(self._gradient, piece)
        if so_far.device != summed.device:
            so_far = summed.copy_(so_far)  # into host memory that is pinned
        for each in given:
            so_far = torch.add(so_far, self._decoded(each, summed), out=summed)
        encoded, kept = encode_and_decode(so_far, self._codec)
        if len(self.remainder):
            torch.sub(so_far, kept, out=self._piece(self.remainder, piece))
        if total:
            if kept is not summed:
                summed.copy_(kept)
            self._adopted.add(piece)
        return encoded

    def adopt(self, piece: int, given: EncodedTensor) -> None:
        summed = self._piece(self._sum, piece)
        summed.copy_(self._decoded(given, summed))
        self._adopted.add(piece)

    def fits(self, given: EncodedTensor, schedule: Schedule, piece: int) -> bool:
        bounds = schedule.bounds(self._gradient.numel())
        return given.shape == (bounds[piece + 1] - bounds[piece],) and given.dtype == self._codec

    @property
    def summed(self) -> Tensor:
        complete = self._bounds is not None and len(self._adopted) == len(self._bounds) - 1
        assert self._sum is not None and complete, f"the sum is not complete: {sorted(self._adopted)} of {self._bounds}"
        return self._sum

    def close(self, *, followed: bool) -> None:
        if not followed and self._bounds is not None:
            self.remainder.zero_()  # it is of sums that the optimizer did not follow, perhaps for not being finite
        self._bounds = None

    def _empty(self, values: int) -> Tensor:
        return empty_beside(self._gradient, values, offload=self._offload)

    def _piece(self, tensor: Tensor | None, piece: int) -> Tensor:
        assert tensor is not None and self._bounds is not None, "a piece before averaging has begun"
        return tensor[self._bounds[piece] : self._bounds[piece + 1]]

    def _decoded(self, given: EncodedTensor, piece: Tensor) -> Tensor:
        if given.shape != piece.shape or given.dtype != self._codec:
            came = f"a {given.dtype} piece of shape {list(given.shape)}"
            raise ValueError(f"{came} came instead of {self._codec} {list(piece.shape)}")
        return decode(given, piece.device)


def empty_beside(gradient: Tensor, values: int, *, offload: bool) -> Tensor:
    """Memory for sums of a gradient, or for what is left of it; with `offload`, of the host."""
    if not offload:
        return gradient.new_empty(values)
    return gradient.new_empty(values, device="cpu", pin_memory=True)
