"""int2: two bits for each coefficient of a rotated tile (see `hadamard`): the levels −10, −3, 3 and 10.

A rotated tile is nearly Gaussian, and of four levels for a Gaussian the best are ±0.4528 and ±1.510 times its root mean
square (Max, Lloyd); 3 and 10 times 0.151 are these. Code c stands for the c-th level, and each coefficient goes to the
nearest. What is taken away has 0.12 of the squares of a Gaussian tile, and less than all of them in any tile: that is
what error feedback needs. Meant for weight gradients; on a hop nothing would give back what it takes away.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from skippipe.codecs.hadamard import TILE, HadamardCodec, inverse, sound_scales
from skippipe.codecs.interface import SMALLEST_SCALE, divided

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 0.151  # of a level, in root mean squares
BORDER = 6.5  # between the levels 3 and 10


class Int2(HadamardCodec):
    id = "int2"
    number = 9
    error_bound = f"in the root mean square over a tile of {TILE}, 0.98 of that of the tile; of Gaussian values, 0.35"
    error_feedback = True
    for_hops = False
    bits = 2

    def quantized(self, rotated: Tensor, first: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        import torch

        largest = rotated.abs().amax(0)
        squares = (rotated * divided(1.0, largest).where(largest >= SMALLEST_SCALE, 0.0)).square_()
        while len(squares) > 1:  # in this order on every device
            half = len(squares) // 2
            squares = squares[:half] + squares[half:]
        scale = sound_scales(largest * squares[0].sqrt() * (UNIT / TILE**1.5))
        codes = rotated.mul_(inverse(scale, TILE * BORDER)).add_(2).clamp_(0, 3)
        return codes.to(torch.uint8), scale

    def encode_compiled(self, kernels: ModuleType, values: Any, codes: Any, scales: Any) -> None:
        kernels.encode_int2(values, UNIT / TILE**1.5, TILE * BORDER, codes, scales.view("uint16"))

    def levels(self, codes: Tensor) -> Tensor:
        import torch

        return (7 * codes).to(torch.int8) - 10 - (codes >> 1).to(torch.int8)
