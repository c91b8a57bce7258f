"""The conductor: who is measured when. A state machine like the coordinator and the gateway.

Nodes come and compute, all at once: they do in training too. When everybody is there, or has been waited for long
enough, and has computed, links are measured: two nodes at a time, first one way and then the other, as soon as both are
free, in the order of a tournament (`rounds`). So no node is measured twice at once, and nobody waits for the slowest
link of a round.

A node that is lost is left out, unless it comes back. Two that cannot reach each other in one direction have no link in
either: nothing that one of them sends could be answered.


Who is measured with whom, and when: a round-robin tournament.

The circle method: one stays where it is, the others move on by a place from round to round, and whoever faces each
other is measured. n nodes take n − 1 rounds, or n if n is odd: then one of them rests in each.

"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from skippipe.profiling.estimators import LinkEstimate, NodeEstimate, estimate_link, estimate_node
from skippipe.profiling.link_probe import ProbeSettings
from skippipe.profiling.results import Ends, ProfileResult
from skippipe.runtime.messages import Computed, ControlMessage, Failed, LinkDown, Probe, Probed
from skippipe.workload import Workload


class ProfilingEnv(Protocol):
    """All that a conductor can do to the world."""

    def now_ns(self) -> int: ...

    def tell(self, node: int, control: ControlMessage) -> None: ...


class ProfilingCallback:
    """Whoever wants to know how it goes."""

    def progressed(self, done: int, of: int, doing: str) -> None:
        """So many nodes and links are measured."""

    def happened(self, text: str) -> None:
        """Something out of the ordinary."""


@dataclass(frozen=True)
class ProfilingDeadlines:
    joining: timedelta = timedelta(minutes=10)
    """For all nodes to be there; then it goes on with those that are."""
    computing: timedelta = timedelta(minutes=10)


@dataclass(frozen=True)
class RunningProbe:
    """A link is being measured."""

    sender: int
    receiver: int
    until_ns: int

    @property
    def nodes(self) -> set[int]:
        return {self.sender, self.receiver}


@dataclass
class ProfilingCoordinator:
    names: tuple[str, ...]
    work: str
    """What nodes compute, in words …"""
    workload: Workload
    """… and in figures."""
    env: ProfilingEnv
    watching: ProfilingCallback = field(default_factory=ProfilingCallback)
    effort: ProbeSettings = field(default_factory=ProbeSettings)
    deadlines: ProfilingDeadlines = field(default_factory=ProfilingDeadlines)
    _began_ns: int = field(init=False)
    _seen: set[int] = field(init=False, default_factory=set)
    """Nodes that have come, or are known not to."""
    _computing: dict[int, int] = field(init=False, default_factory=dict)
    """Node → until when that is waited for."""
    _computed: dict[int, Computed] = field(init=False, default_factory=dict)
    _links: dict[Match, LinkEstimate | None] = field(init=False, default_factory=dict)
    """What has been measured; None: there is no way."""
    _order: list[Match] = field(init=False)
    _running: dict[int, RunningProbe] = field(init=False, default_factory=dict)
    """By the number of the measurement."""
    _probes: int = field(init=False, default=0)
    _gathered: bool = field(init=False, default=False)
    _linking: bool = field(init=False, default=False)
    """All have computed, which would disturb what is measured now."""

    def __post_init__(self) -> None:
        self._began_ns = self.env.now_ns()
        self._order = [match for each in round_robin_pairs(len(self.names)) for match in each]

    # What it hears

    def joined(self, node: int) -> None:
        """It has been told what to compute, and does."""
        self._seen.add(node)
        self._computing[node] = self._until_ns(self.deadlines.computing)
        self._go_on()

    def hear(self, node: int, control: ControlMessage) -> None:
        match control:
            case Computed() if node in self._computing:
                self._has_computed(node, control)
            case Probed() if control.probe in self._running and self._running[control.probe].sender == node:
                self._has_probed(control)
            case LinkDown():
                self._cannot_reach(node, control.peer)
            case Failed():
                self.lost(node, control.reason)
            case _:  # too late, or a sign of life
                return
        self._go_on()

    def lost(self, node: int, how: str) -> None:
        """It is left out, unless it comes back."""
        if node in self._computing or node in self._computed or node not in self._seen:
            self.watching.happened(f"'{self.names[node]}' is left out: {how}")
        self._seen.add(node)
        self._computing.pop(node, None)
        self._computed.pop(node, None)
        for probe, running in list(self._running.items()):
            if node in running.nodes:
                del self._running[probe]
        self._links = {match: link for match, link in self._links.items() if node not in match}
        self._go_on()

    def tick(self) -> None:
        """To be called often: deadlines pass."""
        now_ns = self.env.now_ns()
        for node in [node for node, until_ns in self._computing.items() if now_ns > until_ns]:
            self.lost(node, f"it has computed for {self.deadlines.computing.total_seconds():g} s without an end")
        for running in [each for each in self._running.values() if now_ns > each.until_ns]:
            self._cannot_reach(running.sender, running.receiver)
        self._go_on()

    # How it stands

    @property
    def missing(self) -> list[str]:
        """Nodes that are waited for."""
        return [] if self._gathered else [name for at, name in enumerate(self.names) if at not in self._seen]

    @property
    def over(self) -> bool:
        return self._gathered and not self._computing and not self._open()

    def survey(self, when: str) -> ProfileResult:
        """What has been measured so far."""
        nodes = self._node_figures()
        links: dict[Ends, LinkEstimate | None] = {
            (self.names[a], self.names[b]): link for (a, b), link in sorted(self._links.items())
        }
        looked_for = range(len(self.names)) if self._gathered else self._seen
        missing = sorted(set(looked_for) - self._computed.keys() - self._computing.keys())
        return ProfileResult(when, self.work, nodes, links, tuple(self.names[node] for node in missing))

    def _node_figures(self) -> dict[str, NodeEstimate]:
        """Nodes on one device have its memory together."""
        places = {node: (said.machine, said.device) for node, said in self._computed.items()}
        sharing = Counter(places.values())
        return {
            self.names[node]: estimate_node(
                said.passes,
                said.machine.partition("/")[0] or "unknown",
                max(1, said.memory_bytes // sharing[places[node]]),
                self.workload,
            )
            for node, said in sorted(self._computed.items())
        }

    # What it does

    def _has_computed(self, node: int, computed: Computed) -> None:
        try:
            estimate_node(computed.passes, "somewhere", max(1, computed.memory_bytes), self.workload)
        except ValueError as error:
            self.lost(node, str(error))
            return
        del self._computing[node]
        self._computed[node] = computed
        self._progressed(f"'{self.names[node]}' has computed")

    def _has_probed(self, probed: Probed) -> None:
        running = self._running[probed.probe]
        figures = estimate_link(probed.samples)
        if figures is None:
            self._cannot_reach(running.sender, running.receiver)
            return
        del self._running[probed.probe]
        self._links[running.sender, running.receiver] = figures
        if (running.receiver, running.sender) not in self._links:
            self._measure(running.receiver, running.sender)
        self._progressed(f"'{self.names[running.sender]}' to '{self.names[running.receiver]}'")

    def _cannot_reach(self, node: int, other: int) -> None:
        """If it is being measured; else it does not matter now."""
        found = [probe for probe, running in self._running.items() if running.nodes == {node, other}]
        if not found:
            return
        del self._running[found[0]]
        self._links[node, other] = self._links[other, node] = None
        self.watching.happened(f"'{self.names[node]}' does not reach '{self.names[other]}': they have no link")
        self._progressed("")

    def _go_on(self) -> None:
        """Begin all that can be begun."""
        if not self._gathered:
            late = self.env.now_ns() > self._began_ns + _ns(self.deadlines.joining)
            if late and self.missing:
                self.watching.happened(f"going on without {', '.join(self.missing)}, for whom was waited long enough")
            self._gathered = late or len(self._seen) == len(self.names)
        self._linking = self._linking or (self._gathered and not self._computing)
        if not self._linking:
            return
        busy = {node for running in self._running.values() for node in running.nodes}
        for sender, receiver in self._open():
            if sender not in busy and receiver not in busy:
                busy |= {sender, receiver}
                self._measure(sender, receiver)

    def _open(self) -> list[Match]:
        """What is still to be measured, or being measured, with those who are there."""
        there, known = self._computed, self._links
        return [
            (a, b) for a, b in self._order if a in there and b in there and not ((a, b) in known and (b, a) in known)
        ]

    def _measure(self, sender: int, receiver: int) -> None:
        self._probes += 1
        limit = timedelta(seconds=self.effort.most_s + 2 * self.effort.patience_s)  # the node itself gives up before
        self._running[self._probes] = RunningProbe(sender, receiver, self._until_ns(limit))
        self.env.tell(sender, Probe(self._probes, receiver))

    def _progressed(self, doing: str) -> None:
        there = len(self._computed) + len(self._computing) + len(self.missing)
        self.watching.progressed(len(self._computed) + len(self._links), there * there, doing)

    def _until_ns(self, limit: timedelta) -> int:
        return self.env.now_ns() + _ns(limit)


def _ns(span: timedelta) -> int:
    return round(span.total_seconds() * 1e9)


Match = tuple[int, int]
"""Two nodes, measured in this direction first and then in the other."""


def round_robin_pairs(nodes: int) -> list[list[Match]]:
    """Every two nodes once, nobody twice in a round."""
    places = nodes + nodes % 2  # with an odd number, whoever faces the last place rests
    circle = list(range(places))
    found = []
    for turn in range(places - 1):
        pairs = [(circle[at], circle[-1 - at]) for at in range(places // 2)]
        swapped = [pair[::-1] if turn % 2 else pair for pair in pairs]  # nobody is always the first
        found.append([(a, b) for a, b in swapped if a < nodes and b < nodes])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [matches for matches in found if matches]
