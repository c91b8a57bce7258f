"""State in host memory: a step brings it to the device piece by piece, and back.

While one piece is stepped along, the next one comes and the one before it goes: on a GPU in streams of their own, from
and to memory that is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.optim.interface import HOST_BUFFERS, HOST_PIECE


class HostTensor(NamedTuple):
    """A tensor in host memory, flat or in rows."""

    whole: Tensor
    each: int = 1
    """Parameters for each of its numbers, or rows."""

    def part(self, here: range) -> Tensor:
        return self.whole[here.start // self.each : -(-here.stop // self.each)]


class HostState:
    """Brings parts of tensors in host memory to the device and back."""

    def __init__(self, device: torch.device, parameters: int, tensors: Sequence[HostTensor]) -> None:
        self._device = device
        self._tensors = tensors
        piece = min(HOST_PIECE, parameters)
        shapes = [((-(-piece // each), *whole.shape[1:]), whole.dtype) for whole, each in tensors]
        self._buffers = [
            [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (*shapes, ((piece,), torch.float32))]
            for _ in range(HOST_BUFFERS)
        ]
        """Of each piece: its part of every tensor, and of the gradient if that is in host memory too."""
        self._streams: list[torch.cuda.Stream] | None = None
        """The one in which state comes, and the one in which it goes back."""
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def pieces(
        self, gradient: Tensor, scale: float, ranges: Sequence[range]
    ) -> Iterator[tuple[range, Tensor, list[Tensor]]]:
        """Ranges of at most a piece, with the gradient, times `scale` if it was in host memory, and the state there.

        What the caller does with the state until it asks for the next range goes back to host memory.
        """
        if not ranges:
            return
        away = gradient.device != self._device
        self._after_step(0)
        arrived = self._bring(0, ranges, gradient if away else None)
        for number, here in enumerate(ranges):
            now_here = arrived
            if number + 1 < len(ranges):
                arrived = self._bring(number + 1, ranges, gradient if away else None)
            if now_here is not None:
                torch.cuda.current_stream(self._device).wait_event(now_here)
            *state, now = self._parts(number, here)
            yield here, now.mul_(scale) if away else gradient[here.start : here.stop], state
            self._after_step(1)
            with self._stream(1):
                for tensor, part in zip(self._tensors, state, strict=True):
                    tensor.part(here).copy_(part, non_blocking=True)
        if self._streams is not None:
            self._streams[1].synchronize()  # whoever reads the state next does so on the host

    def _bring(self, number: int, ranges: Sequence[range], gradient: Tensor | None) -> torch.cuda.Event | None:
        """Copy the state of a piece to its buffers; gives the event that it is there."""
        here = ranges[number]
        *state, now = self._parts(number, here)
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])  # what was in these buffers has gone
        with self._stream(0):
            for tensor, part in zip(self._tensors, state, strict=True):
                part.copy_(tensor.part(here), non_blocking=True)
            if gradient is not None:
                now.copy_(gradient[here.start : here.stop], non_blocking=True)
        return None if self._streams is None else self._streams[0].record_event()

    def _parts(self, number: int, here: range) -> list[Tensor]:
        buffers, sizes = self._buffers[number % HOST_BUFFERS], [each for _, each in self._tensors]
        return [buffer[: -(-len(here) // each)] for buffer, each in zip(buffers, (*sizes, 1), strict=True)]

    def _after_step(self, stream: int) -> None:
        """What this stream does next waits for what was computed so far."""
        if self._streams is not None:
            self._streams[stream].wait_stream(torch.cuda.current_stream(self._device))

    def _stream(self, number: int) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[number])


def cut(ranges: Sequence[range]) -> list[range]:
    """The same ranges in pieces; empty ones are left out."""
    return [
        range(first, min(first + HOST_PIECE, each.stop))
        for each in ranges
        for first in range(each.start, each.stop, HOST_PIECE)
    ]
