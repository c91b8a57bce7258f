"""A mailbox that cannot be called: it dials, and all that is sent to it comes over what it has dialled."""

from __future__ import annotations

import os
import random
import resource
import secrets
import socket
import threading
from typing import Any

import pytest

from skippipe.transport import callbacks, token_gate
from skippipe.transport.addresses import callback_ports, split_address
from skippipe.transport.fast_path import LARGE_BYTES
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Lost, Mailbox
from skippipe.transport.streams import StreamLoop
from skippipe.transport.token_gate import MAGIC, PREFACE, TOKEN_BYTES, TokenGate, token_of
from tests.helpers.mailboxes import HELLO, PATIENCE_S, Net, link, network, number_of, numbered
from tests.helpers.processes import wait_for
from tests.helpers.relay import Wire


def parked(net: Net, secret: bytes | None = None) -> tuple[Mailbox, Mailbox]:
    """a can be called; b cannot, and keeps a stream ready there."""
    a, b = net.box("a"), net.box("b", listen=OUT_ONLY)
    secret = secret or secrets.token_bytes(32)
    a.expect_callbacks("b", secret)
    link(a, b)
    b.be_callable(a.address, secret)
    link(b, a)
    return a, b


def passed_on(caller: Mailbox, callee: Mailbox) -> bool:
    """What the coordinator does."""
    for request in caller.call_requests():
        assert request.peer == callee.name
        callee.answer(caller.name, [f"127.0.0.1:{request.port}"], request.token)
    return True


@pytest.mark.parametrize("security", ["curve", "none"])
def test_both_ways_over_what_one_has_dialled(security: str) -> None:
    with network(security) as net:  # type: ignore[arg-type]
        a, b = parked(net)
        a.send("b", HELLO)
        b.send("a", HELLO)
        found = net.until(lambda: a.received_bytes["b"] and b.received_bytes["a"])
        assert [each.message for each in found["a"] + found["b"]] == [HELLO, HELLO]
        assert b.address == OUT_ONLY and not a.lost() and not b.lost()


def test_fast_path_and_order(net: Net) -> None:
    """Small and large messages both ways arrive in order, and both directions get a fast path."""
    rng = random.Random(1)
    a, b = parked(net)
    found = net.exchange(a, b, [rng.choice([0, 1000, LARGE_BYTES, 2_000_001]) for _ in range(60)])
    net.until(lambda: a.on_fast_path == {"b"} and b.on_fast_path == {"a"})
    for box in (a, b):
        assert found[box.name] == list(range(60)) and not box.lost()


def test_callback_on_request(net: Net) -> None:
    """Between two nodes, a third tells the one that cannot be called; the link is watched as any other."""
    a, b = net.box("a"), net.box("b", listen=OUT_ONLY)
    link(a, b)
    a.send("b", HELLO)
    found = net.until(lambda: passed_on(a, b) and b.received_bytes["a"])
    assert found["b"][0].message == HELLO
    net.until(lambda: a.connected)
    a.watch(["b"], 1.0)
    net.until(lambda: passed_on(a, b) and "b" in a.watched)
    assert not a.silent


def test_dials_again_when_the_connection_is_lost(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "PARK_AGAIN_S", (0.02, 0.05))
    ports: list[int] = []
    wire = Wire(lambda: f"127.0.0.1:{ports[0]}")
    ports += callback_ports(split_address(net.box("a").address)[1])
    monkeypatch.setattr(
        callbacks, "callback_ports", lambda port: (split_address(wire.address)[1],) if port == 1 else ports
    )
    a, b = net._boxes[0], net.box("b", listen=OUT_ONLY)
    secret = secrets.token_bytes(32)
    a.expect_callbacks("b", secret)
    link(a, b)
    b.be_callable("127.0.0.1:1", secret)
    for _ in range(3):
        net.until(lambda: a.connected)
        wire.cut()
        assert net.loss(a) == Lost("b", LossReason.DISCONNECTED)
        wire.mend()
    a.send("b", HELLO)
    assert net.until(lambda: b.received_bytes["a"])["b"][0].message == HELLO


