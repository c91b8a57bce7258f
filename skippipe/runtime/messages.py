"""Control messages between coordinator and nodes: everything that is not a tensor.

They form a tagged union: JSON objects on the wire, whose field `say` names the type (`message_json`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from skippipe.runtime.state_source import StateSource
from skippipe.value_ranges import COUNT, DEVICES

COORDINATOR = -1  # stands for the coordinator where a node's number is expected

Count = Annotated[int, msgspec.Meta(ge=int(COUNT.least), le=int(COUNT.most))]
DeviceCount = Annotated[int, msgspec.Meta(ge=int(DEVICES.least), le=int(DEVICES.most))]


def tag_of(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()  # StateRequest → state_request


class ControlMessage(msgspec.Struct, frozen=True, tag_field="say", tag=tag_of, forbid_unknown_fields=True):
    """Base of all control messages; every subclass in this module is one kind."""


# From a node to the coordinator


class Hello(ControlMessage, frozen=True):
    """A node announces itself: its address, its version, and how far it is if it has trained before."""

    address: str
    version: str
    epoch: Count = 0
    iteration: Count = 0
    """The iteration that the node is in, or waits to begin."""
    phase: str = ""
    """The name of its `NodePhase`; empty for a node that is new."""
    backup: Count = 0
    """Iterations that were done when the copy of stage 0's ends was made that this node keeps; 0: it keeps none."""
    callback: str = ""
    """Secret, in hexadecimal digits, of the streams that it opens if it cannot be reached (`transport.callbacks`)."""
    relay: list[float] = []
    """What a relay says in every hello: bytes a second for all nodes together, for one node, and its joined streams."""


class RequestCallback(ControlMessage, frozen=True):
    """The node cannot reach a peer, which is to call it."""

    peer: str
    token: str
    """The token that the peer is to show."""
    port: Count
    """Where the node takes such calls; 0: nowhere."""


class CallFailed(ControlMessage, frozen=True):
    """The node was to call a peer, and nobody answers there."""

    peer: str


class Ready(ControlMessage, frozen=True):
    """The node's stage is built, with its state, and the node can begin an iteration."""

    assignment: Count = 0
    """The number of the `Welcome` or `Recover` that this answers."""


class Devices(ControlMessage, frozen=True):
    """How many devices of the node work, if not as many as planned; why one has failed, if one has, and the epoch of
    the iteration whose gradients are lost with it."""

    working: DeviceCount
    lost: str = ""
    epoch: Count | None = None


class Heartbeat(ControlMessage, frozen=True):
    """The node is alive."""

    doing: str
    """The operation that runs, or what the node waits for, in words for people."""
    busy_s: float = 0.0
    """Seconds for which the node has had work without a pause; 0: it waits for others."""


class MicrobatchDone(ControlMessage, frozen=True):
    """A microbatch is back at its data node; all its backward passes are done."""

    iteration: Count
    epoch: Count
    lane: Count
    microbatch: Count
    loss: float
    """NaN if the node that ran the head is lost."""


class Validated(ControlMessage, frozen=True):
    """A microbatch of held-out samples is back at its data node."""

    iteration: Count
    epoch: Count
    microbatch: Count
    loss: float
    """Mean over its tokens that count."""
    tokens: Count


class DrainAck(ControlMessage, frozen=True):
    """The answer to `Drain`: lane and microbatch of all that are in this node's sum of gradients."""

    iteration: Count
    epoch: Count
    contribution: list[list[Count]] = msgspec.field(name="visits")


class Averaged(ControlMessage, frozen=True):
    """The node has the mean gradient of its stage and waits for the `Commit`."""

    iteration: Count
    epoch: Count
    squared_norm: float
    contribution: list[list[Count]] = msgspec.field(name="visits")
    """Lane and microbatch of all that are in this node's sum of gradients."""
    tasks: list[list[Count]]
    """Lane, microbatch, step, ready, start and end in ns since the iteration began here, and the device unless it is
    the first; empty unless recorded."""
    sent_bytes: list[list[Count]]
    """Receiver, and bytes of tensors sent to it in this iteration."""
    speeds: list[list[Count]]
    """Kind of task (0 forward, 1 head, 2 backward, 3 weight gradients), number of tasks, and ns that they took."""
    lags: list[list[float]]
    """Sender, and the least seconds from there to here; by two clocks, so only there and back together mean much."""
    closing: list[Count] = []
    """When averaging began and ended, in ns since the iteration began here; and how many ns the optimizer step before
    it took, 0 if there was none. Empty unless recorded."""
    copies: list[list[Count]] = []
    """Lane, microbatch and step of a task, 0: to its device or 1: from it, start and end of the copy; likewise."""


