"""How tensors get from the device to the host and back, so that computing waits for none of them.

On a GPU each direction has a stream and a thread of its own, and host memory is pinned: torch keeps what was pinned and
uses it again. What a task has made is encoded on the device, and copied while the next task runs; what came is copied
when it comes, and decoded on the device when its task runs. To pinned memory it is copied in pieces by several threads,
as that takes one of them longer than all the rest takes the device. The thread that computes waits for an event only:
the end of its task. On a CPU there is nothing to copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from skippipe.codecs import CODECS, Buffer, EncodedTensor, decode, encode
from skippipe.runtime.node.copies import TO_DEVICE, TO_HOST, Copy, MovingTensor

MOST_AHEAD = 4  # tensors that came and are on the device before their tasks: their memory is in no plan
PIECE_BYTES = 2**22  # to pinned memory at once: a piece is on its way to the device while others follow
PINNING_THREADS = 4


class Copies(Protocol):
    """Encodes what leaves the device, and decodes what comes to it."""

    def encode(self, tensor: Tensor, codec: str) -> EncodedTensor:
        """The tensor as bytes; the caller does not write to it again."""

    def bring(self, encoded: EncodedTensor) -> EncodedTensor:
        """Begin to copy a tensor that came, which is given to `decode` later, or dropped. From any thread."""

    def decode(self, encoded: EncodedTensor) -> Tensor:
        """A float32 tensor on the device, in memory of its own."""

    def settle(self) -> None:
        """Wait until the device has done what it was given; copies may go on."""


class DirectCopies:
    """Copies of a CPU, whose memory is the host's, and of devices without streams, where copies are waited for."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = device

    def encode(self, tensor: Tensor, codec: str) -> EncodedTensor:
        return encode(tensor, codec, share=True)

    def bring(self, encoded: EncodedTensor) -> EncodedTensor:
        return encoded

    def decode(self, encoded: EncodedTensor) -> Tensor:
        if isinstance(encoded, MovingTensor):
            encoded.wait()
        return decode(encoded, self._device)

    def settle(self) -> None:
        pass


class BackgroundCopies:
    """Copies of a GPU. On a CPU it does the same without streams and pinned memory, which is what tests run."""

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._streams: list[torch.cuda.Stream] = []
        if self._cuda:
            self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("to-device", "to-host")]
        """A thread for each direction; they end when nothing refers to them any more."""
        self._pinning = ThreadPoolExecutor(PINNING_THREADS, thread_name_prefix="to-pinned")
        self._ahead: weakref.WeakSet[Copy] = weakref.WeakSet()
        """Copies to this device, not to another one of the node, that have not been used."""

    def encode(self, tensor: Tensor, codec: str) -> EncodedTensor:
        # to this device: a stage that is divided over several ends on its last one, of which events here know nothing
        raw = CODECS[codec].encode_tensor(tensor).to(self._device)
        if not self._cuda and raw.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raw = raw.clone()
        here = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=self._cuda)
        copy, computed = Copy(TO_HOST), self._event()
        self._start(TO_HOST, copy, lambda: self._fetch(raw, here, computed, copy))
        return MovingTensor(codec, tuple(tensor.shape), here.numpy().data, copy=copy)

    def bring(self, encoded: EncodedTensor) -> EncodedTensor:
        if isinstance(encoded, MovingTensor) or len(self._ahead) >= MOST_AHEAD:
            return encoded
        copy = Copy(TO_DEVICE)
        self._ahead.add(copy)
        self._start(TO_DEVICE, copy, lambda: self._bring(encoded.data, copy))
        return MovingTensor(encoded.dtype, encoded.shape, encoded.data, encoded.starts, copy)

    def decode(self, encoded: EncodedTensor) -> Tensor:
        copy = encoded.copy if isinstance(encoded, MovingTensor) and encoded.copy in self._ahead else None
        if copy is None:
            if isinstance(encoded, MovingTensor):
                encoded.wait()
            copy = Copy(TO_DEVICE)
            self._bring(encoded.data, copy, wait=False)
        raw, there = copy.result()
        if there is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(there)
            raw.record_stream(now)
        return CODECS[encoded.dtype].decode_tensor(raw, encoded.shape).to(torch.float32)

    def settle(self) -> None:
        if (computed := self._event()) is not None:
            computed.synchronize()

    def _fetch(self, raw: Tensor, here: Tensor, computed: torch.cuda.Event | None, copy: Copy) -> None:
        """`raw` lives until the copy has ended, as this call refers to it."""
        if computed is not None:
            computed.synchronize()
        copy.begin()
        with self._stream(TO_HOST):
            here.copy_(raw, non_blocking=True)
            copied = self._event()
        if copied is not None:
            copied.synchronize()
        copy.end()
        copy.arrive()

    def _bring(self, data: Buffer, copy: Copy, *, wait: bool = True) -> None:
        copy.begin()
        came, here = np.frombuffer(data, np.uint8), torch.empty(len(data), dtype=torch.uint8, pin_memory=self._cuda)
        cuts = [slice(at, at + PIECE_BYTES) for at in range(0, len(came), PIECE_BYTES)]
        pieces = [self._pinning.submit(np.copyto, here.numpy()[cut], came[cut]) for cut in cuts]
        with self._stream(TO_DEVICE):
            raw = torch.empty(here.shape, dtype=torch.uint8, device=self._device)
            for cut, piece in zip(cuts, pieces, strict=True):
                piece.result()
                raw[cut].copy_(here[cut], non_blocking=True)
            there = self._event()
        copy.arrive((raw, there))
        if there is not None and wait:
            there.synchronize()
        copy.end()

    def _start(self, direction: int, copy: Copy, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                if copy.done:
                    raise
                copy.fail(error)

        self._threads[direction].submit(guarded)

    def _event(self) -> torch.cuda.Event | None:
        """An event of the stream that this thread uses now. Whoever waits for it sleeps."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _stream(self, direction: int) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._streams[direction]) if self._cuda else nullcontext()


def copies_of(device: str | torch.device) -> Copies:
    return BackgroundCopies(device) if torch.device(device).type == "cuda" else DirectCopies(device)
