"""Clusters whose bottleneck is known, each with a plan, what limits it, and the one change that helps most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skippipe.bottlenecks import CauseGroup
from skippipe.cluster import Cluster
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.whatif.candidates import EditKind
from skippipe.timeline import Timing
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster


def planned(
    cluster: Cluster,
    stages: Sequence[tuple[int, ...]],
    lanes: Sequence[tuple[tuple[int, ...], int]],
    rings: Sequence[tuple[int, ...]] | None = None,
    **settings: Any,
) -> Plan:
    workload = Workload(
        TINY,
        sequence_tokens=16,
        samples_per_microbatch=1,
        microbatches=sum(count for _, count in lanes),
        **{"max_slots": 1, "collective": "ring", **settings},
    )
    layers = zip(workload.layer_split(len(stages)), stages, rings or stages, strict=True)
    return Plan(
        cluster,
        workload,
        tuple(Stage(*each) for each in layers),
        tuple(Lane(*lane) for lane in lanes),
        split_backward=True,
    )


def close(nodes: int) -> Cluster:
    """Links that cost next to nothing."""
    return uniform_cluster(nodes, latency_s=1e-6, bandwidth=1e9)


def with_latency(cluster: Cluster, latency_s: float, *links: tuple[int, int]) -> Cluster:
    changed = cluster.latency_s.copy()
    for link in links:
        changed[link] = latency_s
    return replace(cluster, latency_s=changed)


def with_bandwidth(cluster: Cluster, bandwidth: float, *links: tuple[int, int]) -> Cluster:
    changed = cluster.bandwidth_bytes_per_s.copy()
    for link in links:
        changed[link] = bandwidth
    return replace(cluster, bandwidth_bytes_per_s=changed)


def with_speed(cluster: Cluster, factor: float, node: int) -> Cluster:
    nodes = list(cluster.nodes)
    nodes[node] = replace(nodes[node], flops_per_s=factor * nodes[node].flops_per_s)
    return replace(cluster, nodes=tuple(nodes))


@dataclass(frozen=True)
class Case:
    plan: Plan
    bottleneck: CauseGroup
    where: set[int] | set[tuple[int, int]]
    """Its node, or its links; of averaging through an access line, the node that has it."""
    kind: EditKind
    what: str
    """The change that helps most."""
    changed: Plan | None
    """What it comes to; None: paths are searched anew."""
    timing: Timing = Timing.CONTENTION_ONLY


def on(plan: Plan, cluster: Cluster) -> Plan:
    return replace(plan, cluster=cluster)


def one_slow_link_on_the_only_way() -> Case:
    cluster = with_bandwidth(close(2), 1e4, (0, 1), (1, 0))
    plan = planned(cluster, [(0,), (1,)], [((0, 1), 4)])
    better = on(plan, with_bandwidth(cluster, 2e4, (0, 1), (1, 0)))
    links = {(0, 1), (1, 0)}
    return Case(
        plan, CauseGroup.TRANSFERS, links, EditKind.BANDWIDTH, "twice the bandwidth between 'n0' and 'n1'", better
    )


def a_slow_link_one_way() -> Case:
    """Only gradients come over it."""
    cluster = with_bandwidth(close(3), 1e4, (2, 1))
    plan = planned(cluster, [(0,), (1,), (2,)], [((0, 1, 2), 3)])
    better = on(plan, with_bandwidth(cluster, 2e4, (2, 1)))
    return Case(
        plan, CauseGroup.TRANSFERS, {(2, 1)}, EditKind.BANDWIDTH, "twice the bandwidth from 'n2' to 'n1'", better
    )


def a_long_link() -> Case:
    cluster = with_latency(close(3), 0.2, (0, 1), (1, 0))
    plan = planned(cluster, [(0,), (1,), (2,)], [((0, 1, 2), 3)])
    better = on(plan, with_latency(cluster, 0.1, (0, 1), (1, 0)))
    links = {(0, 1), (1, 0)}
    return Case(plan, CauseGroup.TRANSFERS, links, EditKind.LATENCY, "half the latency between 'n0' and 'n1'", better)


def every_message_costs() -> Case:
    """Bound by latency, wherever one looks."""
    cluster = replace(close(3), hop_overhead_s=0.1)
    plan = planned(cluster, [(0,), (1,), (2,)], [((0, 1, 2), 2)])
    better = on(plan, replace(cluster, hop_overhead_s=0.05))
    links = {(0, 1), (1, 0)}
    return Case(plan, CauseGroup.TRANSFERS, links, EditKind.OVERHEAD, "half the overhead of every hop, 0.05 s", better)


def one_slow_node() -> Case:
    cluster = with_speed(close(3), 0.1, 1)
    plan = planned(cluster, [(0,), (1,), (2,)], [((0, 1, 2), 3)])
    better = on(plan, with_speed(cluster, 2, 1))
    return Case(plan, CauseGroup.COMPUTING, {1}, EditKind.SPEED, "'n1' twice as fast", better)


def a_stage_with_too_few_nodes() -> Case:
    """Its only node is at work all the time, for a lane that the others could do twice."""
    cluster = with_speed(close(3), 0.1, 2)
    plan = planned(cluster, [(0, 1), (2,)], [((0, 2), 4)])
    return Case(plan, CauseGroup.COMPUTING, {2}, EditKind.MORE, "one more node like 'n2' on stage 1", None)


def collisions_at_a_popular_node() -> Case:
    cluster = close(4)
    plan = planned(cluster, [(0, 1, 2), (3,)], [((0, 3), 3), ((1, 3), 3), ((2, 3), 3)], max_slots=3)
    better = on(plan, with_speed(cluster, 2, 3))
    return Case(plan, CauseGroup.COLLISIONS, {3}, EditKind.SPEED, "'n3' twice as fast", better)


def a_popular_node_with_idle_ones_beside_it() -> Case:
    plan = planned(close(6), [(0, 1, 2), (3, 4, 5)], [((0, 3), 3), ((1, 3), 3), ((2, 3), 3)], max_slots=3)
    what = "other paths over the same nodes, searched a little longer"
    return Case(plan, CauseGroup.COLLISIONS, {3}, EditKind.SEARCH, what, None)


def too_small_a_memory() -> Case:
    """Four lanes pass a node that has one slot, which each holds while its microbatch is far away."""
    cluster = uniform_cluster(5, latency_s=0.005, bandwidth=1e9)
    lanes = [((node, 4), 3) for node in range(4)]
    plan = planned(cluster, [(0, 1, 2, 3), (4,)], lanes, max_slots=None)
    need = [plan.workload.fixed_bytes(1, 4) + slots * plan.workload.held_bytes(4) for slots in (1, 2)]
    small, large = (
        replace(cluster, nodes=(*cluster.nodes[:4], replace(cluster.nodes[4], memory_bytes=each))) for each in need
    )
    what = "one more memory slot on 'n4'"
    return Case(on(plan, small), CauseGroup.MEMORY, {4}, EditKind.SLOT, what, on(plan, large))


def a_slow_ring() -> Case:
    cluster = with_bandwidth(close(4), 2e6, (2, 3))
    lanes = [((0, 2), 10), ((0, 2), 10), ((1, 3), 10), ((1, 3), 10)]  # no node could do the work of two
    plan = planned(cluster, [(0, 1), (2, 3)], lanes, max_slots=2)
    better = on(plan, with_bandwidth(cluster, 4e6, (2, 3)))
    what = "twice the bandwidth from 'n2' to 'n3'"
    return Case(plan, CauseGroup.AVERAGING, {(2, 3)}, EditKind.BANDWIDTH, what, better, Timing.FULL)


def a_ring_in_a_bad_order() -> Case:
    cluster = with_bandwidth(close(8), 1e5, (4, 6), (6, 4), (5, 7), (7, 5))
    stages = [(0, 1, 2, 3), (4, 5, 6, 7)]
    lanes = [((0, 4), 2), ((1, 5), 2), ((2, 6), 2), ((3, 7), 2)]
    plan = planned(cluster, stages, lanes, rings=[stages[0], (4, 6, 5, 7)])
    better = planned(cluster, stages, lanes)
    return Case(
        plan,
        CauseGroup.AVERAGING,
        {(5, 7)},
        EditKind.AVERAGING,
        "another way to average on stage 1",
        better,
        Timing.FULL,
    )


def a_far_data_node() -> Case:
    cluster = close(6)
    far = [link for node in range(6) if node != 1 for link in ((1, node), (node, 1))]
    cluster = with_latency(cluster, 0.1, *far)
    plan = planned(cluster, [(0, 1), (2, 3), (4, 5)], [((0, 2, 4), 2), ((1, 3, 5), 2)], max_slots=2)
    links = {(1, 3), (3, 1), (1, 5), (5, 1)}
    return Case(plan, CauseGroup.TRANSFERS, links, EditKind.LESS, "without 'n1'", None, Timing.FULL)


def with_rates(cluster: Cluster, node: int, upload: float | None = None, download: float | None = None) -> Cluster:
    nodes = list(cluster.nodes)
    nodes[node] = replace(nodes[node], upload_bytes_per_s=upload, download_bytes_per_s=download)
    return replace(cluster, nodes=tuple(nodes))


def a_narrow_upload() -> Case:
    """One data node sends the activations of two lanes, each over a fast link of its own."""
    cluster = with_rates(close(5), 0, upload=1e4)
    plan = planned(cluster, [(0,), (1, 2), (3, 4)], [((0, 1, 3), 3), ((0, 2, 4), 3)], max_slots=2)
    better = on(plan, with_rates(cluster, 0, upload=2e4))
    return Case(plan, CauseGroup.TRANSFERS, {0}, EditKind.UPLOAD, "twice the upload of 'n0'", better, Timing.FULL)


def a_narrow_download() -> Case:
    """Stage 1 has one node; what two data nodes send to it comes over one access line."""
    cluster = with_rates(close(3), 2, download=1e4)
    plan = planned(cluster, [(0, 1), (2,)], [((0, 2), 3), ((1, 2), 3)], max_slots=2)
    better = on(plan, with_rates(cluster, 2, download=2e4))
    return Case(plan, CauseGroup.TRANSFERS, {2}, EditKind.DOWNLOAD, "twice the download of 'n2'", better, Timing.FULL)


def averaging_through_a_narrow_upload() -> Case:
    cluster = with_rates(close(4), 2, upload=2e6)
    lanes = [((0, 2), 10), ((0, 2), 10), ((1, 3), 10), ((1, 3), 10)]  # no node could do the work of two
    plan = planned(cluster, [(0, 1), (2, 3)], lanes, max_slots=2)
    better = on(plan, with_rates(cluster, 2, upload=4e6))
    return Case(plan, CauseGroup.AVERAGING, {2}, EditKind.UPLOAD, "twice the upload of 'n2'", better, Timing.FULL)


def a_lane_with_too_many_microbatches() -> Case:
    plan = planned(close(4), [(0, 1), (2, 3)], [((0, 2), 3), ((1, 3), 1)])
    better = planned(plan.cluster, [(0, 1), (2, 3)], [((0, 2), 2), ((1, 3), 2)])
    return Case(plan, CauseGroup.COMPUTING, {0}, EditKind.MICROBATCHES, "a microbatch of lane 0 on lane 1", better)


CASES: list[Callable[[], Case]] = [
    one_slow_link_on_the_only_way,
    a_slow_link_one_way,
    a_long_link,
    every_message_costs,
    one_slow_node,
    a_stage_with_too_few_nodes,
    collisions_at_a_popular_node,
    a_popular_node_with_idle_ones_beside_it,
    too_small_a_memory,
    a_slow_ring,
    a_ring_in_a_bad_order,
    a_far_data_node,
    a_narrow_upload,
    a_narrow_download,
    averaging_through_a_narrow_upload,
    a_lane_with_too_many_microbatches,
]