class Recovered(ControlMessage, frozen=True):
    """A node that joined during training has the whole state of its stage: it is a full replica."""

    iteration: Count
    assignment: Count
    """The number of the `Recover` that this answers."""


class BackupStored(ControlMessage, frozen=True):
    """The node has a whole copy of stage 0's ends: a data node that made one, or a node that fetched one."""

    iterations: Count
    """Iterations that were done when the copy was made."""


class LinkDown(ControlMessage, frozen=True):
    """The link to a peer is broken or silent; the peer may be lost, or only the link."""

    peer: Count
    epoch: Count = 0


class Stepped(ControlMessage, frozen=True):
    """The optimizer step of a `Commit` that was the last, or the last before a pause, is taken."""

    iteration: Count


class Failed(ControlMessage, frozen=True):
    """The node cannot go on."""

    reason: str


class Sampled(ControlMessage, frozen=True):
    """Serving: a step is done, and these are the next tokens of its rows."""

    step: Count
    tokens: list[Count]
    logprobs: list[list[list[float]]] = []
    """Pairs of a token and its log-probability for each row that asks for them: the next token, then the likeliest."""


class StepFailed(ControlMessage, frozen=True):
    """Serving: a step cannot be done, because of what this node or the one before it has computed."""

    step: Count
    node: Count
    """The node that seems to be at fault."""
    reason: str


class Computed(ControlMessage, frozen=True):
    """Profiling: how long one layer takes on this node, and the memory that it has; of one of its alike devices."""

    passes: list[list[float]]
    """Seconds of the forward and of the backward pass with a microbatch, once for each repetition."""
    memory_bytes: Count
    device: str
    machine: str
    """Nodes with the same name here share one machine."""
    devices: DeviceCount = 1


class Probed(ControlMessage, frozen=True):
    """The answer to `Probe`."""

    probe: Count
    samples: list[list[float]]
    """Bytes sent, and seconds until the peer had confirmed them; empty if it never did. After a `ProbeRate`: bytes that
    all links together have carried, and the seconds of that."""


# From a node to the coordinator, or to a node of its stage


class TasksDone(ControlMessage, frozen=True):
    """A node whose download is shared has done its tasks of an iteration: it can take pieces of gradients now."""

    iteration: Count
    epoch: Count


class StateRequest(ControlMessage, frozen=True):
    """Asks for a slice of a stage's state (see `ops.StateSlice`)."""

    stage: Count
    """The stage whose state is needed; the receiver may hold another one by now, and then does not answer."""
    first: Count
    count: Count
    assignment: Count
    """The number of the `Welcome` or `Recover` that the state is for; the answer carries it."""


class BackupRequest(ControlMessage, frozen=True):
    """Asks for a slice of a copy of stage 0's ends, of the data node that made it or of the node that keeps it."""

    iterations: Count
    """Iterations that were done when the copy was made."""
    first: Count
    count: Count
    assignment: Count
    """What the slice is for, as in `StateRequest`; for a node that fetches the copy to keep it, `iterations`."""


class StateDigest(ControlMessage, frozen=True):
    """Comes before a slice of state: the SHA-256 of its bytes."""

    first: Count
    digest: str
    assignment: Count


# From the coordinator to a node


class Welcome(ControlMessage, frozen=True):
    """The node's configuration, and where the other nodes are."""

    node_config: dict[str, Any]
    peers: dict[str, Any]
    """Name → address, empty if the node is not there, and public key."""
    origin: StateSource | None = None
    """Where the state comes from before the node is ready; none: from the seed."""
    assignment: Count = 0
    """The number of this assignment of the node to its stage; no `Welcome`, `Recover` or `GatherState` shares it."""


class PeerUpdate(ControlMessage, frozen=True):
    """Other nodes have joined, or have new addresses."""

    peers: dict[str, Any]


class CallBack(ControlMessage, frozen=True):
    """Call a peer that cannot reach this node."""

    peer: str
    address: str
    token: str
    relay: str = ""
    """The address is a relay's, which the peer dials too: the token to show there. This node asked, if that is all."""


class RelayGrant(ControlMessage, frozen=True):
    """For a relay: join the streams of two nodes that show the tokens of this secret."""

    caller: str
    callee: str
    secret: str


class Begin(ControlMessage, frozen=True):
    """Start an iteration, or start it over: what the node has of it is discarded."""

    iteration: Count
    epoch: Count
    recorded: bool
    """The node reports every task of this iteration."""


