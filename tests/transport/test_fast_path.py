"""Fast paths: the order of messages stays, forged frames get nowhere, and without one all goes on under CURVE."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq

from skippipe.codecs import EncodedTensor
from skippipe.transport import sender
from skippipe.transport.aead import TAG_BYTES
from skippipe.transport.fast_path import LARGE_BYTES, FastPathMessage, FastPathReceiver, FastPathVerb
from skippipe.transport.mailbox import LossReason, Lost, Mailbox, QueueFull
from skippipe.transport.message import HEADER, Message, Received, Stamp
from tests.helpers.mailboxes import HELLO, KEYS, LARGE, PATIENCE_S, Net, link, number_of, numbered
from tests.helpers.quick import others_slow
from tests.helpers.relay import Relay, Tamper


def check(received: list[Received]) -> list[int]:
    """Numbers of the messages, which are as they were sent."""
    for each in received:
        body = each.message.body
        assert each.message == numbered(number_of(each), body.nbytes if isinstance(body, EncodedTensor) else 0)
    return [number_of(each) for each in received]


def both_ways(net: Net, **options: Any) -> tuple[Mailbox, Mailbox]:
    a, b = net.box("a", **options), net.box("b", **options)
    link(a, b)
    link(b, a)
    return a, b


def fast(net: Net, **options: Any) -> tuple[Mailbox, Mailbox]:
    """Two mailboxes, with a fast path from a to b that is in use."""
    a, b = both_ways(net, **options)
    a.send("b", LARGE)
    net.until(lambda: a.on_fast_path)
    a.send("b", HELLO)
    net.until(lambda: b.received_bytes["a"] == a.sent_bytes["b"])
    return a, b


def later(box: Mailbox) -> None:
    """As if REQUEST_AGAIN_S had passed."""
    box._outgoing["b"]._request_from_s = 0.0


def relayed(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    monkeypatch.setattr(FastPathReceiver, "offer", lambda self: relay.offer(self))


# Order


@pytest.mark.parametrize("seed", others_slow([0], [1, 2]))
def test_order_across_fast_path(net: Net, seed: int) -> None:
    """Both ways, from before there is a fast path, with full queues."""
    rng = random.Random(seed)
    boxes = both_ways(net, depth=3)
    lists = [[numbered(n, rng.choice([0, 2, 1000, 70_000, LARGE_BYTES, 2_000_001])) for n in range(120)] for _ in boxes]
    waiting = {box.name: iter(messages) for box, messages in zip(boxes, lists, strict=True)}
    unsent = {name: next(messages, None) for name, messages in waiting.items()}

    def send_some() -> bool:
        for box, peer in (boxes, boxes[::-1]):
            for _ in range(rng.randrange(6)):
                if (message := unsent[box.name]) is not None:
                    try:
                        box.send(peer.name, message)
                    except QueueFull:
                        break
                    unsent[box.name] = next(waiting[box.name], None)
        return all(
            unsent[box.name] is None and peer.received_bytes[box.name] == box.sent_bytes[peer.name]
            for box, peer in (boxes, boxes[::-1])
        )

    found = net.until(send_some)
    net.until(lambda: all(box.on_fast_path == {peer.name} for box, peer in (boxes, boxes[::-1])))
    for box, peer in (boxes, boxes[::-1]):
        assert not box.lost()
        assert check(found[peer.name]) == list(range(120))


@pytest.mark.parametrize("seed", others_slow([0], [1, 2, 3]))
def test_order_stays_when_fast_path_break(net: Net, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Some messages are gone, each time with a loss; none comes twice, none too late, and it goes on."""
    monkeypatch.setattr(sender, "REQUEST_AGAIN_S", 0.5)
    rng, relay = random.Random(seed), Relay()
    relayed(monkeypatch, relay)
    a, b = both_ways(net, depth=4)
    numbers: list[int] = []
    sent = losses = cuts = 0
    last = 300
    deadline = time.monotonic() + 3 * PATIENCE_S
    try:
        while cuts < 3 or not numbers or numbers[-1] < last:
            assert time.monotonic() < deadline
            for _ in range(rng.randrange(4)):
                try:
                    a.send("b", numbered(sent, rng.choice([0, 1000, LARGE_BYTES, 1_500_000])))
                except QueueFull:
                    break
                sent += 1
            if cuts < 3 and a.on_fast_path and rng.random() < 0.05:
                relay.cut()
                cuts, last = cuts + 1, sent + 50
            a.receive(0.001)
            numbers += check(b.receive(0.001))
            losses += len(a.lost())
    finally:
        relay.close()
    assert numbers == sorted(set(numbers))
    assert losses >= 1 and len(relay.offers) >= 3 and not b.refused and not b.malformed


