"""Gradient averaging on real tensors: what a node does in each round of its stage's ring.

Every piece is summed by passing it once around, then the sums are passed around once more. A sum is packed for the
wire by one node, and everybody, that node too, takes the packed values, so all replicas end up with the same bits.
With a low-precision wire, what rounding took away from a piece is kept and added to it in the next iteration (error
feedback): a node packs each piece exactly once an iteration, so one remainder of the gradient's size is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skippipe.runtime.work import piece_sent
from skippipe.transport.packed import Packed, pack, unpack


class GradientRing:
    def __init__(self, gradient: Tensor, at: int, size: int, dtype: str) -> None:
        self._gradient = gradient
        self._at = at
        self._size = size
        self._dtype = dtype
        self._step = -(-gradient.numel() // size)
        self._lost = torch.zeros_like(gradient) if dtype != "fp32" else None

    def turn(self, round_: int, given: Packed | None) -> Packed | None:
        """Take in what came in the round before; what goes out in this one."""
        last_sum = self._size - 1
        if given is not None:
            piece = self._piece(piece_sent(self._at, round_, self._size))
            if given.shape != piece.shape or given.dtype != self._dtype:
                wanted = f"{self._dtype} {list(piece.shape)}"
                raise ValueError(f"a {given.dtype} piece of shape {list(given.shape)} came instead of {wanted}")
            came = unpack(given, piece.device)
            if round_ <= last_sum:
                piece.add_(came)
            else:
                piece.copy_(came)
        if round_ == 2 * last_sum:
            return None
        number = piece_sent(self._at, round_, self._size)
        if given is not None and round_ > last_sum:
            return given  # passed on as it came
        return self._packed(number, adopt=round_ == last_sum)

    def _packed(self, number: int, *, adopt: bool) -> Packed:
        piece = self._piece(number)
        if self._lost is None:
            return pack(piece, self._dtype)
        lost = self._slice(self._lost, number)
        piece.add_(lost)
        packed = pack(piece, self._dtype)
        kept = unpack(packed, piece.device)
        torch.sub(piece, kept, out=lost)
        if adopt:
            piece.copy_(kept)
        return packed

    def _piece(self, number: int) -> Tensor:
        return self._slice(self._gradient, number)

    def _slice(self, whole: Tensor, number: int) -> Tensor:
        return whole[number * self._step : (number + 1) * self._step]
