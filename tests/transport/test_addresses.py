"""Addresses of both kinds, IPv4 and IPv6: how they are spelled, and that those of a peer are tried side by side."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from skippipe.errors import UserError
from skippipe.transport import sender, streams
from skippipe.transport.addresses import free_port, join_address, site_of, split_address, split_all, tcp_server
from skippipe.transport.fast_path import LARGE_BYTES
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Lost, Mailbox, QueueFull
from skippipe.transport.streams import dial
from tests.helpers.mailboxes import HELLO, KEYS, Net, link, number_of, numbered

BOTH = "127.0.0.1:0,[::1]:0"
needs_both = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")


def nowhere(host: str) -> str:
    return join_address(host, free_port(host))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("[::1]:5555", ("::1", 5555)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("head.example.org:5555", ("head.example.org", 5555)),
    ],
)
def test_spelled_as_everywhere(text: str, place: tuple[str, int]) -> None:
    assert split_address(text) == place
    assert split_address(join_address(*place)) == place


@pytest.mark.parametrize("text", ["::1:5555", "[::1]", "::1", "[::1:5555", "[]:5555", "a:65536", "a:-1", ":1", "a"])
def test_no_address(text: str) -> None:
    with pytest.raises(UserError, match="brackets" if text.startswith("::1:") else "host:port|brackets"):
        split_address(text)


def test_a_node_has_eight_addresses_at_most() -> None:
    assert len(split_all("a:1, b:1,a:1")) == 2
    with pytest.raises(UserError, match="9 addresses; at most 8"):
        split_all(",".join(f"a:{port}" for port in range(9)))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("198.51.100.7", "198.51.100.7", True),
        ("198.51.100.7", "198.51.100.8", False),
        ("198.51.100.7", "::ffff:198.51.100.7", True),
        ("::ffff:198.51.100.7", "::ffff:198.51.100.8", False),
        ("2001:db8:1:2::5", "2001:db8:1:2:9::7", True),
        ("2001:db8:1:2::5", "2001:db8:1:3::5", False),
    ],
)
def test_who_is_at_one_site(one: str, other: str, same: bool) -> None:
    assert (site_of(one) == site_of(other)) is same
    assert [site_of(host) for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "")] == [""] * 4


def test_a_silent_address_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that answers is connected to though the first has all the time that there is."""
    monkeypatch.setattr(streams, "RACE_S", 0.05)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # a full backlog: the kernel drops what asks for more
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        up = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses = [join_address(*each.getsockname()) for each in (silent, up)]
        with dial(addresses, timeout_s=2.0) as stream:
            assert stream.getpeername() == up.getsockname()
        with pytest.raises(TimeoutError):
            dial(addresses, timeout_s=0.2, without=[up.getsockname()])
    with pytest.raises(ConnectionRefusedError):
        dial([nowhere("127.0.0.1")])


@needs_both
def test_a_listener_at_every_address_takes_both_kinds() -> None:
    with closing(tcp_server("::", 0)) as server:
        for host in ("127.0.0.1", "::1"):
            dial([join_address(host, server.getsockname()[1])]).close()


@needs_both
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_answers(net: Net, host: str) -> None:
    """A mailbox at both kinds is reached at either, with a fast path; what was sent before there was a connection comes
    first, in order."""
    a, b = net.box("a", listen=BOTH), net.box("b", listen=BOTH)
    (four, port), (six, same) = split_all(b.address)
    assert (four, six, port) == ("127.0.0.1", "::1", same)
    other = "::1" if host == "127.0.0.1" else "127.0.0.1"
    a.connect("b", f"{nowhere(other)},{join_address(host, port)}", KEYS["b"].public)
    link(b, a)
    for number in range(5):
        a.send("b", numbered(number, 0))
    found = net.until(lambda: b.received_bytes["a"] == a.sent_bytes["b"])["b"]
    a.send("b", numbered(5, LARGE_BYTES))
    found += net.until(lambda: "b" in a.on_fast_path)["b"]
    a.send("b", numbered(6, LARGE_BYTES))
    found += net.until(lambda: b.received_bytes["a"] == a.sent_bytes["b"])["b"]
    assert [number_of(each) for each in found] == list(range(7))
    assert not a.lost()
    a.watch(["b"], 1.0)
    net.until(lambda: "b" in a.watched)


