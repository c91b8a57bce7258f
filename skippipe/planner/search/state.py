"""A plan as arrays that kernels change, and tables of what every choice would cost.

Everything is open at once: which node holds which stage or none, the order of rings, the layers of a stage, the path of
every lane and its microbatches, dispatch, and the order of lanes. Also what every search does to lanes: kernels over
paths and microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from skippipe.cluster import Cluster
from skippipe.collectives.topology import all_relays, relay_rates
from skippipe.constraints import MAX_SWAPS
from skippipe.cost_model import NEVER_NS, CostModel, cost_model_of, shared_cost_model
from skippipe.dispatch import Dispatch
from skippipe.jit import Flags, Floats, Ints, inner_kernel, kernel
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.averaging import averaging_fastest
from skippipe.planner.problem import Problem
from skippipe.timeline import Timing
from skippipe.workload import Workload

NEAR = 0.5  # of the bandwidth to the nearest node


class State(NamedTuple):
    stage_of: Ints
    """[node]: its stage; −1: none."""
    ring: Ints
    """[stage, place]: nodes in the order in which they average."""
    size: Ints
    """[stage]: number of its nodes."""
    layers: Ints
    """[stage]: number of its layers."""
    paths: Ints
    """[lane, hop]: nodes of its path, as far as it goes."""
    lengths: Ints
    """[lane]: number of nodes on its path."""
    counts: Ints
    """[lane]: its microbatches; 0: the lane does not exist; negative: it is ruined."""
    dispatch: Ints
    """[0]: number of the dispatch rule."""


class Tables(NamedTuple):
    """What a node would take, for any number of layers. Where stages differ, there is a row for each; the last one is
    for all that follow. Mostly there are two: stage 0, and all others."""

    forward_ns: Ints
    """[layers, node]: forward pass; the next two are alike."""
    backward_ns: Ints
    weight_ns: Ints
    head_ns: Ints
    """[layers of stage 0, node]: head and loss."""
    step_ns: Ints
    """[stage, layers, node]"""
    slots: Ints
    """[stage, layers, node]"""
    workers: Ints
    """[stage, layers, node]: tasks side by side."""
    several: bool
    """Some node can have more than one."""
    gradient_bytes: Ints
    """[stage, layers]"""
    rounds: Ints
    """[stage]: rounds of averaging, over which these bytes are divided."""
    flight_ns: Ints
    transmit_ns: Ints
    upload_ns: Ints
    download_ns: Ints
    bandwidth: Floats
    linked: Flags
    """[node, node]: messages get through both ways."""
    near: Flags
    """[node, other]: hardly any node has a faster link to the first one."""
    relayed: Floats
    """[relay, node]: what a relay carries from and to a node (see `topology`)."""
    relayed_by_all: Floats
    """[node, node]"""
    upload: Floats
    """[node]: what all its links carry from it together; infinite without a limit, as is the next."""
    download: Floats
    only_rings: bool
    """Stages average round rings; False: by direct exchange, too."""
    full: bool
    """Full timing: averaging, the optimizer step and queues on links count."""
    split: bool
    swapped: int
    """Swaps that count as used before a path begins."""
    visitable: Flags
    """[stage]: lanes may visit it."""
    spread: int
    """By how many microbatches the exposures of stages may differ in a solution; 0 is CC3."""


def costs_by_layers(cluster: Cluster, workload: Workload, most_layers: int) -> list[CostModel]:
    """Cost models of stages with 1 to so many layers each; the entry for 0 is not used. There are two stages, the first
    and another, or all if they have codecs of their own."""
    stages = max(2, len(workload.gradient_dtypes))
    work = replace(workload, model=replace(workload.model, layers=stages * most_layers))
    first = cost_model_of(cluster, work, (1,) * stages)
    others = [cost_model_of(cluster, work, (count,) * stages, first) for count in range(2, most_layers + 1)]
    return [first, first, *others]


def tables_of(
    each: Sequence[CostModel], visitable: Flags, timing: Timing, split_backward: bool, swaps: int, spread: int = 0
) -> Tables:
    full = timing is Timing.FULL
    costs = each[0]
    relayed = relay_rates(costs)
    stages = range(len(costs.layers))
    reachable = costs.transmit_ns[0] < NEVER_NS
    return Tables(
        forward_ns=np.array([one.forward_ns[0] for one in each]),
        backward_ns=np.array([(one.input_ns if split_backward else one.backward_ns)[0] for one in each]),
        weight_ns=np.array([one.weight_ns[0] * split_backward for one in each]),
        head_ns=np.array([one.head_ns for one in each]),
        step_ns=np.array([[one.optimizer_ns[stage] * full for one in each] for stage in stages]),
        slots=np.array([[one.slots[stage] for one in each] for stage in stages]),
        workers=np.array([[one.workers[stage] for one in each] for stage in stages]),
        several=any(bool((one.workers > 1).any()) for one in each),
        gradient_bytes=np.array([[one.gradient_bytes[stage] for one in each] for stage in stages]),
        rounds=np.array([len(costs.gradient_rounds[stage]) for stage in stages]),
        flight_ns=costs.flight_ns,
        transmit_ns=costs.transmit_ns,
        upload_ns=costs.upload_ns,
        download_ns=costs.download_ns,
        bandwidth=np.ascontiguousarray(costs.bandwidth_bytes_per_s),
        linked=reachable & reachable.T,
        near=_near(costs.bandwidth_bytes_per_s),
        relayed=relayed,
        relayed_by_all=all_relays(relayed),
        upload=costs.upload_bytes_per_s,
        download=costs.download_bytes_per_s,
        only_rings=costs.collective.only_rings,
        full=full,
        split=split_backward,
        swapped=MAX_SWAPS - swaps,
        visitable=visitable,
        spread=spread,
    )


def _near(bandwidth: Floats) -> Flags:
    both = np.minimum(bandwidth, bandwidth.T)
    both = np.where(np.eye(len(both), dtype=bool), 0.0, both)
    near: Flags = (both > 0) & (both >= NEAR * both.max(axis=1, keepdims=True, initial=0.0))
    return near


def state_of(plan: Plan, most_lanes: int) -> State:
    """The state of a plan, with room for `most_lanes` lanes."""
    nodes, stages = len(plan.cluster), len(plan.stages)
    most_lanes = max(most_lanes, len(plan.lanes))
    state = empty_state(nodes, stages, most_lanes, plan.visited)
    for index, stage in enumerate(plan.stages):
        state.stage_of[list(stage.nodes)] = index
        state.ring[index, : len(stage.ring)] = stage.ring
        state.size[index] = len(stage.ring)
        state.layers[index] = stage.layers
    for number, lane in enumerate(plan.lanes):
        state.paths[number, : len(lane.path)] = lane.path
        state.lengths[number] = len(lane.path)
        state.counts[number] = lane.microbatches
    state.dispatch[0] = plan.dispatch.order
    return state


def empty_state(nodes: int, stages: int, lanes: int, length: int) -> State:
    """Lanes of this length, which is the longest that there can be."""
    return State(
        stage_of=np.full(nodes, -1, np.int64),
        ring=np.zeros((stages, nodes), np.int64),
        size=np.zeros(stages, np.int64),
        layers=np.zeros(stages, np.int64),
        paths=np.zeros((lanes, length), np.int64),
        lengths=np.full(lanes, length, np.int64),
        counts=np.zeros(lanes, np.int64),
        dispatch=np.zeros(1, np.int64),
    )


def copy_state(state: State) -> State:
    return State(*(each.copy() for each in state))


@kernel
def assign(to: State, given: State) -> None:
    """Copy a state in place. Loops, here as in other kernels, are compiled much sooner than numpy's functions."""
    for node in range(len(to.stage_of)):
        to.stage_of[node] = given.stage_of[node]
    for stage in range(len(to.size)):
        to.size[stage] = given.size[stage]
        to.layers[stage] = given.layers[stage]
        for place in range(given.size[stage]):
            to.ring[stage, place] = given.ring[stage, place]
    to.dispatch[0] = given.dispatch[0]
    for lane in range(len(to.counts)):
        to.counts[lane] = given.counts[lane]
        to.lengths[lane] = given.lengths[lane]
        for hop in range(given.lengths[lane]):
            to.paths[lane, hop] = given.paths[lane, hop]


