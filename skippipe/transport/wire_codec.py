"""Tensors on the wire: fp32, bf16, or int8 with a scale for every block of values.

Little-endian, row by row. int8: all values, then all scales. INT8_BLOCK consecutive values of the flattened tensor
share one fp32 scale, the block's largest magnitude / 127, and each is rounded to the nearest multiple of it; the last
block may be short. A block with NaN or an infinity in it gets the scale NaN and comes back as NaN throughout, so that
a sick gradient cannot pass for a sound one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from skippipe.workload import INT8_BLOCK, wire_bytes

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = bytes | bytearray | memoryview

SMALLEST_SCALE = 2.0**-126  # below it fp32 runs out of digits; such a block is sent as zeros


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A tensor as bytes. `data` is of bytes (not of floats) and holds exactly what its type and shape need."""

    dtype: str
    """One of workload.WIRE_DTYPES."""
    shape: tuple[int, ...]
    data: Buffer

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.data)


def encode(tensor: torch.Tensor, dtype: str, *, share: bool = False) -> EncodedTensor:
    """Any device, any type of float; blocks are scaled where the tensor lives, so that fewer bytes leave a GPU.

    The bytes are the packed tensor's own, to be sent while the caller goes on writing to the original. With `share`
    a contiguous CPU tensor that has the wire's type already is not copied: nobody may write to it until it is sent.
    """
    import torch

    assert sys.byteorder == "little"
    if not tensor.is_floating_point() or not tensor.numel():
        raise ValueError(f"a tensor of floats that is not empty is needed, found {list(tensor.shape)} {tensor.dtype}")
    shape = tuple(tensor.shape)
    flat = tensor.detach().reshape(-1)
    if dtype == "int8":
        raw = _quantized(flat.to(torch.float32)).cpu()
    else:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        raw = flat.to(wire).cpu().contiguous().view(torch.uint8)  # rounded where it lies: fewer bytes leave a GPU
        if not share and raw.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raw = raw.clone()
    return EncodedTensor(dtype, shape, raw.numpy().data)


def decode(packed: EncodedTensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """A float32 tensor, or one of `dtype`, in memory of its own: a received buffer is free once this returns."""
    import torch

    raw = torch.empty(packed.nbytes, dtype=torch.uint8)
    raw.numpy().data[:] = packed.data  # torch.frombuffer would share the buffer, and warn where it is read-only
    raw = raw.to(device)
    if packed.dtype == "int8":
        flat = _dequantized(raw, packed.values)
    else:
        flat = raw.view(torch.float32 if packed.dtype == "fp32" else torch.bfloat16)
    return flat.to(dtype or torch.float32).reshape(packed.shape)


def _quantized(flat: torch.Tensor) -> torch.Tensor:
    import torch

    values = flat.numel()
    raw = torch.empty(wire_bytes(values, "int8"), dtype=torch.uint8, device=flat.device)
    scales = []
    for start, part in _in_blocks(flat):
        scale = part.abs().amax(dim=1, keepdim=True) / 127
        sound = scale.isfinite()
        scale = scale.where(sound, torch.nan).where(~(scale < SMALLEST_SCALE), 0.0)
        rounded = (part * (1 / scale).where(scale > 0, 0.0)).round_()
        if not sound.all():
            rounded.nan_to_num_(0, 0, 0)  # what a NaN would become as int8 is up to the processor
        raw[start : start + part.numel()].view(torch.int8).copy_(rounded.view(-1))
        scales.append(scale.view(-1))
    raw[values:].copy_(torch.cat(scales).view(torch.uint8))
    return raw


def _dequantized(raw: torch.Tensor, values: int) -> torch.Tensor:
    import torch

    flat = raw[:values].view(torch.int8).to(torch.float32)
    scales = raw[values:].clone().view(torch.float32)  # a clone, because the values may end on any byte
    for start, part in _in_blocks(flat):
        part.mul_(scales[start // INT8_BLOCK :][: len(part)].unsqueeze(1))
    return flat


def _in_blocks(flat: torch.Tensor) -> Sequence[tuple[int, torch.Tensor]]:
    """Rows of whole blocks, then the short one: (position of the first value, a view of two dimensions)."""
    whole = flat.numel() // INT8_BLOCK * INT8_BLOCK
    parts = ((0, flat[:whole].view(-1, INT8_BLOCK)), (whole, flat[whole:].view(1, -1)))
    return [(start, part) for start, part in parts if part.numel()]
