"""The coordinator of profiling: which node and link is measured when. A state machine like that of training, and the
server that runs it over a mailbox with the nodes of a launcher.

Nodes join and compute, all at once: they do in training too. When all have joined, or the deadline for joining has
passed, and all have computed, links are measured: two nodes at a time, first one way and then the other, as soon as
both are free, in the order of a round-robin tournament (`round_robin_pairs`). So no node is measured twice at once, and
no pair waits for the slowest link of a round.

Last, every node measures what it sends to several others at once, and what it receives from several: to those that
together carry the most, or to others that are free and carry nearly as much. No node takes part in two of these at once
either.

A node that is lost is left out, unless it comes back. Two that cannot reach each other in one direction have no link in
either: nothing that one of them sends could be answered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from skippipe.heartbeat import PROFILING_TIMEOUT
from skippipe.launch.launcher import Launcher
from skippipe.profiling.estimators import (
    LinkEstimate,
    NodeEstimate,
    estimate_link,
    estimate_node,
    estimate_rate,
    stream_over,
)
from skippipe.profiling.node import ProfilingConfig
from skippipe.profiling.results import Ends, ProfileResult
from skippipe.runtime.admission import Admission
from skippipe.runtime.messages import Computed, ControlMessage, Failed, LinkDown, Probe, Probed, ProbeRate
from skippipe.runtime.rendezvous import EndedNodes, Rendezvous
from skippipe.transport.keys import THE_COORDINATOR
from skippipe.transport.mailbox import Mailbox

NodePair = tuple[int, int]
"""Two nodes, measured in this direction first and then in the other."""
RateOf = tuple[int, bool]
"""A node and whether it receives: its download, or else its upload."""
MOST_PEERS = 4  # that a node sends to at once, or receives from, when its rates are measured
FEWEST_PEERS = 2
NEARLY = 0.9  # of what the best peers carry together: others that do are as good


class ProfilingEnv(Protocol):
    """All that the coordinator can do to the world."""

    def now_ns(self) -> int: ...

    def tell(self, node: int, control: ControlMessage) -> None: ...


class ProfilingCallback:
    """Is told how profiling goes."""

    def progressed(self, done: int, of: int, doing: str) -> None:
        """So many nodes, links and rates of nodes, of so many, are measured."""

    def happened(self, text: str) -> None:
        """Something out of the ordinary."""


@dataclass(frozen=True)
class ProfilingDeadlines:
    """How long nodes are waited for."""

    joining: timedelta = timedelta(minutes=10)
    """Within which nodes must join; profiling goes on with those that have."""
    computing: timedelta = timedelta(minutes=10)
    """Within which a node must have computed, or it is left out."""


@dataclass(frozen=True)
class RunningProbe:
    """A link that is being measured, or several at once."""

    node: int
    """The node that measures."""
    peers: tuple[int, ...]
    until_ns: int
    rate: RateOf | None = None
    """What several links are measured for."""
    alone_bytes_per_s: float = 0.0
    """What those carry one at a time, added up."""

    @property
    def nodes(self) -> set[int]:
        return {self.node, *self.peers}


@dataclass
class ProfilingCoordinator:
    config: ProfilingConfig
    env: ProfilingEnv
    callback: ProfilingCallback = field(default_factory=ProfilingCallback)
    deadlines: ProfilingDeadlines = field(default_factory=ProfilingDeadlines)
    _joining_until_ns: int = field(init=False)
    _seen: set[int] = field(init=False, default_factory=set)
    """Nodes that have joined, or are known to have ended before they did."""
    _computing: dict[int, int] = field(init=False, default_factory=dict)
    """Node that computes → its deadline."""
    _computed: dict[int, Computed] = field(init=False, default_factory=dict)
    _links: dict[NodePair, LinkEstimate | None] = field(init=False, default_factory=dict)
    """Sender and receiver → what was measured; None: the sender does not reach the receiver."""
    _rates: dict[RateOf, float | None] = field(init=False, default_factory=dict)
    """What was measured in bytes a second; infinite: no limit was found; None: it could not be measured."""
    _order: list[NodePair] = field(init=False)
    _running: dict[int, RunningProbe] = field(init=False, default_factory=dict)
    """Number of the probe → what it measures."""
    _probes: int = field(init=False, default=0)
    _gathered: bool = field(init=False, default=False)
    _linking: bool = field(init=False, default=False)
    """Links are measured: no node computes any more, which would disturb that."""
    _tried_in: tuple[object, ...] = field(init=False, default=())
    """The state in which no more probes could be started."""

    def __post_init__(self) -> None:
        self._joining_until_ns = self._until_ns(self.deadlines.joining)
        self._order = [match for each in round_robin_pairs(len(self.config.names)) for match in each]

    # Input

    def joined(self, node: int) -> None:
        """A node has joined; it was told what to compute, and does."""
        self._seen.add(node)
        self._computing[node] = self._until_ns(self.deadlines.computing)
        self._start_probes()

    def handle(self, node: int, control: ControlMessage) -> None:
        match control:
            case Computed() if node in self._computing:
                self._take_computed(node, control)
            case Probed() if control.probe in self._running and self._running[control.probe].node == node:
                self._take_probed(control)
            case LinkDown():
                self._mark_unreachable(node, control.peer)
            case Failed():
                self.lost(node, control.reason)
            case _:  # too late, or a heartbeat
                return
        self._start_probes()

    def lost(self, node: int, how: str) -> None:
        """A node is left out, unless it comes back."""
        if node in self._computing or node in self._computed or node not in self._seen:
            self.callback.happened(f"'{self.config.names[node]}' is left out: {how}")
        self._seen.add(node)
        self._computing.pop(node, None)
        self._computed.pop(node, None)
        for probe, running in list(self._running.items()):
            if node in running.nodes:
                del self._running[probe]
        self._links = {match: link for match, link in self._links.items() if node not in match}
        self._rates = {which: rate for which, rate in self._rates.items() if which[0] != node}
        self._start_probes()

    def tick(self) -> None:
        """Act on deadlines that have passed; to be called often."""
        now_ns = self.env.now_ns()
        for node in [node for node, until_ns in self._computing.items() if now_ns > until_ns]:
            self.lost(node, f"it has computed for {self.deadlines.computing.total_seconds():g} s without an end")
        for running in [each for each in self._running.values() if now_ns > each.until_ns]:
            self._mark_unreachable(running.node, running.peers[0])
        self._start_probes()

    # State

    @property
    def missing(self) -> list[str]:
        """Nodes that have not joined yet."""
        return [] if self._gathered else [name for at, name in enumerate(self.config.names) if at not in self._seen]

    @property
    def over(self) -> bool:
        ready = self._gathered and not self._computing and not self._running
        return ready and not self._pending_pairs() and not self._pending_rates()

    def result(self, when: str) -> ProfileResult:
        """What has been measured so far, at this time (ISO 8601)."""
        nodes = self._node_estimates()
        links: dict[Ends, LinkEstimate | None] = {
            (self.config.names[a], self.config.names[b]): link for (a, b), link in sorted(self._links.items())
        }
        expected = range(len(self.config.names)) if self._gathered else self._seen
        missing = sorted(set(expected) - self._computed.keys() - self._computing.keys())
        return ProfileResult(when, self.config.work, nodes, links, tuple(self.config.names[node] for node in missing))

    def _node_estimates(self) -> dict[str, NodeEstimate]:
        """By node. Nodes on one device share its memory."""
        places = {node: (computed.machine, computed.device) for node, computed in self._computed.items()}
        sharing = Counter(places.values())
        return {
            self.config.names[node]: replace(
                estimate_node(
                    computed.passes,
                    computed.machine.partition("/")[0] or "unknown",
                    max(1, computed.memory_bytes // sharing[places[node]]),
                    self.config.workload,
                ),
                upload_bytes_per_s=self._rates.get((node, False)),
                download_bytes_per_s=self._rates.get((node, True)),
                devices=computed.devices,
            )
            for node, computed in sorted(self._computed.items())
        }

    # Measuring

    def _take_computed(self, node: int, computed: Computed) -> None:
        try:
            estimate_node(computed.passes, "somewhere", max(1, computed.memory_bytes), self.config.workload)
        except ValueError as error:
            self.lost(node, str(error))
            return
        del self._computing[node]
        self._computed[node] = computed
        self._progressed(f"'{self.config.names[node]}' has computed")

    def _take_probed(self, probed: Probed) -> None:
        running = self._running[probed.probe]
        name = self.config.names[running.node]
        if running.rate is not None:
            rate = estimate_rate(probed.samples, running.alone_bytes_per_s)
            if rate is None:
                self._mark_unreachable(running.node, running.peers[0])
                return
            del self._running[probed.probe]
            self._rates[running.rate] = rate
            self._progressed(f"several to '{name}'" if running.rate[1] else f"'{name}' to several")
            return
        figures = estimate_link(probed.samples)
        (other,) = running.peers
        if figures is None:
            self._mark_unreachable(running.node, other)
            return
        del self._running[probed.probe]
        self._links[running.node, other] = figures
        if (other, running.node) not in self._links:
            self._measure(other, running.node)
        self._progressed(f"'{name}' to '{self.config.names[other]}'")

    def _mark_unreachable(self, node: int, other: int) -> None:
        """Two nodes have no link, if it is being measured now, or a rate is not known, if it is measured over that
        link; otherwise it does not matter yet."""
        found = [probe for probe, running in self._running.items() if {node, other} <= running.nodes]
        if not found:
            return
        running = self._running.pop(found[0])
        names = self.config.names
        if running.rate is None:
            self._links[node, other] = self._links[other, node] = None
            self.callback.happened(f"'{names[node]}' does not reach '{names[other]}': they have no link")
        else:
            self._rates[running.rate] = None
            what = "download" if running.rate[1] else "upload"
            self.callback.happened(
                f"the {what} of '{names[running.node]}' is not known: its links do not answer when several are in use"
            )
        self._progressed("")

    def _start_probes(self) -> None:
        """Probe every link whose two nodes are free, once all have joined and computed; then the rates of nodes."""
        if not self._gathered:
            late = self.env.now_ns() > self._joining_until_ns
            if late and self.missing:
                self.callback.happened(f"going on without {', '.join(self.missing)}: they have not joined in time")
            self._gathered = late or len(self._seen) == len(self.config.names)
        self._linking = self._linking or (self._gathered and not self._computing)
        state = self._probes, len(self._running), len(self._links), len(self._rates), tuple(self._computed)
        if not self._linking or state == self._tried_in:
            return
        self._tried_in = state
        busy = {node for running in self._running.values() for node in running.nodes}
        for sender, receiver in self._pending_pairs():
            if sender not in busy and receiver not in busy:
                busy |= {sender, receiver}
                self._measure(sender, receiver)
        for which in self._pending_rates() if not self._pending_pairs() else ():
            peers = self._peers_at_once(which, busy)
            if which[0] not in busy and len(peers) >= FEWEST_PEERS:
                busy |= {which[0], *peers}
                self._measure_rate(which, peers)

    def _pending_rates(self) -> list[RateOf]:
        """Uploads and downloads still to be measured, or being measured, of nodes that have links enough."""
        both = [(node, receiving) for receiving in (False, True) for node in sorted(self._computed)]
        return [each for each in both if each not in self._rates and len(self._links_of(each)) >= FEWEST_PEERS]

    def _links_of(self, which: RateOf) -> dict[int, LinkEstimate]:
        """The node's links to its peers, or from them, the fastest first."""
        node, receiving = which
        found = {
            peer: link
            for peer in self._computed
            if (link := self._links.get((peer, node) if receiving else (node, peer))) is not None
        }
        return dict(sorted(found.items(), key=lambda each: -each[1].bandwidth_bytes_per_s))

    def _peers_at_once(self, which: RateOf, busy: set[int]) -> dict[int, LinkEstimate]:
        """Peers that are free and carry the most together, or nearly so; none, if too many are busy."""
        links = self._links_of(which)
        best = sum(link.bandwidth_bytes_per_s for link in list(links.values())[:MOST_PEERS])
        free = dict([(peer, link) for peer, link in links.items() if peer not in busy][:MOST_PEERS])
        return free if sum(link.bandwidth_bytes_per_s for link in free.values()) >= NEARLY * best else {}

    def _measure_rate(self, which: RateOf, peers: Mapping[int, LinkEstimate]) -> None:
        alone = sum(link.bandwidth_bytes_per_s for link in peers.values())
        streams = {peer: stream_over(link, self.config.effort) for peer, link in peers.items()}
        rows = [[peer, *asdict(stream).values()] for peer, stream in streams.items()]
        probe = self._start(which[0], tuple(peers), which, alone)
        self.env.tell(which[0], ProbeRate(probe, which[1], rows))

    def _pending_pairs(self) -> list[NodePair]:
        """Links still to be measured, or being measured, between nodes that are there."""
        there, known = self._computed, self._links
        return [
            (a, b) for a, b in self._order if a in there and b in there and not ((a, b) in known and (b, a) in known)
        ]

    def _measure(self, sender: int, receiver: int) -> None:
        self.env.tell(sender, Probe(self._start(sender, (receiver,)), receiver))

    def _start(
        self, node: int, peers: tuple[int, ...], rate: RateOf | None = None, alone_bytes_per_s: float = 0.0
    ) -> int:
        """Note that a probe runs, and give its number."""
        self._probes += 1
        effort = self.config.effort
        limit = timedelta(seconds=effort.most_s + 2 * effort.answer_timeout_s)  # the node itself gives up before
        self._running[self._probes] = RunningProbe(node, peers, self._until_ns(limit), rate, alone_bytes_per_s)
        return self._probes

    def _progressed(self, doing: str) -> None:
        there = len(self._computed) + len(self._computing) + len(self.missing)
        rates = 2 * there if there > FEWEST_PEERS else 0
        done = len(self._computed) + len(self._links) + len(self._rates)
        self.callback.progressed(done, there * there + rates, doing)

    def _until_ns(self, limit: timedelta) -> int:
        return self.env.now_ns() + round(limit.total_seconds() * 1e9)