class Recover(ControlMessage, frozen=True):
    """A node that joined during training gets its state from there, while the others go on."""

    origin: StateSource
    assignment: Count


class MakeBackup(ControlMessage, frozen=True):
    """To a data node: copy embedding, final norm and head, which only stage 0 holds, after the step that was committed
    last."""

    iterations: Count


class FetchBackup(ControlMessage, frozen=True):
    """To a node of another stage: fetch this copy of embedding, final norm and head during training, and keep it."""

    source: Count
    iterations: Count


class Reroute(ControlMessage, frozen=True):
    """Nodes are lost: how this iteration goes on without them."""

    iteration: Count
    epoch: Count
    gone: list[Count]
    lanes: list[list[Count]]
    """The lanes that change: lane, the microbatch that is on its way, and the path."""
    skipped: list[list[Count]]
    """Lane, and a place of its path that is skipped from now on."""


class Drain(ControlMessage, frozen=True):
    """All microbatches are back: the node finishes what is left and answers with `DrainAck`."""

    iteration: Count
    epoch: Count
    inspect: bool
    """The gradient of some node is not finite: the node checks its own, and clears it if it is that one."""


class Average(ControlMessage, frozen=True):
    """All nodes have answered `Drain`: average the gradients."""

    iteration: Count
    epoch: Count
    stage_microbatches: list[Count] = msgspec.field(name="visits")
    """Microbatches in the sum of each stage."""


class NewPlan(ControlMessage, frozen=True):
    """The plan from the next iteration on."""

    plan: dict[str, Any]


class Commit(ControlMessage, frozen=True):
    """Take the optimizer step, then begin the next iteration, or wait if it says so."""

    iteration: Count
    rate: float
    scale: float
    """Factor of the gradient; 0: no step, because the gradient is not finite."""
    wait: bool = False
    """The node waits after the step."""
    snapshot: bool = False
    """The node copies its state after the step, for a checkpoint; also if it has taken that step before."""
    recorded: bool = False
    """The node reports every task of the next iteration."""


class Validate(ControlMessage, frozen=True):
    """Evaluate held-out samples with the weights after an iteration, before the next one begins."""

    iteration: Count
    epoch: Count
    microbatches: Count
    """Microbatch m goes along path m modulo the number of paths."""
    paths: list[list[Count]]
    """The nodes of each path, from a data node over every stage; the head is at the data node."""


class GatherState(ControlMessage, frozen=True):
    """Send one piece of the stage's state; the next is requested when it has come, so that no queue fills up."""

    piece: Count
    from_snapshot: bool
    """A piece of the copy that was made for a checkpoint, with the optimizer's state, instead of the weights."""
    collection: Count
    """The number of this gathering; the piece carries it."""


class RunStep(ControlMessage, frozen=True):
    """Serving: run the new tokens of several sequences along a path."""

    step: Count
    lane: Count
    path: list[Count]
    rows: list[list[Count]]
    """Cache slot, tokens computed before, and new tokens of each sequence."""
    freed: list[Count]
    """Cache slots to empty first."""
    tokens: list[list[Count]]
    """The new tokens of each row; empty but for the first node of the path."""
    chances: list[list[float]]
    """Temperature, top-k, top-p, min-p, repetition, presence and frequency penalty of each row; likewise."""
    seeds: list[Count]
    """The seed of each row; likewise."""
    prompts: list[Count] = []
    """How many tokens of each row's sequence are its prompt; likewise."""
    biases: list[list[list[float]]] = []
    """Tokens of each row and what is added to their logits; likewise."""
    logprobs: list[Count] = []
    """One more than the likeliest tokens of each row that are reported, 0 for no log-probabilities; likewise."""
    allowed: list[str] = []
    """Bits of the tokens that may come next in each row, in base64, or empty for all of them; likewise."""


class EndSequences(ControlMessage, frozen=True):
    """Serving: nothing more comes on a lane."""

    lane: Count


class Probe(ControlMessage, frozen=True):
    """Profiling: measure the link to a peer. Serving: send it one small message, and report the answer if it comes."""

    probe: Count
    peer: Count


class ProbeRate(ControlMessage, frozen=True):
    """Profiling: measure what the links to several peers, or from them, carry at once. `Probed` is the answer."""

    probe: Count
    receiving: bool
    streams: list[list[Count]]
    """Rows of a peer, the bytes of a chunk, how many chunks are on the way at any time, and µs there and back."""


class Stop(ControlMessage, frozen=True):
    """End at once; `reason` is empty if all is well."""

    reason: str
    again: bool = False
    """The node was declared dead: it starts over with a new `Hello`."""
