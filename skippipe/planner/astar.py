"""The best path of one microbatch: A* with time as a dimension, forward and backward pass together.

The heuristic is exact for a cluster without other traffic: a table of the cheapest cost to go from every node, within
the rules (`_cost_to_go`). Without forbidden intervals the search therefore walks straight to the best path; with them,
every delay makes it look at the next best. Paths are kept apart even when they meet in a node, since the backward pass
depends on the whole of them.
"""

from __future__ import annotations

import numpy as np

from skippipe.constraints import MAX_SWAPS, cc2_step
from skippipe.event_loop import drop_first, push
from skippipe.jit import Flags, Ints, inner_kernel, kernel

INFINITE_NS = 2**62
LABEL_LIMIT_REACHED = -1
GAP, LATE = 1, 2  # how a node was reached: 0 in order, GAP leaving the stage before it open, LATE closing such a gap
NEVER_BUSY = np.empty((0, 3), np.int64)
MAX_LABELS = 20_000  # partial paths that one search may look at


@inner_kernel
def _follow(stage: int, mode: int, swaps: int, following: int, required: Flags) -> tuple[bool, int, int]:
    """Whether `following` may be visited next; if so, how, and with how many swaps used."""
    highest = stage + 1 if mode == LATE else stage
    allowed, now_highest, gap, swaps = cc2_step(highest, 1 if mode == GAP else 0, swaps, following)
    if not allowed:
        return False, 0, 0
    if following < now_highest:
        return True, LATE, swaps
    if mode == GAP and required[highest - 1]:
        return False, 0, 0  # the open stage had to come now
    for stage_between in range(highest + 1, following - 1):
        if required[stage_between]:
            return False, 0, 0
    return True, gap, swaps


@inner_kernel
def _may_end(stage: int, mode: int, required: Flags) -> bool:
    highest = stage + 1 if mode == LATE else stage
    if mode == GAP and required[highest - 1]:
        return False
    return not required[highest + 1 :].any()


@inner_kernel
def _cost_to_go(
    data_node: int, visited: int, stage_of: Ints, allowed: Flags, required: Flags, task_ns: Ints, hop_ns: Ints
) -> Ints:
    """[visits left, node, mode, swaps]: cost to go, the cheapest rest of the round trip after the node's own tasks."""
    nodes = len(stage_of)
    table = np.full((visited, nodes, 3, MAX_SWAPS + 1), INFINITE_NS, np.int64)
    for node in range(nodes):
        if stage_of[node] > 0 and allowed[node]:
            home = hop_ns[node, data_node] + hop_ns[data_node, node]
            for mode in range(3):
                if _may_end(stage_of[node], mode, required):
                    table[0, node, mode, :] = home
    for left in range(1, visited):
        for node in range(nodes):
            if left == visited - 1:
                if node != data_node:
                    continue
            elif stage_of[node] <= 0 or not allowed[node]:
                continue
            for mode in range(3):
                for swaps in range(MAX_SWAPS + 1):
                    best = INFINITE_NS
                    for following in range(nodes):
                        if stage_of[following] <= 0 or not allowed[following]:
                            continue
                        ok, mode_there, swaps_there = _follow(
                            stage_of[node], mode, swaps, stage_of[following], required
                        )
                        if not ok:
                            continue
                        rest = table[left - 1, following, mode_there, swaps_there]
                        if rest < INFINITE_NS:
                            way = rest + hop_ns[node, following] + hop_ns[following, node] + task_ns[following]
                            best = min(best, way)
                    table[left, node, mode, swaps] = best
    return table


@inner_kernel
def _earliest_start(node: int, ready_ns: int, length_ns: int, busy: Ints) -> int:
    """The earliest start at which the task meets no forbidden interval of the node."""
    start = ready_ns
    moved = True
    while moved:
        moved = False
        for k in range(len(busy)):
            if busy[k, 0] == node and start < busy[k, 2] and start + length_ns > busy[k, 1]:
                start = busy[k, 2]
                moved = True
    return start


