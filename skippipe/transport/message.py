"""What one node says to another: a header of fixed layout, and a tensor, a JSON object or nothing.

Bytes from the network are checked in full before anything is built from them: `from_frames` either gives a message
or raises `Malformed` with the reason, whatever it is handed. There is no pickle here, and no length in the header
that is believed: a tensor's codec compares what has arrived with the shape.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Never, TypeAlias

from skippipe.codecs import CODECS, Buffer, Codec, EncodedTensor

MAGIC = b"SKPP"
VERSION = 3
MOST_DIMS = 4
LARGEST_COUNT = 2**32 - 1
LARGEST_NS = 2**63 - 1
SHOWN = 32  # characters of a number in a complaint; it may have a million

# magic, version, kind, body, dims; iteration; lane, microbatch, step, epoch; sent_ns, due_ns; dims (unused ones are 0)
HEADER = struct.Struct(f"<4sBBBBQIIIIQQ{MOST_DIMS}I")
NOTHING, JSON = 0, 1  # the number of a body in the header; tensors have that of their codec

BOUNDS = (
    ("iteration", LARGEST_NS),
    ("sent_ns", LARGEST_NS),
    *((name, LARGEST_COUNT) for name in ("lane", "microbatch", "step", "epoch")),
)

Body: TypeAlias = EncodedTensor | dict[str, Any] | None


class Malformed(Exception):
    """Bytes that are no message of ours, and why."""


class MessageKind(IntEnum):
    HOP = 1
    """An activation, or the gradient of one, along the path of a lane."""
    CHUNK = 2
    """A piece of a gradient on its way round a ring; `lane` is the stage, `microbatch` the piece, `step` the round."""
    CONTROL = 3
    """A JSON object: everything that is not a tensor."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: MessageKind
    iteration: int
    lane: int
    microbatch: int
    step: int
    body: Body = None
    epoch: int = 0
    """How often the coordinator had changed the ways, as far as the sender knew."""
    sent_ns: int = 0
    """On the sender's clock; two nodes that send to each other learn from it what the link takes both ways."""

    def __post_init__(self) -> None:
        for name, most in BOUNDS:
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)} does not fit into a message")
        if self.body is not None and isinstance(self.body, dict) != (self.kind is MessageKind.CONTROL):
            raise ValueError(f"a {self.kind.name} message cannot carry {type(self.body).__name__}")


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it came out of a mailbox."""

    peer: str
    message: Message
    due_ns: int = 0
    """When an emulated link would have delivered it (see `shaping`); 0: now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message from outside may ask for at most."""

    payload_bytes: int
    json_bytes: int = 2**20
    json_depth: int = 16


def to_frames(message: Message, due_ns: int = 0) -> tuple[bytes, Buffer]:
    """Header and payload."""
    body = message.body
    shape: tuple[int, ...] = ()
    payload: Buffer = b""
    number = NOTHING
    if isinstance(body, EncodedTensor):
        shape, payload = body.shape, body.data
        codec = CODECS[body.dtype]
        number = codec.number
        wrong = codec.malformed(payload, shape) or (f"{len(shape)} dimensions" if len(shape) > MOST_DIMS else "")
        if wrong:
            raise ValueError(f"a tensor that does not fit into a message: {wrong}")
    elif body is not None:
        number = JSON
        payload = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    dims = shape + (0,) * (MOST_DIMS - len(shape))
    counts = (message.iteration, message.lane, message.microbatch, message.step, message.epoch, message.sent_ns)
    return HEADER.pack(MAGIC, VERSION, message.kind, number, len(shape), *counts, due_ns, *dims), payload


def from_frames(frames: Sequence[Buffer], limits: Limits) -> tuple[Message, int]:
    """The message and its due_ns. The payload may come in several frames; one alone is not copied."""
    if len(frames) < 2:
        raise Malformed(f"{len(frames)} frames instead of a header and a payload")
    if len(frames[0]) != HEADER.size:
        raise Malformed(f"a header of {len(frames[0])} bytes instead of {HEADER.size}")
    magic, version, kind, number, ndim, iteration, *places, sent_ns, due_ns, d0, d1, d2, d3 = HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise Malformed("the header does not start like one of ours")
    if version != VERSION:
        raise Malformed(f"version {version} is not known here; this release speaks {VERSION}")
    if kind not in tuple(MessageKind):
        raise Malformed(f"kind {kind} is unknown")
    codec = next((each for each in CODECS.values() if each.number == number), None)
    if codec is None and number not in (NOTHING, JSON):
        raise Malformed(f"body {number} is unknown")
    if max(iteration, sent_ns, due_ns) > LARGEST_NS:
        raise Malformed("iteration or time out of range")
    if number != NOTHING and (number == JSON) != (kind == MessageKind.CONTROL):
        raise Malformed(f"a {MessageKind(kind).name} message with a body of {'json' if codec is None else codec.id}")
    size = sum(len(frame) for frame in frames[1:])
    if size > limits.payload_bytes:
        raise Malformed(f"{size} bytes; at most {limits.payload_bytes} are taken")
    dims = (d0, d1, d2, d3)
    if codec is not None:
        body: Body = _tensor(codec, dims, ndim, frames[1:], limits)
    elif ndim or any(dims):
        raise Malformed("a shape without a tensor")
    elif number == JSON:
        body = _json(frames[1:], size, limits)
    elif size:
        raise Malformed(f"{size} bytes where there should be no payload")
    else:
        body = None
    lane, microbatch, step, epoch = places
    return Message(MessageKind(kind), iteration, lane, microbatch, step, body, epoch, sent_ns), due_ns


def _tensor(codec: Codec, dims: tuple[int, ...], ndim: int, payload: Sequence[Buffer], limits: Limits) -> EncodedTensor:
    shape = dims[:ndim]
    if ndim > MOST_DIMS or not all(shape) or any(dims[ndim:]):
        raise Malformed(f"{ndim} dimensions {list(dims)} are no shape")
    if not codec.fixed_size and 4 * math.prod(shape) > limits.payload_bytes:  # few bytes may stand for many values
        raise Malformed(f"a {codec.id} tensor of shape {list(shape)}; at most {limits.payload_bytes} bytes are taken")
    data = _joined(payload)
    wrong = codec.malformed(data, shape)
    if wrong:
        raise Malformed(wrong)
    return EncodedTensor(codec.id, shape, data)


def _joined(payload: Sequence[Buffer]) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)


def _json(payload: Sequence[Buffer], size: int, limits: Limits) -> dict[str, Any]:
    if size > limits.json_bytes:
        raise Malformed(f"{size} bytes of JSON; at most {limits.json_bytes} are taken")
    try:
        found = json.loads(bytes(_joined(payload)).decode(), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, a number of thousands of digits
        raise Malformed(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise Malformed("JSON, but no object")
    level: list[Any] = [found]
    for _ in range(limits.json_depth):
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inside for value in values if isinstance(value, (dict, list))]
        if not level:
            return found
    raise Malformed(f"JSON nested deeper than {limits.json_depth}")


def _no_number(text: str) -> Never:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:SHOWN]} is too large")
    return number
