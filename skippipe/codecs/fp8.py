"""fp8: one byte a value, an 8-bit float, and one byte for the scale of every block of values.

All values come first, then all scales. BLOCK consecutive values share one scale, the smallest power of two 2^(b − 127),
b ≥ 1, by which the largest of them becomes no more than the largest number of the float type; its byte is b. A power of
two moves exponents only, so a scale takes nothing away and one byte is enough for it. Each value is divided by it and
rounded to the nearest float of the type, ties to even; the last block may be short. A block with NaN or an infinity in
it gets b = 255 and comes back as NaN throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from skippipe.codecs.interface import Codec, in_blocks, kernels_for

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # values that share one scale
NOT_FINITE = 255


class Fp8(Codec):
    """4 bits of exponent, 3 of mantissa: numbers up to 448 = 1.75 · 2⁸."""

    id = "fp8"
    number = 5
    error_bound = f"1/16 of the value, or 2⁻¹⁷ of the largest magnitude among {BLOCK} neighbouring values"
    error_feedback = True
    torch_dtype: ClassVar[str] = "float8_e4m3fn"
    mantissa_bits: ClassVar[int] = 3
    largest_exponent: ClassVar[int] = 8
    """Of the largest number, which is 1.75 times this power of two."""

    def expected_bytes(self, values: int) -> int:
        return values + -(-values // BLOCK)

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        values, dtype = flat.numel(), getattr(torch, self.torch_dtype)
        raw = torch.empty(self.expected_bytes(values), dtype=torch.uint8, device=flat.device)
        whole = 0
        if kernels := kernels_for(flat, values):
            whole = values // BLOCK * BLOCK
            scales = raw[values:][: whole // BLOCK].numpy()
            kernels.encode_fp8(
                kernels.as_array(flat), self.mantissa_bits, self.largest_exponent, kernels.as_array(raw), scales
            )
        for start, block in in_blocks(flat[whole:].to(torch.float32), BLOCK):
            start += whole
            largest = block.abs().amax(dim=1, keepdim=True)
            # The exponent of fp32, one more where the mantissa is above 1.75.
            exponent = (largest.view(torch.int32) + 0x1FFFFF) >> 23
            finite = largest.isfinite()
            biased = (exponent - self.largest_exponent).clamp(min=1).where(finite, NOT_FINITE)
            factor = ((254 - biased) << 23).view(torch.float32).where(finite, torch.nan)
            raw[start : start + block.numel()].view(dtype).copy_((block * factor).view(-1))
            raw[values + start // BLOCK :][: len(block)].copy_(biased.view(-1))
        return raw

    def decode(self, raw: Tensor, values: int) -> Tensor:
        import torch

        dtype = getattr(torch, self.torch_dtype)
        if kernels := kernels_for(raw, values):
            flat, table = torch.empty(values), torch.arange(256, dtype=torch.uint8).view(dtype).float()
            kernels.decode_fp8(raw.numpy(), raw[values:].numpy(), table.numpy(), flat.numpy())
            return flat
        flat = raw[:values].view(dtype).to(torch.float32)
        biased = raw[values:].to(torch.int32)
        scales = (biased << 23).view(torch.float32).where(biased < NOT_FINITE, torch.nan)
        for start, block in in_blocks(flat, BLOCK):
            block.mul_(scales[start // BLOCK :][: len(block)].unsqueeze(1))
        return flat


class Fp8E5m2(Fp8):
    """5 bits of exponent, 2 of mantissa: numbers up to 57344 = 1.75 · 2¹⁵."""

    id = "fp8-e5m2"
    number = 6
    error_bound = f"1/8 of the value, or 2⁻³¹ of the largest magnitude among {BLOCK} neighbouring values"
    torch_dtype = "float8_e5m2"
    mantissa_bits = 2
    largest_exponent = 15
