"""Who holds which stage, and how far it is from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.workload import ModelShape, wire_bytes

MANY_STAGES = 8  # beyond it, one node each unless more are asked for


def names_here(stages: int, nodes: int | None) -> list[str]:
    """Of nodes on this machine: so many, or two for every stage."""
    count = nodes if nodes is not None else stages * (2 if stages <= MANY_STAGES else 1)
    return [f"stage{number % stages}.{number // stages}" for number in range(count)]


def dealt(names: Sequence[str], stages: int) -> dict[str, int]:
    """Name → stage: one node for each stage in turn, in the order in which they are named."""
    if len(names) < stages:
        raise UserError(f"{len(names)} nodes cannot hold {stages} stages: start more, or cut the model into fewer")
    return {name: number % stages for number, name in enumerate(names)}


@dataclass(frozen=True)
class Mapped:
    """As the cluster file says; nodes have the numbers that they have there."""

    cluster: Cluster
    stage_flops: tuple[int, ...]
    """Of a token, in each stage."""
    hop_bytes: int
    """Of a token's hidden state."""

    @classmethod
    def of(cls, cluster: Cluster, shape: ModelShape, layers: Sequence[int], wire_dtype: str) -> Mapped:
        ends = [shape.head_flops(1), *[0] * (len(layers) - 1)]
        flops = tuple(count * shape.layer_flops(1) + end for count, end in zip(layers, ends, strict=True))
        return cls(cluster, flops, wire_bytes(shape.hidden, wire_dtype))

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