@inner_kernel
def same(one: State, other: State) -> bool:
    for node in range(len(one.stage_of)):
        if one.stage_of[node] != other.stage_of[node]:
            return False
    for stage in range(len(one.size)):
        if one.layers[stage] != other.layers[stage]:
            return False
        for place in range(one.size[stage]):
            if one.ring[stage, place] != other.ring[stage, place]:
                return False
    if one.dispatch[0] != other.dispatch[0]:
        return False
    for lane in range(len(one.counts)):
        if one.counts[lane] != other.counts[lane] or one.lengths[lane] != other.lengths[lane]:
            return False
        for hop in range(one.lengths[lane]):
            if one.paths[lane, hop] != other.paths[lane, hop]:
                return False
    return True


@inner_kernel
def lanes_through(state: State) -> Ints:
    """[node]: number of lanes through it."""
    through = np.zeros(len(state.stage_of), np.int64)
    for lane in range(len(state.counts)):
        if state.counts[lane] > 0:
            for hop in range(state.lengths[lane]):
                through[state.paths[lane, hop]] += 1
    return through


@inner_kernel
def remove_from_ring(node: int, stage: int, state: State) -> None:
    ring, members = state.ring[stage], state.size[stage]
    place = 0
    while ring[place] != node:
        place += 1
    for after in range(place, members - 1):
        ring[after] = ring[after + 1]
    state.size[stage] = members - 1


