"""int4: four bits for each coefficient of a rotated tile (see `hadamard`), rounded to the nearest of 16 levels.

Code c stands for the level 2c − 15. The levels reach from −a to a, where a is the largest magnitude in the rotated
tile: the scale is a / (15 · 128), rounded up to bf16.

int4-stochastic: the same bytes, but a coefficient goes to one of the two levels beside it by chance, so that it is
right in the mean: for gradients of activations, whose errors add up over many tokens. The chance is a hash of the place
in the tile, the number of the tile and the bits of the scale: the same tensor gives the same bytes on every
CPU, and one whose last digits differ, as sums in another order do, mostly gives them, too.

int4-tile32 and int4-tile32-stochastic: the same with tiles of 32. An outlier hurts fewer values and the largest
magnitude among fewer is smaller, for half a bit a value in place of an eighth for scales.

int6 and int6-stochastic: the same with six bits and 64 levels: code c stands for the level 2c − 63, and the scale is
a / (63 · 128). For activations, for which four bits are too few: the error of fp8 in three quarters of its bytes.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from skippipe.codecs.hadamard import TILE, HadamardCodec, inverse, sound_scales

if TYPE_CHECKING:
    from torch import Tensor


ROUNDED_UP = 1 + 2**-8  # a scale times this is not below the scale when it is rounded to bf16


def error_bound(tile: int, part: int) -> str:
    return f"in the root mean square over a tile of {tile}, 1/{part} of the largest magnitude in the rotated tile"


class Int4(HadamardCodec):
    """Levels at equal distances, each coefficient rounded to the nearest."""

    id = "int4"
    number = 7
    error_bound = error_bound(TILE, 14)
    error_feedback = True
    bits = 4
    gradients: ClassVar[str | None] = "int4-stochastic"
    stochastic: ClassVar[bool] = False

    @property
    def highest(self) -> int:
        """Level."""
        return (1 << self.bits) - 1

    def quantized(self, rotated: Tensor, first: int) -> tuple[Tensor, Tensor]:
        import torch

        largest = rotated.abs().amax(0)
        scale = sound_scales(largest * (ROUNDED_UP / (self.highest * self.block)))
        steps = rotated.mul_(inverse(scale, 2 * self.block)).add_(2.0 ** (self.bits - 1))  # int4: now 0.5 … 15.5
        if self.stochastic:
            steps.add_(_noise(self.block, scale, first), alpha=2.0**-16)
        return steps.to(torch.uint8), scale  # whole parts

    def levels(self, codes: Tensor) -> Tensor:
        import torch

        return 2 * codes.to(torch.int8) - self.highest

    def encode_compiled(self, kernels: ModuleType, values: Any, codes: Any, scales: Any) -> None:
        unit = ROUNDED_UP / (self.highest * self.block)
        kernels.encode_levels(values, self.bits, unit, self.stochastic, codes, scales.view("uint16"))


class Int4Stochastic(Int4):
    id = "int4-stochastic"
    number = 8
    error_bound = error_bound(TILE, 7)
    error_feedback = False  # it is right in the mean by itself, and what it takes away can be more than what it leaves
    gradients = None
    stochastic = True


class Int4Tile32(Int4):
    id = "int4-tile32"
    number = 12
    error_bound = error_bound(32, 14)
    gradients = "int4-tile32-stochastic"
    block = 32


class Int4Tile32Stochastic(Int4Stochastic):
    id = "int4-tile32-stochastic"
    number = 13
    error_bound = error_bound(32, 7)
    block = 32


class Int6(Int4):
    id = "int6"
    number = 10
    error_bound = error_bound(TILE, 62)
    bits = 6
    gradients = "int6-stochastic"


class Int6Stochastic(Int4Stochastic):
    id = "int6-stochastic"
    number = 11
    error_bound = error_bound(TILE, 31)
    bits = 6


def _noise(tile: int, scale: Tensor, first: int) -> Tensor:
    """For each coefficient [tile, tiles] a whole number from −2¹⁵ to 2¹⁵ − 1."""
    import torch

    places = torch.arange(tile, dtype=torch.int32, device=scale.device).unsqueeze(1)
    tiles = torch.arange(first, first + len(scale), dtype=torch.int32, device=scale.device)
    noise = mixed(places) ^ mixed(scale.view(torch.int32) ^ mixed(tiles + tile))
    return (noise + 2 * noise * noise) >> 16  # as in RC6, one to one before the shift


def mixed(numbers: Tensor) -> Tensor:
    """A hash of 32 bits, one to one (lowbias32 of hash-prospector); shifts are as those of unsigned numbers."""
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * 0x21F0AAAD
    numbers = (numbers ^ ((numbers >> 15) & 0x1FFFF)) * 0x735A2D97
    return numbers ^ ((numbers >> 15) & 0x1FFFF)
