"""What one node says to another: a header of fixed layout, and a tensor, a JSON object or nothing.

Bytes from the network are checked in full before anything is built from them: `from_frames` either gives a message
or raises `Malformed` with the reason, whatever it is handed. There is no pickle here, and no length in the header
that is believed: sizes follow from the tensor's shape and must equal what has arrived.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Never, TypeAlias

from skippipe.transport.wire_codec import Buffer, EncodedTensor
from skippipe.workload import WIRE_DTYPES, wire_bytes

MAGIC = b"SKPP"
VERSION = 3
MOST_DIMS = 4
LARGEST_COUNT = 2**32 - 1
LARGEST_NS = 2**63 - 1
SHOWN = 32  # characters of a number in a complaint; it may have a million

# magic, version, kind, body, dims; iteration; lane, microbatch, step, epoch; sent_ns, due_ns; dims (unused ones are 0)
HEADER = struct.Struct(f"<4sBBBBQIIIIQQ{MOST_DIMS}I")
BODIES = ("nothing", "json", *WIRE_DTYPES)  # by their number in the header

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
    number = 0
    if isinstance(body, EncodedTensor):
        shape, payload = body.shape, body.data
        number = BODIES.index(body.dtype)
        if len(shape) > MOST_DIMS or body.nbytes != wire_bytes(body.values, body.dtype):
            raise ValueError(f"{body.nbytes} bytes are no {body.dtype} tensor of shape {list(shape)}")
    elif body is not None:
        number = BODIES.index("json")
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
    if number >= len(BODIES):
        raise Malformed(f"body {number} is unknown")
    if max(iteration, sent_ns, due_ns) > LARGEST_NS:
        raise Malformed("iteration or time out of range")
    if BODIES[number] != "nothing" and (BODIES[number] == "json") != (kind == MessageKind.CONTROL):
        raise Malformed(f"a {MessageKind(kind).name} message with a body of {BODIES[number]}")
    size = sum(len(frame) for frame in frames[1:])
    if size > limits.payload_bytes:
        raise Malformed(f"{size} bytes; at most {limits.payload_bytes} are taken")
    dims = (d0, d1, d2, d3)
    if BODIES[number] in WIRE_DTYPES:
        body: Body = _tensor(BODIES[number], dims, ndim, frames[1:], size)
    elif ndim or any(dims):
        raise Malformed("a shape without a tensor")
    elif BODIES[number] == "json":
        body = _json(frames[1:], size, limits)
    elif size:
        raise Malformed(f"{size} bytes where there should be no payload")
    else:
        body = None
    lane, microbatch, step, epoch = places
    return Message(MessageKind(kind), iteration, lane, microbatch, step, body, epoch, sent_ns), due_ns


def _tensor(dtype: str, dims: tuple[int, ...], ndim: int, payload: Sequence[Buffer], size: int) -> EncodedTensor:
    shape = dims[:ndim]
    if ndim > MOST_DIMS or not all(shape) or any(dims[ndim:]):
        raise Malformed(f"{ndim} dimensions {list(dims)} are no shape")
    needed = wire_bytes(math.prod(shape), dtype)  # Python's whole numbers cannot overflow
    if size != needed:
        raise Malformed(f"{size} bytes; a {dtype} tensor of shape {list(shape)} has {needed}")
    return EncodedTensor(dtype, shape, _joined(payload))


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
