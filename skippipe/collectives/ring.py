"""Averaging in messages between the nodes of a stage: a ring, or what the plan has for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.collectives.interface import Collective, GroupConfig, MakeAverager

if TYPE_CHECKING:
    from torch import Tensor


class Ring(Collective):
    id = "ring"
    elastic = True

    def join(self, group: GroupConfig) -> MakeAverager:  # noqa: ARG002
        return GradientRing


class Auto(Ring):
    """The way that is fastest for each stage, by simulation."""

    id = "auto"
    only_rings = False


def piece_sent(at: int, round_: int, size: int) -> int:
    """Which piece the node at a place of the ring passes on in a round: first its own, then what came last."""
    return (at - round_) % size


class GradientRing:
    """What a node computes in each round of its stage's ring.

    A sum is encoded by one node, and all nodes, that one too, take the decoded values, so all replicas end up with the
    same bits. Sums lie beside the gradient, which stays as it is: a ring that broke can be begun again, with other
    members. Every piece of the sum is written on the way, so nothing is copied at the start or zeroed at the end.

    If the codec asks for error feedback, what encoding took away from a piece is kept and added to it in the next
    iteration. A node encodes each piece exactly once in a ring, whatever its size, so one remainder of the gradient's
    size is enough.
    """

    def __init__(self, gradient: Tensor, codec: str) -> None:
        self._gradient = gradient
        self._codec = codec
        self._sum: Tensor | None = None
        self._remainder = gradient.new_zeros(gradient.shape) if CODECS[codec].error_feedback else None
        self._turned: tuple[int, int, int] | None = None
        """The last round of the iteration, with this node's place and the ring's size."""
        self._complete = False

    def turn(self, round_: int, at: int, size: int, given: EncodedTensor | None) -> EncodedTensor | None:
        if round_ == 0:
            self._begin()
        else:
            assert self._turned == (round_ - 1, at, size), f"round {round_} at {at} of {size} after {self._turned}"
        self._turned = round_, at, size
        if self._sum is None:
            self._sum = self._gradient.new_empty(self._gradient.shape)
        number = piece_sent(at, round_, size)
        own, total = (_piece(tensor, number, size) for tensor in (self._gradient, self._sum))
        came = self._decoded(given, own) if round_ else None
        last_sum = size - 1
        self._complete = round_ == 2 * last_sum
        if round_ <= last_sum:
            return self._encoded(number, size, own, came, total, adopt=round_ == last_sum)
        assert came is not None
        total.copy_(came)
        return None if self._complete else given  # passed on as it came

    def fits(self, given: EncodedTensor, round_: int, at: int, size: int) -> bool:
        piece = _piece(self._gradient, piece_sent(at, round_, size), size)
        return given.shape == piece.shape and given.dtype == self._codec

    @property
    def summed(self) -> Tensor:
        assert self._sum is not None and self._complete, f"the ring is not complete: {self._turned}"
        return self._sum

    def close(self, *, followed: bool) -> None:
        if not followed and self._turned is not None:
            self._drop_remainder()  # of sums that the optimizer did not follow, perhaps for not being finite
        self._turned = None
        self._complete = False

    def _begin(self) -> None:
        if self._turned is not None:
            self._drop_remainder()  # it has gone into sums that were given up; what it was before is not known
        self._complete = False

    def _drop_remainder(self) -> None:
        if self._remainder is not None:
            self._remainder.zero_()

    def _decoded(self, given: EncodedTensor | None, piece: Tensor) -> Tensor:
        if given is None or given.shape != piece.shape or given.dtype != self._codec:
            came = "nothing" if given is None else f"a {given.dtype} piece of shape {list(given.shape)}"
            raise ValueError(f"{came} came instead of {self._codec} {list(piece.shape)}")
        return decode(given, piece.device)

    def _encoded(
        self, number: int, size: int, own: Tensor, came: Tensor | None, total: Tensor, *, adopt: bool
    ) -> EncodedTensor:
        import torch

        so_far = own if came is None else torch.add(own, came, out=total)
        remainder = None if self._remainder is None else _piece(self._remainder, number, size)
        if remainder is not None:
            so_far = torch.add(so_far, remainder, out=total)
        encoded = encode(so_far, self._codec)
        if CODECS[self._codec].lossless:
            return encoded
        kept = decode(encoded, total.device)
        if remainder is not None:
            torch.sub(so_far, kept, out=remainder)
        if adopt:
            total.copy_(kept)
        return encoded


def _piece(tensor: Tensor, number: int, size: int) -> Tensor:
    step = -(-tensor.numel() // size)
    return tensor[number * step : (number + 1) * step]
