"""Path scheduling by conflict-based search, as the study does it: a path for every group of lanes, conflicts solved
by constraints, in the order CC3 (a stage visited too often), TC1 (a node on too many lanes), TC2 (a collision).

What differs from the textbook: a conflict of CC3 or TC1 splits on one group into "must not" and "must", so no
combination is looked at twice; the tree is searched with a focus (least conflicts first among the nearly best bounds),
so it has an answer early and goes on to better ones; and every conflict-free set of paths is judged by the simulator,
not by the estimate that led to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from skippipe.planner.effort import Effort
from skippipe.planner.problem import Placement, Problem, stage_of
from skippipe.planner.tours import NO_WAY, TOO_MANY, best_path
from skippipe.simulate import Course, as_arrays

Path = tuple[int, ...]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Lanes of one data node that share a path: the agents of the search."""

    data_node: int
    lanes: tuple[int, ...]
    """Microbatches of each lane."""
    begin_ns: int
    """When its first microbatch can start at the data node."""

    @property
    def microbatches(self) -> int:
        return sum(self.lanes)


@dataclass(frozen=True)
class Limits:
    """What the conflicts solved so far demand of a group's path."""

    banned: frozenset[int] = frozenset()
    """Nodes it must not visit."""
    required: frozenset[int] = frozenset()
    """Stages it must visit."""
    busy: tuple[tuple[int, int, int], ...] = ()
    """(node, from, until): when it must not use a node."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A node of the search tree."""

    limits: tuple[Limits, ...]
    paths: tuple[Path, ...]
    alone_ns: tuple[int, ...]
    """Of each group: a round trip without other traffic, under its limits."""
    bound_ns: int
    excess: int
    """Lanes and microbatches that are where too many are."""


class _Tree:
    """Open branches: the least conflicting first, among those whose bound is near the best.

    What counts as near widens when nothing is left there, and step by step while the search goes on without an end.
    """

    WIDEN = 1.02
    PATIENCE = 500  # branches

    def __init__(self) -> None:
        self._near: list[tuple[int, int, int, int, Branch]] = []
        self._far: list[tuple[int, int, Branch]] = []
        self._order = count()
        self._limit_ns = 0
        self._taken = 0

    def add(self, branch: Branch) -> None:
        if branch.bound_ns <= self._limit_ns:
            total = sum(branch.alone_ns)
            heapq.heappush(self._near, (branch.excess, branch.bound_ns, total, -next(self._order), branch))
        else:
            heapq.heappush(self._far, (branch.bound_ns, -next(self._order), branch))

    def take(self, below_ns: int) -> Branch | None:
        """The next branch that may lead below the best time so far."""
        while self._near or self._far:
            self._taken += 1
            if self._taken % self.PATIENCE == 0:
                self._widen(self._limit_ns)
            if not self._near:
                self._widen(self._far[0][0])
            branch = heapq.heappop(self._near)[-1]
            if branch.bound_ns < below_ns:
                return branch
        return None

    def _widen(self, from_ns: int) -> None:
        self._limit_ns = int(from_ns * self.WIDEN)
        while self._far and self._far[0][0] <= self._limit_ns:
            self.add(heapq.heappop(self._far)[-1])


Found = Callable[[tuple[Path, ...], int], None]
"""Called with a better set of paths, one for each lane, and the end of its last backward."""


