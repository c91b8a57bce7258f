"""Which way a token takes: for every stage that anybody holds, one node; all in all, the fastest way there is.

Who holds which stage, and how far it is from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from skippipe.cluster import Cluster
from skippipe.codecs import CODECS
from skippipe.constraints import circle
from skippipe.errors import UserError
from skippipe.workload import ModelShape


class LinkCost(Protocol):
    """What a token takes."""

    def task_s(self, stage: int, node: int) -> float:
        """On a node that holds this stage."""

    def hop_s(self, sender: int, receiver: int) -> float:
        """From node to node; infinite if there is no way."""


@dataclass(frozen=True)
class UniformCost:
    """Nothing is known of nodes and links: all alike."""

    def task_s(self, stage: int, node: int) -> float:  # noqa: ARG002
        return 1.0

    def hop_s(self, sender: int, receiver: int) -> float:
        return 0.0 if sender == receiver else 1.0


@dataclass
class ServingRoute:
    """A way through the stages, and the streams that take it."""

    number: int
    """Never given twice: caches are kept by it."""
    path: tuple[int, ...]
    """Begins at the node that embeds and samples."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot → the stream that has it."""
    step: int | None = None
    """That is on its way round."""
    stepped_ns: int = 0
    """When it set out."""

    def free_slot(self) -> int:
        """The lowest: caches stay dense."""
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


def fastest_route(
    holders: Sequence[Sequence[int]], distance: LinkCost, busy: Mapping[int, int], start: int
) -> tuple[int, ...] | None:
    """From this node of stage 0 through one node of every other stage that anybody holds, and back; None: no way.

    Whoever lies on `busy` lanes already takes so many times longer: lanes spread over replicas.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {start: (0.0, (start,))}
    for stage, nodes in enumerate(holders):
        if stage == 0 or not nodes:
            continue
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for node in nodes:
            task_s = distance.task_s(stage, node) * (1 + busy.get(node, 0))
            found[node] = min(
                (so_far_s + distance.hop_s(last, node) + task_s, (*path, node))
                for last, (so_far_s, path) in best.items()
            )
        best = found
    whole_s, path = min((so_far_s + distance.hop_s(last, start), path) for last, (so_far_s, path) in best.items())
    return path if whole_s < inf else None


def links(path: Sequence[int]) -> set[frozenset[int]]:
    """Between one node and the next, and back to the first."""
    return {frozenset(pair) for pair in circle(path) if pair[0] != pair[1]}


MANY_STAGES = 8  # beyond it, one node each unless more are asked for


def local_node_names(stages: int, nodes: int | None) -> list[str]:
    """Of nodes on this machine: so many, or two for every stage."""
    count = nodes if nodes is not None else stages * (2 if stages <= MANY_STAGES else 1)
    return [f"stage{number % stages}.{number // stages}" for number in range(count)]


def assign_stages(names: Sequence[str], stages: int) -> dict[str, int]:
    """Name → stage: one node for each stage in turn, in the order in which they are named."""
    if len(names) < stages:
        raise UserError(f"{len(names)} nodes cannot hold {stages} stages: start more, or cut the model into fewer")
    return {name: number % stages for number, name in enumerate(names)}


@dataclass(frozen=True)
class ClusterCost:
    """As the cluster file says; nodes have the numbers that they have there."""

    cluster: Cluster
    stage_flops: tuple[int, ...]
    """Of a token, in each stage."""
    hop_bytes: int
    """Of a token's hidden state."""

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
