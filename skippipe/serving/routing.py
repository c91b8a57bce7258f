"""Which nodes hold which stage, which links work, and the fastest route through one node of every stage in reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from skippipe.cluster import Cluster
from skippipe.codecs import CODECS
from skippipe.constraints import circle
from skippipe.errors import UserError
from skippipe.model_shape import ModelShape
from skippipe.runtime.rendezvous import RELAY_ONLY_S

LOST_STEP_PENALTY = 10  # times longer that a link seems, for every step that was lost on a route over it
MAX_REPLICATED_STAGES = 8  # a model of more stages gets one node for each unless --nodes says more


class RouteCost(Protocol):
    """Seconds that one token takes on nodes and links."""

    def task_s(self, stage: int, node: int) -> float:
        """Seconds of a stage on a node that holds it."""

    def hop_s(self, sender: int, receiver: int) -> float:
        """Seconds from node to node; infinite if there is no link."""


@dataclass(frozen=True)
class UniformCost:
    """The same cost for all nodes and links, where nothing is known of them."""

    def task_s(self, stage: int, node: int) -> float:  # noqa: ARG002
        return 1.0

    def hop_s(self, sender: int, receiver: int) -> float:
        return 0.0 if sender == receiver else 1.0


@dataclass
class ServingRoute:
    """A path through the stages, and the sequences that take it; on the wire, a lane."""

    number: int
    """Never given twice: nodes keep KV caches by it."""
    path: tuple[int, ...]
    """Nodes in their order, from the one that embeds and samples on."""
    missing: tuple[int, ...] = ()
    """Stages of the model that it does without."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot of the KV caches → number of the sequence that has it."""
    freed: list[int] = field(default_factory=list)
    """Slots whose sequences have finished since the last step."""
    step: int | None = None
    """Number of the step in flight."""
    step_began_ns: int = 0

    @property
    def links(self) -> set[frozenset[int]]:
        return links(self.path)

    def free_slot(self) -> int:
        """The lowest free slot: caches stay dense."""
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


