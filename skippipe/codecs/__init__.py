"""Codecs: how activations and gradients are written as bytes for the wire.

CODECS is the registry: planner, simulator, messages, job file and command line read it. GRADIENTS is what weight
gradients can be averaged as: by a codec, or as factors of low rank. Tensors are written row by row. torch is imported
when the first tensor is encoded.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Literal

from skippipe.codecs.floats import Bf16, Fp32
from skippipe.codecs.fp8 import Fp8, Fp8E5m2
from skippipe.codecs.int2 import Int2
from skippipe.codecs.int4 import Int4, Int4Stochastic, Int4Tile32, Int4Tile32Stochastic, Int6, Int6Stochastic
from skippipe.codecs.int4_rank8 import Int4Rank8, Int4Rank8Stochastic
from skippipe.codecs.int8 import Int8
from skippipe.codecs.interface import Buffer, Codec, EncodedTensor, compile_on_device
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
    "after_hop",
    "compared_bytes",
    "compile_on_device",
    "decode",
    "encode",
    "encode_and_decode",
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
        Int4Rank8(),
        Int4Rank8Stochastic(),
    )
}

LOW_RANK: dict[str, LowRank] = {each.id: each for each in map(LowRank, (4, 8, 16, 32, 64))}
GRADIENTS: Mapping[str, Codec | LowRank] = ChainMap[str, Codec | LowRank]({**LOW_RANK}, CODECS)  # type: ignore[arg-type]

if not TYPE_CHECKING:
    CodecId = Literal[tuple(CODECS)]  # what a job file or an option may say; a type checker takes any text
    GradientsId = Literal[tuple(GRADIENTS)]

COMPARED_SHAPE = (1024, 1024)  # of a tensor by which the sizes of codecs are compared


def encode(tensor: torch.Tensor, codec: str, *, share: bool = False) -> EncodedTensor:
    """A tensor of floats, of any type and on any device, as the bytes that its codec makes of it.

    The bytes are a copy, to be sent while the caller goes on writing to the tensor. With `share` a contiguous CPU
    tensor that the codec leaves as it is is not copied: the caller must not write to it until it is sent.
    """
    assert sys.byteorder == "little"
    if not tensor.is_floating_point() or not tensor.numel():
        raise ValueError(f"a tensor of floats that is not empty is needed, found {list(tensor.shape)} {tensor.dtype}")
    raw = CODECS[codec].encode_tensor(tensor)
    return EncodedTensor(codec, tuple(tensor.shape), _on_host(raw, None if share else tensor).numpy().data)


def encode_and_decode(tensor: torch.Tensor, codec: str) -> tuple[EncodedTensor, torch.Tensor]:
    """As `encode`; and what `decode` makes of it, on the device of the tensor: only bytes go from there to the host.

    Of a lossless codec the second is the tensor itself."""
    coder = CODECS[codec]
    raw, shape = coder.encode_tensor(tensor), tuple(tensor.shape)
    back = tensor if coder.lossless else coder.decode_tensor(raw, shape).float()
    return EncodedTensor(codec, shape, _on_host(raw, tensor).numpy().data), back


def _on_host(raw: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """Bytes in host memory, apart from those of the tensor that was `given`. From a GPU or pinned memory they come into
    pinned memory, which torch keeps and uses again: new pages would take longer than the copy."""
    import torch

    if raw.is_cuda:
        return torch.empty(raw.shape, dtype=raw.dtype, pin_memory=True).copy_(raw)
    raw = raw.cpu()
    shared = given is not None and raw.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return torch.empty(raw.shape, dtype=raw.dtype, pin_memory=raw.is_pinned()).copy_(raw) if shared else raw


def decode(encoded: EncodedTensor, device: str | torch.device = "cpu") -> torch.Tensor:
    """A float32 tensor in memory of its own: a received buffer is free once this returns."""
    import torch

    raw = torch.empty(encoded.nbytes, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    raw.numpy().data[:] = encoded.data  # torch.frombuffer would share the buffer, and warn where it is read-only
    raw = raw.to(device, non_blocking=True)
    return CODECS[encoded.dtype].decode_tensor(raw, encoded.shape).to(torch.float32)


def after_hop(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    """What arrives of a tensor, of its type, in a process that has all stages. Codecs compute in fp32 as on nodes, also
    where layers compute in bf16."""
    import torch

    with torch.autocast(tensor.device.type, enabled=False):
        return CODECS[codec].rounded(tensor).to(tensor.dtype)


def gradient_codec(codec: str) -> str:
    """The codec of the gradients that go back over hops whose activations have this one."""
    return CODECS[codec].gradients or codec


def smallest(ids: Iterable[str]) -> str:
    """The codec with the fewest bytes; the first of several."""
    return min(ids, key=compared_bytes)


def smaller_than(codec: str, among: Iterable[str] = CODECS) -> str | None:
    """Of the codecs for hops, the largest that makes clearly fewer bytes than this one: three quarters at most."""
    fewer = [each for each in among if CODECS[each].for_hops and 4 * compared_bytes(each) <= 3 * compared_bytes(codec)]
    return max(fewer, key=compared_bytes, default=None)


def compared_bytes(codec: str) -> int:
    """Bytes of a tensor by which codecs are compared, also those of weight gradients alone."""
    found = GRADIENTS[codec]
    return (
        found.expected_bytes(prod(COMPARED_SHAPE)) if isinstance(found, LowRank) else found.tensor_bytes(COMPARED_SHAPE)
    )