# Somebody on the wire


def swapped(number: int, head: bytes, body: bytes) -> list[bytes]:
    if number == 3:
        kept.append(head + body)
        return []
    return [head + body, kept.pop()] if number == 4 else [head + body]


kept: list[bytes] = []
TAMPERS: dict[str, Tamper] = {
    "altered": lambda number, head, body: [head + body[:-1] + bytes([body[-1] ^ (number == 3)])],
    "replayed": lambda number, head, body: [head + body] * (1 + (number == 3)),
    "left out": lambda number, head, body: [head + body] * (number != 3),
    "swapped": swapped,
    "inserted": lambda number, head, body: [b"\x00\x20" + bytes(32)] * (number == 3) + [head + body],
    "in parts": lambda number, head, body: [bytes([head[0] | (number == 3)]) + head[1:] + body],
    "too long": lambda number, head, body: [b"\x02" + (2**40).to_bytes(8, "big")] * (number == 3) + [head + body],
}


@pytest.mark.parametrize("how", TAMPERS)
def test_tampering_ends_the_fast_path_and_nothing_else(net: Net, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Frame 3 is the payload of the second message in the fast path; nothing after it comes through."""
    relay = Relay(TAMPERS[how])
    relayed(monkeypatch, relay)
    try:
        a, b = both_ways(net)
        a.send("b", LARGE)
        net.until(lambda: a.on_fast_path)
        for number in range(1, 6):
            a.send("b", numbered(number, LARGE_BYTES))
        found = net.until(lambda: not a.on_fast_path)
        assert a.lost() == [Lost("b", LossReason.DISCONNECTED)] and a.connected == {"b"}
        assert set(check(found["b"])) <= ({1, 2} if how == "replayed" else {1})
        assert b.refused == (how != "too long") and not b.malformed  # libzmq itself hangs up on a frame too long
        if b.refused:
            assert b.last_refused == "fast path of 'a'"
        later(a)
        a.send("b", numbered(6, LARGE_BYTES))  # under CURVE
        assert net.until(lambda: a.on_fast_path)["b"][-1].message == numbered(6, LARGE_BYTES)
        first, second = relay.offers
        assert first.path_id != second.path_id and first.secret != second.secret
    finally:
        relay.close()


def test_payload_is_not_readable_on_the_wire(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def read(_: int, head: bytes, body: bytes) -> list[bytes]:
        seen.append(body)
        return [head + body]

    relay = Relay(read)
    relayed(monkeypatch, relay)
    try:
        a, _ = fast(net)
        a.send("b", numbered(7, 3 * LARGE_BYTES))
        assert check(net.until(lambda: len(seen) == 6)["b"]) in ([], [7])
    finally:
        relay.close()
    assert not any(bytes([7]) * 8 in body or b"SKPP" in body or b"hello" in body for body in seen)
    assert len({body[:32] for body in seen}) == 6


@contextmanager
def stranger(offer: FastPathMessage) -> Iterator[zmq.Socket[bytes]]:
    """Somebody who has read name and password off the wire."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.PLAIN_USERNAME, offer.path_id.hex().encode())
        push.setsockopt(zmq.PLAIN_PASSWORD, offer.secret.hex().encode())
        push.connect(f"tcp://127.0.0.1:{offer.port}")
        yield push


def test_name_and_password_are_good_for_once(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay()
    relayed(monkeypatch, relay)
    try:
        a, b = fast(net)
        with stranger(relay.offers[0]) as push:
            push.send(b"x" * (HEADER.size + 8 + TAG_BYTES))
            assert not net.until(lambda: b.refused)["b"]
        assert b.last_refused == f"fast path '{relay.offers[0].path_id.hex()[:8]}'"
        a.send("b", HELLO)  # the fast path stands
        assert net.delivered(b) == [Received("a", HELLO)] and not a.lost() and a.on_fast_path
    finally:
        relay.close()


def test_stranger_who_comes_first_keeps_out_of_the_fast_path_and_no_more(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers: list[FastPathMessage] = []
    real, came = FastPathReceiver.offer, ExitStack()

    def raced(path: FastPathReceiver) -> FastPathMessage:
        """The offer goes to a when the stranger is in."""
        offers.append(real(path))
        if len(offers) == 1:
            push = came.enter_context(stranger(offers[0]))
            push.send(b"x" * (HEADER.size + 8 + TAG_BYTES))
            deadline = time.monotonic() + PATIENCE_S
            while b._incoming.auth._token_of and time.monotonic() < deadline:
                b._incoming.answer_authentication()
        return offers[-1]

    monkeypatch.setattr(FastPathReceiver, "offer", raced)
    with came:
        a, b = both_ways(net)
        a.send("b", LARGE)
        net.until(lambda: b.refused)  # it is a that is refused
        assert not a.on_fast_path and not a.lost()
        later(a)
        a.send("b", numbered(1, LARGE_BYTES))
        found = net.until(lambda: a.on_fast_path)["b"]  # the second try is better
        assert check(found) == [1] and len(offers) == 2 and not b.malformed


# Losses, and doing without


def test_peer_that_returns_gets_a_new_fast_path(net: Net) -> None:
    a, b = fast(net)
    address = b.address
    b.close()
    net.forget(b)
    net.until(lambda: not a.connected)
    assert set(a.lost()) == {Lost("b", LossReason.DISCONNECTED)} and not a.on_fast_path
    again = net.box("b", listen=address)
    link(again, a)
    for number in range(3):
        a.send("b", numbered(number, LARGE_BYTES))
    assert check(net.until(lambda: a.on_fast_path and again.received_bytes["a"] >= 3 * LARGE_BYTES)["b"]) == [0, 1, 2]


def test_sender_that_returns_gets_a_new_fast_path(net: Net) -> None:
    a, b = fast(net)
    a.close(linger_s=PATIENCE_S)
    net.forget(a)
    again = net.box("a", listen=a.address)
    link(again, b)
    again.send("b", numbered(1, LARGE_BYTES))
    assert check(net.until(lambda: again.on_fast_path)["b"]) == [1]
    again.send("b", numbered(2, LARGE_BYTES))
    assert check(net.delivered(b)) == [2]


def test_close_lets_the_fast_path_leave(net: Net) -> None:
    a, b = fast(net)
    for number in range(8):
        a.send("b", numbered(number, 4 * LARGE_BYTES))
    a.close(linger_s=PATIENCE_S)
    net.forget(a)
    assert check(net.delivered(b, 8)) == list(range(8))


@pytest.mark.parametrize("nbytes", [60_000, 16 * LARGE_BYTES])  # the smaller ones pyzmq would copy
def test_full_fast_path_is_an_error_and_loses_nothing(net: Net, nbytes: int) -> None:
    a, b = fast(net, depth=2, largest_bytes=16 * LARGE_BYTES)
    sent, full_s = 0, 0.0
    while full_s < 0.3:  # meanwhile some of it leaves for what b's queue can take
        try:
            a.send("b", numbered(sent, nbytes))
            sent += 1
            assert sent < 1000
        except QueueFull:
            began = time.monotonic()
            assert a.receive(0.3) == []
            full_s = time.monotonic() - began
    with pytest.raises(QueueFull, match="b"):
        a.send("b", HELLO)  # however small
    began = time.monotonic()
    assert check(net.delivered(b, sent)) == list(range(sent))
    assert a.receive(PATIENCE_S) == [] and time.monotonic() - began < PATIENCE_S  # there is room: no need to wait
    a.send("b", HELLO)
    assert net.delivered(b) == [Received("a", HELLO)] and a.on_fast_path


def test_forbidden_in_the_fast_path_too(net: Net) -> None:
    a, b = fast(net)
    b.forbid("a")
    a.send("b", LARGE)
    assert net.loss(a) == Lost("b", LossReason.DISCONNECTED)
    a.send("b", LARGE)
    assert not net.until(lambda: b.refused)["b"]
    b.allow("a", KEYS["a"].public)
    later(a)
    a.send("b", LARGE)
    assert len(net.until(lambda: a.on_fast_path)["b"]) == 1


def test_oversize_ends_the_fast_path(net: Net) -> None:
    a, b = net.box("a"), net.box("b", largest_bytes=2**20)
    link(a, b)
    link(b, a)
    a.send("b", LARGE)
    net.until(lambda: a.on_fast_path)
    a.send("b", numbered(1, 2**20 + 2))
    assert net.loss(a) == Lost("b", LossReason.DISCONNECTED) and b.malformed == {"a": 1}
    a.send("b", HELLO)
    assert net.delivered(b) == [Received("a", HELLO)]


def test_lane_needs_both_ways(net: Net) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    a.send("b", LARGE)
    assert net.delivered(b)[0].message == LARGE
    a.receive(0.05)
    assert not a.on_fast_path
    link(b, a)  # later than asked for
    net.until(lambda: a.on_fast_path)
    assert not b.on_fast_path  # each way has its own, and this way nothing large was sent


def test_offer_for_a_question_of_the_past(net: Net) -> None:
    a, _ = both_ways(net)
    a.send("b", LARGE)
    a._outgoing["b"].open_fast_path(FastPathMessage(FastPathVerb.OFFER, bytes(16), 5555))
    assert a._outgoing["b"].fast_path is None
    net.until(lambda: a.on_fast_path)


def test_control_messages_ask_for_no_fast_path(net: Net) -> None:
    a, b = both_ways(net, json_bytes=2**20)
    a.send("b", Message(Stamp(0, 0, 0), {"brief": "x" * LARGE_BYTES}))
    a.send("b", Message(Stamp(0, 0, 0), {"brief": "x" * 2**20}))
    assert len(net.until(lambda: b.malformed)["b"]) == 1
    assert a._outgoing["b"]._requested is None


@pytest.mark.parametrize("options", [({"fast_path": False}, {}), ({}, {"fast_path": False})])
def test_lane_needs_both_to_want_it(net: Net, options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    a, b = net.box("a", **options[0]), net.box("b", **options[1])
    link(a, b)
    link(b, a)
    for number in range(4):
        a.send("b", numbered(number, LARGE_BYTES))
    assert check(net.until(lambda: b.received_bytes["a"] == a.sent_bytes["b"])["b"]) == [0, 1, 2, 3]
    assert not a.on_fast_path and not b._incoming._paths


def test_unreachable_port_is_not_tried_all_the_time(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        offers: list[bytes] = []

        def wrong_offer(path: FastPathReceiver) -> FastPathMessage:
            offers.append(path.path_id)
            return FastPathMessage(FastPathVerb.OFFER, path.path_id, port, path.token)

        monkeypatch.setattr(FastPathReceiver, "offer", wrong_offer)
        a, b = both_ways(net)
        for number in range(6):
            if number == 4:
                later(a)
            a.send("b", numbered(number, LARGE_BYTES))
            assert check(net.until(lambda: b.received_bytes["a"] == a.sent_bytes["b"])["b"]) == [number]
        net.until(lambda: len(offers) == 2 and a._outgoing["b"].fast_path is None)
        assert not a.lost() and not a.on_fast_path


def test_without_cryptography() -> None:
    """In a process of its own, that cannot import it."""
    program = """
import sys
sys.modules["cryptography"] = None
from skippipe.transport import aead
from tests.helpers.mailboxes import LARGE, link, network
assert not aead.AVAILABLE
with network("curve") as net:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    link(b, a)
    for _ in range(3):
        a.send("b", LARGE)
    assert [received.message for received in net.delivered(b, 3)] == [LARGE] * 3
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
