"""A time that no plan can beat, whatever its stage sizes, allocation, lanes, paths, dispatch and rings: the largest of
several relaxations, each of which drops some of a plan's constraints.

best lanes       the slots of a node carry only lanes that take at least the shortest closed walk through it
node load        every stage finds nodes for its share of the microbatches (CC3), one stage a node, one task a worker;
                 data nodes are idle while as many microbatches as they have slots are under way
slots and tours  lanes compete for the slots along their tours (`tour_relaxation`), first divisible, then whole

Under full timing averaging comes on top. How long it takes and how early a stage can be done both depend on how many
nodes share the stage, so every number of data nodes is solved by itself. That messages wait for each other on a link is
dropped. Paths visit exactly `problem.visited` stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippipe.cost_model import NEVER_NS
from skippipe.planner.bounds.load_relaxation import (
    averaging_by_size_ns,
    lanes_infeasible_by,
    least_step_ns,
    load_infeasible_by,
    loaded_by_size_ns,
    share_of,
)
from skippipe.planner.bounds.node_classes import NodeClasses, all_tours, shortest_rounds_ns
from skippipe.planner.bounds.tour_relaxation import TourProgramme
from skippipe.planner.problem import Problem
from skippipe.timeline import Timing

FINE = 1e-5  # of the bound: nearer to what a relaxation can prove is not worth a step
STRIDE = 0.05  # of the bound: the first step of a search upwards
SHORT_STRIDE = 0.002  # the same with whole lanes, which are seldom much worse than divisible ones


@dataclass(frozen=True)
class Bound:
    ns: int
    """No plan's iteration is shorter."""
    reason: str
    """Name of the relaxation that proves it; empty: there was no time to prove more than that time does not stop."""


def lower_bound(
    problems: Sequence[Problem],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
    stopped: Callable[[], bool] = lambda: False,
) -> Bound:
    """Bound for plans of any of these problems, such as one with the backward whole and one with it split.

    It holds for a problem's timing, layers and kind of backward; `sizes` and `dispatch` do not matter.
    """
    each_s = budget_s / len(problems)
    return min((_BoundSearch(each, clock() + each_s, clock, stopped).bound() for each in problems), key=_ns)


