"""A mailbox that lasts: floods of junk are counted and dropped, and honest messages still arrive."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from benchmarks.fuzz import bad_message
from skippipe.codecs import EncodedTensor
from skippipe.transport.addresses import Socket
from skippipe.transport.fast_path import VERB_MAGIC
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox
from skippipe.transport.message import HEADER, Hop, Limits, Malformed, Message, Received, from_frames, to_frames
from tests.helpers.mailboxes import HELLO, KEYS, PATIENCE_S, Net, link

JUNK = 2000
GROWTH_BYTES = 64 * 2**20
LARGEST_BYTES = 2**22
SOUND = [bytes(frame) for frame in to_frames(HELLO)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def raw(to: Mailbox, own: KeyPair, key_of: str) -> Iterator[Socket]:
    """A socket that keeps to no rule but the encryption."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.SNDHWM, 2 * JUNK)
        push.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        push.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        push.setsockopt(zmq.CURVE_SERVERKEY, KEYS[key_of].public.encode())
        push.connect(f"tcp://{to.address}")
        yield push


def junk(rng: random.Random) -> list[bytes]:
    """What a peer with the name 'a' may send, and nobody can make sense of."""
    header = SOUND[0]
    deep = b'{"a":' * 3000 + b"0" + b"}" * 3000
    small, _ = to_frames(Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (1, 1), bytes(4))))
    huge = small[:-16] + struct.pack("<4I", 2**32 - 1, 2**32 - 1, 0, 0)
    return rng.choice(
        [
            [rng.randbytes(rng.randrange(300))],
            [b"", header, b"{}"],
            [b"b", *SOUND],  # in the name of another
            [b"\xff" * 300, *SOUND],
            [b"a"],
            [b"a", header],
            [b"a", header[: rng.randrange(HEADER.size)], b"{}"],
            [b"a", rng.randbytes(HEADER.size), rng.randbytes(rng.randrange(2000))],
            [b"a", header, rng.randbytes(rng.randrange(2, 2000))],
            [b"a", header, deep],
            [b"a", header, json.dumps(["no object"] * 100).encode()],
            [b"a", huge, bytes(100)],
            [b"a", header, *[b" " * 2**10] * 100],  # more frames than there may be
            [b"a", VERB_MAGIC + rng.randbytes(rng.randrange(40))],
            [b"a", *_broken(rng)],
        ]
    )


def _broken(rng: random.Random) -> list[bytes]:
    while True:
        frames = bad_message(rng)
        try:
            from_frames(frames, Limits(payload_bytes=LARGEST_BYTES))
        except Malformed:
            return frames


def until_counted(box: Mailbox, count: int) -> None:
    deadline = time.monotonic() + 6 * PATIENCE_S
    while box.malformed["a"] < count:
        assert time.monotonic() < deadline, f"{box.malformed} of {count}"
        assert not box.receive(0.05)


def test_junk_of_a_peer_is_counted_and_nothing_else(net: Net) -> None:
    b, rng = net.box("b", allow="a", largest_bytes=LARGEST_BYTES), random.Random(0)
    b.allow("stranger", KEYS["stranger"].public)  # an honest one this time
    honest = net.box("stranger")
    link(honest, b)
    with raw(b, KEYS["a"], "b") as push:
        for _ in range(100):
            push.send_multipart(junk(rng))
        until_counted(b, 100)
        before = resident_bytes()
        for _ in range(JUNK - 100):
            push.send_multipart(junk(rng))
        until_counted(b, JUNK)
        assert b.malformed == {"a": JUNK} and not b.refused
        push.send_multipart([b"a", *SOUND])
        assert net.delivered(b) == [Received("a", HELLO)]
        honest.send("b", HELLO)
        assert net.delivered(b) == [Received("stranger", HELLO)]
        assert b.malformed == {"a": JUNK} and resident_bytes() - before < GROWTH_BYTES


def test_nothing_of_a_stranger_is_read(net: Net) -> None:
    b, rng = net.box("b"), random.Random(1)
    with raw(b, KEYS["stranger"], "b") as push:
        for _ in range(50):
            push.send_multipart(junk(rng))
        deadline = time.monotonic() + PATIENCE_S
        while not b.refused:
            assert time.monotonic() < deadline
            assert not b.receive(0.05)
    a = net.box("a")
    link(a, b)
    a.send("b", HELLO)
    assert net.delivered(b) == [Received("a", HELLO)]
    assert not b.malformed and set(b.received_bytes) == {"a"}
    assert b.last_refused == f"key {KEYS['stranger'].public[:8]}…"