def fastest_route(
    holders: Sequence[Sequence[int]], cost: RouteCost, load: Mapping[int, int], start: int
) -> tuple[int, ...] | None:
    """The path from this node of stage 0 through one node of every other stage that is held; None: there is none.

    A node on n routes already (`load`) counts as n + 1 times slower, so that routes spread over replicas.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {start: (0.0, (start,))}
    for stage, nodes in enumerate(holders):
        if stage == 0 or not nodes:
            continue
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for node in nodes:
            task_s = cost.task_s(stage, node) * (1 + load.get(node, 0))
            found[node] = min(
                (so_far_s + cost.hop_s(last, node) + task_s, (*path, node)) for last, (so_far_s, path) in best.items()
            )
        best = found
    whole_s, path = min((so_far_s + cost.hop_s(last, start), path) for last, (so_far_s, path) in best.items())
    return path if whole_s < inf else None


class Reach(NamedTuple):
    """Which stages a route leads through, and why it leaves out others that are held."""

    stages: tuple[int, ...] = ()
    """Stages of the route that has most of them, the fastest of such; none without a node of stage 0."""
    broken_hops: tuple[tuple[int, int], ...] = ()
    """Stage and the next one that is held, if no node of the one reaches any node of the other."""


def reach_of(holders: Sequence[Sequence[int]], cost: RouteCost) -> Reach:
    held = [stage for stage, nodes in enumerate(holders) if nodes]
    broken = (
        (a, b)
        for a, b in circle(held)
        if all(cost.hop_s(sender, receiver) == inf for sender in holders[a] for receiver in holders[b])
    )
    if any(fastest_route(holders, cost, {}, start) for start in holders[0]):
        return Reach(tuple(held), tuple(broken))
    routes = (_longest_route(holders, cost, start) for start in holders[0])
    stages = min(routes, default=(0, 0.0, ()))[2]
    return Reach(stages, tuple(broken))


def _longest_route(holders: Sequence[Sequence[int]], cost: RouteCost, start: int) -> tuple[int, float, tuple[int, ...]]:
    """Of the route from this node and back that leaves out the fewest stages, the fastest of such: minus the number of
    its stages, its seconds, and the stages."""
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {start: (-1, 0.0, (0,))}
    for stage, nodes in enumerate(holders[1:], start=1):
        found = {}
        for node in nodes:
            task_s = cost.task_s(stage, node)
            ways = (
                (count - 1, so_far_s + hop_s + task_s, (*stages, stage))
                for last, (count, so_far_s, stages) in best.items()
                if (hop_s := cost.hop_s(last, node)) < inf
            )
            if (way := min(ways, default=None)) is not None:
                found[node] = way
        best |= found
    return min(
        (count, so_far_s + hop_s, stages)
        for last, (count, so_far_s, stages) in best.items()
        if (hop_s := cost.hop_s(last, start)) < inf
    )


def links(path: Sequence[int]) -> set[frozenset[int]]:
    """The links between one node of a path and the next, and back to the first."""
    return {frozenset(pair) for pair in circle(path) if pair[0] != pair[1]}


class LinkProbe(NamedTuple):
    """A small message to the other end of a link and back, which shows that it works."""

    number: int
    prober: int
    peer: int


@dataclass
class LinkStates:
    """Links that do not work, and links on which steps were lost: routes avoid them. A broken link is used again when a
    probe of it has come through, so no request waits to find out that it is broken still."""

    cost: RouteCost
    """Cost of links that work."""
    _broken: dict[frozenset[int], float] = field(default_factory=dict)
    """Link → when it is probed next, on the scheduler's clock; infinite: when something has changed."""
    _wait_s: dict[frozenset[int], float] = field(default_factory=dict)
    """Link that nodes have reported → how long it was or is not to be probed."""
    _probes: dict[frozenset[int], LinkProbe] = field(default_factory=dict)
    """Broken link → its newest probe."""
    _num_probes: int = 0
    _lost_steps: Counter[frozenset[int]] = field(default_factory=Counter)
    """Link → how many steps in a row were lost on routes over it."""

    def retry_ns(self, a: int, b: int, now_ns: int) -> float | None:
        """When a link that is reported now is to be probed, after a wait that grows; None: it is known."""
        link = frozenset((a, b))
        return None if link in self._broken else self._next_probe_ns(link, now_ns)

    def _next_probe_ns(self, link: frozenset[int], now_ns: int) -> float:
        self._wait_s[link] = min(2 * self._wait_s.get(link, RELAY_ONLY_S[0] / 2), RELAY_ONLY_S[1])
        return now_ns + 1e9 * self._wait_s[link]

    def broken(self, a: int, b: int, probe_ns: float) -> None:
        """`probe_ns` is when the link is to be probed; that an earlier probe comes through no longer counts."""
        self._broken[frozenset((a, b))] = probe_ns
        self._probes.pop(frozenset((a, b)), None)

    def mended(self, a: int, b: int) -> None:
        self._broken.pop(frozenset((a, b)), None)
        self._probes.pop(frozenset((a, b)), None)

    def retry(self, a: int, b: int) -> None:
        """A link is to be probed at once, if it is broken."""
        if frozenset((a, b)) in self._broken:
            self.broken(a, b, 0.0)

    def due_probes(self, now_ns: int) -> list[LinkProbe]:
        """Probes to send now. As long as none comes through, a link is probed again and again."""
        due = [link for link, probe_ns in self._broken.items() if now_ns >= probe_ns]
        for link in due:
            self._broken[link] = self._next_probe_ns(link, now_ns)
            self._num_probes += 1
            self._probes[link] = LinkProbe(self._num_probes, *sorted(link))
        return [self._probes[link] for link in due]

    def probed(self, number: int, node: int) -> LinkProbe | None:
        """The probe that a node reports to have come through, if it is the newest of a link that is still broken."""
        return next((each for each in self._probes.values() if (each.number, each.prober) == (number, node)), None)

    def node_joined(self, node: int) -> None:
        """A node that comes again may be elsewhere: its links may work."""
        self._broken = {link: until_ns for link, until_ns in self._broken.items() if node not in link}
        self._wait_s = {link: wait_s for link, wait_s in self._wait_s.items() if node not in link}
        self._probes = {link: probe for link, probe in self._probes.items() if node not in link}

    def step_done(self, path: Sequence[int]) -> None:
        for link in links(path):
            self._lost_steps.pop(link, None)
            self._wait_s.pop(link, None)

    def step_lost(self, path: Sequence[int]) -> None:
        self._lost_steps.update(links(path))

    def task_s(self, stage: int, node: int) -> float:
        return self.cost.task_s(stage, node)

    def hop_s(self, sender: int, receiver: int) -> float:
        """The cost of a hop: infinite over broken links, and higher over links where steps were lost."""
        link = frozenset((sender, receiver))
        if link in self._broken:
            return inf
        return self.cost.hop_s(sender, receiver) * (1 + LOST_STEP_PENALTY * self._lost_steps[link])


def local_node_names(stages: int, nodes: int | None) -> list[str]:
    """Names of nodes on this machine: so many, or two for every stage."""
    count = nodes if nodes is not None else stages * (2 if stages <= MAX_REPLICATED_STAGES else 1)
    return [f"stage{number % stages}.{number // stages}" for number in range(count)]


def assign_stages(names: Sequence[str], stages: int) -> dict[str, int]:
    """Name → stage: the nodes get the stages in turn."""
    if len(names) < stages:
        raise UserError(f"{len(names)} nodes cannot hold {stages} stages: start more, or cut the model into fewer")
    return {name: number % stages for number, name in enumerate(names)}


@dataclass(frozen=True)
class ClusterCost:
    """Cost by a cluster file, whose numbers the nodes have."""

    cluster: Cluster
    stage_flops: tuple[int, ...]
    """Operations of a token in each stage."""
    hop_bytes: int
    """Bytes of a token's hidden state on the wire."""

    @classmethod
    def of(cls, cluster: Cluster, shape: ModelShape, layers: Sequence[int], wire_dtype: str) -> ClusterCost:
        ends = [shape.head_flops(1), *[0] * (len(layers) - 1)]
        flops = tuple(count * shape.layer_flops(1) + end for count, end in zip(layers, ends, strict=True))
        return cls(cluster, flops, CODECS[wire_dtype].expected_bytes(shape.hidden))

    def task_s(self, stage: int, node: int) -> float:
        return self.stage_flops[stage] / self.cluster.nodes[node].flops_per_s

    def hop_s(self, sender: int, receiver: int) -> float:
        if sender == receiver:
            return 0.0
        bandwidth = float(self.cluster.bandwidth_bytes_per_s[sender, receiver])
        if not bandwidth:
            return inf
        latency_s = float(self.cluster.latency_s[sender, receiver]) + self.cluster.hop_overhead_s
        return latency_s + self.hop_bytes / bandwidth
