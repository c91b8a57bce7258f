"""What coordinator and nodes say to each other beside tensors: a few small typed messages, JSON on the wire."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_integer, as_number

MOST_QUOTED = 200  # characters of what came, in a complaint about it
COORDINATOR = -1
"""Its number among the nodes."""


# A node to the coordinator


@dataclass(frozen=True)
class Hello:
    """A node is there: where others reach it, what runs it, and how far it is if it has been there before."""

    address: str
    version: str
    epoch: int = 0
    iteration: int = 0
    """That it is in, or waits to begin."""
    phase: str = ""
    """The name of a `Phase`; empty: it is new."""
    backup: int = 0
    """After how many iterations the copy of stage 0's ends was made that it keeps; 0: it keeps none."""


@dataclass(frozen=True)
class Ready:
    """The stage is built and the node can begin; or, while nobody steps, it has its state."""

    assignment: int = 0
    """The number of the `Welcome` or `Recover` that this answers."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life."""

    doing: str
    """What it is busy with, for people."""
    busy_s: float = 0.0
    """For how long it has had work all the time; 0: it waits for others."""


@dataclass(frozen=True)
class MicrobatchDone:
    """A microbatch is back at its data node, all its backward passes are done."""

    iteration: int
    epoch: int
    lane: int
    microbatch: int
    loss: float
    """NaN if the node that knew it is gone."""


@dataclass(frozen=True)
class DrainAck:
    """The answer to `Drain`: what this node has added up."""

    iteration: int
    epoch: int
    visits: list[list[int]]
    """Lane and microbatch."""


@dataclass(frozen=True)
class Averaged:
    """A node's stage has its mean gradient; the node waits for the step."""

    iteration: int
    epoch: int
    squared_norm: float
    visits: list[list[int]]
    """Lane and microbatch of all that this node has added up."""
    tasks: list[list[int]]
    """Lane, microbatch, step, ready, start and end in ns since the iteration began here; empty unless asked for."""
    sent_bytes: list[list[int]]
    """Receiver and bytes of tensors sent to it in this iteration."""
    speeds: list[list[int]]
    """Kind of task (see `traffic.KINDS_OF_TASK`), how many, and ns that they took."""
    lags: list[list[float]]
    """Sender, and the least seconds from there to here; by two clocks, so only there and back together mean much."""


@dataclass(frozen=True)
class Recovered:
    """A node that came late has the state of its stage, and is as good as any other."""

    iteration: int
    assignment: int
    """The number of the `Recover` that this answers."""


@dataclass(frozen=True)
class BackupStored:
    """A node has a whole copy of stage 0's ends: a data node that was told to make one, or one that fetched it."""

    iterations: int
    """That were done when it was made."""


@dataclass(frozen=True)
class LinkDown:
    """The connection to a peer broke; it may be gone, or only the link."""

    peer: int
    epoch: int = 0


@dataclass(frozen=True)
class Stepped:
    """The last step is taken, or the last before a pause."""

    iteration: int


@dataclass(frozen=True)
class Failed:
    """A node cannot go on."""

    reason: str


@dataclass(frozen=True)
class Sampled:
    """A node that serves: a step is back, and these are the next tokens of its rows."""

    step: int
    tokens: list[int]


@dataclass(frozen=True)
class StepFailed:
    """A node that serves: a step cannot be done, because of what this node or the one before it has made."""

    step: int
    node: int
    """Whose fault it seems."""
    reason: str


@dataclass(frozen=True)
class Computed:
    """A node that is profiled: what one layer takes, and what there is room for."""

    passes: list[list[float]]
    """Seconds of the forward and of the backward pass with a microbatch, again and again."""
    memory_bytes: int
    device: str
    machine: str
    """That others of the same name share with it."""


@dataclass(frozen=True)
class Probed:
    """A node that is profiled: the answer to `Probe`."""

    probe: int
    samples: list[list[float]]
    """Bytes sent, and seconds until the other had them and said so; none if it never did."""


# A node to the coordinator, or to a node of its stage


@dataclass(frozen=True)
class StateRequest:
    """Numbers of a stage's state (see `work.Part`), for one that learns."""

    stage: int
    """That it is asked for; whoever was asked may hold another by now."""
    first: int
    count: int
    assignment: int
    """The number of the `Welcome` or `Recover` that it is for; what is lent has it as its epoch."""


@dataclass(frozen=True)
class BackupRequest:
    """Numbers of a copy of stage 0's ends: asked of the data node that made it, or of the node that keeps it."""

    iterations: int
    """That were done when it was made."""
    first: int
    count: int
    assignment: int
    """As in `StateRequest`; for one that keeps the copy, `iterations`."""


@dataclass(frozen=True)
class StateDigest:
    """What a lender says before it sends: the SHA-256 of the numbers that come next."""

    first: int
    digest: str
    assignment: int
    """As in `StateRequest`."""


# The coordinator to a node


@dataclass(frozen=True)
class Welcome:
    """What to train, and where the others are."""

    node_config: dict[str, Any]
    peers: dict[str, Any]
    """Name → address, empty if it is not there, and public key."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Where the state comes from before the node is ready (see `work.Origin`); empty: from the seed."""
    assignment: int = 0
    """Of the node to its stage: a number that no other `Welcome`, `Recover` or `GatherState` of the run has."""


@dataclass(frozen=True)
class PeerUpdate:
    """Others are there now, or elsewhere."""

    peers: dict[str, Any]


