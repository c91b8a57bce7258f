"""Lanes changed a little, again and again, for as long as that makes an iteration shorter.

A change takes another node of the same stage, exchanges nodes or stages between two lanes, swaps neighbours on a path,
moves microbatches from lane to lane, or starts a lane where memory is left. One that breaks a rule is not looked at
further; the others are simulated, averaging included. Worse ones are taken too while it is warm: it cools down in
rounds, and each round begins with the best lanes so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skippipe.collectives.ring import Rings, averaging_spans
from skippipe.constraints import MAX_SWAPS, cc2_step
from skippipe.event_loop import run
from skippipe.jit import kernel
from skippipe.planner.astar import NO_WAY
from skippipe.planner.problem import Budget
from skippipe.planner.search.state import move_microbatches, put_in_order, visits
from skippipe.simulator import Course

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Lanes = list[tuple[tuple[int, ...], int]]
"""(path, microbatches) of every lane; all paths visit the same number of stages."""

AT_ONCE = 16  # changes between two looks at the effort
COOLING = 96  # such steps in a round
PROGRESS = 0.001  # of a round: while there is as much, it stays cold
TEMPERATURE = 0.15  # by how much worse lanes may be at the start of a round, shared by their number
TRAVEL_WEIGHT = 500  # of two equally short iterations, the one with less travel; it counts one part in so many
KINDS = 9  # of changes, see `_change`


class LaneConstraints(NamedTuple):
    """What lanes must keep to, for the kernels."""

    stage_of: Ints
    nodes: Ints
    first: Ints
    linked: Flags
    swapped: int
    """Swaps that count as used before a path begins."""
    uneven: int
    """By how much the exposures of stages may differ."""


class TaskTimes(NamedTuple):
    """A course, for the kernels."""

    forward_ns: Ints
    backward_ns: Ints
    weight_ns: Ints
    head_ns: Ints
    slots: Ints
    flight_ns: Ints
    transmit_ns: Ints
    order: int
    split: bool
    ring_nodes: Ints
    ring_transmit_ns: Ints
    ring_flight_ns: Ints
    ring_ends: Ints
    step_ns: int


@dataclass(frozen=True)
class LaneProblem:
    """What lanes run on, and what they must keep to."""

    course: Course
    rings: Rings
    """The search reckons with the time of a ring, whatever the collective."""
    stage_of: Ints
    """[node]; −1: no lane may use it."""
    nodes: Ints
    """Those that lanes may use, stage by stage."""
    first: Ints
    """[stage]: where its nodes begin; one more entry for the end."""
    linked: Flags
    """[node, node]: messages get through both ways."""
    swaps: int
    """That a path may have."""
    length: int
    """Of every path."""
    room: int
    """Lanes that there can be."""

    def rerouted(self, lanes: Lanes, effort: Budget) -> Lanes:
        """The best lanes found; they expose stages no less evenly than the given ones."""
        search = _Search(self, lanes)
        while effort.spend():
            search.step(effort.spent - 1)
        return search.best()

    def score(self, lanes: Lanes) -> int:
        """Nanoseconds of an iteration and a little for travel; NO_WAY if a rule is broken."""
        return _Search(self, lanes).score

    def spread(self, lanes: Lanes) -> int:
        """How unevenly the lanes visit the stages that have nodes."""
        counts = [0] * (len(self.first) - 1)
        for path, microbatches in lanes:
            for node in path:
                counts[self.stage_of[node]] += microbatches
        held = [counts[stage] for stage in range(1, len(counts)) if self.first[stage] < self.first[stage + 1]]
        return max(held) - min(held)


class _Search:
    def __init__(self, ground: LaneProblem, lanes: Lanes) -> None:
        course, rings = ground.course, ground.rings
        room = max(ground.room, len(lanes))
        self.paths = np.zeros((room, ground.length), np.int64)
        self.counts = np.zeros(room, np.int64)
        for lane, (path, microbatches) in enumerate(lanes):
            self.paths[lane] = path
            self.counts[lane] = microbatches
        self.draw = np.random.default_rng(0)
        self.demands = LaneConstraints(
            stage_of=ground.stage_of,
            nodes=ground.nodes,
            first=ground.first,
            linked=ground.linked,
            swapped=MAX_SWAPS - ground.swaps,
            uneven=ground.spread(lanes),
        )
        self.times = TaskTimes(
            forward_ns=course.forward_ns,
            backward_ns=course.backward_ns,
            weight_ns=course.weight_ns,
            head_ns=course.head_ns,
            slots=course.slots,
            flight_ns=course.flight_ns,
            transmit_ns=course.transmit_ns,
            order=course.order,
            split=course.split_backward,
            ring_nodes=rings.nodes,
            ring_transmit_ns=rings.transmit_ns,
            ring_flight_ns=rings.flight_ns,
            ring_ends=rings.ends,
            step_ns=course.step_ns,
        )
        self.lengths = np.full(room, ground.length, np.int64)
        self.score = int(evaluate(self.paths, self.lengths, self.counts, NO_WAY, self.demands, self.times))
        self.best_paths, self.best_counts = self.paths.copy(), self.counts.copy()
        self.scores = np.array([self.score, self.score])
        self.downhill = True

    def step(self, number: int) -> None:
        place = number % COOLING
        if place == 0:
            best = int(self.scores[1])
            self.downhill = number == 0 or best < (1 - PROGRESS) * self.score
            self.score = best
            self.paths[:], self.counts[:] = self.best_paths, self.best_counts
            self.scores[0] = best
        warm = 0.0 if self.downhill else TEMPERATURE / len(self.counts) * (1 - place / COOLING)
        draws = self.draw.integers(0, 2**31, (AT_ONCE, 10))
        arrays = (self.paths, self.lengths, self.counts, self.best_paths, self.best_counts, self.scores)
        search_lanes(*arrays, draws, warm, self.demands, self.times)

    def best(self) -> Lanes:
        return [
            (tuple(path), microbatches)
            for path, microbatches in zip(self.best_paths.tolist(), self.best_counts.tolist(), strict=True)
            if microbatches
        ]


@kernel
def search_lanes(
    paths: Ints,  # [lane, hop]; a lane without microbatches is not there
    lengths: Ints,
    counts: Ints,
    best_paths: Ints,
    best_counts: Ints,
    scores: Ints,  # of the lanes, and of the best
    draws: Ints,  # [change, …]
    warm: float,
    demands: LaneConstraints,
    times: TaskTimes,
) -> None:
    """Try changes one after another; the lanes and the best lanes are changed in place."""
    trial_paths, trial_counts = paths.copy(), counts.copy()
    for draw in draws:
        if not _change(draw, trial_paths, trial_counts, demands, times.slots):
            trial_paths[:], trial_counts[:] = paths, counts
            continue
        limit = scores[0] + int(warm * (draw[0] % 1024) / 1024 * scores[0])
        score = evaluate(trial_paths, lengths, trial_counts, limit, demands, times)
        if score > limit:
            trial_paths[:], trial_counts[:] = paths, counts
            continue
        paths[:], counts[:] = trial_paths, trial_counts
        scores[0] = score
        if score < scores[1]:
            best_paths[:], best_counts[:] = paths, counts
            scores[1] = score


@kernel
def evaluate(paths: Ints, lengths: Ints, counts: Ints, limit: int, demands: LaneConstraints, times: TaskTimes) -> int:
    """Nanoseconds of an iteration, and a little for travel; NO_WAY if a rule is broken or it is over the limit."""
    length = paths.shape[1]
    first = demands.first
    through = np.zeros(len(demands.stage_of), np.int64)
    exposure = np.zeros(len(first) - 1, np.int64)
    travel_ns = 0
    lanes = 0
    for lane in range(len(counts)):
        if counts[lane] == 0:
            continue
        lanes += 1
        highest, gap, swapped = -1, 0, demands.swapped
        alone_ns = times.head_ns[paths[lane, 0]]
        for hop in range(length):
            node = paths[lane, hop]
            stage = demands.stage_of[node]
            following = paths[lane, hop + 1 if hop + 1 < length else 0]
            allowed, highest, gap, swapped = cc2_step(highest, gap, swapped, stage)
            if not allowed or (hop == 0) != (stage == 0) or not demands.linked[node, following]:
                return NO_WAY
            through[node] += 1
            if through[node] > times.slots[node]:
                return NO_WAY
            exposure[stage] += counts[lane]
            alone_ns += times.forward_ns[node] + times.backward_ns[node]
            alone_ns += times.flight_ns[node, following] + times.transmit_ns[node, following]
            alone_ns += times.flight_ns[following, node] + times.transmit_ns[following, node]
        travel_ns += counts[lane] * alone_ns
        if counts[lane] * alone_ns + times.step_ns > limit:
            return NO_WAY
    lowest, most = NO_WAY, 0
    for stage in range(1, len(exposure)):
        if first[stage] < first[stage + 1]:
            lowest, most = min(lowest, exposure[stage]), max(most, exposure[stage])
    if most - lowest > demands.uneven:
        return NO_WAY
    done_ns = np.zeros(len(demands.stage_of), np.int64)
    _, left = run(
        paths,
        lengths,
        counts,
        times.forward_ns,
        times.backward_ns,
        times.weight_ns,
        times.head_ns,
        times.slots,
        times.flight_ns,
        times.transmit_ns,
        True,
        times.order,
        times.split,
        np.empty(0, np.int64),
        done_ns,
        np.empty((0, 3), np.int64),
    )
    if left > 0:
        return NO_WAY
    spans = np.empty((len(times.ring_ends), 2), np.int64)
    averaging_spans(done_ns, times.ring_nodes, times.ring_transmit_ns, times.ring_flight_ns, times.ring_ends, spans)
    return int(spans[:, 1].max() + times.step_ns + travel_ns // lanes // TRAVEL_WEIGHT)


@kernel
def _change(draw: Ints, paths: Ints, counts: Ints, demands: LaneConstraints, slots: Ints) -> bool:
    """Make one change; False if there is nothing to change in the lanes drawn."""
    stage_of, first = demands.stage_of, demands.first
    kind = draw[1] % KINDS
    length = paths.shape[1]
    a, b = draw[2] % len(counts), draw[3] % len(counts)
    if counts[a] == 0 or counts[b] == 0:
        return False
    if kind <= 1:  # another node of the stage
        hop = draw[4] % length
        node = _member(stage_of[paths[a, hop]], draw[5], demands)
        if node == paths[a, hop]:
            return False
        paths[a, hop] = node
        return True
    if kind == 2:  # nodes of one stage change lanes
        hop = draw[4] % length
        for other in range(length):
            if stage_of[paths[b, other]] == stage_of[paths[a, hop]]:
                if paths[b, other] == paths[a, hop]:
                    return False
                paths[a, hop], paths[b, other] = paths[b, other], paths[a, hop]
                return True
        return False
    if kind == 3:  # stages change lanes, with their nodes
        here, there = 1 + draw[4] % (length - 1), 1 + draw[5] % (length - 1)
        if visits(paths[b], stage_of[paths[a, here]], stage_of):
            return False
        if visits(paths[a], stage_of[paths[b, there]], stage_of):
            return False
        paths[a, here], paths[b, there] = paths[b, there], paths[a, here]
        put_in_order(paths[a], stage_of)
        put_in_order(paths[b], stage_of)
        return True
    if kind == 4:  # neighbours on a path swap
        if length < 3:
            return False
        hop = 1 + draw[4] % (length - 2)
        paths[a, hop], paths[a, hop + 1] = paths[a, hop + 1], paths[a, hop]
        return True
    if kind == 5:  # a stage for another
        hop = 1 + draw[4] % (length - 1)
        stage = 1 + draw[5] % (len(first) - 2)
        if first[stage] == first[stage + 1] or visits(paths[a], stage, stage_of):
            return False
        paths[a, hop] = _member(stage, draw[6], demands)
        put_in_order(paths[a], stage_of)
        return True
    if kind == 6:  # a lane shares its microbatches with a new one
        return _split(a, draw, paths, counts, demands, slots)
    if a == b:
        return False
    moved = counts[a] if kind == 8 else 1  # microbatches go to another lane
    move_microbatches(a, b, moved, draw[5], draw[5], paths, counts, stage_of)
    return True  # if stages are not visited equally often now, the spread may allow it all the same


@kernel
def _member(stage: int, drawn: int, demands: LaneConstraints) -> int:
    begin, end = demands.first[stage], demands.first[stage + 1]
    return int(demands.nodes[begin + drawn % (end - begin)])


@kernel
def _split(lane: int, draw: Ints, paths: Ints, counts: Ints, demands: LaneConstraints, slots: Ints) -> bool:
    """The new lane visits the same stages, at nodes with a slot left."""
    if counts[lane] < 2:
        return False
    stage_of, first = demands.stage_of, demands.first
    new = -1
    through = np.zeros(len(stage_of), np.int64)
    for each in range(len(counts)):
        if counts[each] == 0:
            new = each
        else:
            for node in paths[each]:
                through[node] += 1
    if new < 0:
        return False
    for hop in range(paths.shape[1]):
        stage = stage_of[paths[lane, hop]]
        begin, members = first[stage], first[stage + 1] - first[stage]
        found = False
        for nth in range(members):
            node = demands.nodes[begin + (draw[4 + hop % 5] + nth) % members]
            if through[node] < slots[node]:
                paths[new, hop] = node
                found = True
                break
        if not found:
            return False
    counts[new] = 1 + draw[9] % (counts[lane] - 1)
    counts[lane] -= counts[new]
    return True
