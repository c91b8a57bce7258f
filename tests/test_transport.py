"""Bytes, messages, keys, mailboxes and emulated links: what arrives is what was sent, and only from those let in."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.mailbox import PIECE_BYTES, Lost, Mailbox, NotConnected, QueueFull, Reason, Security
from skippipe.transport.message import HEADER, Kind, Limits, Malformed, Message, Received, from_frames, to_frames
from skippipe.transport.packed import Packed, pack, unpack
from skippipe.transport.shaping import Held, Link, Shaper
from skippipe.workload import INT8_BLOCK, WIRE_DTYPES, wire_bytes

PATIENCE_S = 10.0  # the deadline of every wait here
LIMITS = Limits(payload_bytes=2**24)

shapes = st.lists(st.integers(1, 300), min_size=0, max_size=4).filter(lambda dims: math.prod(dims) <= 2000).map(tuple)
counts = st.integers(0, 2**32 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = 10.0 ** draw(st.integers(-45, 37))
    return (torch.randn(draw(shapes), generator=generator, dtype=torch.float64) * spread).float()


# Tensors


@given(tensors(), st.sampled_from(WIRE_DTYPES))
@example(torch.zeros(300), "int8")
@example(torch.tensor(-3.5), "int8")
def test_packed_and_back(tensor: torch.Tensor, dtype: str) -> None:
    packed = pack(tensor, dtype)
    assert packed.nbytes == wire_bytes(tensor.numel(), dtype)
    back = unpack(packed)
    assert back.shape == tensor.shape and back.dtype == torch.float32
    if dtype == "fp32":
        assert torch.equal(back, tensor)
    elif dtype == "bf16":
        assert torch.equal(back, tensor.bfloat16().float())
    else:
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % INT8_BLOCK))
        largest = padded.view(-1, INT8_BLOCK).abs().amax(1).repeat_interleave(INT8_BLOCK)[: tensor.numel()]
        error = (back - tensor).abs().reshape(-1)
        assert bool((error <= (largest / 127 * 0.50001).maximum(torch.tensor(127 * 2.0**-126))).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_what_is_not_finite_does_not_become_a_number(bad: float, dtype: str) -> None:
    tensor = torch.ones(3 * INT8_BLOCK + 5)
    tensor[INT8_BLOCK + 3] = bad
    back = unpack(pack(tensor, dtype))
    hurt = ~back.isfinite()
    if dtype == "int8":
        assert back[INT8_BLOCK : 2 * INT8_BLOCK].isnan().all() and hurt.sum() == INT8_BLOCK
    else:
        assert hurt.nonzero().tolist() == [[INT8_BLOCK + 3]]


def test_int8_layout() -> None:
    """All values, then all scales, little-endian; the last block is short."""
    tensor = torch.cat([torch.full((INT8_BLOCK,), 127.0), torch.tensor([-254.0])])
    data = bytes(pack(tensor, "int8").data)
    assert data == b"\x7f" * INT8_BLOCK + b"\x81" + b"\x00\x00\x80\x3f" + b"\x00\x00\x00\x40"


def test_packed_bytes_are_their_own_unless_shared() -> None:
    tensor = torch.ones(4, 4)
    own, shared = pack(tensor, "fp32"), pack(tensor, "fp32", share=True)
    tensor.zero_()
    assert unpack(own).sum() == 16 and unpack(shared).sum() == 0
    back = unpack(shared)
    tensor.fill_(7)
    assert back.sum() == 0


def test_pack_takes_any_layout_and_float() -> None:
    tensor = torch.arange(12, dtype=torch.float64).reshape(3, 4).t()[1:]
    assert torch.equal(unpack(pack(tensor, "fp32")), tensor.float())
    assert unpack(pack(tensor.half(), "bf16"), dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="tensor of floats"):
        pack(torch.arange(3), "fp32")
    with pytest.raises(ValueError, match="not empty"):
        pack(torch.empty(0), "fp32")


# Messages

objects = st.dictionaries(
    st.text(),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    ),
    max_size=4,
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(Kind))
    places = (draw(st.integers(0, 2**63 - 1)), draw(counts), draw(counts), draw(counts))
    if draw(st.booleans()):
        return Message(kind, *places)
    if kind is Kind.CONTROL:
        return Message(kind, *places, draw(objects))
    dtype, shape = draw(st.sampled_from(WIRE_DTYPES)), draw(shapes)
    return Message(kind, *places, Packed(dtype, shape, b"\x5a" * wire_bytes(math.prod(shape), dtype)))


@given(messages(), st.integers(0, 2**63 - 1), st.integers(1, 400))
def test_frames_and_back(message: Message, due_ns: int, cut: int) -> None:
    header, payload = to_frames(message, due_ns)
    limits = Limits(payload_bytes=2**24, json_depth=100)
    assert from_frames([header, payload], limits) == (message, due_ns)
    assert from_frames([header, payload[:cut], payload[cut:]], limits) == (message, due_ns)


@settings(max_examples=400)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_any_bytes_are_a_message_or_malformed(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        from_frames(frames, LIMITS)


@settings(max_examples=200)
@given(messages(), st.integers(0, HEADER.size - 1), st.integers(0, 255), st.binary(max_size=60) | st.none())
def test_damaged_messages_are_messages_or_malformed(message: Message, at: int, byte: int, other: bytes | None) -> None:
    header, payload = to_frames(message)
    damaged = bytearray(header)
    damaged[at] = byte
    try:
        back, _ = from_frames([damaged, payload if other is None else other], LIMITS)
    except Malformed:
        return
    assert not isinstance(back.body, Packed) or back.body.nbytes == wire_bytes(back.body.values, back.body.dtype)


def frames_with(**changes: Any) -> list[bytes]:
    """The frames of a good message, with some fields of its header or its payload replaced."""
    names = ("magic", "version", "kind", "body", "ndim", "iteration", "lane", "microbatch", "step", "due_ns")
    fields: dict[str, Any] = dict(zip(names, (b"SKPP", 1, 1, 2, 1, 0, 0, 0, 0, 0), strict=True))
    fields |= {"dims": (2, 0, 0, 0), "payload": bytes(8)} | changes
    payload, dims = fields.pop("payload"), fields.pop("dims")
    return [HEADER.pack(*fields.values(), *dims), payload]


MALFORMED: dict[str, tuple[list[bytes], str]] = {
    "no payload": (frames_with()[:1], "1 frames instead of"),
    "short header": ([b"SKPP", b""], "a header of 4 bytes"),
    "magic": (frames_with(magic=b"SKIP"), "does not start like"),
    "version": (frames_with(version=2), "version 2 is not known"),
    "kind": (frames_with(kind=9), "kind 9 is unknown"),
    "body": (frames_with(body=5), "body 5 is unknown"),
    "json in a hop": (frames_with(body=1), "a HOP message with a body of json"),
    "tensor in control": (frames_with(kind=3), "a CONTROL message with a body of fp32"),
    "time": (frames_with(due_ns=2**63), "out of range"),
    "short payload": (frames_with(payload=bytes(7)), "7 bytes; a fp32 tensor of shape [2] has 8"),
    "huge shape": (frames_with(ndim=4, dims=(2**32 - 1,) * 4), "8 bytes; a fp32 tensor"),
    "zero": (frames_with(dims=(0, 0, 0, 0), payload=b""), "are no shape"),
    "five dims": (frames_with(ndim=5), "are no shape"),
    "more dims": (frames_with(dims=(2, 2, 0, 0)), "are no shape"),
    "shape of nothing": (frames_with(body=0, payload=b""), "a shape without a tensor"),
    "payload of nothing": (frames_with(body=0, ndim=0, dims=(0,) * 4), "8 bytes where there should be no payload"),
    "too large": (frames_with(payload=bytes(2**24 + 1)), "at most 16777216 are taken"),
}
BAD_JSON = {
    b"[]": "no object",
    b'{"a":': "not valid JSON",
    b"\xff": "not valid JSON",
    b'{"a": NaN}': "NaN is no number",
    b'{"a": 1e999}': "1e999 is too large",
    b'{"a":' + b"[" * 20 + b"]" * 20 + b"}": "nested deeper than 16",
    b'{"a":' + b"[" * 100_000: "not valid JSON",
    b'{"a":"' + b"x" * 2**20 + b'"}': "bytes of JSON; at most 1048576",
    b'{"a":' + b"9" * 5000 + b"}": "not valid JSON",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_says_why(case: str) -> None:
    frames, reason = MALFORMED[case]
    with pytest.raises(Malformed) as caught:
        from_frames(frames, LIMITS)
    assert reason in str(caught.value)


@pytest.mark.parametrize("payload", BAD_JSON, ids=BAD_JSON.values())
def test_malformed_json_says_why(payload: bytes) -> None:
    with pytest.raises(Malformed) as caught:
        from_frames(frames_with(kind=3, body=1, ndim=0, dims=(0,) * 4, payload=payload), LIMITS)
    assert BAD_JSON[payload] in str(caught.value)


def test_messages_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="lane -1 does not fit"):
        Message(Kind.HOP, 0, -1, 0, 0)
    with pytest.raises(ValueError, match="a HOP message cannot carry dict"):
        Message(Kind.HOP, 0, 0, 0, 0, {})
    with pytest.raises(ValueError, match="3 bytes are no fp32 tensor"):
        to_frames(Message(Kind.HOP, 0, 0, 0, 0, Packed("fp32", (1,), b"abc")))


def test_messages_and_tensors_need_no_sockets() -> None:
    """GPU machines may lack pyzmq."""
    program = "import sys; sys.modules['zmq'] = None; import skippipe.transport.message, skippipe.transport.packed"
    subprocess.run([sys.executable, "-c", program + "; assert 'torch' not in sys.modules"], check=True, timeout=60)


# Keys


def test_key_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "n0.json"
    file = KeyFile("n0", KeyPair.new(), KeyPair.new().public)
    file.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyFile.load(path) == file
    assert [entry.name for entry in path.parent.iterdir()] == ["n0.json"]
    assert file.keys.secret not in repr(file)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"mode 640 lets others at the secret key; run: chmod 600 .*n0\.json$"):
        KeyFile.load(path)
    file.save(path)
    assert KeyFile.load(path) == file


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "skippipe-plan"}, "a 'skippipe-key' file is needed here"),
        ({"public": "short"}, "public: a key has 40 characters"),
        ({"public": KeyPair.new().public}, "not the public half"),
        ({"coordinator": "é" * 40}, "coordinator: a key has 40 characters"),
        ({"extra": 1}, "extra: unknown field"),
    ],
)
def test_bad_key_file_is_named_with_its_fix(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "key.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(KeyFile("n0", KeyPair.new()).to_json() | change))
    with pytest.raises(UserError) as caught:
        KeyFile.load(path)
    assert complaint in str(caught.value) and str(caught.value).startswith(str(path))


def test_peer_list(tmp_path: Path) -> None:
    path, public = tmp_path / "peers.json", KeyPair.new().public
    peers = PeerList({"n0": public, "n1": KeyPair.new().public})
    peers.save(path)
    assert PeerList.load(path) == peers
    path.write_text(json.dumps(peers.to_json() | {"peers": {"n0": public, "n1": public}}))
    with pytest.raises(UserError, match=r"peers\.n1: the key is already that of 'n0'"):
        PeerList.load(path)


# Mailboxes

KEYS = {name: KeyPair.new() for name in ("a", "b", "stranger")}
HELLO = Message(Kind.CONTROL, 1, 2, 3, 4, {"hello": [1, 2.5, "ü"]})


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

    def until(self, done: Callable[[], object]) -> dict[str, list[Received]]:
        """Let every mailbox run until `done`; what each has received."""
        found: dict[str, list[Received]] = {box.name: [] for box in self._boxes}
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "waited in vain"
            for box in self._boxes:
                found[box.name] += box.receive(0.002)
        return found

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


@pytest.fixture(params=["curve", "none"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with network(request.param) as made:
        yield made


@pytest.fixture
def curve() -> Iterator[Net]:
    with network("curve") as made:
        yield made


def link(sender: Mailbox, receiver: Mailbox, key_of: str = "") -> None:
    sender.connect(receiver.name, receiver.address, KEYS[key_of or receiver.name].public)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_delivery_in_order(net: Net, dtype: str) -> None:
    a, b = net.box("a"), net.box("b")
    link(a, b)
    tensor = torch.randn(3, PIECE_BYTES // 2 + 7)  # several pieces, and a rest
    sizes = [a.send("b", HELLO)]
    sizes.append(a.send("b", Message(Kind.HOP, 5, 1, 2, 3, pack(tensor, dtype)), due_ns=99))
    sizes.append(a.send("b", Message(Kind.CHUNK, 5, 0, 1, 2)))
    first, second, third = net.delivered(b, 3)
    assert first == Received("a", HELLO, 0)
    assert (second.peer, second.due_ns, second.message.microbatch) == ("a", 99, 2)
    assert isinstance(second.message.body, Packed)
    assert torch.equal(unpack(second.message.body), unpack(pack(tensor, dtype)))
    assert third.message == Message(Kind.CHUNK, 5, 0, 1, 2)
    assert a.sent_bytes["b"] == b.received_bytes["a"] == sum(sizes)
    assert not a.lost() and a.connected == {"b"}


def test_stranger_is_refused_and_counted(curve: Net, caplog: pytest.LogCaptureFixture) -> None:
    b, stranger = curve.box("b"), curve.box("stranger")
    link(stranger, b)
    stranger.send("b", HELLO)
    assert curve.loss(stranger) == Lost("b", Reason.REFUSED)
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
        assert curve.loss(a) == Lost("b", Reason.HANDSHAKE)
    assert not a.connected and not b.received_bytes


def test_security_must_agree(curve: Net) -> None:
    a = curve.box("a")
    with network("none") as plain:
        b = plain.box("b")
        link(b, a)
        b.send("a", HELLO)
        assert plain.loss(b).reason in (Reason.FOREIGN, Reason.HANDSHAKE)  # whoever of the two notices first
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
        assert net.loss(a) == Lost("b", Reason.REFUSED)


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
    large = Message(Kind.HOP, 0, 0, 0, 0, pack(torch.zeros(2**16), "fp32"))
    a.send("b", large)
    assert net.loss(a) == Lost("b", Reason.DISCONNECTED)
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
    a.send("b", Message(Kind.HOP, 0, 0, 0, 0, pack(torch.zeros(PIECE_BYTES), "fp32")))
    assert not curve.until(lambda: b.malformed["a"])["b"]


def test_full_queue_is_an_error_and_loses_nothing(net: Net) -> None:
    a, b = net.box("a", depth=2), net.box("b", depth=2)
    link(a, b)
    with pytest.raises(QueueFull, match="b"):
        for _ in range(100):
            a.send("b", HELLO)
    with pytest.raises(NotConnected, match="nobody"):
        a.send("nobody", HELLO)
    queued = len(net.until(lambda: b.received_bytes)["b"])
    sent, body = 0, pack(torch.zeros(2**20), "fp32")  # larger than what TCP takes on its own
    while True:
        try:
            a.send("b", Message(Kind.HOP, sent, 0, 0, 0, body))
        except QueueFull:
            break
        sent += 1
        assert sent < 1000
    began = time.monotonic()
    found = net.delivered(b, 2 - queued + sent)[2 - queued :]
    assert [received.message.iteration for received in found] == list(range(sent))
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
    assert lost == [Lost("b", Reason.DISCONNECTED)] and not a.lost() and not a.connected
    again = Mailbox("b", KEYS["b"], listen=address, security=net.security)
    try:
        again.allow("a", KEYS["a"].public)
        a.send("b", HELLO)
        assert net.delivered(again) == [Received("a", HELLO)]
    finally:
        again.close()


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
    return Received(peer, Message(Kind.HOP, number, 0, 0, 0), due_ns)


def test_transfers_queue_on_a_link() -> None:
    now = [1000]
    shaper = Shaper({"b": Link(0.5, 1e9), "c": Link(0.0, 2e9)}, lambda: now[0])
    half_ns = 500_000_000
    assert shaper.due_ns("b", 100) == 1100 + half_ns
    assert shaper.due_ns("b", 50) == 1150 + half_ns  # after the first
    assert shaper.due_ns("c", 100) == 1050  # another link
    assert shaper.due_ns("nobody", 100) == 0
    now[0] = 5000
    assert shaper.due_ns("b", 100) == 5100 + half_ns  # free again
    with pytest.raises(ValueError, match="no link has"):
        Link(0.1, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**8)), min_size=1), st.floats(1e3, 1e10))
def test_order_and_rate_of_a_link(sends: list[tuple[int, int]], bandwidth: float) -> None:
    now = [0]
    shaper, held = Shaper({"b": Link(0.01, bandwidth)}, lambda: now[0]), Held()
    for number, (pause_ns, nbytes) in enumerate(sends):
        now[0] += pause_ns
        held.put(at(shaper.due_ns("b", nbytes), number))
    last_ns = max(entry.due_ns for entry in held.ready(2**62))
    assert last_ns >= sum(nbytes for _, nbytes in sends) / bandwidth * 1e9 - len(sends)
    for number, (_, nbytes) in enumerate(sends):
        held.put(at(shaper.due_ns("b", nbytes), number))
    order = [entry.message.iteration for entry in held.ready(2**62)]
    assert order == sorted(order)


def test_held_until_due() -> None:
    held = Held()
    for received in (at(30, 1), at(10, 2), at(10, 3), at(0, 4)):
        held.put(received)
    assert held.next_due_ns() == 0
    assert [entry.message.iteration for entry in held.ready(9)] == [4]
    assert held.next_due_ns() == 10 and held.ready(9) == []
    assert [entry.message.iteration for entry in held.ready(10)] == [2, 3]
    assert len(held) == 1
    assert [entry.message.iteration for entry in held.ready(10**9)] == [1]
    assert held.next_due_ns() is None