def round_robin_pairs(nodes: int) -> list[list[NodePair]]:
    """Every two nodes once, no node twice in a round.

    The circle method: one node stays where it is, the others move on by a place from round to round, and those that
    face each other are measured. n nodes take n − 1 rounds, or n if n is odd: then one of them rests in each.
    """
    places = nodes + nodes % 2  # with an odd number, the node that faces the last place rests
    circle = list(range(places))
    found = []
    for turn in range(places - 1):
        pairs = [(circle[at], circle[-1 - at]) for at in range(places // 2)]
        swapped = [pair[::-1] if turn % 2 else pair for pair in pairs]  # no node is always the sender first
        found.append([(a, b) for a, b in swapped if a < nodes and b < nodes])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [matches for matches in found if matches]


def profile_nodes(
    config: ProfilingConfig,
    launcher: Launcher,
    callback: ProfilingCallback,
    *,
    listen: str = "127.0.0.1:0",
    deadlines: ProfilingDeadlines = ProfilingDeadlines(),  # noqa: B008 (frozen)
    stopped: Callable[[], bool] = lambda: False,
) -> ProfileResult:
    """Measure the nodes of a launcher, which is closed in the end; if `stopped`, the result is what there is then."""
    try:
        endpoints = launcher.prepare()
        mailbox = Mailbox(THE_COORDINATOR, launcher.keys, listen=listen, depth=1024)
        server = ProfilingServer(config, mailbox, endpoints.public_keys, callback, deadlines, endpoints.admission)
        launcher.start(mailbox.address)
        return server.run(launcher.ended, stopped)
    finally:
        launcher.close()


class ProfilingServer:
    """The environment of the coordinator over a mailbox, and the loop around it."""

    def __init__(
        self,
        config: ProfilingConfig,
        mailbox: Mailbox,
        public_keys: Mapping[str, str | None],
        callback: ProfilingCallback,
        deadlines: ProfilingDeadlines,
        admission: Admission | None = None,
    ) -> None:
        self._config = config
        self._callback = callback
        self._admission = admission
        timeout_s = PROFILING_TIMEOUT * config.heartbeat_s
        self._rendezvous = Rendezvous(
            mailbox, config.names, public_keys, host=self, node_config=config.to_json(), timeout_s=timeout_s
        )
        if admission is not None:
            admission.follow(self._rendezvous)
        self._coordinator = ProfilingCoordinator(config, self, callback, deadlines)

    def run(self, ended: EndedNodes, stopped: Callable[[], bool]) -> ProfileResult:
        try:
            while not self._coordinator.over and not stopped():
                self._rendezvous.poll()
                revoked = self._admission.poll(self._rendezvous) if self._admission else []
                for event in self._admission.events() if self._admission else ():
                    self._callback.happened(f"{event.kind}: '{event.name}' {event.text}")
                for name, how in (*ended(), *revoked):
                    if not self._rendezvous.declare_lost(name, how):
                        self.lost(name, how)  # it has ended before it joined
                self._coordinator.tick()
        finally:
            self._rendezvous.close()
        return self._coordinator.result(datetime.now(UTC).isoformat(timespec="seconds"))

    # ProfilingEnv

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def tell(self, node: int, control: ControlMessage) -> None:
        self._rendezvous.send(self._config.names[node], control)

    # The rendezvous' host

    def joined(self, name: str) -> None:
        self._coordinator.joined(self._config.number[name])

    def received(self, name: str, control: ControlMessage) -> None:
        self._coordinator.handle(self._config.number[name], control)

    def lost(self, name: str, how: str) -> None:
        self._coordinator.lost(self._config.number[name], how)

    def refused(self, name: str, why: str) -> None:
        self._callback.happened(f"'{name}' is left out: {why}")