@dataclass(frozen=True)
class Begin:
    """Start an iteration, or start it over: whatever there is of it is forgotten."""

    iteration: int
    epoch: int
    recorded: bool
    """Report every task of this iteration."""


@dataclass(frozen=True)
class Recover:
    """Where a node that comes late gets its state from (see `work.Origin`), while the others go on."""

    origin: dict[str, Any]
    assignment: int
    """As in `Welcome`."""


@dataclass(frozen=True)
class Snapshot:
    """To a data node: copy what only stage 0 holds, after the step that was told last."""

    iterations: int
    """That are done then."""


@dataclass(frozen=True)
class Backup:
    """To a node of another stage: fetch this copy of stage 0's ends while the others go on, and keep it."""

    source: int
    iterations: int


@dataclass(frozen=True)
class Reroute:
    """Nodes are gone: how this iteration goes on without them."""

    iteration: int
    epoch: int
    gone: list[int]
    lanes: list[list[int]]
    """The lanes that change: lane, the microbatch that is on its way, and the path."""
    skipped: list[list[int]]
    """Lane, and a place of its path that is left out from now on."""


@dataclass(frozen=True)
class Drain:
    """All microbatches are back: say what you have added up."""

    iteration: int
    epoch: int
    inspect: bool
    """Somebody's gradient is not finite: look whether it is yours, and clear it."""


@dataclass(frozen=True)
class Average:
    """The answers are in: average again."""

    iteration: int
    epoch: int
    visits: list[int]
    """Of each stage."""


@dataclass(frozen=True)
class NewPlan:
    """From the next iteration on there is another plan."""

    plan: dict[str, Any]


@dataclass(frozen=True)
class Commit:
    """Take the optimizer step, then go on with the next iteration, unless this was the last."""

    iteration: int
    rate: float
    scale: float
    """Of the gradient; 0: no step, it is of no use."""
    last: bool
    """Wait after the step."""
    kept: bool
    """Keep a copy of the stage's state after the step, for a checkpoint; also if that step was taken before."""
    recorded: bool
    """Report every task of the next iteration."""


@dataclass(frozen=True)
class GatherState:
    """Send a piece of the stage's weights; the next is asked for when it has come, so that no queue fills up."""

    piece: int
    kept: bool
    """Of the copy that was made for a checkpoint, optimizer and all, instead of the weights as they are now."""
    collection: int
    """The number of what is collected; the piece has it as its epoch."""


@dataclass(frozen=True)
class RunStep:
    """To nodes that serve: new tokens of several streams go along a path."""

    step: int
    lane: int
    path: list[int]
    rows: list[list[int]]
    """Of each stream its slot, the tokens that were fed before, and how many are new."""
    freed: list[int]
    """Slots to empty first."""
    tokens: list[list[int]]
    """The new ones of each row; empty but for the first node of the path."""
    chances: list[list[float]]
    """Of each row: temperature, top-k, top-p; likewise."""
    seeds: list[int]
    """Of each row; likewise."""


@dataclass(frozen=True)
class EndSequences:
    """To nodes that serve: nothing more comes on a lane."""

    lane: int


@dataclass(frozen=True)
class Probe:
    """To a node that is profiled: measure the link to another."""

    probe: int
    peer: int


@dataclass(frozen=True)
class Stop:
    """End at once; `reason` is empty if all is well."""

    reason: str
    again: bool = False
    """Say hello again: you were taken for dead."""


ControlMessage = (
    Hello
    | Ready
    | Heartbeat
    | MicrobatchDone
    | DrainAck
    | Averaged
    | Recovered
    | BackupStored
    | LinkDown
    | Stepped
    | Failed
    | Sampled
    | StepFailed
    | Computed
    | Probed
    | StateRequest
    | BackupRequest
    | StateDigest
    | Welcome
    | PeerUpdate
    | Begin
    | Recover
    | Snapshot
    | Backup
    | Reroute
    | Drain
    | Average
    | NewPlan
    | Commit
    | GatherState
    | RunStep
    | EndSequences
    | Probe
    | Stop
)


def _tag(kind: type[Any]) -> str:
    """`StateRequest` → state_request: how a message is named in JSON."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


MESSAGE_TYPES: dict[str, type[Any]] = {_tag(kind): kind for kind in ControlMessage.__args__}


def to_json(control: ControlMessage) -> dict[str, Any]:
    return {"say": _tag(type(control)), **{name: _plain(value) for name, value in vars(control).items()}}


def _plain(value: Any) -> Any:
    """JSON has no NaN, but a loss may be one, and must be seen."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def from_json(value: Any) -> ControlMessage:
    """Checked field by field; UserError says what is wrong, in few and plain characters whatever came."""
    said = value.get("say") if isinstance(value, dict) else None
    kind = MESSAGE_TYPES.get(said) if isinstance(said, str) else None
    if kind is None or value.keys() != {"say", *kind.__annotations__}:
        raise UserError(f"no message of ours: it says {ascii(said)[:MOST_QUOTED]}")
    fields = Fields(value, "message")
    fields.take("say")
    try:
        control: ControlMessage = kind(
            **{name: _read(fields, name, hint) for name, hint in kind.__annotations__.items()}
        )
    except UserError as error:
        raise UserError(ascii(str(error))[1:-1][:MOST_QUOTED]) from None
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
    if hint == "list[int]":
        return [as_integer(each, at) for each in fields.items(name)]
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
