"""int8: one byte a value, and an fp32 scale for every block of values.

All values come first, then all scales, little-endian. BLOCK consecutive values share one scale, the block's largest
magnitude / 127, and each is rounded to the nearest multiple of it; the last block may be short. A block with NaN or an
infinity in it gets the scale NaN and comes back as NaN throughout, so that a sick gradient cannot pass for a sound one.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from skippipe.codecs.interface import SMALLEST_SCALE, BlockCodec, bytes_of, divided, words_of

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # values that share one scale


class Int8(BlockCodec):
    id = "int8"
    number = 4
    error_bound = f"1/254 of the largest magnitude among {BLOCK} neighbouring values"
    error_feedback = True
    block = BLOCK
    scale_bytes = 4

    def encode_blocks(self, blocks: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        import torch

        blocks = blocks.to(torch.float32)
        scale = divided(blocks.abs().amax(dim=1, keepdim=True), 127)
        scale = scale.where(scale.isfinite(), torch.nan).where(~(scale < SMALLEST_SCALE), 0.0)
        whole = (blocks * divided(1.0, scale).where(scale > 0, 0.0)).round()
        whole = whole.nan_to_num(0, 0, 0)  # what a NaN would become as int8 is up to the processor
        return whole.to(torch.int8).view(torch.uint8), bytes_of(scale.view(-1).view(torch.int32), 4)

    def decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        import torch

        return codes.view(torch.int8).to(torch.float32) * words_of(scales).view(torch.float32).unsqueeze(1)

    def encode_compiled(self, kernels: ModuleType, values: Any, codes: Any, scales: Any) -> None:
        kernels.encode_int8(values, codes, scales.view("float32"))

    def decode_compiled(self, kernels: ModuleType, codes: Any, scales: Any, values: Any) -> None:
        kernels.decode_int8(codes.view("int8"), scales.view("float32"), values)
