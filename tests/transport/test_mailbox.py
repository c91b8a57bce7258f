"""Mailboxes and emulated links: what was sent arrives in order, and only from those let in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.errors import UserError
from skippipe.transport.link_emulation import DelayQueue, EmulatedLink, LinkEmulator
from skippipe.transport.mailbox import PIECE_BYTES, LossReason, Lost, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import GradientPiece, Hop, Message, Received, to_frames
from tests.helpers.mailboxes import HELLO, KEYS, PATIENCE_S, Net, link, network, number_of
from tests.helpers.relay import Wire


@pytest.fixture(params=["curve", "none"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with network(request.param) as made:
        yield made


@pytest.fixture
def curve() -> Iterator[Net]:
    with network("curve") as made:
        yield made


@pytest.mark.parametrize("dtype", CODECS)
def test_delivery_in_order(net: Net, dtype: str) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    tensor = torch.randn(3, PIECE_BYTES // 2 + 7)  # several pieces, and a rest
    sizes = [a.send("b", HELLO)]
    sizes.append(a.send("b", Message(Hop(5, 1, 2, 3), encode(tensor, dtype)), due_ns=99))
    sizes.append(a.send("b", Message(GradientPiece(5, 0, 2))))
    first, second, third = net.delivered(b, 3)
    assert first == Received("a", HELLO, 0)
    assert (second.peer, second.due_ns, second.message.header) == ("a", 99, Hop(5, 1, 2, 3))
    assert isinstance(second.message.body, EncodedTensor)
    assert torch.equal(decode(second.message.body), decode(encode(tensor, dtype)))
    assert third.message == Message(GradientPiece(5, 0, 2))
    assert a.sent_bytes["b"] == b.received_bytes["a"] == sum(sizes)
    assert not a.lost() and a.connected == {"b"}


def test_stranger_is_refused_and_counted(curve: Net, caplog: pytest.LogCaptureFixture) -> None:
    b, stranger = curve.box("b"), curve.box("stranger")
    link(stranger, b)
    stranger.send("b", HELLO)
    assert curve.loss(stranger) == Lost("b", LossReason.REFUSED)
    assert b.refused == 1 and not b.received_bytes
    assert b.last_refused == f"key {KEYS['stranger'].public[:8]}…" and b.last_refused in caplog.text
    with pytest.raises(NotConnected):
        stranger.send("b", HELLO)
    b.allow("stranger", KEYS["stranger"].public)  # let in later, it gets in
    link(stranger, b)
    stranger.send("b", HELLO)
    assert curve.delivered(b)[0].peer == "stranger"


def test_wrong_server_key_gets_nothing(curve: Net) -> None:
    a, b = curve.box("a"), curve.box("b")
    link(a, b, key_of="stranger")
    a.send("b", HELLO)
    for _ in range(2):
        assert curve.loss(a) == Lost("b", LossReason.HANDSHAKE)
    assert not a.connected and not b.received_bytes


def test_security_must_agree(curve: Net) -> None:
    a = curve.box("a")
    with network("none") as plain:
        b = plain.box("b")
        link(b, a)
        b.send("a", HELLO)
        assert plain.loss(b).reason in (LossReason.FOREIGN, LossReason.HANDSHAKE)  # whoever of the two notices first
        assert not a.receive(0) and not b.connected


def test_forbidden_at_once_and_after_reconnecting(net: Net) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    a.send("b", HELLO)
    net.delivered(b)
    b.forbid("a")
    a.send("b", HELLO)
    assert not net.until(lambda: b.refused == 1)["b"]
    a.disconnect("b")
    link(a, b)
    a.send("b", HELLO)
    assert not net.until(lambda: b.refused == 2)["b"]
    if net.security == "curve":
        assert net.loss(a) == Lost("b", LossReason.REFUSED)


def test_name_must_go_with_the_key(curve: Net, caplog: pytest.LogCaptureFixture) -> None:
    b, liar = curve.box("b"), curve.box("b", keys=KEYS["a"])
    link(liar, b)
    liar.send("b", HELLO)
    liar.send("b", HELLO)
    deadline = time.monotonic() + PATIENCE_S
    while b.malformed["a"] < 2 and time.monotonic() < deadline:
        assert not b.receive(0.05)
    assert b.malformed == {"a": 2}
    assert [record.message for record in caplog.records if "malformed" in record.message] == [
        "malformed message from 'a', dropped (later ones are only counted): "
        "the sender says it is 'b', but its key is that of 'a'"
    ]


def test_noise_is_counted_and_the_connection_stands(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with network("none") as net, zmq.Context() as context, context.socket(zmq.PUSH) as noise:
        b = net.box("b", largest_bytes=1000)
        noise.setsockopt(zmq.LINGER, 0)
        noise.connect(f"tcp://{b.address}")
        for frames in ([b"a"], [b"a", b"x"], [b"a", *[b"y"] * 500], [b"nobody", b"x"], [b"\xff" * 300]):
            noise.send_multipart(frames)
        noise.send_multipart([b"a", *to_frames(HELLO)])
        assert net.delivered(b) == [Received("a", HELLO)]
        assert b.malformed == {"a": 3} and b.refused == 2
        assert sum("malformed" in record.message for record in caplog.records) == 1


def test_oversize_is_refused(net: Net) -> None:
    a, b = net.box("a"), net.box("b", largest_bytes=2**16)
    link(a, b)
    large = Message(Hop(0, 0, 0, 0), encode(torch.zeros(2**16), "fp32"))
    a.send("b", large)
    assert net.loss(a) == Lost("b", LossReason.DISCONNECTED)
    assert not b.received_bytes
    net.until(lambda: "b" in a.connected)
    a.send("b", HELLO)
    assert net.delivered(b) == [Received("a", HELLO)]
    link(b, a)
    with pytest.raises(ValueError, match="262144 bytes for 'a'; at most 65536"):
        b.send("a", large)


def test_oversize_in_pieces_is_malformed(curve: Net) -> None:
    a, b = curve.box("a"), curve.box("b", largest_bytes=PIECE_BYTES)
    link(a, b)
    a.send("b", Message(Hop(0, 0, 0, 0), encode(torch.zeros(PIECE_BYTES), "fp32")))
    assert not curve.until(lambda: b.malformed["a"])["b"]


def test_full_queue_is_an_error_and_loses_nothing(net: Net) -> None:
    a, b = net.box("a", depth=2), net.box("b", depth=2)
    link(a, b)
    greetings = 0  # more than the depth where the connection has taken one meanwhile
    with pytest.raises(QueueFull, match="b"):
        while greetings < 100:
            a.send("b", HELLO)
            greetings += 1
    with pytest.raises(NotConnected, match="nobody"):
        a.send("nobody", HELLO)
    assert net.delivered(b, greetings) == [Received("a", HELLO)] * greetings
    sent, body = 0, encode(torch.zeros(2**20), "fp32")  # larger than what TCP takes on its own
    while True:
        try:
            a.send("b", Message(Hop(sent, 0, 0, 0), body))
        except QueueFull:
            break
        sent += 1
        assert sent < 1000
    began = time.monotonic()
    found = net.delivered(b, sent)
    assert [number_of(received) for received in found] == list(range(sent))
    assert a.receive(PATIENCE_S) == [] and time.monotonic() - began < PATIENCE_S  # there is room: no need to wait


def test_wake_from_another_thread(net: Net) -> None:
    a = net.box("a")
    timer = threading.Timer(0.05, a.wake)
    began = time.monotonic()
    timer.start()
    assert a.receive(PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S / 2
    timer.join(PATIENCE_S)
    a.wake()  # before the wait: it does not wait at all
    assert a.receive(PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S / 2
    began = time.monotonic()
    assert a.receive(0.02) == []
    assert 0.02 <= time.monotonic() - began < PATIENCE_S / 2
    a.close()
    a.wake()  # too late, and harmless


def test_lost_when_the_peer_closes_and_back_when_it_returns(net: Net) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    net.until(lambda: "b" in a.connected)
    address = b.address
    b.close()
    began = time.monotonic()
    while not (lost := a.lost()):
        assert time.monotonic() - began < PATIENCE_S
        a.receive(PATIENCE_S)
    assert lost == [Lost("b", LossReason.DISCONNECTED)] and not a.lost() and not a.connected
    again = Mailbox("b", KEYS["b"], listen=address, security=net.security)
    try:
        again.allow("a", KEYS["a"].public)
        a.send("b", HELLO)
        assert net.delivered(again) == [Received("a", HELLO)]
    finally:
        again.close()


@contextmanager
def watched(net: Net, heartbeat_s: float) -> Iterator[tuple[Mailbox, Mailbox, Wire]]:
    """From a to b, over a wire that can be cut."""
    a, b = net.box("a"), net.box("b")
    wire = Wire(lambda: b.address)
    a.connect("b", wire.address, KEYS["b"].public)
    net.until(lambda: "b" in a.connected)
    a.watch({"b"}, heartbeat_s)
    net.until(lambda: "b" in a.watched)
    yield a, b, wire
    wire.cut()


def test_a_link_that_is_cut_without_a_word_is_silent_until_it_is_back(net: Net) -> None:
    with watched(net, 0.5) as (a, _, wire):
        assert not a.silent
        wire.cut(silent=True)
        net.until(lambda: "b" in a.silent)
        assert "b" in a.connected, "the connection for messages has not noticed"
        assert not a.lost()
        wire.mend()
        net.until(lambda: not a.silent)
        a.watch(set(), 0.5)
        assert not a.watched


def test_a_link_that_is_busy_with_a_large_message_is_not_silent(net: Net) -> None:
    with watched(net, 1.0) as (a, b, wire):
        wire.times = 20.0
        silent: dict[str, float] = {}
        began = time.monotonic()
        a.send("b", Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (2**20,), bytes(2**22))))
        net.until(lambda: silent.update(a.silent) or b.received_bytes["a"])
        assert time.monotonic() > began + 1.0, "a heartbeat behind this message would have come too late"
        assert not silent


def test_close_lets_the_queue_leave(net: Net) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    net.until(lambda: "b" in a.connected)
    a.send("b", HELLO)
    a.close(linger_s=PATIENCE_S)
    assert net.delivered(b) == [Received("a", HELLO)]


def test_bad_addresses_and_keys() -> None:
    with network("none") as net:
        a = net.box("a")
        with pytest.raises(UserError, match="cannot listen there: Address already in use; choose another port"):
            net.box("b", listen=a.address)
        with pytest.raises(UserError, match="security 'none' is for one machine"):
            net.box("b", listen="0.0.0.0:0")
        with pytest.raises(UserError, match="security 'none' is for one machine"):
            a.connect("b", "example.com:5555")
        with pytest.raises(UserError, match="expected host:port"):
            a.connect("b", "127.0.0.1")
    with network("curve") as net:
        a = net.box("a")
        with pytest.raises(UserError, match="key of 'b': a key has 40 characters"):
            a.connect("b", "127.0.0.1:1", "no key")
        with pytest.raises(UserError, match="key of 'b': missing"):
            a.connect("b", "127.0.0.1:1")
        with pytest.raises(UserError, match="key of 'c': this is already the key of 'b'"):
            a.allow("c", KEYS["b"].public)
        with pytest.raises(UserError, match="needs a key pair"):
            Mailbox("x", None)


# Emulated links


def at(due_ns: int, number: int = 0, peer: str = "a") -> Received:
    return Received(peer, Message(Hop(number, 0, 0, 0)), due_ns)


def unsent(peer: str, message: Message, due_ns: int) -> None:
    raise AssertionError(f"{message} to {peer}, due at {due_ns}")


def test_transfers_queue_on_a_link() -> None:
    now = [1000]
    shaper = LinkEmulator({"b": EmulatedLink(0.5, 1e9), "c": EmulatedLink(0.0, 2e9)}, unsent, lambda: now[0])
    half_ns = 500_000_000
    assert shaper.due_ns("b", 100) == 1100 + half_ns
    assert shaper.due_ns("b", 50) == 1150 + half_ns  # after the first
    assert shaper.due_ns("c", 100) == 1050  # another link
    assert shaper.due_ns("nobody", 100) == 0
    now[0] = 5000
    assert shaper.due_ns("b", 100) == 5100 + half_ns  # free again
    with pytest.raises(ValueError, match="no link has"):
        EmulatedLink(0.1, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**8)), min_size=1), st.floats(1e3, 1e10))
def test_order_and_rate_of_a_link(sends: list[tuple[int, int]], bandwidth: float) -> None:
    now = [0]
    shaper, held = LinkEmulator({"b": EmulatedLink(0.01, bandwidth)}, unsent, lambda: now[0]), DelayQueue()
    for number, (pause_ns, nbytes) in enumerate(sends):
        now[0] += pause_ns
        held.put(at(shaper.due_ns("b", nbytes), number))
    last_ns = max(entry.due_ns for entry in held.ready(2**62))
    assert last_ns >= sum(nbytes for _, nbytes in sends) / bandwidth * 1e9 - len(sends)
    for number, (_, nbytes) in enumerate(sends):
        held.put(at(shaper.due_ns("b", nbytes), number))
    order = [number_of(entry) for entry in held.ready(2**62)]
    assert order == sorted(order)


def test_held_until_due() -> None:
    held = DelayQueue()
    for received in (at(30, 1), at(10, 2), at(10, 3), at(0, 4)):
        held.put(received)
    assert held.next_due_ns() == 0
    assert [number_of(entry) for entry in held.ready(9)] == [4]
    assert held.next_due_ns() == 10 and held.ready(9) == []
    assert [number_of(entry) for entry in held.ready(10)] == [2, 3]
    assert len(held) == 1
    assert [number_of(entry) for entry in held.ready(10**9)] == [1]
    assert held.next_due_ns() is None
