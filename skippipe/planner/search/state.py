"""A plan as arrays that kernels change, and what every choice would cost.

Everything is open at once: who holds which stage or none, the order of rings, how many layers a stage has, the path of
every lane and its microbatches, who goes next on a node and which lane before which.


What searches do to lanes, whatever else they change: kernels over paths and microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skippipe.constraints import MAX_SWAPS
from skippipe.cost_model import NEVER_NS, CostModel, cost_model_of
from skippipe.dispatch import Dispatch
from skippipe.jit import kernel
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import Problem
from skippipe.timeline import Timing

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class State(NamedTuple):
    stage_of: Ints
    """[node]; −1: it stays out."""
    ring: Ints
    """[stage, place] node, in the order in which they average."""
    size: Ints
    """[stage]: how many nodes hold it."""
    layers: Ints
    """[stage]"""
    paths: Ints
    """[lane, hop] node."""
    counts: Ints
    """[lane]: its microbatches; 0: the lane is not there."""
    order: Ints
    """Of dispatch, as one number."""


class Tables(NamedTuple):
    """What a node would take, for any number of layers. Where stage 0 differs from others, it is row 0, they row 1."""

    forward_ns: Ints
    """[layers, node]"""
    backward_ns: Ints
    weight_ns: Ints
    head_ns: Ints
    """[layers of stage 0, node]"""
    step_ns: Ints
    """[0 or 1, layers, node]"""
    slots: Ints
    """[0 or 1, layers, node]"""
    gradient_bytes: Ints
    """[0 or 1, layers]"""
    flight_ns: Ints
    transmit_ns: Ints
    bandwidth: NDArray[np.float64]
    linked: Flags
    """[node, node]: messages get through both ways."""
    full: bool
    """Averaging, the step and queues on links count."""
    split: bool
    swapped: int
    """Swaps that count as used before a path begins."""


def costs_by_layers(problem: Problem, most_layers: int) -> list[CostModel]:
    """Of two stages, the first and another, with 1 to so many layers; the entry for 0 is not used."""
    shape = replace(problem.workload.model, layers=2 * most_layers)
    work = replace(problem.workload, model=shape)
    found = [cost_model_of(problem.cluster, work, (count, count)) for count in range(1, most_layers + 1)]
    return [found[0], *found]


def tables_of(problem: Problem, each: Sequence[CostModel]) -> Tables:
    full = problem.timing is Timing.FULL
    costs = each[0]
    reachable = costs.transmit_ns < NEVER_NS
    return Tables(
        forward_ns=np.array([one.forward_ns[0] for one in each]),
        backward_ns=np.array([(one.input_ns if problem.split_backward else one.backward_ns)[0] for one in each]),
        weight_ns=np.array([one.weight_ns[0] * problem.split_backward for one in each]),
        head_ns=np.array([one.head_ns for one in each]),
        step_ns=np.array([[one.optimizer_ns[stage] * full for one in each] for stage in (0, 1)]),
        slots=np.array([[one.slots[stage] for one in each] for stage in (0, 1)]),
        gradient_bytes=np.array([[one.gradient_bytes[stage] for one in each] for stage in (0, 1)]),
        flight_ns=costs.flight_ns,
        transmit_ns=costs.transmit_ns,
        bandwidth=np.ascontiguousarray(costs.bandwidth_bytes_per_s),
        linked=reachable & reachable.T,
        full=full,
        split=problem.split_backward,
        swapped=MAX_SWAPS - problem.swaps,
    )


def state_of(plan: Plan, room: int) -> State:
    """`room`: lanes that there may come to be."""
    nodes, stages = len(plan.cluster), len(plan.stages)
    room = max(room, len(plan.lanes))
    state = empty(nodes, stages, room, plan.visited)
    for index, stage in enumerate(plan.stages):
        state.stage_of[list(stage.nodes)] = index
        state.ring[index, : len(stage.ring)] = stage.ring
        state.size[index] = len(stage.ring)
        state.layers[index] = stage.layers
    for number, lane in enumerate(plan.lanes):
        state.paths[number] = lane.path
        state.counts[number] = lane.microbatches
    state.order[0] = plan.dispatch.order
    return state


def empty(nodes: int, stages: int, lanes: int, length: int) -> State:
    return State(
        stage_of=np.full(nodes, -1, np.int64),
        ring=np.zeros((stages, nodes), np.int64),
        size=np.zeros(stages, np.int64),
        layers=np.zeros(stages, np.int64),
        paths=np.zeros((lanes, length), np.int64),
        counts=np.zeros(lanes, np.int64),
        order=np.zeros(1, np.int64),
    )


def copy_of(state: State) -> State:
    return State(*(each.copy() for each in state))


@kernel
def assign(to: State, given: State) -> None:
    """Loops, here as in other kernels: they are compiled much sooner than what numpy has for the same."""
    for node in range(len(to.stage_of)):
        to.stage_of[node] = given.stage_of[node]
    for stage in range(len(to.size)):
        to.size[stage] = given.size[stage]
        to.layers[stage] = given.layers[stage]
        for place in range(given.size[stage]):
            to.ring[stage, place] = given.ring[stage, place]
    to.order[0] = given.order[0]
    for lane in range(len(to.counts)):
        to.counts[lane] = given.counts[lane]
        for hop in range(to.paths.shape[1]):
            to.paths[lane, hop] = given.paths[lane, hop]


@kernel
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
    if one.order[0] != other.order[0]:
        return False
    for lane in range(len(one.counts)):
        if one.counts[lane] != other.counts[lane]:
            return False
        for hop in range(one.paths.shape[1]):
            if one.paths[lane, hop] != other.paths[lane, hop]:
                return False
    return True


@kernel
def lanes_through(state: State) -> Ints:
    """[node]: lanes."""
    through = np.zeros(len(state.stage_of), np.int64)
    for lane in range(len(state.counts)):
        if state.counts[lane] > 0:
            for node in state.paths[lane]:
                through[node] += 1
    return through


@kernel
def slots_of(node: int, stage: int, state: State, tables: Tables) -> int:
    return int(tables.slots[min(stage, 1), state.layers[stage], node])


def plans_of(problem: Problem, state: State, strategy: str) -> list[Plan]:
    """With all nodes and without those that no lane visits, which may still carry gradients around a ring; and with the
    rings as they are and in the best order for nodes that are done at the same time. Some may break a rule."""
    used = set(state.paths[state.counts > 0].ravel().tolist())
    layers = tuple(state.layers.tolist())
    costs = cost_model_of(problem.cluster, problem.workload, layers)
    everybody = [tuple(row[:size].tolist()) for row, size in zip(state.ring, state.size, strict=True)]
    at_work = [tuple(node for node in ring if node in used) for ring in everybody]
    lanes = tuple(
        Lane(tuple(path), count)
        for path, count in zip(state.paths.tolist(), state.counts.tolist(), strict=True)
        if count
    )
    members = [at_work] if at_work == everybody or problem.timing is Timing.CONTENTION_ONLY else [at_work, everybody]
    in_order = [[costs.averaging_order(stage, ring) for stage, ring in enumerate(rings)] for rings in members]
    return [
        Plan(
            cluster=problem.cluster,
            workload=problem.workload,
            stages=tuple(Stage(count, tuple(sorted(ring)), ring) for count, ring in zip(layers, rings, strict=True)),
            lanes=lanes,
            dispatch=list(Dispatch)[state.order[0]],
            split_backward=problem.split_backward,
            strategy=strategy,
        )
        for rings in [*in_order, *members]
    ]


@kernel
def visits(path: Ints, stage: int, stage_of: Ints) -> bool:
    for node in path:  # noqa: SIM110, numba has no `any` over a generator
        if stage_of[node] == stage:
            return True
    return False


@kernel
def put_in_order(path: Ints, stage_of: Ints) -> None:
    """By stage."""
    for end in range(1, len(path)):
        hop = end
        while hop > 0 and stage_of[path[hop]] < stage_of[path[hop - 1]]:
            path[hop], path[hop - 1] = path[hop - 1], path[hop]
            hop -= 1


@kernel
def move_microbatches(
    a: int, b: int, moved: int, from_: int, to: int, paths: Ints, counts: Ints, stage_of: Ints
) -> None:
    """From lane a to b. If these visit other stages, as many go where they make up for it, if there is such a pair:
    looked for from lanes `from_` and `to` on."""
    counts[a] -= moved
    counts[b] += moved
    lanes = len(counts)
    sets = np.zeros(lanes, np.int64)
    for lane in range(lanes):
        if counts[lane] > 0 or lane == a:
            for node in paths[lane]:
                sets[lane] |= 1 << stage_of[node]
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
