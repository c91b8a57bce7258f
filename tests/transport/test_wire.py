"""Bytes, messages, keys, seals: what is unpacked is what was packed, and whatever is not one of ours says why."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import good_control
from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.codecs.int8 import BLOCK as INT8_BLOCK
from skippipe.errors import UserError
from skippipe.runtime import message_json
from skippipe.runtime import messages as control_messages
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import (
    HEADER,
    HEADERS,
    VERSION,
    Body,
    Header,
    Hop,
    Limits,
    Malformed,
    Message,
    MessageKind,
    StatePiece,
    from_frames,
    to_frames,
)
from tests.helpers.plans import may_skip

LIMITS = Limits(payload_bytes=2**24)

shapes = st.lists(st.integers(1, 300), min_size=0, max_size=4).filter(lambda dims: math.prod(dims) <= 2000).map(tuple)
times = st.integers(0, 2**63 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = 10.0 ** draw(st.integers(-45, 37))
    return (torch.randn(draw(shapes), generator=generator, dtype=torch.float64) * spread).float()


# Tensors


@given(tensors(), st.sampled_from(sorted(CODECS)))
@example(torch.zeros(300), "int8")
@example(torch.tensor(-3.5), "int8")
def test_packed_and_back(tensor: torch.Tensor, dtype: str) -> None:
    packed = encode(tensor, dtype)
    assert packed.nbytes == CODECS[dtype].expected_bytes(tensor.numel())
    back = decode(packed)
    assert back.shape == tensor.shape and back.dtype == torch.float32
    if dtype == "fp32":
        assert torch.equal(back, tensor)
    elif dtype == "bf16":
        assert torch.equal(back, tensor.bfloat16().float())
    elif dtype == "int8":
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % INT8_BLOCK))
        largest = padded.view(-1, INT8_BLOCK).abs().amax(1).repeat_interleave(INT8_BLOCK)[: tensor.numel()]
        error = (back - tensor).abs().reshape(-1)
        assert bool((error <= (largest / 127 * 0.50001).maximum(torch.tensor(127 * 2.0**-126))).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", CODECS)
def test_what_is_not_finite_does_not_become_a_number(bad: float, dtype: str) -> None:
    tensor = torch.ones(3 * INT8_BLOCK + 5)
    tensor[INT8_BLOCK + 3] = bad
    back = decode(encode(tensor, dtype))
    hurt = ~back.isfinite()
    if dtype not in ("fp32", "bf16"):
        block = getattr(CODECS[dtype], "block", INT8_BLOCK)
        assert back[INT8_BLOCK : INT8_BLOCK + block].isnan().all() and hurt.sum() == block
    else:
        assert hurt.nonzero().tolist() == [[INT8_BLOCK + 3]]


def test_int8_layout() -> None:
    """All values, then all scales, little-endian; the last block is short."""
    tensor = torch.cat([torch.full((INT8_BLOCK,), 127.0), torch.tensor([-254.0])])
    data = bytes(encode(tensor, "int8").data)
    assert data == b"\x7f" * INT8_BLOCK + b"\x81" + b"\x00\x00\x80\x3f" + b"\x00\x00\x00\x40"


def test_packed_bytes_are_their_own_unless_shared() -> None:
    tensor = torch.ones(4, 4)
    own, shared = encode(tensor, "fp32"), encode(tensor, "fp32", share=True)
    tensor.zero_()
    assert decode(own).sum() == 16 and decode(shared).sum() == 0
    back = decode(shared)
    tensor.fill_(7)
    assert back.sum() == 0


def test_pack_takes_any_layout_and_float() -> None:
    tensor = torch.arange(12, dtype=torch.float64).reshape(3, 4).t()[1:]
    assert torch.equal(decode(encode(tensor, "fp32")), tensor.float())
    assert torch.equal(decode(encode(tensor.half(), "bf16")), tensor.bfloat16().float())
    with pytest.raises(ValueError, match="tensor of floats"):
        encode(torch.arange(3), "fp32")
    with pytest.raises(ValueError, match="not empty"):
        encode(torch.empty(0), "fp32")


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
    kind = draw(st.sampled_from(MessageKind))
    header = HEADERS[kind](*(draw(st.integers(0, most)) for most in HEADERS[kind].bounds().values()))
    body: Body = None
    if draw(st.booleans()) and kind is MessageKind.CONTROL:
        body = draw(objects)
    elif draw(st.booleans()) and kind is not MessageKind.CONTROL:
        dtype, shape = draw(st.sampled_from(sorted(CODECS))), draw(shapes)
        body = EncodedTensor(dtype, shape, b"\x5a" * CODECS[dtype].expected_bytes(math.prod(shape)))
        if len(shape) > 1 and draw(st.booleans()):
            body = replace(body, starts=b"\xa5" * body.starts_bytes)
    return Message(header, body, draw(times))


def largest(kind: type[Header]) -> Message:
    return Message(kind(*kind.bounds().values()), sent_ns=2**63 - 1)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(messages(), times, st.integers(1, 400))
@example(largest(Hop), 2**63 - 1, 1)
@example(largest(StatePiece), 2**63 - 1, 1)
def test_frames_and_back(message: Message, due_ns: int, cut: int) -> None:
    header, payload = to_frames(message, due_ns)
    limits = Limits(payload_bytes=2**24, json_depth=100)
    assert from_frames([header, payload], limits) == (message, due_ns)
    assert from_frames([header, payload[:cut], payload[cut:]], limits) == (message, due_ns)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_any_bytes_are_a_message_or_malformed(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        from_frames(frames, LIMITS)


@may_skip(Malformed)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(messages(), st.integers(0, HEADER.size - 1), st.integers(0, 255), st.binary(max_size=60) | st.none())
def test_damaged_messages_are_messages_or_malformed(message: Message, at: int, byte: int, other: bytes | None) -> None:
    header, payload = to_frames(message)
    damaged = bytearray(header)
    damaged[at] = byte
    back, _ = from_frames([damaged, payload if other is None else other], LIMITS)
    body = back.body
    assert not isinstance(body, EncodedTensor) or body.nbytes == CODECS[body.dtype].expected_bytes(body.values)


def frames_with(**changes: Any) -> list[bytes]:
    """The frames of a good message, with some fields of its header or its payload replaced."""
    fields: dict[str, Any] = {"magic": b"SKPP", "version": VERSION, "kind": 1, "body": 2, "ndim": 1}
    fields |= {"about": bytes(24), "sent_ns": 0, "due_ns": 0, "dims": (2, 0, 0, 0), "payload": bytes(8)} | changes
    payload, dims = fields.pop("payload"), fields.pop("dims")
    return [HEADER.pack(*fields.values(), *dims), payload]


def test_every_field_has_its_place() -> None:
    frames = frames_with(about=Hop(1, 2, 3, 4, 5).to_bytes(), sent_ns=6, due_ns=7)
    message = Message(Hop(1, 2, 3, 4, epoch=5), EncodedTensor("fp32", (2,), bytes(8)), sent_ns=6)
    assert from_frames(frames, LIMITS) == (message, 7)
    assert list(to_frames(message, 7)) == frames
    assert frames[0] == bytes.fromhex(
        "534b5050 05 01 02 01 0100000000000000 02000000 03000000 04000000 05000000"
        "0600000000000000 0700000000000000 02000000 00000000 00000000 00000000"
    )


def test_starts_follow_the_tensor() -> None:
    frames = frames_with(body=130, ndim=2, dims=(3, 4, 0, 0), payload=bytes(48) + b"\xa0\x10")
    message = Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (3, 4), bytes(48), b"\xa0\x10"))
    assert from_frames(frames, LIMITS) == (message, 0)
    assert [bytes(each) for each in to_frames(message)] == frames
    for bad in (
        {"payload": bytes(48)},
        {"payload": b"\xa0"},
        {"payload": b""},
        {"payload": bytes(51)},
        {"ndim": 1, "dims": (12, 0, 0, 0), "payload": bytes(50)},
        {"body": 128},
        {"body": 129, "kind": 3},
    ):
        with pytest.raises(Malformed):
            from_frames(frames_with(**{"body": 130, "ndim": 2, "dims": (3, 4, 0, 0), **bad}), LIMITS)
    with pytest.raises(ValueError, match="1 bytes of starts; 2 belong to"):
        to_frames(Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (3, 4), bytes(48), b"\xa0")))


def test_every_kind_has_its_numbers() -> None:
    """What they are called, and their bytes in the header: what an older release would send is not taken for them."""
    about = {kind: header(*range(1, 1 + len(header.bounds()))).to_bytes() for kind, header in HEADERS.items()}
    assert set(about) == set(MessageKind)
    assert {len(each) for each in about.values()} == {24}
    shown = {kind.name: (" ".join(HEADERS[kind].bounds()), each.rstrip(bytes(1)).hex()) for kind, each in about.items()}
    assert shown == {
        "HOP": ("iteration lane microbatch step epoch", "0100000000000000020000000300000004000000" + "05"),
        "GRADIENT_PIECE": ("iteration stage transfer epoch", "0100000000000000020000000300000004"),
        "CONTROL": ("incarnation term number", "01000000000000000200000003"),
        "STATE_PIECE": ("iteration first assignment", "0100000000000000020000000000000003"),
        "BACKUP_PIECE": ("first assignment", "010000000000000002"),
        "WEIGHTS_PIECE": ("stage piece collection", "010000000200000003"),
        "CHECKPOINT_PIECE": ("stage piece collection", "010000000200000003"),
        "STEP_HOP": ("step lane place", "01000000000000000200000003"),
        "VALIDATION_HOP": ("iteration lane microbatch step epoch", "010000000000000002000000030000000400000005"),
        "TEACHER_HOP": ("iteration lane microbatch step epoch", "010000000000000002000000030000000400000005"),
        "PROBE_PIECE": ("probe direction step answer_bytes", "0100000000000000020000000300000004"),
    }


MALFORMED: dict[str, tuple[list[bytes], str]] = {
    "no payload": (frames_with()[:1], "1 frames instead of"),
    "short header": ([b"SKPP", b""], "a header of 4 bytes"),
    "magic": (frames_with(magic=b"SKIP"), "does not start like"),
    "version": (frames_with(version=1), "version 1 is not known here; this release speaks 5"),
    "header of version 1": ([frames_with(version=1)[0][:52], bytes(8)], "a header of 52 bytes instead of 64"),
    "kind": (frames_with(kind=12), "kind 12 is unknown"),
    "body": (frames_with(body=99), "body 99 is unknown"),
    "json in a hop": (frames_with(body=1), "a hop with a body of json"),
    "tensor in control": (frames_with(kind=3), "a control with a body of fp32"),
    "due time": (frames_with(due_ns=2**63), "out of range"),
    "time of sending": (frames_with(sent_ns=2**63), "out of range"),
    "iteration": (frames_with(about=bytes(7) + b"\x80" + bytes(16)), f"iteration {2**63} does not fit"),
    "numbers of another kind": (frames_with(kind=5, about=bytes(23) + b"\1"), "a backup piece with numbers that it"),
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
    b'{"a": ' + b"1" * 5000 + b".5}": "not valid JSON: " + "1" * 32 + " is too large",
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
    for header in HEADERS.values():
        for field, most in header.bounds().items():
            for beyond in (-1, most + 1):
                with pytest.raises(ValueError, match=f"{field} {beyond} does not fit"):
                    header(**{**dict.fromkeys(header.bounds(), 0), field: beyond})
    for beyond in (-1, 2**63):
        with pytest.raises(ValueError, match=f"sent_ns {beyond} does not fit"):
            Message(Hop(0, 0, 0, 0), sent_ns=beyond)
    with pytest.raises(ValueError, match="a hop cannot carry dict"):
        Message(Hop(0, 0, 0, 0), {})
    with pytest.raises(ValueError, match=r"3 bytes; a fp32 tensor of shape \[1\] has 4"):
        to_frames(Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (1,), b"abc")))


def test_a_shape_alone_takes_no_memory() -> None:
    program = """
