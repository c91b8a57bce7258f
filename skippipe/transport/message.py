"""Messages on the wire: a header of fixed layout with the numbers of its kind, and a tensor, a JSON object or nothing.

Bytes from the network are checked in full before anything is built from them: `from_frames` either gives a message
or raises `Malformed` with the reason, whatever it is given. There is no pickle here, and no length in the header
that is trusted: a tensor's codec compares what has arrived with the shape.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Never, TypeAlias

from skippipe.codecs import CODECS, Buffer, Codec, EncodedTensor

MAGIC = b"SKPP"
VERSION = 5
MOST_DIMS = 4
LARGEST_COUNT = 2**32 - 1
LARGEST_NS = 2**63 - 1
SHOWN = 32  # characters of a number in an error; it may have a million

# magic, version, kind, body, dims; the numbers of the kind (see Header.layout); sent_ns, due_ns; dims (unused: 0)
HEADER = struct.Struct(f"<4sBBBB24sQQ{MOST_DIMS}I")
NOTHING, JSON = 0, 1  # the number of a body in the header; tensors have that of their codec
STARTS = 128  # is added to it if the bits that say where conversations begin follow the tensor

Body: TypeAlias = EncodedTensor | dict[str, Any] | None


class Malformed(Exception):
    """Bytes that are no message of this protocol; the argument is the reason."""


class MessageKind(IntEnum):
    HOP = 1
    GRADIENT_PIECE = 2
    CONTROL = 3
    STATE_PIECE = 4
    BACKUP_PIECE = 5
    WEIGHTS_PIECE = 6
    CHECKPOINT_PIECE = 7
    STEP_HOP = 8
    PROBE_PIECE = 9
    VALIDATION_HOP = 10
    TEACHER_HOP = 11

    @property
    def label(self) -> str:
        """The kind in words for people: "a gradient piece"."""
        return f"a {self.name.replace('_', ' ').lower()}"


class Header:
    """The numbers that say what a message is about; each kind of message has a subclass with its own fields."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    kind: ClassVar[MessageKind]
    layout: ClassVar[struct.Struct]
    """24 bytes, in the order of the fields: Q for those up to LARGEST_NS, I for those up to LARGEST_COUNT."""

    if TYPE_CHECKING:  # each subclass is a dataclass of whole numbers

        def __init__(self, *numbers: int, **named: int) -> None: ...

    def __post_init__(self) -> None:
        for name, most in self.bounds().items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)} does not fit into a message")

    @classmethod
    @cache
    def bounds(cls) -> dict[str, int]:
        """The largest value of each field, by its name."""
        codes = re.sub(r"[^QI]", "", cls.layout.format)
        return dict(
            zip(cls.__match_args__, (LARGEST_NS if code == "Q" else LARGEST_COUNT for code in codes), strict=True)
        )

    def to_bytes(self) -> bytes:
        return self.layout.pack(*(getattr(self, name) for name in self.__match_args__))


@dataclass(frozen=True, slots=True)
class Hop(Header):
    """An activation, or the gradient of one, along the path of a lane."""

    kind = MessageKind.HOP
    layout = struct.Struct("<QIIII")
    iteration: int
    lane: int
    microbatch: int
    step: int
    epoch: int = 0
    """How often the coordinator had changed the routes of the run, as far as the sender knew."""


@dataclass(frozen=True, slots=True)
class GradientPiece(Header):
    """A piece of a stage's gradient: a contribution to its sum, or the sum."""

    kind = MessageKind.GRADIENT_PIECE
    layout = struct.Struct("<QIII4x")
    iteration: int
    stage: int
    transfer: int
    """Its number in the averaging schedule of the stage."""
    epoch: int = 0
    """As in `Hop`."""


@dataclass(frozen=True, slots=True)
class StatePiece(Header):
    """A slice of a stage's state, as it was in an iteration, for a node that recovers."""

    kind = MessageKind.STATE_PIECE
    layout = struct.Struct("<QQI4x")
    iteration: int
    first: int
    """The place of its first value in the state."""
    assignment: int = 0
    """The number of the `Welcome` or `Recover` that the state is for."""