@inner_kernel
def _back_at(path: Ints, sent_ns: int, head_ns: int, backward_ns: Ints, hop_ns: Ints, busy: Ints) -> int:
    """When a microbatch is back whose last forward ended at `sent_ns`: head, then backward over the path."""
    home = path[0]
    time = sent_ns + hop_ns[path[-1], home]
    time = _earliest_start(home, time, head_ns, busy) + head_ns
    came_from = home
    for node in path[::-1]:
        time += hop_ns[came_from, node]
        time = _earliest_start(node, time, backward_ns[node], busy) + backward_ns[node]
        came_from = node
    return int(time)


@kernel
def best_path(
    data_node: int,
    visited: int,
    swaps: int,  # that the path may have
    stage_of: Ints,  # [node]; −1: not used
    allowed: Flags,  # [node]
    required: Flags,  # [stage]
    forward_ns: Ints,  # [node]
    backward_ns: Ints,  # [node]
    head_ns: int,
    hop_ns: Ints,  # [from, to]
    begin_ns: int,
    busy: Ints,  # [interval, (node, from, until)]: when a node must not be used
    path: Ints,  # out: [hop]
) -> int:
    """Nanoseconds from `begin_ns` until the microbatch is back; the path is left in `path`.

    INFINITE_NS if there is no path, LABEL_LIMIT_REACHED if the intervals leave too many paths to look at.
    """
    nodes = len(stage_of)
    table = _cost_to_go(data_node, visited, stage_of, allowed, required, forward_ns + backward_ns, hop_ns)
    if table[visited - 1, data_node, 0, MAX_SWAPS - swaps] >= INFINITE_NS:
        return INFINITE_NS

    # A label is a partial path: the node it ends in, how it got there, and when the forward pass leaves that node.
    node_of = np.empty(MAX_LABELS, np.int64)
    before = np.empty(MAX_LABELS, np.int64)
    mode_of = np.empty(MAX_LABELS, np.int64)
    swaps_of = np.empty(MAX_LABELS, np.int64)
    depth_of = np.empty(MAX_LABELS, np.int64)  # `visited` once the round trip is complete
    sent_ns = np.empty(MAX_LABELS, np.int64)
    way_back_ns = np.empty(MAX_LABELS, np.int64)  # at least
    keys = np.empty(MAX_LABELS, np.int64)
    values = np.empty(MAX_LABELS, np.int64)

    node_of[0], before[0], mode_of[0], swaps_of[0], depth_of[0] = data_node, -1, 0, MAX_SWAPS - swaps, 0
    start = _earliest_start(data_node, begin_ns, forward_ns[data_node], busy)
    sent_ns[0] = start + forward_ns[data_node]
    way_back_ns[0] = head_ns + backward_ns[data_node]
    labels = 1
    size = push(keys, values, 0, 0, 0)

    while size > 0:
        label = values[0]
        cost = keys[0]
        size = drop_first(keys, values, size)
        depth = depth_of[label]
        node = node_of[label]
        if depth >= visited - 1:
            back = label
            for hop in range(visited - 1, -1, -1):
                path[hop] = node_of[back]
                back = before[back]
        if depth == visited:
            return int(cost)
        if labels + nodes >= MAX_LABELS:
            return LABEL_LIMIT_REACHED
        if depth == visited - 1:
            node_of[labels], before[labels], depth_of[labels] = node, before[label], visited
            back_at = _back_at(path, sent_ns[label], head_ns, backward_ns, hop_ns, busy)
            size = push(keys, values, size, back_at - begin_ns, labels)
            labels += 1
            continue
        for following in range(nodes):
            if stage_of[following] <= 0 or not allowed[following]:
                continue
            ok, mode, swapped = _follow(stage_of[node], mode_of[label], swaps_of[label], stage_of[following], required)
            if not ok:
                continue
            rest = table[visited - 2 - depth, following, mode, swapped]
            if rest >= INFINITE_NS:
                continue
            arrival = sent_ns[label] + hop_ns[node, following]
            start = _earliest_start(following, arrival, forward_ns[following], busy)
            node_of[labels], before[labels], depth_of[labels] = following, label, depth + 1
            mode_of[labels], swaps_of[labels] = mode, swapped
            sent_ns[labels] = start + forward_ns[following]
            way_back_ns[labels] = way_back_ns[label] + hop_ns[following, node] + backward_ns[following]
            least = sent_ns[labels] + way_back_ns[labels] + rest - begin_ns
            size = push(keys, values, size, least, labels)
            labels += 1
    return INFINITE_NS
