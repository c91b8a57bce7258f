"""Node allocation as in the paper: a genetic search over partitions of the nodes into stages.

The score of a partition is its widest edge inside a stage (gradient averaging waits for it) plus twice the best tour
over the stages, where the edge between two stages comes from a matching of their nodes and the order of the stages is
a travelling salesman's. Five-point crossover, repair of the sizes, cyclic exchanges between stages as refinement.

The paper's score is for passes alone. Where an iteration includes averaging, both terms are weighed by what they cost
there: the slowest ring in full, and as many round trips over the visited share of the tour as a lane has microbatches.
"""

from __future__ import annotations

from bisect import insort
from itertools import combinations

import numpy as np
from scipy.optimize import linear_sum_assignment

from skippipe.jit import Floats, Ints, inner_kernel, kernel
from skippipe.planner.problem import Budget, Placement, Problem
from skippipe.timeline import Timing

POPULATION = 200
CROSSOVER_POINTS = 5
IMPOSSIBLE = 1e9  # the score of a placement that has room for no lane; more for every node that cannot hold its stage
EXCHANGES = 3  # tried on every child
EXACT_TOURS_UP_TO = 12  # stages

Partition = tuple[frozenset[int], ...]


def allocate(problem: Problem, budget: Budget, seed: int, keep: int = 8) -> list[Placement]:
    """The best placements found, best first; stages are numbered along the tour."""
    return _GeneticSearch(problem, np.random.default_rng(seed)).run(budget, keep)


def pairwise_s(problem: Problem) -> Floats:
    """Seconds of a hop there and back, halved; what the paper calls an edge."""
    hop = problem.costs.hop_ns / 1e9
    return (hop + hop.T) / 2


class _GeneticSearch:
    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.problem = problem
        self.rng = rng
        self.edge_s = pairwise_s(problem)
        self.nodes = len(problem.cluster)
        # groups that differ in size or layers are not free to change places along a tour
        self.in_order = len(set(problem.sizes[1:])) > 1 or len(set(problem.layers[1:])) > 1
        self.matching_s: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        self.within_s: dict[tuple[frozenset[int], int], float] = {}
        self.scores: dict[Partition, tuple[float, tuple[int, ...]]] = {}

    def run(self, budget: Budget, keep: int) -> list[Placement]:
        members: set[Partition] = set()
        for _ in range(POPULATION):
            if budget.spend() or min(map(self._fitness, members), default=IMPOSSIBLE) >= IMPOSSIBLE:
                individual = self._random()
                members.add(individual)
                self._fitness(individual)  # now, while the budget is counted
        ranked = sorted(members, key=lambda partition: (self._fitness(partition), self._numbered(partition)))
        while budget.spend():
            mother, father = (ranked[min(self.rng.integers(len(ranked), size=2))] for _ in range(2))
            child = self._exchanged(self._resized(self._crossover(mother, father)))
            if child not in members and self._fitness(child) < self._fitness(ranked[-1]):
                members.remove(ranked.pop())
                members.add(child)
                insort(ranked, child, key=self._fitness)
        distinct = dict.fromkeys(self._numbered(partition) for partition in ranked)
        return list(distinct)[:keep]

    # score

    def _fitness(self, partition: Partition) -> float:
        return self._evaluate(partition)[0]

    def _evaluate(self, partition: Partition) -> tuple[float, tuple[int, ...]]:
        """The score, and the tour behind it: groups in the order of their stages."""
        if partition not in self.scores:
            weights = np.zeros((len(partition), len(partition)))
            for a, b in combinations(range(len(partition)), 2):
                weights[a, b] = weights[b, a] = self._between_s(partition[a], partition[b])
            order = np.arange(len(partition))
            tour_s = float(weights[order, np.roll(order, -1)].sum()) if self.in_order else best_tour(weights, order)
            within_s = max(self._within_s(group, min(label, 1)) for label, group in enumerate(partition))
            placed = tuple(order.tolist())
            lanes = self._lanes(tuple(partition[each] for each in placed))
            score = within_s + 2 * tour_s * self._rounds(lanes)
            self.scores[partition] = (score if lanes > 0 else IMPOSSIBLE * (1 - lanes), placed)
        return self.scores[partition]

    def _between_s(self, a: frozenset[int], b: frozenset[int]) -> float:
        if (a, b) not in self.matching_s:
            edges = self.edge_s.take(list(a), 0).take(list(b), 1)
            rows, columns = linear_sum_assignment(edges)
            self.matching_s[a, b] = float(edges[rows, columns].sum()) / len(rows)
        return self.matching_s[a, b]

    def _within_s(self, group: frozenset[int], stage: int) -> float:
        """Seconds inside a group: the paper's widest edge; or its averaging, as stage 0 or as another one."""
        if (group, stage) not in self.within_s:
            members = list(group)
            costs = self.problem.costs
            self.within_s[group, stage] = (
                costs.averaging_ns(stage, costs.averaging(stage, members)) / 1e9
                if self.problem.timing is Timing.FULL
                else float(self.edge_s.take(members, 0).take(members, 1).max())
            )
        return self.within_s[group, stage]

    def _rounds(self, lanes: int) -> float:
        """Round trips of a lane in an iteration; the paper counts one."""
        if self.problem.timing is Timing.CONTENTION_ONLY:
            return 1.0
        return self.problem.workload.microbatches / max(1, lanes) * self.problem.visited / self.problem.stages

    def _lanes(self, stages: Partition) -> int:
        """Lanes that the placement can carry; below 1: minus the number of nodes that cannot hold their stage."""
        slots = self.problem.costs.slots
        unable = sum(int(slots[stage, node] == 0) for stage, nodes in enumerate(stages) for node in nodes)
        return -unable or self.problem.lane_limit(tuple(tuple(sorted(nodes)) for nodes in stages))

    def _numbered(self, partition: Partition) -> Placement:
        return tuple(tuple(sorted(partition[each])) for each in self._evaluate(partition)[1])

    # breeding

    def _random(self) -> Partition:
        order = self.rng.permutation(self.nodes).tolist()
        partition = []
        for size in self.problem.sizes:
            partition.append(frozenset(order[:size]))
            order = order[size:]
        return tuple(partition)

    def _labels(self, partition: Partition) -> Ints:
        labels = np.full(self.nodes, -1, np.int64)
        for label, group in enumerate(partition):
            labels[list(group)] = label
        return labels

    def _crossover(self, mother: Partition, father: Partition) -> Ints:
        points = np.sort(self.rng.integers(0, self.nodes + 1, CROSSOVER_POINTS))
        from_father = np.searchsorted(points, np.arange(self.nodes), side="right") % 2 == 1
        child: Ints = np.where(from_father, self._labels(father), self._labels(mother))
        return child

    def _resized(self, labels: Ints) -> Partition:
        """A partition with the problem's sizes: random nodes of groups that are too large go where some are missing."""
        partition: list[list[int]] = []
        spare = np.flatnonzero(labels < 0).tolist()
        for label, size in enumerate(self.problem.sizes):
            members = self.rng.permutation(np.flatnonzero(labels == label)).tolist()
            partition.append(members[:size])
            spare += members[size:]
        spare = self.rng.permutation(spare).tolist()
        for group, size in zip(partition, self.problem.sizes, strict=True):
            while len(group) < size:
                group.append(int(spare.pop()))
        return tuple(frozenset(group) for group in partition)

    def _exchanged(self, partition: Partition) -> Partition:
        for _ in range(EXCHANGES):
            cycle = self.rng.permutation(len(partition))[: self.rng.integers(2, 4)].tolist()
            movers = [int(self.rng.choice(sorted(partition[label]))) for label in cycle]
            changed = [set(group) for group in partition]
            for label, mover in zip(cycle, movers, strict=True):
                changed[label].remove(mover)
            for label, mover in zip([*cycle[1:], cycle[0]], movers, strict=True):
                changed[label].add(mover)
            other = tuple(frozenset(group) for group in changed)
            if self._fitness(other) < self._fitness(partition):
                partition = other
        return partition


