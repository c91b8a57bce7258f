"""Codecs: how activations and gradients are written as bytes for the wire.

CODECS is the registry: planner, simulator, messages, job file and command line read it. GRADIENTS is what weight
gradients can be averaged as: by a codec, or as factors of low rank. Tensors are written row by row. torch is imported
when the first tensor is encoded.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from skippipe.codecs.bf16 import Bf16
from skippipe.codecs.fp8 import Fp8, Fp8E5m2
from skippipe.codecs.fp32 import Fp32
from skippipe.codecs.int2 import Int2
from skippipe.codecs.int4 import Int4, Int4Stochastic, Int4Tile32, Int4Tile32Stochastic
from skippipe.codecs.int6 import Int6, Int6Stochastic
from skippipe.codecs.int8 import Int8
from skippipe.codecs.interface import Buffer, Codec, EncodedTensor
from skippipe.codecs.low_rank import LowRank

if TYPE_CHECKING:
    import torch

    CodecId = str
    GradientsId = str

__all__ = [
    "CODECS",
    "GRADIENTS",
    "LOW_RANK",
    "Buffer",
    "Codec",
    "CodecId",
    "EncodedTensor",
    "GradientsId",
    "LowRank",
    "decode",
    "encode",
    "gradient_codec",
    "smaller_than",
    "smallest",
]

CODECS: dict[str, Codec] = {
    codec.id: codec
    for codec in (
        Fp32(),
        Bf16(),
        Int8(),
        Fp8(),
        Fp8E5m2(),
        Int4(),
        Int4Stochastic(),
        Int2(),
        Int6(),
        Int6Stochastic(),
        Int4Tile32(),
        Int4Tile32Stochastic(),
    )
}

LOW_RANK: dict[str, LowRank] = {each.id: each for each in map(LowRank, (4, 8, 16, 32, 64))}
GRADIENTS: Mapping[str, Codec | LowRank] = ChainMap[str, Codec | LowRank]({**LOW_RANK}, CODECS)  # type: ignore[arg-type]

if not TYPE_CHECKING:
    CodecId = Literal[tuple(CODECS)]  # what a job file or an option may say; a type checker takes any text
    GradientsId = Literal[tuple(GRADIENTS)]

COMPARED_VALUES = 2**20  # of a tensor by which the sizes of codecs are compared


def encode(tensor: torch.Tensor, codec: str, *, share: bool = False) -> EncodedTensor:
    """A tensor of floats, of any type and on any device, as the bytes that its codec makes of it.

    The bytes are a copy, to be sent while the caller goes on writing to the tensor. With `share` a contiguous CPU
    tensor that the codec leaves as it is is not copied: the caller must not write to it until it is sent.
    """
    assert sys.byteorder == "little"
    if not tensor.is_floating_point() or not tensor.numel():
        raise ValueError(f"a tensor of floats that is not empty is needed, found {list(tensor.shape)} {tensor.dtype}")
    raw = CODECS[codec].encode(tensor.detach().reshape(-1)).cpu()
    if not share and raw.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        raw = raw.clone()
    return EncodedTensor(codec, tuple(tensor.shape), raw.numpy().data)


def decode(
    encoded: EncodedTensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A float32 tensor, or one of `dtype`, in memory of its own: a received buffer is free once this returns."""
    import torch

    raw = torch.empty(encoded.nbytes, dtype=torch.uint8)
    raw.numpy().data[:] = encoded.data  # torch.frombuffer would share the buffer, and warn where it is read-only
    flat = CODECS[encoded.dtype].decode(raw.to(device), encoded.values)
    return flat.to(dtype or torch.float32).reshape(encoded.shape)


def gradient_codec(codec: str) -> str:
    """The codec of the gradients that go back over hops whose activations have this one."""
    return CODECS[codec].gradients or codec


def smallest(ids: Iterable[str]) -> str:
    """The codec with the fewest bytes; the first of several."""
    return min(ids, key=_size)


def smaller_than(codec: str, among: Iterable[str] = CODECS) -> str | None:
    """Of the codecs for hops, the largest that makes clearly fewer bytes than this one: three quarters at most."""
    fewer = [each for each in among if CODECS[each].for_hops and 4 * _size(each) <= 3 * _size(codec)]
    return max(fewer, key=_size, default=None)


def _size(codec: str) -> int:
    return GRADIENTS[codec].expected_bytes(COMPARED_VALUES)
