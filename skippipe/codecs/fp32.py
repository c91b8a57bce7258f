"""fp32: values as they are, four bytes each, little-endian."""

from __future__ import annotations

from skippipe.codecs.interface import LOSSLESS, CastCodec


class Fp32(CastCodec):
    id = "fp32"
    number = 2
    error_bound = LOSSLESS
    error_feedback = False
    torch_dtype = "float32"
    value_bytes = 4
