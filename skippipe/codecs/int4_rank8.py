"""int4-rank8: of every matrix of a tensor, tokens by channels, its part of low rank by itself, and the rest as int4.

Early in training nearly all of what activations are is the same for every token, or one of a few directions: what
tells tokens apart is smaller than the steps of int4, and lost. Eight directions of each matrix X are found by a power
iteration from fixed signs, and X is taken apart into L + R, with L = Σ sₖ lₖ rₖ' where lₖ and rₖ are columns of whole
numbers from −127 to 127. R has all that L does not, so what L is rounded by as well, and goes as int4.

First come the bytes that int4 makes of all R, one after the other, then for each matrix the columns l₁ … l₈ and
r₁ … r₈, as int8, and s₁ … s₈, as fp32. Tensors of one dimension, and matrices with fewer than LEAST rows or columns,
for which factors would be many, have no L: they are as int4 sends them.

int4-rank8-stochastic: the same with R as int4-stochastic, for gradients of activations.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar

from skippipe.codecs.hadamard import TILE
from skippipe.codecs.int4 import Int4, Int4Stochastic, error_bound, mixed
from skippipe.codecs.interface import SMALLEST_SCALE, kernels_for

if TYPE_CHECKING:
    from torch import Tensor

RANK = 8
LEAST = 128  # rows and columns of a matrix that has factors: they are a quarter of its bytes then, and fewer else
HIGHEST = 127
OF_THE_REST = ", of what the factors leave"


class Int4Rank8(Int4):
    """Factors of the last two dimensions; the rest of their product is rounded to the nearest."""

    id = "int4-rank8"
    number = 14
    error_bound = error_bound(TILE, 14) + OF_THE_REST
    gradients: ClassVar[str | None] = "int4-rank8-stochastic"

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        return self.expected_bytes(prod(shape)) + _factor_bytes(shape)

    def encode_tensor(self, tensor: Tensor) -> Tensor:
        import torch

        if not _factor_bytes(tuple(tensor.shape)):
            return super().encode_tensor(tensor)
        with torch.autocast(tensor.device.type, enabled=False):
            matrices = tensor.detach().float().reshape(-1, *tensor.shape[-2:])
            left, right, scales = _factors(matrices)
            rest = self.encode((matrices - _product(left, right, scales)).reshape(-1))
            after = (left.mT.flatten(1), right.mT.flatten(1), scales)
            return torch.cat([rest, torch.cat([each.contiguous().view(torch.uint8) for each in after], 1).view(-1)])

    def decode_tensor(self, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        import torch

        factor_bytes = _factor_bytes(shape)
        if not factor_bytes:
            return super().decode_tensor(raw, shape)
        rows, columns = shape[-2:]
        rest = self.decode(raw[:-factor_bytes], prod(shape)).view(-1, rows, columns)
        factors = raw[-factor_bytes:].view(len(rest), -1)
        across, down, scales = torch.split(factors, [RANK * rows, RANK * columns, 4 * RANK], 1)
        left, right = (each.view(torch.int8).reshape(len(rest), RANK, -1).mT for each in (across, down))
        low = _product(left, right, scales.clone().view(torch.float32))  # a clone: they may begin on any byte
        return (rest + low).view(shape)


class Int4Rank8Stochastic(Int4Rank8):
    id = "int4-rank8-stochastic"
    number = 15
    error_bound = error_bound(TILE, 7) + OF_THE_REST
    error_feedback = Int4Stochastic.error_feedback
    gradients = None
    stochastic = True


def _factor_bytes(shape: tuple[int, ...]) -> int:
    if len(shape) < 2 or min(shape[-2:]) < LEAST:
        return 0
    return prod(shape[:-2]) * RANK * (sum(shape[-2:]) + 4)


def _factors(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [matrix, row, RANK] and [matrix, column, RANK] as int8, and their scales [matrix, RANK]."""
    import torch

    from skippipe.codecs.factors import orthonormal

    column = torch.arange(matrices.shape[-1], dtype=torch.int32, device=matrices.device).unsqueeze(1)
    place = torch.arange(RANK, dtype=torch.int32, device=matrices.device)
    signs = 1 - 2 * ((mixed(column) >> place) & 1).float()
    right = orthonormal((orthonormal(matrices @ signs).mT @ matrices).mT)
    left, across = _in_bytes(matrices @ right)
    right, down = _in_bytes(right)
    scale = across * down
    return left, right, scale.where(scale.isfinite(), torch.nan).where(~(scale < SMALLEST_SCALE), 0.0)


def _in_bytes(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of whole numbers, and their scales [matrix, column]."""
    import torch

    scale = columns.abs().amax(1) / HIGHEST
    rounded = (columns * (1 / scale).where(scale > 0, 0.0).unsqueeze(1)).round_()
    return rounded.nan_to_num_(0, 0, 0).to(torch.int8), scale  # what a NaN would become is up to the processor


def _product(left: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    """L of each matrix: one direction after the other, so that the same bytes give the same bits on every device."""
    import torch

    scaled, across = left.float() * scales.unsqueeze(1), right.mT.float().contiguous()
    total = torch.empty(len(left), left.shape[1], right.shape[1], device=left.device)
    if kernels := kernels_for(total, total.numel()):
        kernels.multiply_factors(scaled.numpy(), across.numpy(), total.numpy())
        return total
    torch.mul(scaled[..., :1], across[:, :1], out=total)
    for at in range(1, RANK):
        total += scaled[..., at : at + 1] * across[:, at : at + 1]
    return total
