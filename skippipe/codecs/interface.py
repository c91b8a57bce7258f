"""What a codec is: how the values of a tensor become bytes on the wire, and values again.

A codec is one file of this package. Planner, simulator and messages need its id, its number and its sizes, so importing
it must not import torch; `encode`, `decode` and `rounded` may.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, dtype

Buffer: TypeAlias = bytes | bytearray | memoryview
LOSSLESS = "lossless"
SMALLEST_SCALE = 2.0**-126  # below it fp32 runs out of digits; values with such a scale are sent as zeros

COMPILED_FROM = 4096  # values of a tensor: for fewer, nothing has to be compiled or read from disk
COMPILE_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # or casts to bf16 and back would be left out, and products and sums be one
}


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
    """Whether the shape of a tensor alone gives the number of bytes. If not, `malformed` has to be overridden."""

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

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape, as `expected_bytes`. A codec for which shapes matter overrides this and the
        next two; weight gradients, which have none, go without."""
        return self.expected_bytes(prod(shape))

    def encode_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of any shape as one of uint8."""
        return self.encode(tensor.detach().reshape(-1))

    def decode_tensor(self, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of what `encode_tensor` made."""
        return self.decode(raw, prod(shape)).reshape(shape)

    def rounded(self, tensor: Tensor) -> Tensor:
        """What is left of a tensor after a hop, for a reference that runs all stages in one process."""
        return self.decode_tensor(self.encode_tensor(tensor), tuple(tensor.shape))

    def malformed(self, data: Buffer, shape: tuple[int, ...]) -> str:
        """Why bytes from the network are no tensor of this shape; empty if they are one.

        A codec whose size depends on content checks here, without torch, all that its `decode` relies on: offsets,
        indices, counts. No length that stands in the data is to be believed before it is compared with len(data).
        """
        needed = self.tensor_bytes(shape)
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


