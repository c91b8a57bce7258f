"""Faults that read as sentences: `kill(node=3).at(iteration=2, during="backward").back_after(1.5)`.

A fault begins when its node does what `during` says for the first time in that iteration or a later one; if the node
never does that (only data nodes run heads), when somebody does. The same faults strike virtual clusters and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from skippipe import dispatch
from skippipe.compiled import plain
from skippipe.plan import Plan
from skippipe.runtime.control import COORDINATOR
from skippipe.runtime.work import (
    CopyEnds,
    Drop,
    Inspect,
    Keep,
    Lend,
    Load,
    Measure,
    OpenBackup,
    Pass,
    Show,
    Step,
    StoreBackup,
    Study,
    Task,
    Work,
)

is_weights = plain(dispatch.is_weights)

During = Literal[
    "forward", "head", "backward", "weights", "averaging", "step", "checkpoint", "backup", "joining", "repair"
]
Kind = Literal["kill", "freeze", "cut", "cut one way", "slow node", "slow link", "poison", "stale", "accuse"]
DURING: tuple[During, ...] = (
    "forward", "head", "backward", "averaging", "step", "checkpoint", "backup", "joining", "repair",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: Kind
    nodes: tuple[int, ...]
    """One; two for a link; those whose messages come again; the coordinator's number is −1."""
    iteration: int = 0
    during: During = "forward"
    lasts_s: float | None = None
    """Until it is over: a killed node is started again, a frozen one goes on, a link works; none: for ever."""
    times: float = 10.0
    """By which something slow takes longer."""
    silent: bool = False
    """A link that is cut drops what it is given, and nobody is told; no: connections are broken."""
    share: float = 0.1
    """Of messages that come again."""
    late_s: float = 0.0
    """The most that words between nodes and coordinator are on their way."""

    def at(self, iteration: int, during: During = "forward") -> Fault:
        return replace(self, iteration=iteration, during=during)

    def back_after(self, seconds: float) -> Fault:
        return replace(self, lasts_s=seconds)

    def strikes(self, node: int, work: Work, iteration: int, *, anybody: bool) -> bool:
        """Does it begin with this work? `anybody`: the node that it is for never does such work."""
        here = anybody or node in self.nodes or COORDINATOR in self.nodes
        return iteration >= self.iteration and here and phase_of(work) == self.during

    def __str__(self) -> str:
        names = ["the coordinator" if node == COORDINATOR else f"node {node}" for node in self.nodes]
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
            + f", words to and from the coordinator up to {self.late_s:g} s late" * bool(self.late_s),
            "accuse": f"have {who} complain of everybody",
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


def stale(*nodes: int, share: float = 0.1, late_s: float = 0.0) -> Fault:
    """Under virtual time only: copies of messages come later, whatever has become of sender and receiver."""
    return Fault("stale", nodes, share=share, late_s=late_s)


def accuse(node: int) -> Fault:
    """Under virtual time only: it says again and again that it cannot reach anybody."""
    return Fault("accuse", (node,))


def phase_of(work: Work) -> During | None:
    match work:
        case Task():
            if work.step < work.length:
                return "forward"
            if work.step == work.length:
                return "head"
            return "weights" if is_weights(work.step, work.length) else "backward"
        case Pass() | Measure():
            return "averaging"
        case Step():
            return "step"
        case Keep() | Show():
            return "checkpoint"
        case CopyEnds() | OpenBackup() | StoreBackup():
            return "backup"
        case Study() | Load() | Lend():
            return "backup" if isinstance(work, Lend) and work.backup else "joining"
        case Drop() | Inspect():
            return "repair"
    return None


def drawn(random: Random, plan: Plan, iterations: int, most: int = 3) -> list[Fault]:
    """A few faults at random, such that somebody comes back in time to go on with."""
    nodes = sorted(plan.stage_of)
    faults = []
    for _ in range(random.randint(1, most)):
        node, other = random.sample(nodes, 2)
        makers: list[Callable[[], Fault]] = [
            lambda node=node: kill(node),  # type: ignore[misc]
            lambda node=node: kill(node),  # type: ignore[misc]
            lambda node=node: kill(node),  # type: ignore[misc]
            lambda node=node: freeze(node),  # type: ignore[misc]
            lambda node=node, other=other: cut(node, other),  # type: ignore[misc]
            lambda node=node, other=other: cut(node, other, one_way=True),  # type: ignore[misc]
            lambda node=node: slow_node(node),  # type: ignore[misc]
            lambda node=node, other=other: slow_link(node, other),  # type: ignore[misc]
            lambda node=node: poison(node),  # type: ignore[misc]
            kill_coordinator,
        ]
        fault = random.choice(makers)().at(random.randrange(iterations), random.choice(DURING))
        faults.append(fault.back_after(random.choice([0.01, 0.5, 3.0, 12.0, 40.0])))
    return faults
