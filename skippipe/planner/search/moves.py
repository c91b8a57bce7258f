"""Changes of a state, from one node of one lane to whole roles. Whether they keep the rules is for `score` to say.

Each takes the numbers it needs from a row of random draws. False: there was nothing to change, and the state may be
left half changed.
"""

from __future__ import annotations

from enum import IntEnum

from skippipe.dispatch import LANES_IN_ORDER, Dispatch
from skippipe.jit import kernel
from skippipe.planner.search.state import (
    Ints,
    State,
    Tables,
    lanes_through,
    move_microbatches,
    put_in_order,
    slots_of,
    visits,
)

DRAWS = 16  # numbers in a row
MOST_REMOVED = 4  # of the lanes through a node, fewer than this are laid anew together
DISPATCHES = len(Dispatch)


class Move(IntEnum):
    """What can be changed."""

    NODE = 0
    NODES_OF_TWO = 1
    STAGES_OF_TWO = 2
    ORDER = 3
    MICROBATCHES = 4
    NEW_LANE = 5
    WAYS = 6
    STAGE = 7
    RING = 8
    ROLES_OF_TWO = 9
    ROLE = 10
    LAYERS = 11
    DISPATCH = 12
    RANKS = 13


SHARES = {
    Move.NODE: 14,
    Move.NODES_OF_TWO: 10,
    Move.STAGES_OF_TWO: 10,
    Move.ORDER: 6,
    Move.MICROBATCHES: 10,
    Move.NEW_LANE: 8,
    Move.WAYS: 12,
    Move.STAGE: 12,
    Move.RING: 4,
    Move.ROLES_OF_TWO: 14,
    Move.ROLE: 8,
    Move.LAYERS: 4,
    Move.DISPATCH: 1,
    Move.RANKS: 6,
}
"""How often each is drawn, relative to each other, where it is open."""


@kernel
def propose(draw: Ints, state: State, tables: Tables, shares: Ints) -> bool:
    """One kind of change. Lanes that are to be laid anew then are lifted; `lay_lifted` of `laying` has to follow."""
    drawn = draw[0] % shares[-1]
    kind = 0
    while drawn >= shares[kind]:
        kind += 1
    lanes = len(state.counts)
    a, b = _there(draw[1] % lanes, state), _there(draw[2] % lanes, state)
    if kind == Move.NODE:
        return _other_node(a, draw, state, tables)
    if kind == Move.NODES_OF_TWO:
        return _exchange_nodes(a, b, draw, state)
    if kind == Move.STAGES_OF_TWO:
        return _exchange_stages(a, b, draw, state)
    if kind == Move.ORDER:
        return _swap_neighbours(a, draw, state)
    if kind == Move.MICROBATCHES:
        if a != b:
            moved = state.counts[a] if draw[3] % 4 == 0 else 1
            move_microbatches(a, b, moved, draw[4], draw[5], state.paths, state.counts, state.stage_of)
        return a != b
    if kind == Move.NEW_LANE:
        return _split_lane(a, draw, state)
    if kind == Move.WAYS:
        return _lift_some(a, b, draw, state)
    if kind == Move.STAGE:
        return _replace_stage(a, draw, state)
    if kind == Move.RING:
        return _turn_ring(draw, state)
    if kind == Move.ROLES_OF_TWO:
        return _exchange_roles(draw, state)
    if kind == Move.ROLE:
        return _change_role(draw, state, tables)
    if kind == Move.LAYERS:
        return _move_layer(draw, state, tables)
    if kind == Move.DISPATCH:
        state.order[0] = draw[3] % DISPATCHES
        return True
    return _exchange_ranks(a, b, state)


@kernel
def _there(lane: int, state: State) -> int:
    """This lane, or the next one that is there."""
    while state.counts[lane] == 0:
        lane = lane + 1 if lane + 1 < len(state.counts) else 0
    return lane


@kernel
def _exchange_ranks(a: int, b: int, state: State) -> bool:
    """Of two lanes; where it does not matter which lane comes before which, nothing changes."""
    if a == b or state.order[0] != LANES_IN_ORDER:
        return False
    state.counts[a], state.counts[b] = state.counts[b], state.counts[a]
    for hop in range(state.paths.shape[1]):
        state.paths[a, hop], state.paths[b, hop] = state.paths[b, hop], state.paths[a, hop]
    return True


@kernel
def _lift(lane: int, state: State) -> None:
    """Nobody sees a lane whose count is negative: it leaves its slots to those that are laid before it."""
    if state.counts[lane] > 0:
        state.counts[lane] = -state.counts[lane]