@inner_kernel
def insert_into_ring(node: int, stage: int, drawn: int, state: State) -> None:
    ring, members = state.ring[stage], state.size[stage]
    place = drawn % (members + 1)
    for after in range(members, place, -1):
        ring[after] = ring[after - 1]
    ring[place] = node
    state.size[stage] = members + 1


@inner_kernel
def slots_of(node: int, stage: int, state: State, tables: Tables) -> int:
    return int(tables.slots[min(stage, len(tables.slots) - 1), state.layers[stage], node])


def lanes_of(state: State) -> tuple[Lane, ...]:
    lanes = zip(state.paths.tolist(), state.lengths.tolist(), state.counts.tolist(), strict=True)
    return tuple(Lane(tuple(path[:length]), count) for path, length, count in lanes if count)


def plans_of(problem: Problem, state: State, strategy: str) -> list[Plan]:
    """Plans of a state; some may break a rule.

    With all nodes that have memory for their stage, and without those that no lane visits, which may still carry
    gradients around a ring; each stage averages in the way that is fastest for when its nodes are done.
    """
    lanes = lanes_of(state)
    used = {node for lane in lanes for node in lane.path}
    layers = tuple(state.layers.tolist())
    costs = shared_cost_model(problem.cluster, problem.workload, layers)
    rings = [row[:size].tolist() for row, size in zip(state.ring, state.size, strict=True)]
    all_rings = [tuple(node for node in ring if costs.slots[stage, node]) for stage, ring in enumerate(rings)]
    at_work = [tuple(node for node in ring if node in used) for ring in all_rings]
    members = [at_work] if at_work == all_rings or problem.timing is Timing.CONTENTION_ONLY else [at_work, all_rings]
    found = []
    for chosen in members:
        averagings = [costs.averaging(stage, ring) for stage, ring in enumerate(chosen)]
        plan = Plan(
            cluster=problem.cluster,
            workload=problem.workload,
            stages=tuple(map(Stage.of, layers, averagings)),
            lanes=lanes,
            dispatch=list(Dispatch)[state.dispatch[0]],
            split_backward=problem.split_backward,
            strategy=strategy,
        )
        found.append(averaging_fastest(plan, chosen) if problem.timing is Timing.FULL else plan)
    return found


@inner_kernel
def path_of(lane: int, state: State) -> Ints:
    """The nodes on a lane's path, as a view."""
    return state.paths[lane, : state.lengths[lane]]


@inner_kernel
def visits(path: Ints, stage: int, stage_of: Ints) -> bool:
    for node in path:  # noqa: SIM110, numba has no `any` over a generator
        if stage_of[node] == stage:
            return True
    return False


@inner_kernel
def sort_by_stage(path: Ints, stage_of: Ints) -> None:
    """Sort the nodes of a path by stage."""
    for end in range(1, len(path)):
        hop = end
        while hop > 0 and stage_of[path[hop]] < stage_of[path[hop - 1]]:
            path[hop], path[hop - 1] = path[hop - 1], path[hop]
            hop -= 1


@kernel
def move_microbatches(
    a: int, b: int, moved: int, from_: int, to: int, paths: Ints, lengths: Ints, counts: Ints, stage_of: Ints
) -> None:
    """Move microbatches from lane a to b, which is as long. If these visit other stages, as many go where they make up
    for it, if there is such a pair, which is equally long then: looked for from lanes `from_` and `to` on."""
    counts[a] -= moved
    counts[b] += moved
    lanes = len(counts)
    sets = np.zeros(lanes, np.int64)
    for lane in range(lanes):
        if counts[lane] > 0 or lane == a:
            for hop in range(lengths[lane]):
                sets[lane] |= 1 << stage_of[paths[lane, hop]]
    lost, won = sets[a] & ~sets[b], sets[b] & ~sets[a]
    if lost == 0 and won == 0:
        return
    for nth in range(lanes):
        c = (from_ + nth) % lanes
        if counts[c] < moved or won & ~sets[c] or lost & sets[c]:
            continue
        for other in range(lanes):
            d = (to + other) % lanes
            back = c == b and d == a
            if counts[d] > 0 and not back and sets[c] & ~sets[d] == won and sets[d] & ~sets[c] == lost:
                counts[c] -= moved
                counts[d] += moved
                return
