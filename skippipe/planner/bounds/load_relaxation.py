"""Relaxations that look at nodes alone: the work they must do, the lanes they can carry, the rings they form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, kron
from scipy.sparse.csgraph import minimum_spanning_tree

from skippipe.cost_model import NEVER_NS, CostModel
from skippipe.jit import Floats, Ints
from skippipe.planner.bounds.node_classes import NodeClasses
from skippipe.planner.problem import Problem

MARGIN = 1e-6  # of a stage's share: by how much a proof must hold
WHOLE_NODES = 300  # (stage, class) pairs: with more, nodes may be divided over stages
MILP_LIMIT_S = 1.0
ROUNDING = 1e-9  # more than a sum of doubles is off by
INFEASIBLE = 2  # what scipy calls it


def share_of(problem: Problem, stage: int) -> int:
    """The microbatches that visit the stage (CC3)."""
    microbatches = problem.workload.microbatches
    return microbatches if stage == 0 else microbatches * (problem.visited - 1) // (problem.stages - 1)


def work_ns(classes: NodeClasses) -> Ints:
    """[stage, class]: nanoseconds of one of a node's workers for one microbatch."""
    work: Ints = classes.forward_ns + classes.backward_ns + classes.weight_ns
    work[0] += classes.head_ns
    return work


def before_ns(classes: NodeClasses) -> Ints:
    """[class]: the earliest start of the first task on a node of a stage other than 0."""
    first: Ints = classes.forward_ns[0][classes.slots[0] > 0].min(initial=NEVER_NS) + classes.hop_in_ns
    return first


def after_ns(classes: NodeClasses) -> Ints:
    """[class]: the least time between the last task on such a node and the end."""
    if classes.weight_ns.any():  # that may be a weight gradient, which no task waits for
        return np.zeros(len(classes), np.int64)
    last: Ints = classes.backward_ns[0][classes.slots[0] > 0].min(initial=NEVER_NS) + classes.hop_out_ns
    return last


