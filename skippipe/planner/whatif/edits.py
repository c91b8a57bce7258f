"""What-if edits: the same plan with one thing different, such as a faster node, a better link, a slot or a node more or
less.

Stages keep their layers and nodes their stages. The edited plan has no promised timeline: the caller simulates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from skippipe.cluster import Cluster, Matrix
from skippipe.collectives.rings import ring_order
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.cost_model import cost_model_of, device_bytes
from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible
from skippipe.node_names import file_identity, with_ending
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.repair.repair import repaired
from skippipe.planner.search.state import move_microbatches
from skippipe.simulator import lane_arrays

Links = Iterable[tuple[int, int]]


def _with_node(plan: Plan, number: int, **changes: Any) -> Plan:
    """The plan on a cluster where one node has other figures."""
    nodes = list(plan.cluster.nodes)
    nodes[number] = replace(nodes[number], **changes)
    return plan.edited(cluster=replace(plan.cluster, nodes=tuple(nodes)))


def _scaled(matrix: Matrix, links: Links, factor: float) -> Matrix:
    changed = matrix.copy()
    for link in links:
        changed[link] *= factor
    return changed


def faster_node(plan: Plan, node: int) -> Plan:
    """The node is twice as fast."""
    return _with_node(plan, node, flops_per_s=2 * plan.cluster.nodes[node].flops_per_s)


def one_more_device(plan: Plan, node: int) -> Plan:
    """The node has one more device."""
    return _with_node(plan, node, devices=plan.cluster.nodes[node].devices + 1)


def wider_links(plan: Plan, links: Links) -> Plan:
    """The links have twice the bandwidth."""
    bandwidth = _scaled(plan.cluster.bandwidth_bytes_per_s, links, 2)
    return plan.edited(cluster=replace(plan.cluster, bandwidth_bytes_per_s=bandwidth))


def shorter_links(plan: Plan, links: Links) -> Plan:
    """The links have half the latency."""
    return plan.edited(cluster=replace(plan.cluster, latency_s=_scaled(plan.cluster.latency_s, links, 0.5)))


def faster_upload(plan: Plan, node: int) -> Plan:
    """The node has twice the upload rate."""
    upload = 2 * (plan.cluster.nodes[node].upload_bytes_per_s or 0) or None
    return _with_node(plan, node, upload_bytes_per_s=upload)


def faster_download(plan: Plan, node: int) -> Plan:
    """The node has twice the download rate."""
    download = 2 * (plan.cluster.nodes[node].download_bytes_per_s or 0) or None
    return _with_node(plan, node, download_bytes_per_s=download)


def half_overhead(plan: Plan) -> Plan:
    """Every hop has half the software overhead."""
    return plan.edited(cluster=replace(plan.cluster, hop_overhead_s=plan.cluster.hop_overhead_s / 2))


def smaller_messages(plan: Plan, dtype: str) -> Plan:
    """Activations and their gradients are sent in this type, but on links that have codecs of their own."""
    return plan.edited(workload=replace(plan.workload, wire_dtype=dtype))


def other_codecs(plan: Plan, hop: str, gradient: str) -> Plan:
    """All links have the one codec, and all stages the other."""
    kinds = {"wire_dtype": hop, "gradient_dtype": gradient, "wire_dtypes": (), "gradient_dtypes": ()}
    return plan.edited(workload=replace(plan.workload, **kinds))  # type: ignore[arg-type]


def other_dispatch(plan: Plan, dispatch: Dispatch) -> Plan:
    return plan.edited(dispatch=dispatch)


def other_backward(plan: Plan) -> Plan:
    """The backward is split if it is whole, and whole if it is split."""
    return plan.edited(split_backward=not plan.split_backward)


def other_averaging(plan: Plan, stage: int, averaging: Averaging) -> Plan:
    """The stage averages in another way."""
    stages = list(plan.stages)
    stages[stage] = Stage.of(stages[stage].layers, averaging)
    return plan.edited(stages=tuple(stages))


def averaging_in_rings(plan: Plan) -> Plan:
    """All stages average in rings."""
    rings = [Averaging(ring_order(plan.costs, index, stage.nodes)) for index, stage in enumerate(plan.stages)]
    return plan.edited(stages=tuple(map(Stage.of, plan.layers, rings)))


def other_checkpointing(plan: Plan) -> Plan:
    """Activations are recomputed if they are kept, and kept if they are recomputed."""
    work = plan.workload
    return plan.edited(workload=replace(work, activation_checkpointing=not work.activation_checkpointing))


def moved_microbatch(plan: Plan, lane: int, other: int) -> Plan:
    """One microbatch goes from lane to lane, all paths being equally long. Where these visit other stages, one goes
    from a third lane to a fourth to make up for it (CC3); Infeasible if there are no such lanes."""
    paths, lengths, counts = lane_arrays(plan)
    stage_of = np.full(len(plan.cluster), -1, np.int64)
    stage_of[list(plan.stage_of)] = list(plan.stage_of.values())
    move_microbatches(lane, other, 1, 0, 0, paths, lengths, counts, stage_of)
    lanes = [Lane(each.path, count) for each, count in zip(plan.lanes, counts.tolist(), strict=True) if count]
    moved = plan.edited(lanes=tuple(lanes))
    if moved.exposure != plan.exposure:
        raise Infeasible(f"a microbatch of lane {lane} on lane {other} leaves stages unequally visited (CC3)")
    return moved


def one_more_slot(plan: Plan, node: int) -> Plan:
    """This node alone has one more slot, or one on each of its devices: if the workload caps slots, all others get just
    the memory that they use."""
    workload, changed = plan.workload, plan

    def slots_of(number: int) -> int:
        return plan.slots[number] // plan.workers[number]

    def memory_for(number: int, slots: int) -> int:
        stage = plan.stage_of[number]
        return device_bytes(plan.cluster.nodes[number], workload, stage, plan.layers[stage], slots)

    slots = slots_of(node)
    if slots != workload.max_slots:
        return _with_node(plan, node, memory_bytes=memory_for(node, slots + 1))
    for number in plan.stage_of:
        memory_bytes = memory_for(number, slots_of(number) + (number == node))
        changed = _with_node(changed, number, memory_bytes=memory_bytes)
    return changed.edited(workload=replace(workload, max_slots=slots + 1))


def with_twin(plan: Plan, node: int) -> Plan:
    """One more node like this one, with the same links, on its stage; no lane uses it yet."""
    cluster, twin = plan.cluster, len(plan.cluster)
    names, ending = {file_identity(name) for name in cluster.number}, "-twin"
    while file_identity(name := with_ending(cluster.nodes[node].name, ending)) in names:
        ending += "-twin"

    def grown(matrix: Matrix, between: float) -> Matrix:
        """The matrix with the node's row and column again; `between` is the value between the two."""
        kept = [*range(twin), node]
        wide = matrix[np.ix_(kept, kept)]
        wide[node, twin] = wide[twin, node] = between
        return wide

    others = np.arange(twin) != node  # its twin is as near as the nearest of these
    cluster = Cluster(
        cluster.name,
        (*cluster.nodes, replace(cluster.nodes[node], name=name)),
        grown(cluster.latency_s, float(cluster.latency_s[node, others].min())),
        grown(cluster.bandwidth_bytes_per_s, float(cluster.bandwidth_bytes_per_s[node, others].max())),
        cluster.hop_overhead_s,
    )
    stage = plan.stage_of[node]
    members = (*plan.stages[stage].nodes, twin)
    costs = cost_model_of(cluster, plan.workload, plan.layers)
    stages = list(plan.stages)
    stages[stage] = Stage.of(stages[stage].layers, costs.averaging(stage, members))
    return plan.edited(cluster=cluster, stages=tuple(stages))


def without_node(plan: Plan, node: int) -> Plan:
    """The plan without a node: its lanes take the first other paths that there are; Infeasible if there are none."""
    members = [[each for each in stage.nodes if each != node] for stage in plan.stages]
    able = [each for nodes in members for each in nodes]
    found = repaired(plan, members, able, budget_s=0)
    if found is None:
        raise Infeasible(f"there are no lanes without '{plan.cluster.nodes[node].name}'")
    kept = [number for number in range(len(plan.cluster)) if number != node]
    number = {old: new for new, old in enumerate(kept)}

    def renamed(nodes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[each] for each in nodes)

    def renamed_links(links: Links) -> tuple[tuple[int, int], ...]:
        return tuple((number[a], number[b]) for a, b in links)

    def averaged(stage: Stage) -> Averaging:
        pieces = [
            Piece(number[each.root], each.share, renamed_links(each.via), renamed_links(each.relays))
            for each in stage.pieces
        ]
        return Averaging(renamed(stage.ring), tuple(pieces))

    return found.edited(
        cluster=plan.cluster.only(kept),
        stages=tuple(Stage.of(each.layers, averaged(each)) for each in found.stages),
        lanes=tuple(Lane(renamed(lane.path), lane.microbatches) for lane in found.lanes),
    )
