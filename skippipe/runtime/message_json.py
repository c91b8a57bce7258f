"""Control messages as JSON. What comes from the network is checked against their types before anything acts on it."""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import asdict
from typing import Any, Union

import msgspec

from skippipe.errors import UserError
from skippipe.runtime.messages import ControlMessage, tag_of
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import Message, MessageKind, Stamp

MOST_QUOTED = 200  # characters of an error about a message; it goes into logs and to the coordinator
NON_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers, but a loss may be one, and must be seen

MESSAGE_TYPES: dict[str, type[ControlMessage]] = {
    tag_of(kind.__name__): kind for kind in ControlMessage.__subclasses__()
}
_ANY_CONTROL: Any = Union[tuple(MESSAGE_TYPES.values())]  # noqa: UP007  the types are known at run time only
_FLOATS = {
    say: {each.encode_name for each in msgspec.structs.fields(kind) if "float" in str(each.type)}
    for say, kind in MESSAGE_TYPES.items()
}


def to_json(control: ControlMessage) -> dict[str, Any]:
    names = zip(control.__struct_encode_fields__, control.__struct_fields__, strict=True)
    return {"say": control.__struct_config__.tag, **{name: _to_plain(getattr(control, field)) for name, field in names}}


def from_json(value: Any) -> ControlMessage:
    """The message, checked; UserError names the field, what was expected and found, in few, printable characters."""
    try:
        control: ControlMessage = msgspec.convert(_prepared(value), _ANY_CONTROL)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for surrogates in names of fields
        raise UserError(ascii(_explained(str(error), value))[1:-1][:MOST_QUOTED]) from None
    return control


def stamped(control: ControlMessage, stamp: Stamp) -> Message:
    """A control message as it is sent; its stamp tells messages of the past (see `fencing`)."""
    return Message(stamp, to_json(control))


def control_of(message: Message) -> ControlMessage:
    """The control message that came; UserError if it is none, or cannot be read."""
    if message.kind is not MessageKind.CONTROL:
        raise UserError("a tensor where there should be none")
    return from_json(message.body)


def _to_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_plain(each) for each in value]
    if isinstance(value, StateSource):
        return asdict(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _prepared(value: Any) -> Any:
    """Numbers that are not finite become floats; characters that could play tricks on a terminal become spaces."""
    floats = _FLOATS.get(str(value.get("say"))) if isinstance(value, dict) else None
    return value if floats is None else {name: _read(each, name in floats) for name, each in value.items()}


def _read(value: Any, floats: bool) -> Any:
    if floats and isinstance(value, list):
        return [_read(each, floats) for each in value]
    if not isinstance(value, str) or floats:
        return float(value) if isinstance(value, str) and value in NON_FINITE else value
    return "".join(each if each.isprintable() else " " for each in value)


def _explained(error: str, value: Any) -> str:
    """What msgspec says, the way our other errors say it: "message.visits[0]: expected int >= 0, found -1"."""
    reason, _, path = error.partition(" - at `$")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    reason = "expected a kind of control message" if path == ".say`" else reason.partition(", got ")[0].replace("`", "")
    return f"message{path.rstrip('`')}: {reason[:1].lower()}{reason[1:]}, found {reprlib.repr(value)}"
