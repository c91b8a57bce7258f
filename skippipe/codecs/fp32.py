"""fp32: values as they are, four bytes each, little-endian."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippipe.codecs.interface import LOSSLESS, Codec

if TYPE_CHECKING:
    from torch import Tensor


class Fp32(Codec):
    id = "fp32"
    number = 2
    error_bound = LOSSLESS
    error_feedback = False

    def expected_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        return flat.to(torch.float32).contiguous().view(torch.uint8)

    def decode(self, raw: Tensor, values: int) -> Tensor:  # noqa: ARG002
        import torch

        return raw.view(torch.float32)

    def rounded(self, tensor: Tensor) -> Tensor:
        return tensor.float()