@kernel
def _lift_through(node: int, most: int, drawn: int, state: State) -> None:
    """So many of the lanes that visit a node."""
    lanes = len(state.counts)
    for nth in range(lanes):
        lane = (drawn + nth) % lanes
        if most == 0:
            return
        if state.counts[lane] > 0:
            for visited in state.paths[lane]:
                if visited == node:
                    _lift(lane, state)
                    most -= 1
                    break


@kernel
def _lift_some(a: int, b: int, draw: Ints, state: State) -> bool:
    """A lane, by itself, with others that share a node with it, or with any other."""
    together = draw[3] % MOST_REMOVED
    if draw[4] % 2:
        put_in_order(state.paths[a], state.stage_of)
    _lift(a, state)
    if draw[5] % 4:
        _lift_through(state.paths[a, draw[6] % state.paths.shape[1]], together, draw[7], state)
    elif together > 0:
        _lift(b, state)
    return True


@kernel
def _other_node(lane: int, draw: Ints, state: State, tables: Tables) -> bool:
    """Of the same stage. If it has no slot left, one of its lanes comes to the node that is left."""
    paths = state.paths
    hop = draw[3] % paths.shape[1]
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
            for place in range(paths.shape[1]):
                if not found and state.counts[other] > 0 and paths[other, place] == new:
                    paths[other, place] = old
                    found = True
    paths[lane, hop] = new
    return True


@kernel
def _exchange_nodes(a: int, b: int, draw: Ints, state: State) -> bool:
    """Of a stage that both lanes visit."""
    paths = state.paths
    hop = draw[3] % paths.shape[1]
    for other in range(paths.shape[1]):
        if state.stage_of[paths[b, other]] == state.stage_of[paths[a, hop]]:
            if paths[b, other] == paths[a, hop]:
                return False
            paths[a, hop], paths[b, other] = paths[b, other], paths[a, hop]
            return True
    return False


@kernel
def _exchange_stages(a: int, b: int, draw: Ints, state: State) -> bool:
    """A stage that only one of them visits for one that only the other does, with their nodes."""
    paths, stage_of = state.paths, state.stage_of
    here, there = _only_on(a, b, draw[3], state), _only_on(b, a, draw[4], state)
    if here < 0 or there < 0:
        return False
    paths[a, here], paths[b, there] = paths[b, there], paths[a, here]
    put_in_order(paths[a], stage_of)
    put_in_order(paths[b], stage_of)
    if draw[5] % 2:
        _lift(a, state)
        _lift(b, state)
    return True


@kernel
def _only_on(a: int, b: int, drawn: int, state: State) -> int:
    """A place of lane a whose stage lane b does not visit; −1: there is none."""
    others = state.paths.shape[1] - 1
    for nth in range(others):
        place = 1 + (drawn + nth) % others
        if not visits(state.paths[b], state.stage_of[state.paths[a, place]], state.stage_of):
            return int(place)
    return -1


@kernel
def _swap_neighbours(lane: int, draw: Ints, state: State) -> bool:
    paths, length = state.paths, state.paths.shape[1]
    if length < 3:
        return False
    hop = 1 + draw[3] % (length - 2)
    paths[lane, hop], paths[lane, hop + 1] = paths[lane, hop + 1], paths[lane, hop]
    return True


@kernel
def _replace_stage(lane: int, draw: Ints, state: State) -> bool:
    """A stage for one that is not visited yet."""
    hop = 1 + draw[3] % (state.paths.shape[1] - 1)
    others = len(state.size) - 1
    for nth in range(others):
        stage = 1 + (draw[4] + nth) % others
        if not visits(state.paths[lane], stage, state.stage_of):
            state.paths[lane, hop] = state.ring[stage, draw[5] % state.size[stage]]
            put_in_order(state.paths[lane], state.stage_of)
            _lift(lane, state)
            return True
    return False


@kernel
def _split_lane(lane: int, draw: Ints, state: State) -> bool:
    """Some of its microbatches go on a new lane to the same stages."""
    counts = state.counts
    if counts[lane] < 2:
        return False
    for new in range(len(counts)):
        if counts[new] == 0:
            for hop in range(state.paths.shape[1]):
                state.paths[new, hop] = state.paths[lane, hop]
            counts[new] = 1 + draw[3] % (counts[lane] - 1)
            counts[lane] -= counts[new]
            _lift(new, state)
            return True
    return False