@kernel
def best_tour(weights: Floats, order: Ints) -> float:
    """The length of the shortest round trip from 0; its order is left in `order`. Exact up to a dozen stops."""
    stops = len(weights)
    if stops > EXACT_TOURS_UP_TO:
        return _short_tour(weights, order)
    full = 1 << (stops - 1)  # sets of the stops 1 and up
    cost = np.full((full, stops), np.inf)
    before = np.zeros((full, stops), np.int64)
    for stop in range(1, stops):
        cost[1 << (stop - 1), stop] = weights[0, stop]
    for visited in range(1, full):
        for last in range(1, stops):
            if cost[visited, last] == np.inf:
                continue
            for stop in range(1, stops):
                bit = 1 << (stop - 1)
                if visited & bit:
                    continue
                way = cost[visited, last] + weights[last, stop]
                if way < cost[visited | bit, stop]:
                    cost[visited | bit, stop] = way
                    before[visited | bit, stop] = last
    last = 1
    for stop in range(1, stops):
        if cost[full - 1, stop] + weights[stop, 0] < cost[full - 1, last] + weights[last, 0]:
            last = stop
    length = cost[full - 1, last] + weights[last, 0]
    visited = full - 1
    for position in range(stops - 1, 0, -1):
        order[position] = last
        earlier = before[visited, last]
        visited ^= 1 << (last - 1)
        last = earlier
    order[0] = 0
    return float(length)


@inner_kernel
def _short_tour(weights: Floats, order: Ints) -> float:
    """Nearest neighbour, then pieces turned around for as long as that helps."""
    stops = len(weights)
    order[:] = np.arange(stops)
    for position in range(1, stops):
        nearest = position
        for other in range(position, stops):
            if weights[order[position - 1], order[other]] < weights[order[position - 1], order[nearest]]:
                nearest = other
        order[position], order[nearest] = order[nearest], order[position]
    improved = True
    while improved:
        improved = False
        for start in range(1, stops - 1):
            for end in range(start + 1, stops):
                a, b, c, d = order[start - 1], order[start], order[end], order[(end + 1) % stops]
                if weights[a, c] + weights[b, d] < weights[a, b] + weights[c, d] - 1e-12:
                    order[start : end + 1] = order[start : end + 1][::-1].copy()
                    improved = True
    length = 0.0
    for position in range(stops):
        length += weights[order[position], order[(position + 1) % stops]]
    return length
