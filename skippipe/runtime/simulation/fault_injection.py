"""Faults that read as sentences: `kill(node=3).at(iteration=2, during="backward").back_after(1.5)`.

A fault begins when its node does what `during` says for the first time in that iteration or a later one; if the node
never does that (only data nodes run heads), when another node does. The same faults strike virtual clusters and
processes. Messages that come late, or come again as from the buffer of a connection that has been replaced, are for
virtual clusters only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from skippipe.cost_model import ns
from skippipe.plan import Plan
from skippipe.runtime.messages import COORDINATOR
from skippipe.runtime.node import ops

During = Literal[
    "forward", "head", "backward", "weights", "averaging", "step", "checkpoint", "backup", "joining", "repair",
    "validation", "teaching",
]  # fmt: skip
FaultKind = Literal[
    "kill", "lose", "freeze", "cut", "cut one way", "slow node", "slow link", "poison", "stale", "accuse",
]  # fmt: skip
DURING: tuple[During, ...] = (
    "forward", "head", "backward", "averaging", "step", "checkpoint", "backup", "joining", "repair",
)  # fmt: skip


RELAY = -2
"""The number of a relay, which only processes have."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, when it begins, and how long it lasts."""

    kind: FaultKind
    nodes: tuple[int, ...]
    """One node; two for a link; the nodes whose messages come again; the coordinator's number is −1."""
    iteration: int = 0
    during: During = "forward"
    lasts_s: float | None = None
    """Seconds until a killed node is started again, a frozen one goes on, a link works; none: for ever."""
    times: float = 10.0
    """The factor by which something slow takes longer."""
    silent: bool = False
    """A link that is cut drops what it is given, and neither end is told; if not, its connections are broken."""
    share: float = 0.1
    """The share of messages that come again."""
    late_s: float = 0.0
    """The longest that control messages between nodes and coordinator are on their way."""
    device: int = 0
    """The device that is lost."""

    def at(self, iteration: int, during: During = "forward") -> Fault:
        return replace(self, iteration=iteration, during=during)

    def back_after(self, seconds: float) -> Fault:
        return replace(self, lasts_s=seconds)

    def strikes(self, node: int, op: ops.Op, iteration: int, *, any_node: bool) -> bool:
        """Does it begin with this operation? `any_node`: the node that it is for never runs such operations."""
        here = any_node or node in self.nodes or min(self.nodes) < 0
        return iteration >= self.iteration and here and phase_of(op) == self.during

    def __str__(self) -> str:
        other = {COORDINATOR: "the coordinator", RELAY: "the relay"}
        names = [other.get(node, f"node {node}") for node in self.nodes]
        who = " and ".join(names) if len(names) < 3 else f"{len(names)} nodes"
        what = {
            "kill": f"kill {who}",
            "freeze": f"freeze {who}",
            "cut": f"cut the link between {who}{' silently' if self.silent else ''}",
            "cut one way": f"cut the link from {who.replace(' and ', ' to ')}{' silently' if self.silent else ''}",
            "slow node": f"make {who} {self.times:g} times slower",
            "slow link": f"make the link between {who} {self.times:g} times slower",
            "poison": f"spoil a gradient of {who}",
            "stale": f"let {self.share:.0%} of the messages from and to {who} come again later"
            + f", control messages to and from the coordinator up to {self.late_s:g} s late" * bool(self.late_s),
            "lose": f"lose device {self.device} of {who}",
            "accuse": f"have {who} report all its links as down",
        }[self.kind]
        end = "" if self.lasts_s is None else f", for {self.lasts_s:g} s"
        return f"{what} in iteration {self.iteration} during {self.during}{end}"


def kill(node: int) -> Fault:
    return Fault("kill", (node,))


def kill_coordinator() -> Fault:
    return Fault("kill", (COORDINATOR,), lasts_s=1.0)


def freeze(node: int) -> Fault:
    return Fault("freeze", (node,))


def cut(a: int, b: int, *, one_way: bool = False, silent: bool = False) -> Fault:
    return Fault("cut one way" if one_way else "cut", (a, b), silent=silent)


