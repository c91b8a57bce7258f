"""Mailboxes that talk to each other in one process, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from skippipe.codecs import EncodedTensor
from skippipe.transport.fast_path import LARGE_BYTES
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Lost, Mailbox, QueueFull, Security
from skippipe.transport.message import Hop, Message, Received, Stamp

PATIENCE_S = 60.0  # the deadline of every wait here
KEYS = {name: KeyPair.new() for name in ("a", "b", "stranger")}
HELLO = Message(Stamp(1, 2, 3), {"hello": [1, 2.5, "ü"]})


class Net:
    """Mailboxes that are closed when the test ends, and waits that end."""

    def __init__(self, stack: ExitStack, security: Security) -> None:
        self._stack = stack
        self._boxes: list[Mailbox] = []
        self.security: Security = security

    def box(self, name: str, *, allow: str = "ab", keys: KeyPair | None = None, **options: Any) -> Mailbox:
        box = Mailbox(name, keys or KEYS[name], security=self.security, **options)
        self._stack.callback(box.close)
        for peer in allow:
            box.allow(peer, KEYS[peer].public)
        self._boxes.append(box)
        return box

    def forget(self, box: Mailbox) -> None:
        """It was closed."""
        self._boxes.remove(box)

    def until(self, done: Callable[[], object]) -> dict[str, list[Received]]:
        """Let every mailbox run until `done`; what each has received."""
        found: dict[str, list[Received]] = {box.name: [] for box in self._boxes}
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "waited in vain"
            for box in self._boxes:
                found[box.name] += box.receive(0.002)
        return found

    def exchange(
        self, a: Mailbox, b: Mailbox, sizes: Sequence[int], meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, list[int]]:
        """Send messages of these sizes both ways; the numbers of those that each has received."""
        unsent = {box.name: [numbered(n, size) for n, size in enumerate(sizes)] for box in (a, b)}
        before = {box.name: (box.sent_bytes.total(), box.received_bytes.total()) for box in (a, b)}

        def sent_all() -> bool:
            meanwhile()
            for box, peer in ((a, b), (b, a)):
                while unsent[box.name]:
                    try:
                        box.send(peer.name, unsent[box.name][0])
                    except QueueFull:
                        break
                    del unsent[box.name][0]
            moved = {box.name: (box.sent_bytes.total(), box.received_bytes.total()) for box in (a, b)}
            return not any(unsent.values()) and all(
                moved[box.name][0] - before[box.name][0] == moved[peer.name][1] - before[peer.name][1]
                for box, peer in ((a, b), (b, a))
            )

        found = self.until(sent_all)
        return {name: [number_of(each) for each in received] for name, received in found.items()}

    def loss(self, box: Mailbox) -> Lost:
        """The one connection that this mailbox loses."""
        lost: list[Lost] = []
        deadline = time.monotonic() + PATIENCE_S
        while not lost:
            assert time.monotonic() < deadline, f"{box.name} lost nobody"
            for other in self._boxes:
                assert not other.receive(0.002)
            lost = box.lost()
        (only,) = lost
        return only

    def delivered(self, to: Mailbox, count: int = 1) -> list[Received]:
        found: list[Received] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"{to.name} waited in vain"
            found += to.receive(0.05)
        return found


@contextmanager
def network(security: Security) -> Iterator[Net]:
    with ExitStack() as stack:
        yield Net(stack, security)


def link(sender: Mailbox, receiver: Mailbox, key_of: str = "") -> None:
    sender.connect(receiver.name, receiver.address, KEYS[key_of or receiver.name].public)


def numbered(number: int, nbytes: int) -> Message:
    """A message that can be told from others by its payload, too."""
    if not nbytes:
        return Message(Hop(number, 0, 0, 0))
    body = EncodedTensor("bf16", (nbytes // 2,), bytes([number % 251]) * (nbytes // 2 * 2))
    return Message(Hop(number, 0, 0, 0), body)


def number_of(received: Received) -> int:
    """The iteration of a hop, by which tests number their messages."""
    assert isinstance(received.message.header, Hop)
    return received.message.header.iteration


LARGE = numbered(0, LARGE_BYTES)