def data_idle_ns(classes: NodeClasses, rounds_ns: Ints) -> tuple[Ints, Ints]:
    """[class]: how long the workers of a data node are idle at least, all together, until its first microbatch comes
    back and from when its last one sets out: no more than its slots hold are under way, and there is no other work.

    The two are apart if it has more microbatches than slots: the last one waits for a slot, so for one that is back.
    """
    slots, workers = classes.slots[0], classes.workers[0]
    forward_ns, backward_ns, weight_ns = classes.forward_ns[0], classes.backward_ns[0], classes.weight_ns[0]
    round_ns = np.minimum(rounds_ns, NEVER_NS // (4 * workers))  # sums must not overflow
    first_ns = workers * (round_ns - backward_ns) - slots * (forward_ns + classes.head_ns)
    last_ns = workers * (round_ns + weight_ns) - forward_ns - slots * (classes.head_ns + backward_ns + weight_ns)
    return np.maximum(0, first_ns), np.maximum(0, last_ns)


def lanes_infeasible_by(problem: Problem, classes: NodeClasses, rounds_ns: Ints, deadline_ns: int) -> bool:
    """Proven: no lanes bring all microbatches home by then.

    Lanes with k microbatches and more fit only on nodes whose shortest round passes k times; each needs L slots.
    """
    slots = np.maximum(classes.slots[0], classes.slots[1:].max(axis=0)) * classes.count
    rounds = np.maximum(0, deadline_ns - int(classes.weight_ns[0].min())) // rounds_ns
    brought = 0
    for often in range(1, int(rounds.max(initial=0)) + 1):
        lanes = int(slots[rounds >= often].sum()) // problem.visited
        brought += lanes
        if lanes == 0 or brought >= problem.workload.microbatches:
            break
    return brought < problem.workload.microbatches


def load_infeasible_by(
    problem: Problem,
    classes: NodeClasses,
    rounds_ns: Ints,
    deadline_ns: int,
    limit_s: float,
    averaging_ns: Sequence[int] = (),
) -> bool:
    """Proven: no choice of a stage for every node does each stage's share by then; with `averaging_ns` [stage], no
    later than so long before."""
    stages, number = problem.stages, len(classes)
    tail_ns = np.array(averaging_ns or [0] * stages, np.int64)
    window_ns = deadline_ns - before_ns(classes) - np.maximum(after_ns(classes), tail_ns[:, None])
    data_ns = deadline_ns - int(tail_ns[0])
    work = work_ns(classes)
    by_time = classes.workers * np.maximum(0, window_ns) // work
    first_ns, last_ns = data_idle_ns(classes, rounds_ns)
    workers_ns = classes.workers[0] * data_ns
    many = np.maximum(0, workers_ns - first_ns - last_ns) // work[0]
    few = np.maximum(0, workers_ns - np.maximum(first_ns, last_ns)) // work[0]
    by_time[0] = np.maximum(many, np.minimum(few, classes.slots[0]))
    by_lanes = classes.slots * (np.maximum(0, deadline_ns - int(classes.weight_ns[0].min())) // rounds_ns)
    shares = np.array([share_of(problem, stage) for stage in range(stages)])
    each = np.minimum(np.minimum(by_time, by_lanes), shares[:, None]) / shares[:, None]
    if (each.max(axis=1) == 0).any():
        return True
    # unknown: the nodes of each class on each stage
    done = csr_array((each.ravel(), (np.repeat(np.arange(stages), number), np.arange(each.size))))
    used = kron(np.ones((1, stages)), eye_array(number))
    outcome = milp(
        np.zeros(each.size),
        integrality=np.full(each.size, int(each.size <= WHOLE_NODES)),
        constraints=[LinearConstraint(done, 1 - MARGIN, np.inf), LinearConstraint(csr_array(used), 0, classes.count)],
        options={"time_limit": min(MILP_LIMIT_S, max(limit_s, 0.01))},
    )
    return bool(outcome.status == INFEASIBLE)


def loaded_by_size_ns(
    problem: Problem, classes: NodeClasses, stage: int, most: int, rounds_ns: Ints | None = None
) -> list[int]:
    """When a stage of 1, 2, … nodes is done with its share, at the earliest: with the fastest nodes. With round trips
    [class], data nodes are idle while they wait for the first and the last."""
    able = classes.slots[stage] > 0
    work, workers = work_ns(classes)[stage, able], classes.workers[stage, able]
    taken_ns = np.sort(np.repeat(work / workers, classes.count[able]))[:most]
    first_ns = int(before_ns(classes)[able].min(initial=NEVER_NS)) if stage else 0
    share = share_of(problem, stage)
    on_busiest = -(-share // np.arange(1, len(taken_ns) + 1))
    busiest_ns = -(-on_busiest[:, None] * work // workers)
    if stage == 0 and rounds_ns is not None:
        begin_ns, end_ns = (each[able] for each in data_idle_ns(classes, rounds_ns))
        least_ns = np.maximum(begin_ns, end_ns) // workers
        more = on_busiest[:, None] > classes.slots[0, able]
        busiest_ns = busiest_ns + np.where(more, (begin_ns + end_ns) // workers, least_ns)
        first_ns = int(least_ns.min(initial=NEVER_NS))
        busiest_ns = busiest_ns - first_ns
    together_ns = (share / np.cumsum(1 / taken_ns) * (1 - ROUNDING)).astype(np.int64)
    found: list[int] = (first_ns + np.maximum(busiest_ns.min(axis=1, initial=NEVER_NS), together_ns)).tolist()
    return found + [NEVER_NS] * (most - len(found))


def averaging_by_size_ns(problem: Problem, stage: int, most: int) -> list[int]:
    """Least time for which a stage of 1, 2, … nodes averages after the last of them is done. A round takes as long
    after the last node has ended the one before."""
    costs = problem.costs
    able = np.flatnonzero(costs.slots[stage] > 0)
    bandwidth = costs.bandwidth_bytes_per_s[np.ix_(able, able)].copy()
    np.fill_diagonal(bandwidth, 0)
    flight_ns = costs.flight_ns[np.ix_(able, able)] + np.diag(np.full(len(able), NEVER_NS))
    if costs.collective.only_rings:
        rounds = [_ring_by_size_ns(size, bandwidth, flight_ns, most) for size in costs.gradient_rounds[stage]]
    else:
        rounds = [_exchange_by_size_ns(costs, size, able, most) for size in costs.gradient_rounds[stage]]
    return [min(sum(each), NEVER_NS) for each in zip(*rounds, strict=True)]


def _exchange_by_size_ns(costs: CostModel, gradient_bytes: int, able: Ints, most: int) -> list[int]:
    """Whatever the pieces, trees and relays: all of the last node's gradient leaves it afterwards, over all its links,
    as contributions or within the sums of which it is the root; and some node has all but an m-th of the sum still to
    come, which cannot set out before the last node's contribution has arrived."""
    bandwidth = costs.bandwidth_bytes_per_s.copy()
    np.fill_diagonal(bandwidth, 0)
    leaves = np.minimum(bandwidth.sum(axis=1), costs.upload_bytes_per_s)[able].max(initial=0)
    enters = np.minimum(bandwidth.sum(axis=0), costs.download_bytes_per_s)[able].max(initial=0)
    apart_ns = costs.flight_ns + np.diag(np.full(costs.nodes, NEVER_NS))
    least_flight_ns = int(apart_ns.min())
    found = [0]
    for size in range(2, most + 1):
        if size > len(able) or leaves == 0 or enters == 0:
            found.append(NEVER_NS)
            continue
        leaves_ns = gradient_bytes / leaves * 1e9 + least_flight_ns
        enters_ns = (size - 1) / size * gradient_bytes / enters * 1e9 + 2 * least_flight_ns
        found.append(int(min(max(leaves_ns, enters_ns) * (1 - ROUNDING), NEVER_NS)))
    return found


def _ring_by_size_ns(gradient_bytes: int, bandwidth: Floats, flight_ns: Ints, most: int) -> list[int]:
    """A chunk of the last node passes 2(m − 1) edges in a row: all of the ring and then all but two again. And a node
    with a slow edge, d edges further on, has all its steps but the first d left to send."""
    best_edge = np.sort(bandwidth.max(axis=1, initial=0))[::-1]
    slow_edge = _bandwidth_that_connects(bandwidth)
    flights_ns = np.sort(flight_ns.min(axis=1, initial=NEVER_NS))
    found = [0]
    for size in range(2, most + 1):
        if size > len(bandwidth) or slow_edge[size - 1] == 0:
            found.append(NEVER_NS)
            continue
        chunk = -(-gradient_bytes // size)
        edges = np.append(best_edge[: size - 1], min(slow_edge[size - 1], best_edge[size - 1]))
        with np.errstate(over="ignore", divide="ignore"):
            sent_ns = np.minimum(np.rint(chunk / edges * 1e9), NEVER_NS).astype(np.int64)
        way_ns = np.concatenate([[0], np.cumsum(sent_ns + flights_ns[:size])])
        further = np.arange(size)
        waiting_ns = way_ns[further] + (2 * (size - 1) - further) * sent_ns[-1] + flights_ns[0]
        found.append(min(max(int(way_ns[size] + way_ns[size - 2]), int(waiting_ns.min())), NEVER_NS))
    return found


def _bandwidth_that_connects(bandwidth: Floats) -> Floats:
    """[m − 1]: some edge of any ring of m nodes has at most this bandwidth; 0 where there is no such ring."""
    either_way = np.maximum(bandwidth, bandwidth.T)
    with np.errstate(divide="ignore"):
        slowness = np.where(either_way > 0, 1 / either_way, 0)
    tree = minimum_spanning_tree(csr_array(slowness)).tocoo()
    found = np.zeros(len(bandwidth))
    found[:1] = np.inf
    group = np.arange(len(bandwidth))
    largest = 1
    for edge in np.argsort(tree.data, kind="stable"):
        a, b = int(tree.row[edge]), int(tree.col[edge])
        group[group == group[b]] = group[a]
        size = int((group == group[a]).sum())
        found[largest:size] = either_way[a, b]
        largest = max(largest, size)
    return found


def least_step_ns(problem: Problem) -> int:
    """The slowest optimizer step that some node must take."""
    costs = problem.costs
    return int(np.where(costs.slots > 0, costs.optimizer_ns, NEVER_NS).min(axis=1).max())