class BlockCodec(Codec):
    """A codec of blocks: the codes of every block of values come first, then the scales of all.

    `encode_blocks` and `decode_blocks` are functions of tensors alone, without a branch on what is in them and without
    writing to what they are given: torch.compile makes one or two kernels of each, which run on a GPU where that was
    asked for (`compile_on_device`). Their divisions and casts round as those of a CPU do; sums of fp32 may be taken in
    another order there.
    """

    block: ClassVar[int]
    """Values that share a scale."""
    scale_bytes: ClassVar[int]
    bits: ClassVar[int] = 8
    """Of a code."""
    filled_up: ClassVar[bool] = False
    """Whether all codes of a short last block are sent, as if zeros followed its values."""

    @abstractmethod
    def encode_blocks(self, blocks: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """The bytes of the codes [blocks, …] and of the scales [blocks, scale_bytes] of blocks [blocks, block] of any
        float; `first` is the number of the first one in its tensor."""

    @abstractmethod
    def decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Their values, [blocks, block] as fp32."""

    def block_bytes(self) -> int:
        """Of the codes of a whole block."""
        return self.block * self.bits // 8

    def codes_bytes(self, values: int) -> int:
        return -(-values // self.block) * self.block_bytes() if self.filled_up else values * self.bits // 8

    def expected_bytes(self, values: int) -> int:
        return self.codes_bytes(values) + -(-values // self.block) * self.scale_bytes

    @abstractmethod
    def encode_compiled(self, kernels: ModuleType, values: Any, codes: Any, scales: Any) -> None:
        """What `encode_blocks` does, by kernels for a CPU: of whole blocks, as many as there are `scales`; all arrays
        are flat."""

    @abstractmethod
    def decode_compiled(self, kernels: ModuleType, codes: Any, scales: Any, values: Any) -> None:
        """What `decode_blocks` does, by kernels for a CPU; the last block may be short."""

    def kernels(self, tensor: Tensor, values: int) -> ModuleType | None:
        return kernels_for(tensor, values)

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        values = flat.numel()
        if kernels := self.kernels(flat, values):
            return self._encode_on_cpu(kernels, flat)
        blocks = _rows(flat, self.block)
        raw: Tensor = (compiled(self._encoded, blocks) or self._encoded)(blocks)
        codes, sent = len(blocks) * self.block_bytes(), self.codes_bytes(values)
        return raw if codes == sent else torch.cat([raw[:sent], raw[codes:]])

    def decode(self, raw: Tensor, values: int) -> Tensor:
        import torch

        sent = self.codes_bytes(values)
        scales = raw[sent:].view(-1, self.scale_bytes)
        if kernels := self.kernels(raw, values):
            flat = _fresh(len(scales) * self.block, torch.float32)
            # a copy, because codes may end on any byte
            self.decode_compiled(kernels, raw[:sent].numpy(), scales.flatten().clone().numpy(), flat[:values].numpy())
            return flat[:values]
        codes = _rows(raw[:sent], self.block_bytes())
        found: Tensor = (compiled(self.decode_blocks, codes) or self.decode_blocks)(codes, scales)
        return found.view(-1)[:values]

    def rounded(self, tensor: Tensor) -> Tensor:
        flat, of_shapes = tensor.detach().reshape(-1), type(self).encode_tensor is not Codec.encode_tensor
        if of_shapes or self.kernels(flat, flat.numel()):  # blocks are not all, or are quicker by way of their bytes
            return super().rounded(tensor)
        blocks = _rows(flat, self.block)
        found: Tensor = (compiled(self._rounded, blocks) or self._rounded)(blocks)
        return found.view(-1)[: flat.numel()].view(tensor.shape)

    def _encode_on_cpu(self, kernels: ModuleType, flat: Tensor) -> Tensor:
        import torch

        values = flat.numel()
        whole, sent = values // self.block, self.codes_bytes(values)
        raw = _fresh(self.expected_bytes(values), torch.uint8)
        scales = torch.empty(whole * self.scale_bytes, dtype=torch.uint8)
        self.encode_compiled(kernels, kernels.as_array(flat), raw[: whole * self.block_bytes()].numpy(), scales.numpy())
        raw[sent : sent + len(scales)] = scales
        if values > whole * self.block:
            codes, scale = self.encode_blocks(_rows(flat[whole * self.block :], self.block), whole)
            start = whole * self.block_bytes()
            raw[start:sent] = codes.view(-1)[: sent - start]
            raw[sent + len(scales) :] = scale.view(-1)
        return raw

    def _encoded(self, blocks: Tensor) -> Tensor:
        import torch

        codes, scales = self.encode_blocks(blocks)
        return torch.cat([codes.reshape(-1), scales.reshape(-1)])

    def _rounded(self, blocks: Tensor) -> Tensor:
        return self.decode_blocks(*self.encode_blocks(blocks))


def _fresh(count: int, kind: dtype) -> Tensor:
    """Memory from numpy, which asks Linux for huge pages: kernels are faster than pages of 4 KiB can be handed out."""
    import numpy as np
    import torch

    return torch.from_numpy(np.empty(count * kind.itemsize, np.uint8)).view(kind)


def _rows(flat: Tensor, size: int) -> Tensor:
    """Rows of so many values, the last one filled up with zeros."""
    import torch

    if missing := -flat.numel() % size:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.contiguous().view(-1, size)


def divided(number: Tensor | float, by: Tensor | float) -> Tensor:
    """The quotient in fp32, rounded once on every device: Triton's own division of fp32 may be two units off."""
    import torch

    exact = torch.float64
    number, by = (each.to(exact) if isinstance(each, torch.Tensor) else each for each in (number, by))
    found: Tensor = number / by  # type: ignore[assignment]
    return found.to(torch.float32)


def bytes_of(words: Tensor, count: int) -> Tensor:
    """The lowest bytes of int32, in a last dimension of their own, the lowest first."""
    import torch

    shifts = 8 * torch.arange(count, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8)


def words_of(given: Tensor) -> Tensor:
    """int32 from bytes in the last dimension, the lowest first; bytes that are not there are zero."""
    import torch

    word = given[..., 0].to(torch.int32)
    for number in range(1, given.shape[-1]):
        word = word | (given[..., number].to(torch.int32) << 8 * number)
    return word


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


def compile_on_device() -> None:
    """From now on have torch.compile make kernels of the codecs that this process uses on a GPU."""
    global _on_device
    _on_device = True


_on_device = False


def compiled(function: Callable[..., Any], given: Tensor) -> Callable[..., Any] | None:
    """The function of a codec as kernels of the GPU that the tensor is on; None on a CPU, for few values, and where
    nobody has asked for it. It is compiled once for each type of float, for any number of rows."""
    import torch

    wanted = _on_device and given.is_cuda and given.numel() >= COMPILED_FROM
    return _compiled(function) if wanted and not torch.compiler.is_compiling() else None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import mark_dynamic

    from skippipe.torch_compile import compiled_on_device

    made = compiled_on_device(function, "a codec", options=COMPILE_OPTIONS)

    def run(*given: Tensor) -> Any:
        for each in given:
            mark_dynamic(each, 0)
        return made(*given)

    return run


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
