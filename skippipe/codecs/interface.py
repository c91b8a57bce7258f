"""What a codec is: how the values of a tensor become bytes on the wire, and values again.

A codec is one file of this package. Planner, simulator and messages need its id, its number and its sizes, so importing
it must not import torch; `encode`, `decode` and `rounded` may.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Buffer: TypeAlias = bytes | bytearray | memoryview
LOSSLESS = "lossless"
SMALLEST_SCALE = 2.0**-126  # below it fp32 runs out of digits; values with such a scale are sent as zeros

COMPILED_FROM = 4096  # values of a tensor: for fewer, nothing has to be compiled or read from disk


class Codec(ABC):
    """One way to write the values of a tensor as bytes."""

    id: ClassVar[str]
    """Its name in plan, job and cluster files and on the command line; it never changes."""
    number: ClassVar[int]
    """Its number in the header of a message, from 2 to 127; it never changes and is never given to another codec."""
    error_bound: ClassVar[str]
    """How far a decoded value can be from the value that was encoded, in words; or LOSSLESS."""
    error_feedback: ClassVar[bool]
    """Whether gradient averaging keeps what encoding took away from a gradient and adds it in the next iteration. This
    is the state of a codec: one fp32 value for each value of the gradient."""
    for_hops: ClassVar[bool] = True
    """Whether it is exact enough for activations, to which nothing gives back what encoding took away."""
    gradients: ClassVar[str | None] = None
    """The codec of the gradients that go back over hops whose activations have this one: as many bytes, but errors of
    another kind. None: the same codec."""
    fixed_size: ClassVar[bool] = True
    """Whether the number of values alone gives the number of bytes. If not, `malformed` has to be overridden."""

    @property
    def lossless(self) -> bool:
        return self.error_bound == LOSSLESS

    @abstractmethod
    def expected_bytes(self, values: int) -> int:
        """Bytes of so many values: exactly if the size is fixed, else what a plan reckons with."""

    def round_bytes(self, values: int, matrices: Iterable[object]) -> tuple[int, ...]:  # noqa: ARG002
        """Bytes of each round in which so many values of a gradient are averaged: of this codec, in one."""
        return (self.expected_bytes(values),)

    @abstractmethod
    def encode(self, flat: Tensor) -> Tensor:
        """A one-dimensional tensor of floats as one of uint8, on the same device: fewer bytes leave a GPU then."""

    @abstractmethod
    def decode(self, raw: Tensor, values: int) -> Tensor:
        """The values of what `encode` made and `malformed` passed, as a one-dimensional tensor of floats."""

    def rounded(self, tensor: Tensor) -> Tensor:
        """What is left of a tensor after a hop, for a reference that runs all stages in one process."""
        return self.decode(self.encode(tensor.detach().reshape(-1)), tensor.numel()).reshape(tensor.shape)

    def malformed(self, data: Buffer, shape: tuple[int, ...]) -> str:
        """Why bytes from the network are no tensor of this shape; empty if they are one.

        A codec whose size depends on content checks here, without torch, all that its `decode` relies on: offsets,
        indices, counts. No length that stands in the data is to be believed before it is compared with len(data).
        """
        needed = self.expected_bytes(prod(shape))
        if len(data) == needed:
            return ""
        return f"{len(data)} bytes; a {self.id} tensor of shape {list(shape)} has {needed}"


class CastCodec(Codec):
    """A codec that casts every value to another type of float."""

    torch_dtype: ClassVar[str]
    """The name of the type in torch."""
    value_bytes: ClassVar[int]

    def expected_bytes(self, values: int) -> int:
        return self.value_bytes * values

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        return self.rounded(flat).contiguous().view(torch.uint8)

    def decode(self, raw: Tensor, values: int) -> Tensor:  # noqa: ARG002
        import torch

        return raw.view(getattr(torch, self.torch_dtype))

    def rounded(self, tensor: Tensor) -> Tensor:
        import torch

        return tensor.to(getattr(torch, self.torch_dtype))


def in_blocks(flat: Tensor, size: int) -> Sequence[tuple[int, Tensor]]:
    """Rows of whole blocks, then the short one: (position of the first value, a view of two dimensions)."""
    whole = flat.numel() // size * size
    parts = ((0, flat[:whole].view(-1, size)), (whole, flat[whole:].view(1, -1)))
    return [(start, part) for start, part in parts if part.numel()]


def kernels_for(tensor: Tensor, values: int) -> ModuleType | None:
    """The compiled form of codecs, for a tensor in the memory of a CPU; None for few values, where there is no numba,
    and for what is traced by torch.compile."""
    import torch

    if values < COMPILED_FROM or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return _kernels()


@cache
def _kernels() -> ModuleType | None:
    if os.environ.get("SKIPPIPE_PURE_PYTHON"):
        return None
    try:
        from skippipe.codecs import kernels
    except ImportError:
        return None
    return kernels


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A tensor as bytes."""

    dtype: str
    """The id of its codec."""
    shape: tuple[int, ...]
    data: Buffer
    """A buffer of bytes, not of floats: its length is the number of bytes."""
    starts: Buffer = b""
    """Of activations [samples, tokens, …] whose samples hold several conversations: a bit for every token, 1 where a
    conversation begins, as numpy's packbits writes them; empty: every sample is one piece of text."""

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def starts_bytes(self) -> int:
        """Bytes that `starts` has, if it is not empty."""
        return -(-prod(self.shape[:2]) // 8)

    @property
    def nbytes(self) -> int:
        return len(self.data)