@dataclass(frozen=True, slots=True)
class BackupPiece(Header):
    """A slice of a copy of stage 0's ends, which is of use in any iteration."""

    kind = MessageKind.BACKUP_PIECE
    layout = struct.Struct("<QI12x")
    first: int
    assignment: int = 0


@dataclass(frozen=True, slots=True)
class WeightsPiece(Header):
    """A piece of a stage's weights, for the coordinator; without a body after the last one."""

    kind = MessageKind.WEIGHTS_PIECE
    layout = struct.Struct("<III12x")
    stage: int
    piece: int
    collection: int = 0
    """The number of the `GatherState` that this answers."""


@dataclass(frozen=True, slots=True)
class CheckpointPiece(Header):
    """A piece of the copy that a node made for a checkpoint, with the state of the optimizer."""

    kind = MessageKind.CHECKPOINT_PIECE
    layout = struct.Struct("<III12x")
    stage: int
    piece: int
    collection: int = 0


@dataclass(frozen=True, slots=True)
class StepHop(Header):
    """Activations of a serving step along its path."""

    kind = MessageKind.STEP_HOP
    layout = struct.Struct("<QII8x")
    step: int
    lane: int
    place: int
    """The place of the receiver on the path."""


@dataclass(frozen=True, slots=True)
class ValidationHop(Header):
    """An activation of held-out samples along a path that visits every stage."""

    kind = MessageKind.VALIDATION_HOP
    layout = struct.Struct("<QIIII")
    iteration: int
    """The last iteration whose step the weights have taken."""
    lane: int
    microbatch: int
    step: int
    epoch: int = 0
    """As in `Hop`."""


@dataclass(frozen=True, slots=True)
class TeacherHop(Header):
    """An activation of a microbatch that passes every stage, forward only, to teach what its own path leaves out."""

    kind = MessageKind.TEACHER_HOP
    layout = struct.Struct("<QIIII")
    iteration: int
    lane: int
    microbatch: int
    step: int
    epoch: int = 0
    """As in `Hop`."""


PING, PONG = 0, 1


@dataclass(frozen=True, slots=True)
class ProbePiece(Header):
    """Bytes that measure a link, or show that it works."""

    kind = MessageKind.PROBE_PIECE
    layout = struct.Struct("<QIIQ")
    probe: int
    direction: int
    """PING from the node that measures, PONG for the answer."""
    step: int
    answer_bytes: int = 0
    """The size of the answer that the node that measures wants; 0: the smallest there is."""


@dataclass(frozen=True, slots=True)
class Stamp(Header):
    """The header of a control message, whose body is a JSON object: it tells messages of the past (see `fencing`)."""

    kind = MessageKind.CONTROL
    layout = struct.Struct("<QII8x")
    incarnation: int
    """Incarnation of the node, whichever of the two sends: a number that no other incarnation of it has."""
    term: int
    """The coordinator's term: each that takes over has a higher one. From a node, the highest it has seen."""
    number: int
    """The place of this message among all of its sender to this incarnation, from 1."""


HEADERS: dict[MessageKind, type[Header]] = {
    each.kind: each
    for each in (
        *(Hop, GradientPiece, Stamp, StatePiece, BackupPiece, WeightsPiece, CheckpointPiece, StepHop, ProbePiece),
        *(ValidationHop, TeacherHop),
    )
}


@dataclass(frozen=True, slots=True)
class Message:
    header: Header
    body: Body = None
    sent_ns: int = 0
    """When it was sent, by the sender's clock; two nodes that send to each other learn from it what the link takes."""

    def __post_init__(self) -> None:
        if not 0 <= self.sent_ns <= LARGEST_NS:
            raise ValueError(f"sent_ns {self.sent_ns} does not fit into a message")
        if self.body is not None and isinstance(self.body, dict) != (self.kind is MessageKind.CONTROL):
            raise ValueError(f"{self.kind.label} cannot carry {type(self.body).__name__}")

    @property
    def kind(self) -> MessageKind:
        return self.header.kind


