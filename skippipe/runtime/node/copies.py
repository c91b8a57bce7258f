"""Copies between host and device that go on beside computing, as a node's state machine and its agent see them.

The tensor of a message can be handed about while its bytes are still on their way: its size and shape are known. Only
whoever reads the bytes waits for them: the mailbox, which is given a message when its copy is done, and the executor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from skippipe.codecs import EncodedTensor
from skippipe.transport.message import Message

COPY_S = 60.0  # for a copy to end: it has milliseconds to do
TO_DEVICE, TO_HOST = 0, 1


@dataclass
class CopyTimes:
    """When a copy began and ended, by the monotonic clock; 0: it has not yet."""

    direction: int
    began_ns: int = 0
    ended_ns: int = 0


class Copy:
    """A copy that was asked for."""

    def __init__(self, direction: int) -> None:
        self.times = CopyTimes(direction)
        self._arrived: Future[Any] = Future()

    def begin(self) -> None:
        self.times.began_ns = time.monotonic_ns()

    def arrive(self, what: Any = None) -> None:
        """It can be used from now on, although the device may have to wait for it."""
        self._arrived.set_result(what)

    def fail(self, error: BaseException) -> None:
        self._arrived.set_exception(error)

    def end(self) -> None:
        self.times.ended_ns = time.monotonic_ns()

    @property
    def done(self) -> bool:
        return self._arrived.done()

    def result(self) -> Any:
        """What has arrived; waits for it, and raises what went wrong."""
        return self._arrived.result(COPY_S)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls at once, or later from another thread."""
        self._arrived.add_done_callback(lambda _: call())


@dataclass(frozen=True, slots=True)
class MovingTensor(EncodedTensor):
    """An encoded tensor on its way from the device, whose bytes count once the copy is done; or one that came, and is
    on its way to the device."""

    copy: Copy | None = field(default=None, compare=False, repr=False)

    @property
    def is_coming(self) -> bool:
        """Is it on its way to the device?"""
        return self.copy is not None and self.copy.times.direction == TO_DEVICE

    def wait(self) -> None:
        """Until the bytes count."""
        if self.copy is not None and not self.is_coming:
            self.copy.result()


class Outbox:
    """Messages that wait for the copies of their tensors; each goes out when its own is done."""

    def __init__(self, send: Callable[[int, Message], None], wake: Callable[[], None]) -> None:
        """`wake` is called from another thread when there is something to `flush`."""
        self._send = send
        self._wake = wake
        self._copied: deque[tuple[int, Message]] = deque()

    def send(self, receiver: int, message: Message) -> None:
        body = message.body
        if not isinstance(body, MovingTensor) or body.copy is None or body.is_coming or body.copy.done:
            self._send(receiver, message)
            return

        def copied() -> None:
            self._copied.append((receiver, message))
            self._wake()

        body.copy.when_done(copied)

    def flush(self) -> None:
        """Send what has been copied; raises what went wrong with a copy."""
        while self._copied:
            receiver, message = self._copied.popleft()
            assert isinstance(message.body, MovingTensor)
            message.body.wait()
            self._send(receiver, message)
