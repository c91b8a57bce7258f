"""A million broken invitations, and broken requests and replies of admission: none may do more than be refused.

python -m benchmarks.fuzz_admission [--frames 1000000] [--seed 0] [--processes 1] [--only NUMBER]

As `benchmarks.fuzz`, with the same promises. In most invitations the checksum is put right after the damage, or nothing
but the checksum would be tested. Requests are answered by an admission with a real list of members on disk: nobody is
admitted but with the one invitation that there is, and once.
"""

from __future__ import annotations

import json
import random
import tempfile
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from zmq.utils import z85

from benchmarks import fuzz
from benchmarks.fuzz import Reader, odd_json, spoiled
from skippipe import __version__
from skippipe.errors import UserError
from skippipe.transport import enrolment
from skippipe.transport.addresses import free_port
from skippipe.transport.admission import AdmissionServer
from skippipe.transport.enrolment import Admitted, Refused, read_reply, read_request
from skippipe.transport.invitation import CHECKSUM_BYTES, PREFIX, Invitation, _checksum
from skippipe.transport.keys import PeerList
from skippipe.transport.members import MemberStore, cluster_keys

COORDINATOR, STRANGER, *KEYS = (z85.encode(bytes(range(at, at + 32))).decode() for at in range(6))
ADDRESSES = ("10.0.0.1:5555", "[2001:db8::7]:65535", "coordinator.example.org:2", "[::]:1", "a:443")
NAMES = ("bob", "Zürich-1", "n" * 64, "a b", "東京")
ODD_BYTES = (b"", b"\xff" * 40, b"\x00" * 40, b"\x09", b"\xc3\x28", b"\x1b[2J", b"\xff")
LARGEST_REPLY = 4096


def some_invitation(rng: random.Random) -> bytes:
    """Of one: the bytes before the checksum."""
    where = tuple(rng.sample(ADDRESSES, rng.randint(1, len(ADDRESSES))))
    made = Invitation(rng.choice(NAMES), COORDINATOR, where, rng.randrange(2**32), rng.randbytes(16))
    encoded = made.to_text().removeprefix(PREFIX)
    return urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[:-CHECKSUM_BYTES]


def bad_invitation(rng: random.Random) -> list[bytes]:
    content = some_invitation(rng)
    for _ in range(rng.randint(0, 3)):
        if rng.random() < 0.3:
            at = rng.randrange(
                min(53, len(content)), len(content) + 1
            )  # the name and the addresses, in which lengths lie
            content = content[:at] + rng.choice(ODD_BYTES) + content[at + rng.randrange(3) :]
        else:
            content = spoiled(rng, content, some_invitation(rng))
    whole = content + (_checksum(content) if rng.random() < 0.8 else rng.randbytes(rng.randrange(6)))
    text = (PREFIX + urlsafe_b64encode(whole).decode().rstrip("=")).encode()
    if rng.random() < 0.2:
        text = spoiled(rng, text, PREFIX.encode() * 2000)
    return [text]


def read_invitation(frames: list[bytes]) -> bool:
    text = frames[0].decode(errors="surrogateescape")
    found = Invitation.from_text(text)
    assert found.to_text() == "".join(text.split()), "one invitation, two strings"
    assert found.keys.public and found.name.isprintable() and found.addresses
    return True


def good_request(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"ask": "enrol", "public": rng.choice(KEYS), "version": __version__},
        {"ask": "check", "version": rng.choice((__version__, "9.9")), "address": rng.choice(("", *ADDRESSES))},
        {"ask": "call", "address": rng.choice(ADDRESSES), "number": rng.randbytes(16).hex()},
        {"ask": "piece", "back": rng.choice((0, 1, 4096))},
        {"ask": "report", "findings": [{"check": "mtu", "level": "ok", "text": "Zürich"}] * rng.randrange(4)},
    ]
    return rng.choice(kinds)


def good_reply(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"say": "refused", "reason": rng.choice(NAMES)},
        {"say": "admitted", "name": rng.choice(NAMES)},
        {"say": "checked", "name": "bob", "version": "1", "time_s": 1.5, "memory_bytes": 2**40},
        {"say": "called", "failure": ""},
        {"say": "taken", "count": 4096, "back": 1},
    ]
    return rng.choice(kinds)


def broken(rng: random.Random, value: dict[str, Any], other: dict[str, Any]) -> bytes:
    text = json.dumps(value).encode()
    way = rng.randrange(10)
    if way < 6:
        return odd_json(rng, value).encode(errors="surrogatepass")
    return spoiled(rng, text, json.dumps(other).encode()) if way < 9 else text


def bad_request(rng: random.Random) -> list[bytes]:
    frames = [rng.choice([*KEYS[:1], STRANGER, "invited"]).encode(), broken(rng, good_request(rng), good_request(rng))]
    return [*frames, *(rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(3)))]


def bad_reply(rng: random.Random) -> list[bytes]:
    return [broken(rng, good_reply(rng), good_reply(rng))]


@cache
def admission() -> tuple[AdmissionServer, MemberStore]:
    """With one member, and one invitation."""
    folder = Path(tempfile.mkdtemp())
    keys, store = cluster_keys(folder), MemberStore.of_folder(folder)
    PeerList({"ann": KEYS[0]}).save(store.path)
    store.invite("bob", COORDINATOR, 1e6, ADDRESSES)
    return AdmissionServer(store, keys, f"127.0.0.1:{free_port('127.0.0.1') + 1}"), store


def answer_request(frames: list[bytes]) -> bool:
    server, store = admission()
    server._reload()
    server._requests.clear()  # as if a minute had passed
    who, invited = frames[0].decode(), store.current().invitations[-1]
    before = dict(store.current().peers)
    reply = server.answer(invited.public if who == "invited" else who, "10.0.0.9", frames[1:])
    server.events()
    peers = store.current().peers
    if peers != before:
        assert isinstance(reply, Admitted) and who == "invited" and not invited.ended, "admitted without an invitation"
        assert peers == {**before, "bob": json.loads(frames[1])["public"]}
        store.revoke("bob")
        store.invite("bob", COORDINATOR, 1e6, ADDRESSES)
    if callable(reply):
        return True  # it parsed; another machine would be called now
    said = msgspec.json.encode(reply)
    assert len(said) < LARGEST_REPLY
    if isinstance(reply, Refused):
        raise UserError(reply.reason)
    request = read_request(frames[1])
    assert read_request(msgspec.json.encode(request)) == request
    return True


def take_reply(frames: list[bytes]) -> bool:
    reply = read_reply(frames[0])
    assert enrolment.plain(str(reply)).isprintable()
    return bool(reply)


READERS = {
    "invitations": Reader(bad_invitation, read_invitation, (UserError,), 50),
    "requests": Reader(bad_request, answer_request, (UserError,), 40),
    "replies": Reader(bad_reply, take_reply, (UserError,), 10),
}


if __name__ == "__main__":
    fuzz.READERS.clear()
    fuzz.READERS.update(READERS)
    fuzz.TURNS[:] = [name for name, reader in READERS.items() for _ in range(reader.share)]
    fuzz.main()
