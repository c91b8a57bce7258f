"""fp8: one byte a value, an 8-bit float, and one byte for the scale of every block of values.

All values come first, then all scales. BLOCK consecutive values share one scale, the smallest power of two 2^(b − 127),
b ≥ 1, by which the largest of them becomes no more than the largest number of the float type; its byte is b. A power of
two moves exponents only, so a scale takes nothing away and one byte is enough for it. Each value is divided by it and
rounded to the nearest float of the type, ties to even; the last block may be short. A block with NaN or an infinity in
it gets b = 255 and comes back as NaN throughout.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from skippipe.codecs.interface import BlockCodec

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # values that share one scale
NOT_FINITE = 255


class Fp8(BlockCodec):
    """4 bits of exponent, 3 of mantissa: numbers up to 448 = 1.75 · 2⁸."""

    id = "fp8"
    number = 5
    error_bound = f"1/16 of the value, or 2⁻¹⁷ of the largest magnitude among {BLOCK} neighbouring values"
    error_feedback = True
    block = BLOCK
    scale_bytes = 1
    torch_dtype: ClassVar[str] = "float8_e4m3fn"
    mantissa_bits: ClassVar[int] = 3
    largest_exponent: ClassVar[int] = 8
    """Of the largest number, which is 1.75 times this power of two."""

    def encode_blocks(self, blocks: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        import torch

        blocks = blocks.to(torch.float32)
        largest = blocks.abs().amax(dim=1, keepdim=True)
        # The exponent of fp32, one more where the mantissa is above 1.75.
        exponent = (largest.view(torch.int32) + 0x1FFFFF) >> 23
        finite = largest.isfinite()
        biased = (exponent - self.largest_exponent).clamp(min=1).where(finite, NOT_FINITE)
        factor = ((254 - biased) << 23).view(torch.float32).where(finite, torch.nan)
        codes = (blocks * factor).to(getattr(torch, self.torch_dtype))
        return codes.view(torch.uint8), biased.to(torch.uint8)

    def decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        import torch

        biased = scales.to(torch.int32)
        scale = (biased << 23).view(torch.float32).where(biased < NOT_FINITE, torch.nan)
        return codes.view(getattr(torch, self.torch_dtype)).to(torch.float32) * scale

    def encode_compiled(self, kernels: ModuleType, values: Any, codes: Any, scales: Any) -> None:
        kernels.encode_fp8(values, self.mantissa_bits, self.largest_exponent, codes, scales)

    def decode_compiled(self, kernels: ModuleType, codes: Any, scales: Any, values: Any) -> None:
        import torch

        table = torch.arange(256, dtype=torch.uint8).view(getattr(torch, self.torch_dtype)).float()
        kernels.decode_fp8(codes, scales, table.numpy(), values)


class Fp8E5m2(Fp8):
    """5 bits of exponent, 2 of mantissa: numbers up to 57344 = 1.75 · 2¹⁵."""

    id = "fp8-e5m2"
    number = 6
    error_bound = f"1/8 of the value, or 2⁻³¹ of the largest magnitude among {BLOCK} neighbouring values"
    torch_dtype = "float8_e5m2"
    mantissa_bits = 2
    largest_exponent = 15