def test_what_is_queued_leaves_before_the_end(net: Net) -> None:
    a, b = parked(net)
    net.until(lambda: a.connected)
    for number in range(12):
        a.send("b", numbered(number, 1_000_000))
    net.forget(a)
    closing = threading.Thread(target=a.close, args=(PATIENCE_S,))
    closing.start()
    found = net.until(lambda: not closing.is_alive())["b"] + b.receive(0.1)
    assert [number_of(each) for each in found] == list(range(12))


@pytest.mark.parametrize("shown", ["nothing", "junk", "unknown token", "used token", "token of the series"])
def test_strangers_get_nowhere(net: Net, monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """A stream that shows no good token is closed within PREFACE_S; one that shows a good one, and then says what it
    has no business to say, too."""
    monkeypatch.setattr(token_gate, "PREFACE_S", 0.3)
    secret = secrets.token_bytes(32)
    a, b = parked(net, secret)
    net.until(lambda: a.connected)
    first = {
        "nothing": b"",
        "junk": b"GET / HTTP/1.1\r\n\r\n",
        "unknown token": PREFACE.pack(MAGIC, bytes(32)),
        "used token": PREFACE.pack(MAGIC, token_of(secret, 0)),
        "token of the series": PREFACE.pack(MAGIC, token_of(secret, 9)) + b"x",
    }[shown]
    with socket.create_connection(("127.0.0.1", _port(a)), PATIENCE_S) as stream:
        stream.sendall(first)
        said = b""
        while piece := _recv(stream):
            said += piece
    assert said in (b"", callbacks.ACCEPTED)
    a.send("b", HELLO)
    assert net.until(lambda: b.received_bytes["a"])["b"][0].message == HELLO


def _port(box: Mailbox) -> int:
    """Where it takes streams."""
    assert box._callbacks is not None
    return box._callbacks._port


def _recv(stream: socket.socket) -> bytes:
    try:
        return stream.recv(100)
    except ConnectionResetError:
        return b""


def test_only_ports_of_the_mailbox_are_called(net: Net) -> None:
    """A caller cannot reach another program on the machine of a node."""
    _, b = net.box("a"), net.box("b", listen=OUT_ONLY)
    with socket.create_server(("127.0.0.1", 0)) as gate, socket.create_server(("127.0.0.1", 0)) as other:
        b.answer("a", [f"127.0.0.1:{gate.getsockname()[1]}"], bytes(32).hex())
        gate.settimeout(PATIENCE_S)
        stream, _ = gate.accept()
        stream.settimeout(PATIENCE_S)
        assert stream.recv(PREFACE.size) == PREFACE.pack(MAGIC, bytes(32))
        stream.sendall(callbacks.ACCEPTED + callbacks.PORT.pack(other.getsockname()[1]))
        assert _recv(stream) == b""
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_revoked_at_once(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of a peer that is forbidden are closed, and its tokens are good no more."""
    monkeypatch.setattr(token_gate, "PREFACE_S", 0.3)
    secret = secrets.token_bytes(32)
    a, _ = parked(net, secret)
    net.until(lambda: a.connected)
    a.disconnect("b")
    a.forbid("b")
    with socket.create_connection(("127.0.0.1", _port(a)), PATIENCE_S) as stream:
        stream.sendall(PREFACE.pack(MAGIC, token_of(secret, 7)))
        assert _recv(stream) == b""


class Counting(socket.socket):
    """Counts how often a stream was to be taken."""

    attempts = 0

    def accept(self) -> Any:
        self.attempts += 1
        return super().accept()


def test_without_file_descriptors_streams_wait_and_the_thread_does_not_spin() -> None:
    loop, admitted = StreamLoop("a test"), threading.Event()
    gate: TokenGate[str] = TokenGate(loop, lambda stream, meaning: admitted.set())
    token = bytes(range(TOKEN_BYTES))
    listening, dialling = Counting(), socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    turn = threading.Event()
    for begin in (lambda: gate.expect(token, "a stream"), lambda: gate.open(listening), turn.set):
        loop.call(begin)
    assert turn.wait(PATIENCE_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        dialling.connect(listening.getsockname())
        dialling.send(PREFACE.pack(MAGIC, token))
        wait_for(lambda: listening.attempts > 0)
        for _ in range(100):  # turns of the loop, in each of which it would try again
            turn.clear()
            loop.call(turn.set)
            assert turn.wait(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert listening.attempts < 50
    assert admitted.wait(PATIENCE_S), "it is taken once there is room"
    loop.close()
    dialling.close()
