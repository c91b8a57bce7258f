"""A cluster that is to a small model what the real one is to a large one, at a fraction of the time.

One machine can then be a continent: the same ratios between computing, sending and waiting, in seconds instead of
minutes. Only the cluster changes; plan, simulator and runtime know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

from skippipe.cluster import Cluster
from skippipe.workload import Workload


def emulated(cluster: Cluster, like: Workload, small: Workload, time: float) -> Cluster:
    """Forward passes and hops of `small` take here what those of `like` take on the real cluster, times `time`."""
    compute = small.forward_flops(small.model.layers) / (like.forward_flops(like.model.layers) * time)
    carry = small.activation_bytes / (like.activation_bytes * time)
    return replace(
        cluster,
        name=f"{cluster.name} as if for {like.model.name}, {time:g} of the time",
        nodes=tuple(replace(node, flops_per_s=node.flops_per_s * compute) for node in cluster.nodes),
        latency_s=cluster.latency_s * time,
        bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s * carry,
        hop_overhead_s=cluster.hop_overhead_s * time,
    )
