"""fp32: values as they are, four bytes each, little-endian.

bf16: every value rounded to the nearest bfloat16, ties to even; two bytes each.
"""

from __future__ import annotations

from skippipe.codecs.interface import LOSSLESS, CastCodec


class Fp32(CastCodec):
    id = "fp32"
    number = 2
    error_bound = LOSSLESS
    error_feedback = False
    torch_dtype = "float32"
    value_bytes = 4


class Bf16(CastCodec):
    id = "bf16"
    number = 3
    error_bound = "1/256 of the value"
    error_feedback = True
    torch_dtype = "bfloat16"
    value_bytes = 2
