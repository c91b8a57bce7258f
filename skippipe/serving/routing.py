"""Which nodes hold which stage, and the fastest route through one node of every stage that is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from skippipe.cluster import Cluster
from skippipe.codecs import CODECS
from skippipe.constraints import circle
from skippipe.errors import UserError
from skippipe.model_shape import ModelShape

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

    def free_slot(self) -> int:
        """The lowest free slot: caches stay dense."""
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


def fastest_route(
    holders: Sequence[Sequence[int]], cost: RouteCost, load: Mapping[int, int], start: int
) -> tuple[int, ...] | None:
    """From this node of stage 0 through one node of every other stage that is held, and back; None: there is none.

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
    """Whether the nodes that hold stages reach each other, so that there is a route."""

    has_route: bool = False
    broken_hops: tuple[tuple[int, int], ...] = ()
    """Stage and the next one that is held, if no node of the one reaches any node of the other."""


def reach_of(holders: Sequence[Sequence[int]], cost: RouteCost) -> Reach:
    held = [stage for stage, nodes in enumerate(holders) if nodes]
    broken = (
        (a, b)
        for a, b in circle(held)
        if all(cost.hop_s(sender, receiver) == inf for sender in holders[a] for receiver in holders[b])
    )
    return Reach(any(fastest_route(holders, cost, {}, start) for start in holders[0]), tuple(broken))


def links(path: Sequence[int]) -> set[frozenset[int]]:
    """The links between one node of a path and the next, and back to the first."""
    return {frozenset(pair) for pair in circle(path) if pair[0] != pair[1]}


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