@dataclass(frozen=True, slots=True)
class Received:
    """A message that a mailbox has received."""

    peer: str
    message: Message
    due_ns: int = 0
    """When an emulated link would have delivered it (see `link_emulation`); 0: now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a message from the network may take."""

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
        if body.starts:
            number += STARTS
            payload = b"".join((body.data, body.starts))
            if len(body.starts) != body.starts_bytes:
                raise ValueError(f"{len(body.starts)} bytes of starts; {body.starts_bytes} belong to {list(shape)}")
        wrong = codec.malformed(body.data, shape) or (f"{len(shape)} dimensions" if len(shape) > MOST_DIMS else "")
        if wrong:
            raise ValueError(f"a tensor that does not fit into a message: {wrong}")
    elif body is not None:
        number = JSON
        payload = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    dims = shape + (0,) * (MOST_DIMS - len(shape))
    about, sent_ns = message.header.to_bytes(), message.sent_ns
    return HEADER.pack(MAGIC, VERSION, message.kind, number, len(shape), about, sent_ns, due_ns, *dims), payload


def from_frames(frames: Sequence[Buffer], limits: Limits) -> tuple[Message, int]:
    """The message and its due_ns. The payload may come in several frames; one alone is not copied."""
    if len(frames) < 2:
        raise Malformed(f"{len(frames)} frames instead of a header and a payload")
    if len(frames[0]) != HEADER.size:
        raise Malformed(f"a header of {len(frames[0])} bytes instead of {HEADER.size}")
    magic, version, kind, number, ndim, about, sent_ns, due_ns, *dims = HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise Malformed("the header does not start like one of ours")
    if version != VERSION:
        raise Malformed(f"version {version} is not known here; this release speaks {VERSION}")
    if kind not in tuple(MessageKind):
        raise Malformed(f"kind {kind} is unknown")
    packed, number = divmod(number, STARTS)
    codec = next((each for each in CODECS.values() if each.number == number), None)
    if codec is None and (packed or number not in (NOTHING, JSON)):
        raise Malformed(f"body {packed * STARTS + number} is unknown")
    if max(sent_ns, due_ns) > LARGEST_NS:
        raise Malformed("a time out of range")
    if number != NOTHING and (number == JSON) != (kind == MessageKind.CONTROL):
        raise Malformed(f"{MessageKind(kind).label} with a body of {'json' if codec is None else codec.id}")
    size = sum(len(frame) for frame in frames[1:])
    if size > limits.payload_bytes:
        raise Malformed(f"{size} bytes; at most {limits.payload_bytes} are taken")
    if codec is not None:
        body: Body = _tensor(codec, dims, ndim, frames[1:], limits, packed=bool(packed))
    elif ndim or any(dims):
        raise Malformed("a shape without a tensor")
    elif number == JSON:
        body = _json(frames[1:], size, limits)
    elif size:
        raise Malformed(f"{size} bytes where there should be no payload")
    else:
        body = None
    return Message(_header(MessageKind(kind), about), body, sent_ns), due_ns


def _header(kind: MessageKind, about: bytes) -> Header:
    header = HEADERS[kind]
    try:
        found = header(*header.layout.unpack(about))
    except ValueError as error:
        raise Malformed(f"out of range: {error}") from None
    if found.to_bytes() != about:
        raise Malformed(f"{kind.label} with numbers that it does not have")
    return found


def _tensor(
    codec: Codec, dims: Sequence[int], ndim: int, payload: Sequence[Buffer], limits: Limits, *, packed: bool
) -> EncodedTensor:
    shape = tuple(dims[:ndim])
    if ndim > MOST_DIMS or not all(shape) or any(dims[ndim:]):
        raise Malformed(f"{ndim} dimensions {list(dims)} are no shape")
    if not codec.fixed_size and 4 * math.prod(shape) > limits.payload_bytes:  # few bytes may stand for many values
        raise Malformed(f"a {codec.id} tensor of shape {list(shape)}; at most {limits.payload_bytes} bytes are taken")
    data, starts = _joined(payload), memoryview(b"")
    if packed:
        whole, length = memoryview(data), EncodedTensor(codec.id, shape, b"").starts_bytes
        if len(shape) < 2 or len(whole) <= length:
            raise Malformed(f"{len(whole)} bytes of a tensor of shape {list(shape)} and its starts")
        data, starts = whole[:-length], whole[-length:]
    wrong = codec.malformed(data, shape)
    if wrong:
        raise Malformed(wrong)
    return EncodedTensor(codec.id, shape, data, bytes(starts))


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