def slow_node(node: int, times: float = 10.0) -> Fault:
    return Fault("slow node", (node,), times=times)


def slow_link(a: int, b: int, times: float = 10.0) -> Fault:
    return Fault("slow link", (a, b), times=times)


def poison(node: int) -> Fault:
    return Fault("poison", (node,))


def lose(device: int, node: int) -> Fault:
    """Under virtual time only: one of several devices of a node fails."""
    return Fault("lose", (node,), device=device)


def replay_messages(*nodes: int, share: float = 0.1, late_s: float = 0.0) -> Fault:
    """Under virtual time only: copies of messages come later, whatever has become of sender and receiver."""
    return Fault("stale", nodes, share=share, late_s=late_s)


def accuse(node: int) -> Fault:
    """Under virtual time only: it reports again and again that it cannot reach any node."""
    return Fault("accuse", (node,))


def phase_of(op: ops.Op) -> During | None:
    match op:
        case ops.StageTask():
            if op.step < op.length:
                return "forward"
            if op.step == op.length:
                return "head"
            return "weights" if op.is_weights else "backward"
        case ops.EvaluateSamples():
            return "validation"
        case ops.TeacherForward():
            return "teaching"
        case ops.BeginAveraging() | ops.ContributePiece() | ops.AdoptPiece() | ops.GradNorm():
            return "averaging"
        case ops.OptimizerStep():
            return "step"
        case ops.SnapshotState() | ops.ReadWeights():
            return "checkpoint"
        case ops.CopyBackup() | ops.OpenBackup() | ops.StoreBackup():
            return "backup"
        case ops.PlanTransfer() | ops.WriteState() | ops.ReadState():
            return "backup" if isinstance(op, ops.ReadState) and op.backup else "joining"
        case ops.DropMicrobatch() | ops.CheckFinite():
            return "repair"
    return None


def drawn(random: Random, plan: Plan, iterations: int, most: int = 3) -> list[Fault]:
    """A few faults at random, all of which end: nodes come back in time to go on with."""
    nodes = sorted(plan.stage_of)
    faults = []
    for _ in range(random.randint(1, most)):
        node, other = random.sample(nodes, 2)
        kinds = [
            *(kill(node), kill(node), kill(node), freeze(node)),
            *(cut(node, other), cut(node, other, one_way=True), slow_node(node), slow_link(node, other)),
            *(poison(node), kill_coordinator()),
        ]
        fault = random.choice(kinds).at(random.randrange(iterations), random.choice(DURING))
        faults.append(fault.back_after(random.choice([0.01, 0.5, 3.0, 12.0, 40.0])))
    return faults


LATER_S = (0.0005, 0.02, 0.5, 4.0, 15.0)  # roughly: within an iteration, or many incarnations later


class MessageReplay:
    """Messages that come again: which and when follows from the fault alone."""

    def __init__(self) -> None:
        self._faults: list[tuple[Fault, Random]] = []
        self._last_ns: dict[tuple[int, int], int] = {}
        """Sender and receiver → when the last control message arrives; those that follow do not overtake it."""

    def begin(self, fault: Fault) -> None:
        self._faults.append((fault, Random(str(fault))))

    def end(self, fault: Fault) -> None:
        self._faults = [each for each in self._faults if each[0] is not fault]

    def of(self, sender: int, receiver: int) -> Iterator[int]:
        """The delays in ns after which a message that is sent now comes once more."""
        for fault, random in self._faults:
            if (sender in fault.nodes or receiver in fault.nodes) and random.random() < fault.share:
                yield ns(random.choice(LATER_S) * random.uniform(0.5, 1.5))

    def arrival_ns(self, sender: int, receiver: int, now_ns: int) -> int:
        """When a control message between a node and the coordinator arrives; those of both sides may cross."""
        at_ns = max(now_ns, self._last_ns.get((sender, receiver), 0))
        for fault, random in self._faults:
            if fault.late_s and (sender in fault.nodes or receiver in fault.nodes):
                at_ns = max(at_ns, now_ns + ns(fault.late_s * random.random()))
        self._last_ns[sender, receiver] = at_ns
        return at_ns
