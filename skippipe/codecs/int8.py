"""int8: one byte a value, and an fp32 scale for every block of values.

All values come first, then all scales, little-endian. BLOCK consecutive values share one scale, the block's largest
magnitude / 127, and each is rounded to the nearest multiple of it; the last block may be short. A block with NaN or an
infinity in it gets the scale NaN and comes back as NaN throughout, so that a sick gradient cannot pass for a sound one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.codecs.interface import SMALLEST_SCALE, Codec, in_blocks, kernels_for

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # values that share one scale


class Int8(Codec):
    id = "int8"
    number = 4
    error_bound = f"1/254 of the largest magnitude among {BLOCK} neighbouring values"
    error_feedback = True

    def expected_bytes(self, values: int) -> int:
        return values + 4 * -(-values // BLOCK)

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        values = flat.numel()
        raw = torch.empty(self.expected_bytes(values), dtype=torch.uint8, device=flat.device)
        scales = []
        whole = 0
        if kernels := kernels_for(flat, values):
            whole = values // BLOCK * BLOCK
            scales.append(torch.empty(whole // BLOCK))
            kernels.encode_int8(kernels.as_array(flat), kernels.as_array(raw), scales[0].numpy())
        for start, block in in_blocks(flat[whole:].to(torch.float32), BLOCK):
            start += whole
            scale = block.abs().amax(dim=1, keepdim=True) / 127
            scale = scale.where(scale.isfinite(), torch.nan).where(~(scale < SMALLEST_SCALE), 0.0)
            rounded = (block * (1 / scale).where(scale > 0, 0.0)).round_()
            rounded.nan_to_num_(0, 0, 0)  # what a NaN would become as int8 is up to the processor
            raw[start : start + block.numel()].view(torch.int8).copy_(rounded.view(-1))
            scales.append(scale.view(-1))
        raw[values:].copy_(torch.cat(scales).view(torch.uint8))
        return raw

    def decode(self, raw: Tensor, values: int) -> Tensor:
        import torch

        scales = raw[values:].clone().view(torch.float32)  # a clone, because the values may end on any byte
        if kernels := kernels_for(raw, values):
            flat = torch.empty(values)
            kernels.decode_int8(raw.numpy().view("int8"), scales.numpy(), flat.numpy())
            return flat
        flat = raw[:values].view(torch.int8).to(torch.float32)
        for start, block in in_blocks(flat, BLOCK):
            block.mul_(scales[start // BLOCK :][: len(block)].unsqueeze(1))
        return flat
