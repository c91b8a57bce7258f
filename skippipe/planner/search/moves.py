"""Neighbourhood moves of a state, from one node of one lane to whole roles; `objective` says whether they keep the
rules.

Each takes the numbers it needs from a row of random draws. False: there was nothing to change, and the state may be
left half changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from skippipe.dispatch import LANES_IN_ORDER, Dispatch
from skippipe.jit import Ints, inner_kernel, kernel
from skippipe.planner.search.placement import exchange_groups, exchange_nodes, lay_lanes, move_group
from skippipe.planner.search.state import (
    State,
    Tables,
    insert_into_ring,
    lanes_through,
    move_microbatches,
    path_of,
    remove_from_ring,
    slots_of,
    sort_by_stage,
    visits,
)

DRAWS = 16  # numbers in a row
MOST_REMOVED = 4  # of the lanes through a node, fewer than this are ruined together
DISPATCHES = len(Dispatch)


class Move(IntEnum):
    """Kinds of neighbourhood moves."""

    REPLACE_NODE = 0
    SWAP_NODES = 1
    SWAP_STAGES = 2
    SWAP_NEIGHBOURS = 3
    MOVE_MICROBATCHES = 4
    SPLIT_LANE = 5
    RUIN = 6
    REPLACE_STAGE = 7
    REORDER_RING = 8
    SWAP_ROLES = 9
    CHANGE_ROLE = 10
    MOVE_LAYER = 11
    CHANGE_DISPATCH = 12
    SWAP_LANE_ORDER = 13
    MOVE_GROUP = 14
    EXCHANGE_GROUPS = 15
    EXCHANGE_NODES = 16


MOVE_WEIGHTS = {
    Move.REPLACE_NODE: 14,
    Move.SWAP_NODES: 10,
    Move.SWAP_STAGES: 10,
    Move.SWAP_NEIGHBOURS: 6,
    Move.MOVE_MICROBATCHES: 10,
    Move.SPLIT_LANE: 8,
    Move.RUIN: 12,
    Move.REPLACE_STAGE: 12,
    Move.REORDER_RING: 4,
    Move.SWAP_ROLES: 14,
    Move.CHANGE_ROLE: 8,
    Move.MOVE_LAYER: 4,
    Move.CHANGE_DISPATCH: 1,
    Move.SWAP_LANE_ORDER: 6,
    Move.MOVE_GROUP: 1,
    Move.EXCHANGE_GROUPS: 1,
    Move.EXCHANGE_NODES: 1,
}
"""Relative frequency of each move, where it is open."""

PLACEMENT_MOVES = (Move.MOVE_GROUP, Move.EXCHANGE_GROUPS, Move.EXCHANGE_NODES)
"""Moves that lay all lanes anew: each judges a placement by itself, not by lanes that were made for another one."""


def cumulative_move_weights(moves: Iterable[Move]) -> Ints:
    """Cumulative weights for `propose`; only these moves are drawn."""
    chosen = set(moves)
    return np.cumsum([MOVE_WEIGHTS[move] if move in chosen else 0 for move in Move])


@kernel
def propose(draw: Ints, state: State, tables: Tables, cumulative_weights: Ints) -> bool:
    """Apply one random move. Some moves ruin lanes; `recreate` of `reinsertion` has to follow."""
    drawn = draw[0] % cumulative_weights[-1]
    kind = 0
    while drawn >= cumulative_weights[kind]:
        kind += 1
    lanes = len(state.counts)
    a, b = _active_lane(draw[1] % lanes, state), _active_lane(draw[2] % lanes, state)
    if kind == Move.REPLACE_NODE:
        return _replace_node(a, draw, state, tables)
    if kind == Move.SWAP_NODES:
        return _swap_nodes(a, b, draw, state)
    if kind == Move.SWAP_STAGES:
        return _swap_stages(a, b, draw, state)
    if kind == Move.SWAP_NEIGHBOURS:
        return _swap_neighbours(a, draw, state)
    if kind == Move.MOVE_MICROBATCHES:
        if a == b or state.lengths[a] != state.lengths[b]:
            return False
        moved = state.counts[a] if draw[3] % 4 == 0 else 1
        move_microbatches(a, b, moved, draw[4], draw[5], state.paths, state.lengths, state.counts, state.stage_of)
        return True
    if kind == Move.SPLIT_LANE:
        return _split_lane(a, draw, state)
    if kind == Move.RUIN:
        return _ruin_some(a, b, draw, state)
    if kind == Move.REPLACE_STAGE:
        return _replace_stage(a, draw, state, tables)
    if kind == Move.REORDER_RING:
        return _reorder_ring(draw, state)
    if kind == Move.SWAP_ROLES:
        return _swap_roles(draw, state)
    if kind == Move.CHANGE_ROLE:
        return _change_role(draw, state, tables)
    if kind == Move.MOVE_LAYER:
        return _move_layer(draw, state, tables)
    if kind == Move.CHANGE_DISPATCH:
        state.dispatch[0] = draw[3] % DISPATCHES
        return True
    if kind == Move.MOVE_GROUP:
        return move_group(draw, state, tables) and lay_lanes(draw, state, tables)
    if kind == Move.EXCHANGE_GROUPS:
        return exchange_groups(draw, state, tables) and lay_lanes(draw, state, tables)
    if kind == Move.EXCHANGE_NODES:
        return exchange_nodes(draw, state, tables) and lay_lanes(draw, state, tables)
    return _swap_lane_order(a, b, state)


@inner_kernel
def _active_lane(lane: int, state: State) -> int:
    """This lane, or the next one that has microbatches."""
    while state.counts[lane] == 0:
        lane = lane + 1 if lane + 1 < len(state.counts) else 0
    return lane


@inner_kernel
def _swap_lane_order(a: int, b: int, state: State) -> bool:
    """Swap two lanes in the order of dispatch; nothing changes where that order does not matter."""
    if a == b or state.dispatch[0] != LANES_IN_ORDER:
        return False
    state.counts[a], state.counts[b] = state.counts[b], state.counts[a]
    state.lengths[a], state.lengths[b] = state.lengths[b], state.lengths[a]
    for hop in range(state.paths.shape[1]):
        state.paths[a, hop], state.paths[b, hop] = state.paths[b, hop], state.paths[a, hop]
    return True


@inner_kernel
def _ruin(lane: int, state: State) -> None:
    """Ruin a lane: its count becomes negative, and it leaves its slots to those that are recreated before it."""
    if state.counts[lane] > 0:
        state.counts[lane] = -state.counts[lane]


@inner_kernel
def _ruin_through(node: int, most: int, drawn: int, state: State) -> None:
    """Ruin up to `most` of the lanes that visit a node."""
    lanes = len(state.counts)
    for nth in range(lanes):
        lane = (drawn + nth) % lanes
        if most == 0:
            return
        if state.counts[lane] > 0:
            for hop in range(state.lengths[lane]):
                if state.paths[lane, hop] == node:
                    _ruin(lane, state)
                    most -= 1
                    break


@inner_kernel
def _ruin_some(a: int, b: int, draw: Ints, state: State) -> bool:
    """Ruin a lane, alone, with others that share a node with it, or with any other."""
    together = draw[3] % MOST_REMOVED
    if draw[4] % 2:
        sort_by_stage(path_of(a, state), state.stage_of)
    _ruin(a, state)
    if draw[5] % 4:
        _ruin_through(state.paths[a, draw[6] % state.lengths[a]], together, draw[7], state)
    elif together > 0:
        _ruin(b, state)
    return True


@inner_kernel
def _replace_node(lane: int, draw: Ints, state: State, tables: Tables) -> bool:
    """Another node of the same stage for a lane. If it has no slot left, one of its lanes comes to the node that is
    left."""
    paths = state.paths
    hop = draw[3] % state.lengths[lane]
    old = paths[lane, hop]
    stage = state.stage_of[old]
    new = state.ring[stage, draw[4] % state.size[stage]]
    if new == old:
        return False
    if lanes_through(state)[new] >= slots_of(new, stage, state, tables):
        lanes = len(state.counts)
        found = False
        for nth in range(lanes):
            other = (draw[5] + nth) % lanes
            for place in range(state.lengths[other]):
                if not found and state.counts[other] > 0 and paths[other, place] == new:
                    paths[other, place] = old
                    found = True
    paths[lane, hop] = new
    return True


@inner_kernel
def _swap_nodes(a: int, b: int, draw: Ints, state: State) -> bool:
    """Swap the nodes of a stage that both lanes visit."""
    paths = state.paths
    hop = draw[3] % state.lengths[a]
    for other in range(state.lengths[b]):
        if state.stage_of[paths[b, other]] == state.stage_of[paths[a, hop]]:
            if paths[b, other] == paths[a, hop]:
                return False
            paths[a, hop], paths[b, other] = paths[b, other], paths[a, hop]
            return True
    return False


@inner_kernel
def _swap_stages(a: int, b: int, draw: Ints, state: State) -> bool:
    """Swap a stage that only one lane visits for one that only the other does, with their nodes."""
    paths, stage_of = state.paths, state.stage_of
    here, there = _place_only_on(a, b, draw[3], state), _place_only_on(b, a, draw[4], state)
    if here < 0 or there < 0:
        return False
    paths[a, here], paths[b, there] = paths[b, there], paths[a, here]
    sort_by_stage(path_of(a, state), stage_of)
    sort_by_stage(path_of(b, state), stage_of)
    if draw[5] % 2:
        _ruin(a, state)
        _ruin(b, state)
    return True


@inner_kernel
def _place_only_on(a: int, b: int, drawn: int, state: State) -> int:
    """A place of lane a whose stage lane b does not visit; −1: there is none."""
    others = state.lengths[a] - 1
    for nth in range(others):
        place = 1 + (drawn + nth) % others
        if not visits(path_of(b, state), state.stage_of[state.paths[a, place]], state.stage_of):
            return int(place)
    return -1


@inner_kernel
def _swap_neighbours(lane: int, draw: Ints, state: State) -> bool:
    paths, length = state.paths, state.lengths[lane]
    if length < 3:
        return False
    hop = 1 + draw[3] % (length - 2)
    paths[lane, hop], paths[lane, hop + 1] = paths[lane, hop + 1], paths[lane, hop]
    return True


@inner_kernel
def _replace_stage(lane: int, draw: Ints, state: State, tables: Tables) -> bool:
    """Replace a stage of a lane by one that it does not visit yet."""
    hop = 1 + draw[3] % (state.lengths[lane] - 1)
    others = len(state.size) - 1
    for nth in range(others):
        stage = 1 + (draw[4] + nth) % others
        if tables.visitable[stage] and not visits(path_of(lane, state), stage, state.stage_of):
            state.paths[lane, hop] = state.ring[stage, draw[5] % state.size[stage]]
            sort_by_stage(path_of(lane, state), state.stage_of)
            _ruin(lane, state)
            return True
    return False


@inner_kernel
def _split_lane(lane: int, draw: Ints, state: State) -> bool:
    """Move some microbatches of a lane to a new lane over the same stages."""
    counts = state.counts
    if counts[lane] < 2:
        return False
    for new in range(len(counts)):
        if counts[new] == 0:
            state.lengths[new] = state.lengths[lane]
            for hop in range(state.lengths[lane]):
                state.paths[new, hop] = state.paths[lane, hop]
            counts[new] = 1 + draw[3] % (counts[lane] - 1)
            counts[lane] -= counts[new]
            _ruin(new, state)
            return True
    return False


@inner_kernel
def _swap_roles(draw: Ints, state: State) -> bool:
    """Swap two nodes: stage, place in the ring, lanes."""
    nodes = len(state.stage_of)
    x, y = draw[3] % nodes, draw[4] % nodes
    if x == y or (state.stage_of[x] < 0 and state.stage_of[y] < 0):
        return False
    for stage in range(len(state.size)):
        _swap_values(state.ring, stage, state.size[stage], x, y)
    for lane in range(len(state.counts)):
        _swap_values(state.paths, lane, state.lengths[lane], x, y)
    state.stage_of[x], state.stage_of[y] = state.stage_of[y], state.stage_of[x]
    _ruin_through(x, draw[5] % MOST_REMOVED, draw[6], state)
    _ruin_through(y, draw[7] % MOST_REMOVED, draw[8], state)
    return True


@inner_kernel
def _swap_values(rows: Ints, row: int, end: int, x: int, y: int) -> None:
    for index in range(end):
        if rows[row, index] == x:
            rows[row, index] = y
        elif rows[row, index] == y:
            rows[row, index] = x


@inner_kernel
def _change_role(draw: Ints, state: State, tables: Tables) -> bool:
    """Move a node from its stage to another, where it takes over lanes, or to none."""
    node = draw[3] % len(state.stage_of)
    old, new = state.stage_of[node], draw[4] % (len(state.size) + 1) - 1
    if old == new or (old >= 0 and state.size[old] == 1):
        return False
    if old >= 0:
        remove_from_ring(node, old, state)
        state.stage_of[node] = -1
        through = lanes_through(state)
        for lane in range(len(state.counts)):
            if state.counts[lane] == 0:
                continue
            for hop in range(state.lengths[lane]):
                if state.paths[lane, hop] == node:
                    substitute = _node_with_slot(old, draw[5] + lane, through, state, tables)
                    if substitute < 0:
                        return False
                    state.paths[lane, hop] = substitute
                    through[substitute] += 1
    if new >= 0:
        insert_into_ring(node, new, draw[6], state)
        state.stage_of[node] = new
        most_lanes = slots_of(node, new, state, tables)
        for nth in range(len(state.counts)):
            lane = (draw[7] + nth) % len(state.counts)
            if most_lanes == 0 or state.counts[lane] == 0 or (draw[8] >> (nth % 16)) % 2:
                continue
            for hop in range(state.lengths[lane]):
                if state.stage_of[state.paths[lane, hop]] == new:
                    state.paths[lane, hop] = node
                    most_lanes -= 1
                    break
    return True


@inner_kernel
def _node_with_slot(stage: int, drawn: int, through: Ints, state: State, tables: Tables) -> int:
    """A node of the stage with a slot left; −1: there is none."""
    members = state.size[stage]
    for nth in range(members):
        node = state.ring[stage, (drawn + nth) % members]
        if through[node] < slots_of(node, stage, state, tables):
            return int(node)
    return -1


@inner_kernel
def _reorder_ring(draw: Ints, state: State) -> bool:
    """Reverse a piece of a ring, or move a node to another place of it."""
    stage = draw[3] % len(state.size)
    members = state.size[stage]
    if members < 3:
        return False
    ring = state.ring[stage]
    if draw[4] % 2:
        node = ring[draw[5] % members]
        remove_from_ring(node, stage, state)
        insert_into_ring(node, stage, draw[6], state)
        return True
    low, high = draw[5] % members, draw[6] % members
    low, high = min(low, high), max(low, high)
    while low < high:
        ring[low], ring[high] = ring[high], ring[low]
        low, high = low + 1, high - 1
    return True


@inner_kernel
def _move_layer(draw: Ints, state: State, tables: Tables) -> bool:
    """Move a layer from stage to stage. Stage 0 keeps its own, so that no larger share of the model is skipped."""
    stages = len(state.size)
    a, b = 1 + draw[3] % (stages - 1), 1 + draw[4] % (stages - 1)
    if a == b or state.layers[a] < 2 or state.layers[b] + 1 >= len(tables.forward_ns):
        return False
    state.layers[a] -= 1
    state.layers[b] += 1
    return True
