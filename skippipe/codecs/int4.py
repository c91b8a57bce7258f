"""int4: four bits for each coefficient of a rotated tile (see `hadamard`), rounded to the nearest of 16 levels.

Code c stands for the level 2c − 15. The levels reach from −a to a, where a is the largest magnitude in the rotated
tile: the scale is a / (15 · 128), rounded up to bf16.

int4-stochastic: the same bytes, but a coefficient goes to one of the two levels beside it by chance, so that it is
right in the mean: for gradients of activations, whose errors add up over many tokens. The chance is a hash of the place
in the tile, the number of the tile and the bits of the scale: the same tensor gives the same bytes wherever it is
encoded, and one whose last digits differ, as sums in another order do, mostly gives them, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from skippipe.codecs.hadamard import TILE, HadamardCodec, inverse, sound_scales

if TYPE_CHECKING:
    from torch import Tensor

ROUNDED_UP = 1 + 2**-8  # a scale times this is not below the scale when it is rounded to bf16
HIGHEST = 15  # level


class Int4(HadamardCodec):
    id = "int4"
    number = 7
    error_bound = f"in the root mean square over a tile of {TILE}, 1/14 of the largest magnitude in the rotated tile"
    error_feedback = True
    bits = 4
    gradients: ClassVar[str | None] = "int4-stochastic"

    def quantized(self, rotated: Tensor, first: int) -> tuple[Tensor, Tensor]:
        import torch

        largest = rotated.abs().amax(0)
        scale = sound_scales(largest * (ROUNDED_UP / (HIGHEST * TILE)))
        steps = rotated.mul_(inverse(scale, 2 * TILE)).add_(0.5 * (HIGHEST + 1))  # from −7.5 … 7.5 to 0.5 … 15.5
        return self.rounding(steps, scale, first).to(torch.uint8), scale

    def rounding(self, steps: Tensor, scale: Tensor, first: int) -> Tensor:  # noqa: ARG002
        """Numbers of which the whole part is the code."""
        return steps

    def levels(self, codes: Tensor) -> Tensor:
        import torch

        return 2 * codes.to(torch.int8) - HIGHEST


class Int4Stochastic(Int4):
    id = "int4-stochastic"
    number = 8
    error_bound = f"in the root mean square over a tile of {TILE}, 1/7 of the largest magnitude in the rotated tile"
    error_feedback = False  # it is right in the mean by itself, and what it takes away can be more than what it leaves
    gradients = None

    def rounding(self, steps: Tensor, scale: Tensor, first: int) -> Tensor:
        import torch

        places = torch.arange(TILE, dtype=torch.int32, device=steps.device).unsqueeze(1)
        tiles = torch.arange(first, first + len(scale), dtype=torch.int32, device=steps.device)
        key = _mixed(scale.view(torch.int32) ^ _mixed(tiles + TILE))
        noise = _mixed(places) ^ key
        noise = (noise + 2 * noise * noise) >> 16  # as in RC6, one to one before the shift; −2¹⁵ … 2¹⁵ − 1
        return steps.add_(noise, alpha=2.0**-16)


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of 32 bits, one to one (lowbias32 of hash-prospector); shifts are as those of unsigned numbers."""
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * 0x21F0AAAD
    numbers = (numbers ^ ((numbers >> 15) & 0x1FFFF)) * 0x735A2D97
    return numbers ^ ((numbers >> 15) & 0x1FFFF)