@needs_both
def test_where_another_program_answers_the_next_address_is_tried(net: Net) -> None:
    """Two homes have the same private addresses: the machine that answers first is another one."""
    a, b, stranger = net.box("a"), net.box("b", listen="[::1]:0"), net.box("stranger")
    a.connect("b", f"{stranger.address},{b.address}", KEYS["b"].public)
    a.send("b", HELLO)
    assert net.until(lambda: b.received_bytes["a"])["b"][0].message == HELLO
    assert not a.lost() and not stranger.received_bytes
    a.connect("b", f"{stranger.address},{nowhere('::1')}", KEYS["b"].public)
    assert net.loss(a) == Lost("b", LossReason.HANDSHAKE), "no other address answers"


@needs_both
def test_a_peer_that_comes_back_at_its_other_address(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "DIAL_AGAIN_S", 0.1)
    a, b = net.box("a"), net.box("b", listen=BOTH)
    four, six = (join_address(*each) for each in split_all(b.address))
    link(a, b)
    for listen in (six, four):
        net.until(lambda: "b" in a.connected)
        net.forget(b)
        b.close()
        assert net.loss(a) == Lost("b", LossReason.DISCONNECTED)
        b = net.box("b", listen=listen)
    net.until(lambda: "b" in a.connected)
    a.send("b", HELLO)
    assert net.until(lambda: b.received_bytes["a"])["b"][0].message == HELLO


@needs_both
def test_full_queue_before_there_is_a_connection(net: Net) -> None:
    a, b = net.box("a", depth=2), net.box("b")
    a.connect("b", f"{nowhere('::1')},{b.address}", KEYS["b"].public)
    sent: list[int] = []

    def send_all() -> bool:
        try:
            while len(sent) < 40:
                a.send("b", numbered(len(sent), 1000))
                sent.append(len(sent))
        except QueueFull:
            pass
        return b.received_bytes["a"] == a.sent_bytes["b"] and len(sent) == 40

    assert not send_all() and len(sent) == 2
    assert [number_of(each) for each in net.until(send_all)["b"]] == list(range(40))


@needs_both
@pytest.mark.parametrize("listen", ["[::1]:0", BOTH, "[::]:0"])
def test_callbacks_of_both_kinds(net: Net, listen: str) -> None:
    """A node that cannot be called keeps a stream ready at a mailbox that has an IPv6 address, and calls back on
    request; the tensors of both directions get fast paths."""
    a, b = net.box("a", listen=listen), net.box("b", listen=OUT_ONLY)
    secret = secrets.token_bytes(32)
    a.expect_callbacks("b", secret)
    link(a, b)
    port = split_all(a.address)[0][1]
    at = f"{nowhere('127.0.0.1')},[::1]:{port}"
    b.be_callable(at, secret)
    b.connect("a", at, KEYS["a"].public)
    for box, peer in ((a, "b"), (b, "a")):
        box.send(peer, numbered(0, LARGE_BYTES))
    found = net.until(lambda: a.on_fast_path and b.on_fast_path)
    for box, peer in ((a, "b"), (b, "a")):
        box.send(peer, numbered(1, LARGE_BYTES))
    more = net.until(lambda: all(box.received_bytes[p.name] == p.sent_bytes[box.name] for box, p in ((a, b), (b, a))))
    for box in (a, b):
        assert [number_of(each) for each in found[box.name] + more[box.name]] == [0, 1]


@needs_both
def test_a_callback_on_request_over_the_address_that_answers(net: Net) -> None:
    a, b = net.box("a", listen=BOTH), net.box("b", listen=OUT_ONLY)
    link(a, b)
    a.send("b", HELLO)

    def passed_on(caller: Mailbox) -> bool:
        for request in caller.call_requests():
            b.answer("a", [nowhere("127.0.0.1"), f"[::1]:{request.port}"], request.token)
        return bool(b.received_bytes["a"])

    assert net.until(lambda: passed_on(a))["b"][0].message == HELLO
