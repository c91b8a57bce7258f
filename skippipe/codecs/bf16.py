"""bf16: every value rounded to the nearest bfloat16, ties to even; two bytes each, little-endian."""

from __future__ import annotations

from skippipe.codecs.interface import CastCodec


class Bf16(CastCodec):
    id = "bf16"
    number = 3
    error_bound = "1/256 of the value"
    error_feedback = True
    torch_dtype = "bfloat16"
    value_bytes = 2
