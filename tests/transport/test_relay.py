"""Two mailboxes that both only call out, and a relay at which they meet."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Iterator

import pytest

from skippipe.transport import relay as relay_module
from skippipe.transport import token_gate
from skippipe.transport.addresses import split_address
from skippipe.transport.fast_path import LARGE_BYTES
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Lost, Mailbox
from skippipe.transport.relay import CALLEE, CALLER, FREE_BYTES, Bucket, Relay, RelayLimits
from skippipe.transport.token_gate import MAGIC, PREFACE, token_of
from tests.helpers.mailboxes import PATIENCE_S, Net, link


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for each in made:
        each.close()


def granted(relay: Relay, *boxes: Mailbox) -> bool:
    """What the coordinator does with the requests of these mailboxes."""
    for caller in boxes:
        for request in caller.call_requests():
            (callee,) = (box for box in boxes if box.name == request.peer)
            secret = secrets.token_bytes(32)
            relay.grant(caller.name, callee.name, secret)
            caller.meet([relay.address], token_of(secret, CALLER).hex(), "")
            callee.meet([relay.address], token_of(secret, CALLEE).hex(), request.token)
    return True


def pair(net: Net) -> tuple[Mailbox, Mailbox]:
    a, b = (net.box(name, listen=OUT_ONLY) for name in "ab")
    link(a, b)
    link(b, a)
    return a, b


def exchange(net: Net, relay: Relay, a: Mailbox, b: Mailbox, sizes: list[int]) -> dict[str, list[int]]:
    """Send messages of these sizes both ways; the numbers of those that each has received."""
    return net.exchange(a, b, sizes, lambda: granted(relay, a, b))


def test_both_ways_in_order_and_with_fast_paths(net: Net, relays: list[Relay]) -> None:
    rng = random.Random(1)
    relays.append(relay := Relay("127.0.0.1:0"))
    a, b = pair(net)
    found = exchange(net, relay, a, b, [rng.choice([0, 1000, LARGE_BYTES, 2_000_001]) for _ in range(40)])
    assert found == {"a": list(range(40)), "b": list(range(40))}
    net.until(lambda: granted(relay, a, b) and a.on_fast_path == {"b"} and b.on_fast_path == {"a"})
    net.until(lambda: a.connected and b.connected)
    a.watch(["b"], 1.0)
    net.until(lambda: granted(relay, a, b) and "b" in a.watched)
    assert not a.silent and not a.lost() and not b.lost()
    assert relay.load.nodes == 2 and relay.load.forwarded_bytes > a.sent_bytes["b"] + b.sent_bytes["a"]


def test_through_another_relay_when_the_first_is_gone(net: Net, relays: list[Relay]) -> None:
    """Both sides notice, and meet at the other one; messages then arrive as before."""
    relays += [first := Relay("127.0.0.1:0"), second := Relay("127.0.0.1:0")]
    a, b = pair(net)
    sizes = [0, LARGE_BYTES, 1000] * 4
    assert exchange(net, first, a, b, sizes) == {"a": list(range(12)), "b": list(range(12))}
    first.close()
    lost: list[Lost] = []
    net.until(lambda: lost.extend(a.lost() + b.lost()) or len(lost) >= 2)  # type: ignore[func-returns-value]
    assert {each.reason for each in lost} == {LossReason.DISCONNECTED}
    net.until(lambda: granted(second, a, b) and a.connected and b.connected)
    assert exchange(net, second, a, b, sizes) == {"a": list(range(12)), "b": list(range(12))}


def recv(stream: socket.socket) -> bytes:
    try:
        return stream.recv(100)
    except ConnectionResetError:
        return b""


def dialled(relay: Relay, token: bytes) -> socket.socket:
    stream = socket.create_connection(split_address(relay.address), PATIENCE_S)
    stream.sendall(PREFACE.pack(MAGIC, token))
    return stream


def test_a_token_is_good_once_and_for_its_side(relays: list[Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who shows one again, or one that is unknown, is not joined to anybody; nor is one whose peer does not come."""
    monkeypatch.setattr(token_gate, "PREFACE_S", 0.2)
    monkeypatch.setattr(relay_module, "MEET_S", 0.5)
    relays.append(relay := Relay("127.0.0.1:0"))
    secret = secrets.token_bytes(32)
    early = dialled(relay, token_of(secret, CALLER))  # before the relay knows
    relay.grant("a", "b", secret)
    with early, dialled(relay, token_of(secret, CALLER)) as again, dialled(relay, bytes(32)) as unknown:
        assert recv(again) == recv(unknown) == b""
        with dialled(relay, token_of(secret, CALLEE)) as callee:
            callee.sendall(b"x")
            assert recv(early) == b"x"
            early.sendall(b"y")
            assert recv(callee) == b"y"
    other = secrets.token_bytes(32)
    relay.grant("a", "b", other)
    with dialled(relay, token_of(other, CALLEE)) as alone:
        assert recv(alone) == b""
    assert relay.load.refused == 2


def test_limits(relays: list[Relay]) -> None:
    """Streams above the limit of a node are closed, and those that carry nothing for long."""
    relays.append(relay := Relay("127.0.0.1:0", RelayLimits(node_streams=1, idle_s=1.0)))

    def joined(callee: str) -> tuple[socket.socket, socket.socket]:
        secret = secrets.token_bytes(32)
        relay.grant("a", callee, secret)
        return dialled(relay, token_of(secret, CALLER)), dialled(relay, token_of(secret, CALLEE))

    a, b = joined("b")
    a.sendall(b"x")
    assert recv(b) == b"x"
    a2, c = joined("c")
    assert recv(a2) == recv(c) == b"", "'a' has one already"
    assert (relay.load.streams, relay.load.nodes, relay.load.refused) == (1, 2, 1)
    assert recv(a) == recv(b) == b"", "idle"
    a, b = joined("b")
    b.sendall(b"x")
    assert recv(a) == b"x"
    for each in (a, b, a2, c):
        each.close()


def test_what_had_to_wait_is_not_charged_to_what_need_not() -> None:
    """Or a stream that sends more than that, in small pieces, could not be probed for minutes."""
    free = Bucket(4096, 1.0)
    assert free.affords(4096, 100.0) and not free.affords(1, 100.0)
    assert not any(free.affords(4000, 100.0 + number / 1000) for number in range(900))
    assert free.affords(64, 101.0)


def test_a_rate_holds_over_any_second() -> None:
    bucket, now, sent = Bucket(1e6), 100.0, 0
    while now < 102.0:
        sent += 50_000
        now += max(0.0, bucket.take(50_000, now))
    assert 2e6 <= sent <= 2.15e6
    assert bucket.take(1000, now + 60) < 0, "after a pause at once"


def test_what_is_large_goes_on_when_it_is_paid_for(relays: list[Relay]) -> None:
    relays.append(relay := Relay("127.0.0.1:0", RelayLimits(bytes_per_s=1.0)))
    secret = secrets.token_bytes(32)
    relay.grant("a", "b", secret)
    with dialled(relay, token_of(secret, CALLER)) as a, dialled(relay, token_of(secret, CALLEE)) as b:
        a.sendall(b"x")
        assert recv(b) == b"x"
        a.sendall(b"y")
        assert recv(b) == b"y", "small: at once, however much the rate is exceeded"
        b.sendall(bytes(2 * FREE_BYTES))
        a.settimeout(0.1)
        with pytest.raises(TimeoutError):
            a.recv(1)
