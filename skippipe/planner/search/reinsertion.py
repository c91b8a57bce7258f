"""Recreate: ruined lanes are reinserted one after another, each over the best nodes that have a slot left."""

from __future__ import annotations

import numpy as np

from skippipe.jit import Ints, inner_kernel, kernel
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.search.state import State, Tables, lanes_through, slots_of

NOISE = 8  # how differently hops are seen: by up to one part in so many
MOST_STARTS = 6  # data nodes from which a lane is tried


@kernel
def recreate(draw: Ints, state: State, tables: Tables) -> bool:
    """Reinsert all ruined lanes; False: one has no path. Called beside `propose`, not by it: it is long, and is
    compiled into every kernel that calls it."""
    lanes = len(state.counts)
    for nth in range(lanes):
        lane = (draw[13] + nth) % lanes
        if state.counts[lane] < 0 and not _reinsert(lane, draw, state, tables):
            return False
    return True


@inner_kernel
def _reinsert(lane: int, draw: Ints, state: State, tables: Tables) -> bool:
    """Give a lane the best nodes of its stages, among those with a slot left; busy ones seem longer, and all a bit
    random.

    A path over few stages: from each data node, the shortest path through the stages and back.
    """
    paths, length = state.paths, state.lengths[lane]
    through = lanes_through(state)
    node_load_ns = _load_ns(state, tables)
    state.counts[lane] = -state.counts[lane]
    visits = np.empty(length, np.int64)
    widest = 1
    for hop in range(length):
        visits[hop] = state.stage_of[paths[lane, hop]]
        widest = max(widest, state.size[visits[hop]])
    noise = draw[9] % 3
    salt = draw[10] | 1
    load_weight = draw[11] % 4
    reached = np.empty((length, widest), np.int64)
    came_from = np.empty((length, widest), np.int64)
    best_ns = INFINITE_NS
    starts = state.size[0]
    for nth in range(min(starts, MOST_STARTS)):
        start = state.ring[0, (draw[12] + nth) % starts]
        if starts > MOST_STARTS and nth == 0:
            start = paths[lane, 0]
        if through[start] >= slots_of(start, 0, state, tables):
            continue
        first_ns = load_weight * node_load_ns[start] // 4
        for hop in range(1, length):
            stage = visits[hop]
            layers = state.layers[stage]
            for here in range(state.size[stage]):
                node = state.ring[stage, here]
                reached[hop, here] = INFINITE_NS
                if through[node] >= slots_of(node, stage, state, tables):
                    continue
                own_ns = (
                    tables.forward_ns[layers, node]
                    + tables.backward_ns[layers, node]
                    + load_weight * node_load_ns[node] // 4
                )
                if hop == 1:
                    if tables.linked[start, node]:
                        reached[hop, here] = first_ns + own_ns + _noisy_hop_ns(start, node, noise, salt, tables)
                        came_from[hop, here] = 0
                    continue
                for there in range(state.size[visits[hop - 1]]):
                    before_ns = reached[hop - 1, there]
                    before = state.ring[visits[hop - 1], there]
                    if before_ns >= INFINITE_NS or not tables.linked[before, node]:
                        continue
                    total_ns = before_ns + own_ns + _noisy_hop_ns(before, node, noise, salt, tables)
                    if total_ns < reached[hop, here]:
                        reached[hop, here] = total_ns
                        came_from[hop, here] = there
        last = visits[length - 1]
        for here in range(state.size[last]):
            node = state.ring[last, here]
            if reached[length - 1, here] >= INFINITE_NS or not tables.linked[node, start]:
                continue
            total_ns = reached[length - 1, here] + _noisy_hop_ns(node, start, noise, salt, tables)
            if total_ns < best_ns:
                best_ns = total_ns
                paths[lane, 0] = start
                at = here
                for hop in range(length - 1, 0, -1):
                    paths[lane, hop] = state.ring[visits[hop], at]
                    at = came_from[hop, at]
    return bool(best_ns < INFINITE_NS)


@inner_kernel
def _noisy_hop_ns(a: int, b: int, noise: int, salt: int, tables: Tables) -> int:
    """Nanoseconds of a hop there and back, with noise."""
    sent_ns = tables.transmit_ns[0, a, b] + tables.transmit_ns[1, b, a]
    hop_ns = tables.flight_ns[a, b] + tables.flight_ns[b, a] + sent_ns
    if noise == 0:
        return int(hop_ns)
    mixed = ((a * 7919 + b * 104729) * salt) >> 7
    return int(hop_ns + hop_ns // (NOISE * 256) * noise * (mixed % 256))


@inner_kernel
def _load_ns(state: State, tables: Tables) -> Ints:
    """[node]: nanoseconds of work for its lanes in an iteration, for each of its workers."""
    node_load_ns = np.zeros(len(state.stage_of), np.int64)
    for lane in range(len(state.counts)):
        count = state.counts[lane]
        if count <= 0:
            continue
        for hop in range(state.lengths[lane]):
            node = state.paths[lane, hop]
            layers = state.layers[state.stage_of[node]]
            node_load_ns[node] += count * (tables.forward_ns[layers, node] + tables.backward_ns[layers, node])
    if tables.several:
        for node in range(len(node_load_ns)):
            stage = state.stage_of[node]
            if stage >= 0:
                node_load_ns[node] //= tables.workers[min(stage, len(tables.workers) - 1), state.layers[stage], node]
    return node_load_ns
