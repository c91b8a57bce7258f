"""int6: as int4, with six bits and 64 levels: code c stands for the level 2c − 63, and the scale is a / (63 · 128).

For activations, for which four bits are too few: the error of fp8 in three quarters of its bytes.
"""

from __future__ import annotations

from skippipe.codecs.hadamard import TILE
from skippipe.codecs.int4 import Int4, Int4Stochastic, error_bound


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