@kernel
def _exchange_roles(draw: Ints, state: State) -> bool:
    """Of two nodes: stage, place in the ring, lanes."""
    nodes = len(state.stage_of)
    x, y = draw[3] % nodes, draw[4] % nodes
    if x == y or (state.stage_of[x] < 0 and state.stage_of[y] < 0):
        return False
    for stage in range(len(state.size)):
        _exchange(state.ring, stage, state.size[stage], x, y)
    for lane in range(len(state.counts)):
        _exchange(state.paths, lane, state.paths.shape[1], x, y)
    state.stage_of[x], state.stage_of[y] = state.stage_of[y], state.stage_of[x]
    _lift_through(x, draw[5] % MOST_REMOVED, draw[6], state)
    _lift_through(y, draw[7] % MOST_REMOVED, draw[8], state)
    return True


@kernel
def _exchange(rows: Ints, row: int, end: int, x: int, y: int) -> None:
    for index in range(end):
        if rows[row, index] == x:
            rows[row, index] = y
        elif rows[row, index] == y:
            rows[row, index] = x


@kernel
def _change_role(draw: Ints, state: State, tables: Tables) -> bool:
    """A node leaves its stage for another, where it takes over lanes, or for none."""
    node = draw[3] % len(state.stage_of)
    old, new = state.stage_of[node], draw[4] % (len(state.size) + 1) - 1
    if old == new or (old >= 0 and state.size[old] == 1):
        return False
    if old >= 0:
        _leave_ring(node, old, state)
        state.stage_of[node] = -1
        through = lanes_through(state)
        for lane in range(len(state.counts)):
            if state.counts[lane] == 0:
                continue
            for hop in range(state.paths.shape[1]):
                if state.paths[lane, hop] == node:
                    substitute = _with_room(old, draw[5] + lane, through, state, tables)
                    if substitute < 0:
                        return False
                    state.paths[lane, hop] = substitute
                    through[substitute] += 1
    if new >= 0:
        _join_ring(node, new, draw[6], state)
        state.stage_of[node] = new
        room = slots_of(node, new, state, tables)
        for nth in range(len(state.counts)):
            lane = (draw[7] + nth) % len(state.counts)
            if room == 0 or state.counts[lane] == 0 or (draw[8] >> (nth % 16)) % 2:
                continue
            for hop in range(state.paths.shape[1]):
                if state.stage_of[state.paths[lane, hop]] == new:
                    state.paths[lane, hop] = node
                    room -= 1
                    break
    return True


@kernel
def _with_room(stage: int, drawn: int, through: Ints, state: State, tables: Tables) -> int:
    """A node of the stage with a slot left; −1: there is none."""
    members = state.size[stage]
    for nth in range(members):
        node = state.ring[stage, (drawn + nth) % members]
        if through[node] < slots_of(node, stage, state, tables):
            return int(node)
    return -1


@kernel
def _leave_ring(node: int, stage: int, state: State) -> None:
    ring, members = state.ring[stage], state.size[stage]
    place = 0
    while ring[place] != node:
        place += 1
    for after in range(place, members - 1):
        ring[after] = ring[after + 1]
    state.size[stage] = members - 1


@kernel
def _join_ring(node: int, stage: int, drawn: int, state: State) -> None:
    ring, members = state.ring[stage], state.size[stage]
    place = drawn % (members + 1)
    for after in range(members, place, -1):
        ring[after] = ring[after - 1]
    ring[place] = node
    state.size[stage] = members + 1


@kernel
def _turn_ring(draw: Ints, state: State) -> bool:
    """A piece of a ring the other way around, or a node at another place of it."""
    stage = draw[3] % len(state.size)
    members = state.size[stage]
    if members < 3:
        return False
    ring = state.ring[stage]
    if draw[4] % 2:
        node = ring[draw[5] % members]
        _leave_ring(node, stage, state)
        _join_ring(node, stage, draw[6], state)
        return True
    low, high = draw[5] % members, draw[6] % members
    low, high = min(low, high), max(low, high)
    while low < high:
        ring[low], ring[high] = ring[high], ring[low]
        low, high = low + 1, high - 1
    return True


@kernel
def _move_layer(draw: Ints, state: State, tables: Tables) -> bool:
    """From a stage to another. Stage 0 keeps its own, so that no larger share of the model is skipped."""
    stages = len(state.size)
    a, b = 1 + draw[3] % (stages - 1), 1 + draw[4] % (stages - 1)
    if a == b or state.layers[a] < 2 or state.layers[b] + 1 >= len(tables.forward_ns):
        return False
    state.layers[a] -= 1
    state.layers[b] += 1
    return True
