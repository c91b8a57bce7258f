"""The objective: whether a state keeps the rules, and how long its iteration is."""

from __future__ import annotations

import numpy as np

from skippipe.collectives.rings import ring_ns
from skippipe.collectives.topology import estimate_exchange, exchange_ns
from skippipe.collectives.transfers import link_ns
from skippipe.constraints import cc2_step
from skippipe.event_loop import run_iteration
from skippipe.jit import Ints, inner_kernel, kernel
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.search.state import State, Tables

TRAVEL_WEIGHT = 400  # the mean lane alone counts by one part in so many
UNEVEN = 30  # a visit too many or too few costs one part in so many: for much less, a chain would stay at such states
CLOSE = 10  # a lane is nearly the last one if it ends in the last of so many parts
CROWD = 4  # how far lanes are within that part counts, on average, by one part in so many


@kernel
def objective(state: State, limit: int, tables: Tables) -> tuple[int, int, int]:
    """The objective in nanoseconds, the spread of exposures, and the iteration alone.

    The objective is the iteration plus a little for travel, for lanes that end nearly last, and for stages that are not
    visited equally often. One lane is the last, and a change of any other would have no effect if those close to it did
    not count.

    INFINITE_NS if another rule is broken, or if the limit is exceeded for certain. The simulation ends as soon as a
    lane has waited too long to be back in time.
    """
    stage_of, counts, paths = state.stage_of, state.counts, state.paths
    nodes, stages = len(stage_of), len(state.size)
    forward, backward, weight = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    slots = np.zeros(nodes, np.int64)
    workers = np.ones(nodes if tables.several else 0, np.int64)
    step_ns = 0
    for node in range(nodes):
        stage = stage_of[node]
        if stage >= 0:
            layers, other = state.layers[stage], min(stage, len(tables.slots) - 1)
            forward[node] = tables.forward_ns[layers, node]
            backward[node] = tables.backward_ns[layers, node]
            weight[node] = tables.weight_ns[layers, node]
            slots[node] = tables.slots[other, layers, node]
            if tables.several:
                workers[node] = tables.workers[other, layers, node]
            step_ns = max(step_ns, tables.step_ns[other, layers, node])
    head = tables.head_ns[state.layers[0]]

    load = np.zeros(nodes, np.int64)
    through = np.zeros(nodes, np.int64)
    exposure = np.zeros(stages, np.int64)
    slack_ns = np.zeros(len(counts), np.int64)
    travel_ns = 0
    lanes = 0
    for lane in range(len(counts)):
        count = counts[lane]
        if count == 0:
            continue
        lanes += 1
        length = state.lengths[lane]
        highest, gap, swapped = -1, 0, tables.swapped
        alone_ns = head[paths[lane, 0]]
        load[paths[lane, 0]] += count * alone_ns
        for hop in range(length):
            node = paths[lane, hop]
            stage = stage_of[node]
            following = paths[lane, hop + 1 if hop + 1 < length else 0]
            allowed, highest, gap, swapped = cc2_step(highest, gap, swapped, stage)
            if not allowed or (hop == 0) != (stage == 0) or not tables.linked[node, following]:
                return INFINITE_NS, 0, INFINITE_NS
            through[node] += 1
            if through[node] > slots[node]:
                return INFINITE_NS, 0, INFINITE_NS
            exposure[stage] += count
            task_ns = forward[node] + backward[node]
            load[node] += count * (task_ns + weight[node])
            alone_ns += task_ns
            alone_ns += tables.flight_ns[node, following] + tables.transmit_ns[0, node, following]
            alone_ns += tables.flight_ns[following, node] + tables.transmit_ns[1, following, node]
        travel_ns += count * alone_ns
        slack_ns[lane] = limit - count * alone_ns - weight[paths[lane, 0]] - step_ns
        if slack_ns[lane] < 0:
            return INFINITE_NS, 0, INFINITE_NS
    visits, visitable = 0, 0
    least, most = INFINITE_NS, 0
    for stage in range(1, stages):
        if tables.visitable[stage]:
            visits += exposure[stage]
            visitable += 1
            least, most = min(least, exposure[stage]), max(most, exposure[stage])
    uneven = 0
    for stage in range(1, stages):
        if tables.visitable[stage]:
            uneven += abs(exposure[stage] - visits // visitable)
    if tables.several:
        for node in range(nodes):
            slots[node] //= workers[node]  # of each worker
            load[node] = -(-load[node] // workers[node])
    for node in range(nodes):
        if load[node] + step_ns > limit:
            return INFINITE_NS, 0, INFINITE_NS

    done_ns = np.zeros(nodes, np.int64)
    widest = state.size.max() if tables.full else 0
    transfers_ns = np.empty((stages, 3, widest, widest), np.int64)
    if tables.full:  # averaging alone can be too long already, and is quickly worked out
        idle = np.flatnonzero(stage_of < 0)
        for stage in range(stages):
            if not tables.only_rings:
                _estimate_exchange(state, stage, idle, tables, transfers_ns[stage])
            if _averaged(state, stage, load, tables, transfers_ns[stage]) + step_ns > limit:
                return INFINITE_NS, 0, INFINITE_NS
    tasks_ns = forward, backward, weight, head
    if tables.several:
        last_ns, left = _run_iteration(state, tables, tasks_ns, slots, workers, slack_ns, done_ns)
    else:
        last_ns, left = _run_iteration(state, tables, tasks_ns, slots, None, slack_ns, done_ns)
    if left > 0:
        return INFINITE_NS, 0, INFINITE_NS
    if tables.full:
        for stage in range(stages):
            ended_ns = _averaged(state, stage, done_ns, tables, transfers_ns[stage])
            last_ns = max(last_ns, ended_ns)
        last_ns += step_ns
    close_ns = 0
    for lane in range(len(counts)):
        if counts[lane] > 0:
            close_ns += max(0, limit - slack_ns[lane] - last_ns + last_ns // CLOSE)
    extra_ns = travel_ns // lanes // TRAVEL_WEIGHT + close_ns // lanes // CROWD
    return last_ns + extra_ns + uneven * (last_ns // UNEVEN), most - least, last_ns


@inner_kernel
def _run_iteration(
    state: State,
    tables: Tables,
    tasks_ns: tuple[Ints, Ints, Ints, Ints],
    slots: Ints,
    workers: Ints | None,
    slack_ns: Ints,
    done_ns: Ints,
) -> tuple[int, int]:
    nodes = len(done_ns)
    return run_iteration(
        state.paths,
        state.lengths,
        state.counts,
        tasks_ns[0],
        tasks_ns[1],
        tasks_ns[2],
        tasks_ns[3],
        slots,
        workers,
        tables.flight_ns,
        tables.transmit_ns,
        tables.upload_ns,
        tables.download_ns,
        tables.full,
        state.dispatch[0],
        tables.split,
        slack_ns,
        done_ns,
        np.empty((nodes, nodes), np.int64) if tables.full else np.empty((1, 1), np.int64),
        np.empty(nodes, np.int64),
        np.empty(nodes, np.int64),
        np.empty((0, 4), np.int64),
        None,
    )


@inner_kernel
def _estimate_exchange(state: State, stage: int, idle: Ints, tables: Tables, transfers_ns: Ints) -> None:
    members = state.size[stage]
    if members > 1:
        estimate_exchange(
            state.ring[stage, :members],
            tables.gradient_bytes[min(stage, len(tables.gradient_bytes) - 1), state.layers[stage]],
            tables.bandwidth,
            tables.flight_ns,
            tables.relayed,
            tables.relayed_by_all,
            idle,
            tables.upload,
            tables.download,
            transfers_ns[0],
            transfers_ns[1],
            transfers_ns[2],
        )
        rounds = tables.rounds[min(stage, len(tables.rounds) - 1)]
        for place in range(members):  # all that is sent is as much in several rounds as in one, but flies in each
            for other in range(members):
                if other != place:
                    transfers_ns[2, place, other] *= rounds


@inner_kernel
def _averaged(state: State, stage: int, done_ns: Ints, tables: Tables, transfers_ns: Ints) -> int:
    """When all nodes of a stage have the sum, in the fastest way."""
    members = state.size[stage]
    if members == 0:
        return 0
    if members == 1:
        return int(done_ns[state.ring[stage, 0]])
    done, transmit, flight = np.empty(members, np.int64), np.empty(members, np.int64), np.empty(members, np.int64)
    gradient_bytes = tables.gradient_bytes[min(stage, len(tables.gradient_bytes) - 1), state.layers[stage]]
    for place in range(members):
        here = state.ring[stage, place]
        there = state.ring[stage, place + 1 if place + 1 < members else 0]
        done[place] = done_ns[here]
        transmit[place] = link_ns(-(-gradient_bytes // members), tables.bandwidth[here, there])
        flight[place] = tables.flight_ns[here, there] * tables.rounds[min(stage, len(tables.rounds) - 1)]
    averaged = ring_ns(done, transmit, flight)
    if not tables.only_rings:
        averaged = min(averaged, exchange_ns(done, transfers_ns[0], transfers_ns[1], transfers_ns[2]))
    return averaged
