"""Placement moves of a state: nodes change their stages, alone or with those near them, and all lanes are laid anew.

So a placement is judged by itself, not by lanes that were made for another one. Each takes the numbers it needs from a
row of random draws. False: there was nothing to change, and the state may be left half changed.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from skippipe.jit import Ints, inner_kernel
from skippipe.planner.search.state import State, Tables, insert_into_ring, remove_from_ring, slots_of, sort_by_stage

MOST_TOGETHER = 3  # nodes near another one that move with it, at most


@inner_kernel
def move_group(draw: Ints, state: State, tables: Tables) -> bool:
    """Move a node, alone or with those near it, to another stage or to none."""
    node = draw[3] % len(state.stage_of)
    stage = draw[4] % (len(state.size) + 1) - 1
    if stage == state.stage_of[node]:
        return False
    _place(node, stage, draw[5], state)
    if draw[6] % 2:
        _place_near(node, stage, draw[7], state, tables)
    return True


@inner_kernel
def exchange_groups(draw: Ints, state: State, tables: Tables) -> bool:
    """Exchange the stages of two nodes, alone or with those near each."""
    nodes = len(state.stage_of)
    a, b = draw[3] % nodes, draw[4] % nodes
    to_a, to_b = state.stage_of[b], state.stage_of[a]
    if to_a == to_b:
        return False
    if draw[6] % 2:
        _place_near(a, to_a, draw[7], state, tables)
        _place_near(b, to_b, draw[7], state, tables)
    _place(a, to_a, draw[5], state)
    _place(b, to_b, draw[5], state)
    return True


@inner_kernel
def exchange_nodes(draw: Ints, state: State, tables: Tables) -> bool:
    """Exchange the stages of two nodes, alone or with one more pair near them; stages keep their sizes."""
    nodes = len(state.stage_of)
    a, b = draw[3] % nodes, draw[4] % nodes
    if state.stage_of[a] == state.stage_of[b]:
        return False
    for _ in range(1 + draw[6] % 2):
        to_a, to_b = state.stage_of[b], state.stage_of[a]
        _place(a, to_a, draw[5], state)
        _place(b, to_b, draw[5], state)
        near_a, near_b = -1, -1
        for other in range(nodes):
            if tables.near[a, other] and other != b:
                near_a = other
            if tables.near[b, other] and other != a:
                near_b = other
        if near_a < 0 or near_b < 0 or near_a == near_b:
            break
        a, b = near_a, near_b
    return True


@inner_kernel
def _place(node: int, stage: int, drawn: int, state: State) -> None:
    """Put a node on a stage, or on none; what lanes visit is not changed."""
    old = state.stage_of[node]
    if old == stage:
        return
    if old >= 0:
        remove_from_ring(node, old, state)
    if stage >= 0:
        insert_into_ring(node, stage, drawn, state)
    state.stage_of[node] = stage


@inner_kernel
def _place_near(node: int, stage: int, drawn: int, state: State, tables: Tables) -> None:
    """Put nodes near this one on a stage, or on none: all of them, or as many as drawn."""
    most = 1 + drawn % MOST_TOGETHER
    for other in range(len(state.stage_of)):
        if most > 0 and tables.near[node, other]:
            _place(other, stage, drawn, state)
            most -= 1


@inner_kernel
def lay_lanes(draw: Ints, state: State, tables: Tables) -> bool:
    """New lanes for the nodes on the stages: as many as their memory takes, over stages in turn so that all are visited
    equally often. They are left ruined: `recreate` gives them nodes. False: there are none."""
    stages, length = len(state.size), state.paths.shape[1]
    others, chosen = stages - 1, length - 1
    microbatches = 0
    for lane in range(len(state.counts)):
        microbatches += abs(state.counts[lane])
        state.counts[lane] = 0
    unit = others // gcd(others, chosen)  # as `lane_unit` of `problem`, which is no kernel
    lanes = min(len(state.counts), microbatches)
    for stage in range(stages):
        if state.size[stage] == 0 or not tables.visitable[stage]:
            return False
        slots = 0
        for place in range(state.size[stage]):
            slots += slots_of(state.ring[stage, place], stage, state, tables)
        lanes = min(lanes, slots if stage == 0 else slots * others // chosen)
    lanes = lanes // unit * unit
    if draw[14] % 4 == 0 and lanes > unit:
        lanes -= unit
    if lanes == 0:
        return False
    turn = _shuffled(others, draw[15])
    for lane in range(lanes):
        state.counts[lane] = -(microbatches // lanes + (1 if lane < microbatches % lanes else 0))
        state.lengths[lane] = length
        state.paths[lane, 0] = state.ring[0, 0]
        for hop in range(chosen):
            stage = 1 + turn[(lane * chosen + hop) % others]
            state.paths[lane, 1 + hop] = state.ring[stage, 0]
        sort_by_stage(state.paths[lane], state.stage_of)
    return True


@inner_kernel
def _shuffled(count: int, drawn: int) -> Ints:
    """The numbers below `count` in a random order."""
    order = np.arange(count)
    for end in range(count - 1, 0, -1):
        at = drawn % (end + 1)
        drawn //= end + 1
        order[end], order[at] = order[at], order[end]
    return order
