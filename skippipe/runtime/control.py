"""What coordinator and nodes say to each other beside tensors: a few small typed messages, JSON on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from skippipe.errors import UserError
from skippipe.jsonfile import Fields, as_integer, as_number

COORDINATOR = -1
"""Its number among the nodes."""


@dataclass(frozen=True)
class Hello:
    """A node is there: where others reach it, and what runs it."""

    address: str
    version: str


@dataclass(frozen=True)
class Welcome:
    """Everybody is there: what to train, and where the others are."""

    brief: dict[str, Any]
    peers: dict[str, Any]
    """Name → address and public key."""
    resumed: bool
    """Weights and optimizer come from a checkpoint: ask for them."""


@dataclass(frozen=True)
class Ready:
    """The stage is built and the node can begin."""


@dataclass(frozen=True)
class Begin:
    """Start the first iteration."""

    iteration: int
    recorded: bool
    """Report every task of this iteration."""


@dataclass(frozen=True)
class Averaged:
    """A node's stage has its mean gradient; the node waits for the step."""

    iteration: int
    squared_norm: float
    losses: list[list[float]]
    """Lane, microbatch, loss: of the microbatches whose head ran here."""
    tasks: list[list[int]]
    """Lane, microbatch, step, ready, start and end in ns since the iteration began here; empty unless asked for."""
    sent_bytes: list[list[int]]
    """Receiver and bytes of tensors sent to it in this iteration."""


@dataclass(frozen=True)
class Proceed:
    """Take the optimizer step, then go on with the next iteration, unless this was the last."""

    iteration: int
    rate: float
    scale: float
    last: bool
    kept: bool
    """Keep a copy of the stage's state after the step, for a checkpoint."""
    recorded: bool
    """Report every task of the next iteration."""


@dataclass(frozen=True)
class Collect:
    """Send a piece of the stage's weights; the next is asked for when it has come, so that no queue fills up."""

    piece: int
    kept: bool
    """Of the copy that was made for a checkpoint, optimizer and all, instead of the weights as they are now."""


@dataclass(frozen=True)
class Want:
    """A node that is to go on from a checkpoint asks for a piece of its stage's state."""

    piece: int


@dataclass(frozen=True)
class Stepped:
    """The last step is taken."""

    iteration: int


@dataclass(frozen=True)
class Stop:
    """End at once; `reason` is empty if all is well."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A node cannot go on."""

    reason: str


Control = Hello | Welcome | Ready | Begin | Averaged | Proceed | Collect | Want | Stepped | Stop | Failed
KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Hello, Welcome, Ready, Begin, Averaged, Proceed, Collect, Want, Stepped, Stop, Failed)
}


def to_json(control: Control) -> dict[str, Any]:
    return {"say": type(control).__name__.lower(), **{name: _plain(value) for name, value in vars(control).items()}}


def _plain(value: Any) -> Any:
    """JSON has no NaN, but a loss may be one, and must be seen."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def from_json(value: Any) -> Control:
    """Checked field by field; UserError says what is wrong."""
    fields = Fields(value, "message")
    kind = KINDS[fields.text("say", tuple(KINDS))]
    control: Control = kind(**{name: _read(fields, name, hint) for name, hint in kind.__annotations__.items()})
    fields.close()
    return control


def _read(fields: Fields, name: str, hint: str) -> Any:
    at = fields.at(name)
    if hint == "str":
        return _text(fields.take(name), at)
    if hint == "bool":
        return fields.flag(name)
    if hint == "int":
        return fields.integer(name)
    if hint == "float":
        return _number(fields.take(name), at)
    if hint.startswith("dict"):
        value = fields.take(name)
        if not isinstance(value, dict):
            raise UserError(f"{at}: expected an object")
        return value
    rows = fields.items(name)
    if not all(isinstance(row, list) for row in rows):
        raise UserError(f"{at}: expected a list of lists")
    if "int" in hint:
        return [[as_integer(each, at) for each in row] for row in rows]
    return [[_number(each, at) for each in row] for row in rows]


def _text(value: Any, at: str) -> str:
    """Any, also an empty one; what could play tricks on a terminal becomes a space."""
    if not isinstance(value, str):
        raise UserError(f"{at}: expected a text")
    return "".join(each if each.isprintable() else " " for each in value)


def _number(value: Any, at: str) -> float:
    return float(value) if value in ("nan", "inf", "-inf") else as_number(value, at)