class PathSearch:
    """Conflict-based search over the paths of one placement."""

    def __init__(self, problem: Problem, placement: Placement, groups: Sequence[Group]) -> None:
        costs = problem.costs
        self.problem = problem
        self.groups = tuple(groups)
        self.placement = placement
        self.stage = stage_of(placement)
        self.course = Course.of(costs, self.stage, problem.dispatch, problem.timing)
        self.stage_array = np.full(costs.nodes, -1, np.int64)
        for node, stage in self.stage.items():
            self.stage_array[node] = stage
        self.hop_ns = costs.hop_ns
        self.share = problem.workload.microbatches * (problem.visited - 1) // (problem.stages - 1)
        self.lane_microbatches = np.array([m for group in groups for m in group.lanes], dtype=np.int64)
        self.cache: dict[tuple[int, int, Limits], tuple[Path, int]] = {}

    def run(self, effort: Effort, found: Found, best_ns: int, avoid_collisions: bool) -> None:
        """Search until nothing better can exist or the effort is spent.

        With `avoid_collisions` paths are judged by the simulator; without (the study's ablation) by their length.
        """
        tree = _Tree()
        root = self._root() if effort.spend() else None
        if root is not None:
            tree.add(root)
        while effort.spend():
            branch = tree.take(best_ns)
            if branch is None:
                return
            conflict = self._crowded_stage(branch) or self._crowded_node(branch)
            if conflict:
                for child in self._split(branch, *conflict):
                    tree.add(child)
                continue
            value_ns = self._simulated(branch.paths) if avoid_collisions else branch.bound_ns
            if value_ns < best_ns:
                best_ns = value_ns
                found(self._per_lane(branch.paths), value_ns)
            if avoid_collisions:
                for child in self._apart(branch):
                    tree.add(child)

    # paths of one group

    def _path(self, index: int, limits: Limits) -> tuple[Path, int] | None:
        """The group's best path under its limits, and how long it takes alone."""
        group = self.groups[index]
        key = (group.data_node, group.begin_ns, limits)
        if key not in self.cache:
            self.cache[key] = self._search_path(group, limits)
        path, alone_ns = self.cache[key]
        return (path, alone_ns) if path else None

    def _search_path(self, group: Group, limits: Limits) -> tuple[Path, int]:
        allowed = np.ones(len(self.stage_array), np.bool_)
        allowed[list(limits.banned)] = False
        required = np.zeros(self.problem.stages, np.bool_)
        required[list(limits.required)] = True
        path = np.empty(self.problem.visited, np.int64)
        busy = np.array(limits.busy, dtype=np.int64).reshape(-1, 3).T.copy()
        for intervals in (busy, np.empty((3, 0), np.int64)):  # too many paths to look at: then as if nobody was there
            back_ns = best_path(
                group.data_node,
                self.problem.visited,
                self.problem.swaps,
                self.stage_array,
                allowed,
                required,
                self.course.forward_ns,
                self.course.backward_ns,
                int(self.course.head_ns[group.data_node]),
                self.hop_ns,
                group.begin_ns,
                intervals[0],
                intervals[1],
                intervals[2],
                path,
            )
            if back_ns != TOO_MANY:
                break
        if back_ns == NO_WAY:
            return (), 0
        found = tuple(path.tolist())
        return found, self._alone_ns(found)

    def _alone_ns(self, path: Path) -> int:
        around = [*path, path[0]]
        hops = sum(int(self.hop_ns[a, b] + self.hop_ns[b, a]) for a, b in pairwise(around))
        tasks = sum(int(self.course.forward_ns[node] + self.course.backward_ns[node]) for node in path)
        return hops + tasks + int(self.course.head_ns[path[0]])

    def _root(self) -> Branch | None:
        limits = tuple(Limits() for _ in self.groups)
        found = [self._path(index, Limits()) for index in range(len(self.groups))]
        ways = [way for way in found if way is not None]
        if len(ways) < len(found):
            return None
        return self._branch(limits, tuple(path for path, _ in ways), tuple(alone for _, alone in ways))

    def _branch(self, limits: tuple[Limits, ...], paths: tuple[Path, ...], alone_ns: tuple[int, ...]) -> Branch:
        bound_ns = max(max(group.lanes) * alone for group, alone in zip(self.groups, alone_ns, strict=True))
        crowd, load = self._exposure(paths), self._load(paths)
        excess = sum(max(0, n - self.share) for n in crowd[1:])
        excess += sum(max(0, n - int(self.course.slots[node])) for node, n in load.items())
        return Branch(limits, paths, alone_ns, bound_ns, excess)

    def _with(self, branch: Branch, index: int, limits: Limits) -> Branch | None:
        """The branch with other limits for one group."""
        way = self._path(index, limits)
        if way is None:
            return None
        path, alone_ns = way

        def put(values: tuple, value: object) -> tuple:  # type: ignore[type-arg]
            return (*values[:index], value, *values[index + 1 :])

        return self._branch(put(branch.limits, limits), put(branch.paths, path), put(branch.alone_ns, alone_ns))

    # conflicts

    def _exposure(self, paths: Sequence[Path]) -> list[int]:
        counts = [0] * self.problem.stages
        for group, path in zip(self.groups, paths, strict=True):
            for node in path:
                counts[self.stage[node]] += group.microbatches
        return counts

    def _load(self, paths: Sequence[Path]) -> dict[int, int]:
        lanes: dict[int, int] = {}
        for group, path in zip(self.groups, paths, strict=True):
            for node in path[1:]:
                lanes[node] = lanes.get(node, 0) + len(group.lanes)
        return lanes

    def _crowded_stage(self, branch: Branch) -> tuple[int, frozenset[int]] | None:
        """CC3: the stage most over its share, and its nodes."""
        counts = self._exposure(branch.paths)
        stage = max(range(1, len(counts)), key=lambda each: counts[each])
        return (stage, frozenset(self.placement[stage])) if counts[stage] > self.share else None

    def _crowded_node(self, branch: Branch) -> tuple[int, frozenset[int]] | None:
        """TC1: the node most over its slots, with its stage."""
        load = self._load(branch.paths)
        node = max(load, key=lambda each: (load[each] - int(self.course.slots[each]), -each))
        return (self.stage[node], frozenset([node])) if load[node] > self.course.slots[node] else None

    def _split(self, branch: Branch, stage: int, nodes: frozenset[int]) -> list[Branch]:
        """One group must not use these nodes of a stage; or it must, and the conflict is left to the others.

        The group is the one that gives way at the least cost.
        """
        others = frozenset(self.placement[stage]) - nodes
        best: tuple[int, int, Branch] | None = None
        candidates = []
        for index, path in enumerate(branch.paths):
            limits = branch.limits[index]
            bound_to_it = stage in limits.required and others <= limits.banned
            if not nodes.isdisjoint(path) and not bound_to_it:
                candidates.append(index)
        for index in candidates:
            limits = branch.limits[index]
            away = self._with(branch, index, replace(limits, banned=limits.banned | nodes))
            if away is not None:
                key = (away.bound_ns, max(self.groups[index].lanes) * (away.alone_ns[index] - branch.alone_ns[index]))
                if best is None or key < (best[0], best[1]):
                    best = (*key, away)
                    chosen = index
        children = []
        if best is None:
            if not candidates:
                return []
            chosen = candidates[0]
        elif self._can_fill(best[2]):
            children.append(best[2])
        limits = branch.limits[chosen]
        stay = replace(limits, banned=limits.banned | others, required=limits.required | {stage})
        kept = (*branch.limits[:chosen], stay, *branch.limits[chosen + 1 :])
        held = replace(branch, limits=kept)
        if self._can_fit(held):
            children.append(held)
        return children

    def _can_fit(self, branch: Branch) -> bool:
        """Do the groups that must visit a stage or node fit into it?"""
        pledged: dict[int, int] = {}
        lanes: dict[int, int] = {}
        for group, limits in zip(self.groups, branch.limits, strict=True):
            for stage in limits.required:
                pledged[stage] = pledged.get(stage, 0) + group.microbatches
                left = [node for node in self.placement[stage] if node not in limits.banned]
                if len(left) == 1:
                    lanes[left[0]] = lanes.get(left[0], 0) + len(group.lanes)
        return all(n <= self.share for n in pledged.values()) and all(
            n <= self.course.slots[node] for node, n in lanes.items()
        )

    def _can_fill(self, branch: Branch) -> bool:
        """Can every stage still get its share of microbatches?"""
        for nodes in self.placement[1:]:
            open_to = sum(
                group.microbatches
                for group, limits in zip(self.groups, branch.limits, strict=True)
                if any(node not in limits.banned for node in nodes)
            )
            if open_to < self.share:
                return False
        return True

    # collisions

    def _per_lane(self, paths: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(path for group, path in zip(self.groups, paths, strict=True) for _ in group.lanes)

    def _simulated(self, paths: Sequence[Path]) -> int:
        rows, lengths = as_arrays(self._per_lane(paths))
        return self.course.run(rows, lengths, self.lane_microbatches)

    def _apart(self, branch: Branch) -> list[Branch]:
        """TC2: for the longest wait of a first microbatch behind another group's, each of the two keeps away."""
        rows, lengths = as_arrays(self._per_lane(branch.paths))
        first_wave = np.ones(len(rows), np.int64)
        steps = 2 * self.problem.visited + 1
        record = np.empty((len(rows) * steps, 3), np.int64)
        self.course.run(rows, lengths, first_wave, record=record)
        group_of = [index for index, group in enumerate(self.groups) for _ in group.lanes]
        tasks_on: dict[int, list[tuple[int, int, int, int]]] = {}
        for task, (ready, start, end) in enumerate(record.tolist()):
            lane, step = divmod(task, steps)
            path = branch.paths[group_of[lane]]
            at = step if step < len(path) else 0 if step == len(path) else 2 * len(path) - step
            if at > 0:  # nobody can keep away from its own data node
                tasks_on.setdefault(path[at], []).append((start, end, ready, group_of[lane]))
        worst: tuple[int, int, int, int, tuple[int, int], tuple[int, int]] | None = None
        for node, tasks in tasks_on.items():
            tasks.sort()
            for (start, end, _, ahead), (start2, end2, ready2, waits) in pairwise(tasks):
                wait = start2 - ready2
                if wait > 0 and ahead != waits and ready2 < end and (worst is None or wait > worst[0]):
                    worst = (wait, node, ahead, waits, (start, end), (ready2, ready2 + end2 - start2))
        if worst is None:
            return []
        _, node, ahead, waits, used, wanted = worst
        children = []
        for index, (begin, until) in ((waits, used), (ahead, wanted)):
            limits = branch.limits[index]
            child = self._with(branch, index, replace(limits, busy=(*limits.busy, (node, begin, until))))
            if child is not None:
                children.append(child)
        return children
