"""bf16: every value rounded to the nearest bfloat16, ties to even; two bytes each, little-endian."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.codecs.interface import Codec

if TYPE_CHECKING:
    from torch import Tensor


class Bf16(Codec):
    id = "bf16"
    number = 3
    error_bound = "1/256 of the value"
    error_feedback = True

    def expected_bytes(self, values: int) -> int:
        return 2 * values

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        return flat.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, raw: Tensor, values: int) -> Tensor:  # noqa: ARG002
        import torch

        return raw.view(torch.bfloat16)

    def rounded(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16()