import resource
from skippipe.transport.message import HEADER, MAGIC, VERSION, Limits, Malformed, from_frames
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for dims in ([2**32 - 1] * 4, [2**31, 2**31, 4, 1], [2**30, 1, 1, 1], [2**28, 0, 0, 0]):
    for body in (2, 3, 4):
        for payload in (b"", bytes(8)):
            header = HEADER.pack(MAGIC, VERSION, 1, body, sum(map(bool, dims)), bytes(24), 0, 0, *dims)
            try:
                from_frames([header, payload], Limits(payload_bytes=2**40))
                raise SystemExit("taken")
            except Malformed as error:
                assert f"{len(payload)} bytes; a" in str(error), error
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_a_few_thousand_broken_inputs() -> None:
    """In a process of its own, whose memory nobody else has grown."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--frames", "2000", "--seed", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout
    rows = {line.split()[0]: line.split()[1:] for line in found.stdout.splitlines()[1:6]}
    assert len(rows) == 5
    for taken, refused, failed in rows.values():
        assert taken != "0" and refused != "0" and failed == "0"


def test_broken_control_messages_start_from_sound_ones() -> None:
    """Of every kind: otherwise nobody gets to the checks behind the first."""
    rng, taken = random.Random(0), set()
    for _ in range(150 * len(message_json.MESSAGE_TYPES)):
        body = good_control(rng)
        with contextlib.suppress(UserError):
            message_json.from_json(body)
            taken.add(body["say"])
    assert taken == set(message_json.MESSAGE_TYPES)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"say": "bogus"}, "message.say: expected a kind of control message, found 'bogus'"),
        ({"say": ["begin"]}, "message.say: expected a kind of control message, found ['begin']"),
        ({"iteration": -1}, "message.iteration: expected int >= 0, found -1"),
        ({"iteration": 2**53 + 1}, "message.iteration: expected int <= 9007199254740992, found 9007199254740993"),
        ({"epoch": True}, "message.epoch: expected int, found True"),
        ({"lanes": [[1], [2, "3"]]}, "message.lanes[1][1]: expected int, found '3'"),
        ({"gone": {}}, "message.gone: expected array, found {}"),
        ({"more": 1}, "message: object contains unknown field more, found {'epoch': 1, "),
    ],
)
def test_bad_control_messages_are_refused_with_place_and_value(change: dict[str, Any], complaint: str) -> None:
    sound = message_json.to_json(control_messages.Reroute(0, 1, [3], [[0, 1, 2]], []))
    assert message_json.to_json(message_json.from_json(sound)) == sound
    with pytest.raises(UserError) as caught:
        message_json.from_json(sound | change)
    assert str(caught.value).startswith(complaint)


def test_a_source_of_state_that_is_none() -> None:
    good = StateSource("neighbours", (3, 4), (1, 2), (0.5, 0.5), 7, backup=(5, 2))
    sound = message_json.to_json(control_messages.Recover(good, 1))
    assert message_json.from_json(json.loads(json.dumps(sound))) == control_messages.Recover(good, 1)
    for change, complaint in (({"stages": [1]}, "must be as many"), ({"kind": "guess"}, "found 'guess'")):
        with pytest.raises(UserError, match=complaint):
            message_json.from_json({**sound, "origin": {**sound["origin"], **change}})