class _BoundSearch:
    def __init__(self, problem: Problem, until: float, clock: Callable[[], float], stopped: Callable[[], bool]) -> None:
        self.problem = problem
        self.until = until
        self.clock = clock
        self.stopped = stopped
        self.full = problem.timing is Timing.FULL
        self.classes = NodeClasses.of(problem)
        self.tours = all_tours(self.classes, problem.visited)
        self.rounds_ns = (
            shortest_rounds_ns(self.classes, problem.visited)
            if self.tours is None
            else self.tours.least_ns(self.classes)
        )
        self.most_data_nodes = len(problem.cluster) - (problem.stages - 1)

    def bound(self) -> Bound:
        """The largest bound; under full timing data nodes and others are bounded apart, as each has its own ring to
        come."""
        data_end = self._raise_bound(Bound(1, ""), self._lanes_infeasible_by, STRIDE, "best lanes")
        load = self._raise_bound(data_end, self._load_infeasible_by, STRIDE, "node load")
        if not self.problem.split_backward:  # the last task of all is a data node's
            data_end = load
        data_end = self._by_tours(data_end, self.most_data_nodes)
        if self.full:
            found = self._averaged(data_end, load)
        else:
            found = max(self._by_tours(data_end, self.most_data_nodes, whole_lanes=True), load, key=_ns)
        return Bound(min(found.ns, NEVER_NS), found.reason)

    def _by_tours(self, known: Bound, data_nodes: int, *, whole_lanes: bool = False) -> Bound:
        """The bound by lanes that compete for slots; they are divisible, unless they are `whole_lanes`."""
        if self.tours is None:
            return known
        microbatches, share = self.problem.workload.microbatches, share_of(self.problem, 1)
        with_load = not (self.full and self.problem.split_backward)  # the end of all is not the data nodes' then
        programme = TourProgramme(self.classes, self.tours, microbatches, share, data_nodes, with_load)
        is_infeasible = programme.whole_lanes_infeasible_by if whole_lanes else programme.infeasible_by
        stride, reason = (SHORT_STRIDE, "slots and whole tours") if whole_lanes else (STRIDE, "slots and tours")
        return self._raise_bound(known, lambda deadline_ns: is_infeasible(deadline_ns, self._left_s), stride, reason)

    def _averaged(self, data_end: Bound, load: Bound) -> Bound:
        """The bound with averaging, for the best number of data nodes; where it matters, tours are solved again with no
        more than these."""
        problem, classes = self.problem, self.classes
        step_ns = least_step_ns(problem)
        by_size = [self._by_size(stage) for stage in range(problem.stages)]

        def infeasible_by(deadline_ns: int) -> bool:
            """With averaging of as few nodes as each stage must have to be done by then."""
            least_ns = [
                min((ring for done, ring in each if done + ring <= deadline_ns), default=deadline_ns)
                for each in by_size
            ]
            return load_infeasible_by(problem, classes, self.rounds_ns, deadline_ns, self._left_s(), least_ns)

        found = [self._raise_bound(load, infeasible_by, STRIDE, "node load")]
        for stage in range(1, problem.stages):
            found.append(Bound(min(done + ring for done, ring in by_size[stage]), f"node load of stage {stage}"))
        rings_ns = [ring for _, ring in by_size[0]]
        ends = [max(data_end, Bound(done, "node load"), key=_ns) for done, _ in by_size[0]]
        to_ask = {size: [True, False] for size in range(1, self.most_data_nodes + 1)}  # first divisible, then whole
        while True:
            best = min(range(len(ends)), key=lambda index: ends[index].ns + rings_ns[index])
            size = best + 1
            if not to_ask[size] or self._over():
                break
            again = self._by_tours(ends[best], size, whole_lanes=to_ask[size].pop())
            ends[:size] = [max(end, again, key=_ns) for end in ends[:size]]
        found.append(Bound(ends[best].ns + rings_ns[best], ends[best].reason))
        longest = max(found, key=_ns)
        return Bound(longest.ns + step_ns, longest.reason and f"{longest.reason}, then averaging")

    def _by_size(self, stage: int) -> list[tuple[int, int]]:
        """[nodes − 1]: when a stage of so many is done at the earliest, and how long it averages at least."""
        most = self.most_data_nodes
        done_ns = loaded_by_size_ns(self.problem, self.classes, stage, most, self.rounds_ns)
        return list(zip(done_ns, averaging_by_size_ns(self.problem, stage, most), strict=True))

    def _lanes_infeasible_by(self, deadline_ns: int) -> bool:
        return lanes_infeasible_by(self.problem, self.classes, self.rounds_ns, deadline_ns)

    def _load_infeasible_by(self, deadline_ns: int) -> bool:
        return load_infeasible_by(self.problem, self.classes, self.rounds_ns, deadline_ns, self._left_s())

    def _raise_bound(self, known: Bound, infeasible_by: Callable[[int], bool], stride: float, reason: str) -> Bound:
        """The latest time proven infeasible, plus one nanosecond: strides that double, then bisection."""
        low, high = known.ns - 1, NEVER_NS
        deadline_ns, stride_ns = known.ns, max(1, int(known.ns * stride))
        while high - low > max(1, int(FINE * low)) and not self._over():
            if infeasible_by(deadline_ns):
                low = deadline_ns
            else:
                high = deadline_ns
            deadline_ns = (low + high) // 2 if high < NEVER_NS else min(low + stride_ns, NEVER_NS - 1)
            stride_ns *= 2
        return Bound(low + 1, reason) if low >= known.ns else known

    def _left_s(self) -> float:
        return max(0.0, self.until - self.clock())

    def _over(self) -> bool:
        return self.clock() >= self.until or self.stopped()


def _ns(bound: Bound) -> int:
    return bound.ns
