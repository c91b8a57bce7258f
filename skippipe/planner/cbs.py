"""Path scheduling by conflict-based search, as the study does it: a path for every group of lanes, conflicts solved
by constraints, in the order CC3 (a stage visited too often), TC1 (a node on too many lanes), TC2 (a collision).

What differs from the textbook: a conflict of CC3 or TC1 splits on one group into "must not" and "must", so no
combination is looked at twice; the tree is searched with an aim (least conflicts first, among the bounds that would be
an improvement), so it has an answer early and goes on to better ones; and every conflict-free set of paths is judged
by the simulator, not by the estimate that led to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from skippipe import constraints
from skippipe.cost_model import NEVER_NS
from skippipe.dispatch import all_steps, is_weights, place
from skippipe.planner.astar import NO_WAY, TOO_MANY, best_path
from skippipe.planner.problem import Budget, Placement, Problem, rings, stage_of
from skippipe.simulator import Course, as_arrays
from skippipe.timeline import Timing

Path = tuple[int, ...]
Interval = tuple[int, int, int]
"""Node, from, until."""


@dataclass(frozen=True)
class LaneAgent:
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
class PathConstraints:
    """What the conflicts solved so far demand of a group's path."""

    banned: frozenset[int] = frozenset()
    """Nodes it must not visit."""
    required: frozenset[int] = frozenset()
    """Stages it must visit."""
    busy: tuple[Interval, ...] = ()
    """When it must not use a node."""


@dataclass(frozen=True)
class AgentPath:
    """The path of a group: the best one that its limits leave."""

    limits: PathConstraints
    path: Path
    alone_ns: int
    """A round trip without other traffic."""
    least_ns: int
    """The same for the best path if nodes were never busy: no path under these limits is shorter."""


@dataclass(frozen=True, eq=False)
class CbsNode:
    """A node of the search tree."""

    ways: tuple[AgentPath, ...]
    """One for each group."""
    bound_ns: int
    """No iteration with these limits is shorter."""
    exposure: list[int]
    """Microbatches that visit each stage."""
    lanes: dict[int, list[int]]
    """Node → the lanes that it lies on."""
    excess: int
    """Lanes and microbatches that are where too many are."""


class _Tree:
    """Open branches: the least conflicting first, among those whose bound stays under an aim.

    The aim is half way between the best bound and the best time so far. When nothing is left under it, or nothing was
    found under it for a while, it moves half way up to the best time; when that is nearly reached, it starts again.
    """

    PATIENCE = 100  # branches

    def __init__(self, root: CbsNode) -> None:
        self._near: list[tuple[int, int, int, int, CbsNode]] = []
        self._far: list[tuple[int, int, CbsNode]] = []
        self._order = count()
        self._least_ns = root.bound_ns
        self._aim_ns = self._best_ns = 0
        self._taken = 0
        self.add(root)

    def add(self, branch: CbsNode) -> None:
        if branch.bound_ns <= self._aim_ns:
            total = sum(way.alone_ns for way in branch.ways)
            heapq.heappush(self._near, (branch.excess, branch.bound_ns, total, -next(self._order), branch))
        else:
            heapq.heappush(self._far, (branch.bound_ns, -next(self._order), branch))

    def take(self, best_ns: int) -> CbsNode | None:
        """The next branch that may lead to less than the best time so far."""
        if best_ns != self._best_ns:
            self._best_ns = best_ns
            self._aim(self._least_ns)
        while self._near or self._far:
            self._taken += 1
            if self._taken > self.PATIENCE:
                nearly = self._best_ns - self._aim_ns < (self._best_ns - self._least_ns) // 64
                self._aim(self._least_ns if nearly else self._aim_ns)
            if not self._near:
                self._aim(max(self._aim_ns, self._far[0][0]))
            branch = heapq.heappop(self._near)[-1]
            if branch.bound_ns > self._aim_ns:
                self.add(branch)
            elif branch.bound_ns < best_ns:
                return branch
        return None

    def _aim(self, from_ns: int) -> None:
        """Half way between a bound and the best time."""
        self._taken = 0
        self._aim_ns = max(from_ns, (from_ns + self._best_ns) // 2)
        while self._far and self._far[0][0] <= self._aim_ns:
            self.add(heapq.heappop(self._far)[-1])


Better = Callable[[tuple[Path, ...], int], None]
"""Called with a better set of paths, one for each lane, and the nanoseconds it is judged by."""


class PathSearch:
    """Conflict-based search over the paths of one placement."""

    def __init__(self, problem: Problem, placement: Placement, groups: Sequence[LaneAgent]) -> None:
        costs = problem.costs
        self.problem = problem
        self.placement = placement
        self.groups = tuple(groups)
        self.stage = stage_of(placement)
        ringed = rings(problem, placement)
        self.course = Course.of(costs, ringed, problem.dispatch, problem.timing, problem.split_backward)
        self.after_ns = {node: self._after_ns(ringed[0], node) for node in ringed[0]}
        self.slots = {node: int(self.course.slots[node]) for node in self.stage}
        self.stage_array = np.full(costs.nodes, -1, np.int64)
        for node, stage in self.stage.items():
            self.stage_array[node] = stage
        self.hop_ns = costs.hop_ns
        self.share = problem.workload.microbatches * (problem.visited - 1) // (problem.stages - 1)
        self.microbatches = [count for group in groups for count in group.lanes]
        self.group_of = [index for index, group in enumerate(groups) for _ in group.lanes]
        self.found: dict[tuple[int, int, PathConstraints], AgentPath | None] = {}

    def run(self, effort: Budget, better: Better, best_ns: int, avoid_collisions: bool) -> None:
        """Search until nothing better can exist or the effort is spent.

        With `avoid_collisions` paths are judged by the simulator; without (the study's ablation) by their length.
        """
        root = self._root() if effort.spend() else None
        if root is None:
            return
        tree = _Tree(root)
        seen: set[tuple[Path, ...]] = set()
        while effort.spend():
            branch = tree.take(best_ns)
            if branch is None:
                return
            conflict = self._crowded_stage(branch) or self._crowded_node(branch)
            if conflict:
                for child in self._split(branch, *conflict):
                    tree.add(child)
                continue
            paths = self._paths(branch.ways)
            if paths in seen:
                continue
            seen.add(paths)
            value_ns = self._simulated(paths) if avoid_collisions else self._estimated(branch.ways)
            if value_ns < best_ns:
                best_ns = value_ns
                better(paths, value_ns)
            if avoid_collisions:
                for child in self._apart(branch):
                    tree.add(child)

    # the path of one group

    def _way(self, group: LaneAgent, limits: PathConstraints) -> AgentPath | None:
        """The group's best path under its limits; None if they leave none."""
        key = (group.data_node, group.begin_ns, limits)
        if key not in self.found:
            path = self._best_path(group, limits)
            alone_ns = self.course.alone_ns(path) if path else NEVER_NS
            free = self._way(group, replace(limits, busy=())) if limits.busy else None
            way = AgentPath(limits, path, alone_ns, free.least_ns if free else alone_ns)
            self.found[key] = way if alone_ns < NEVER_NS else None  # longer: it goes over a link that is not there
        return self.found[key]

    def _best_path(self, group: LaneAgent, limits: PathConstraints) -> Path:
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
        return () if back_ns in (NO_WAY, TOO_MANY) else tuple(path.tolist())

    # branches

    def _after_ns(self, ring: Sequence[int], data_node: int) -> int:
        """What follows at least when a lane's last microbatch is back: every lane ends on stage 0, which averages."""
        late_ns = 0
        if self.problem.timing is Timing.FULL:
            late_ns = self.problem.costs.collective.after_ns(self.problem.costs, 0, ring, data_node)
        return int(self.course.weight_ns[data_node]) + late_ns + self.course.step_ns

    def _root(self) -> CbsNode | None:
        ways = [way for group in self.groups if (way := self._way(group, PathConstraints())) is not None]
        return self._branch(tuple(ways)) if len(ways) == len(self.groups) else None

    def _branch(self, ways: tuple[AgentPath, ...]) -> CbsNode:
        lanes_ns = [max(group.lanes) * way.least_ns for group, way in zip(self.groups, ways, strict=True)]
        bound_ns = max(ns + self.after_ns[group.data_node] for ns, group in zip(lanes_ns, self.groups, strict=True))
        visits = [[self.stage[node] for node in way.path] for way in ways]
        exposure = constraints.exposure(visits, [group.microbatches for group in self.groups], self.problem.stages)
        lanes = constraints.lanes_through(self._paths(ways))
        excess = sum(max(0, count - self.share) for count in exposure[1:])
        excess += sum(max(0, len(each) - self.slots[node]) for node, each in lanes.items())
        return CbsNode(ways, bound_ns, exposure, lanes, excess)

    def _with(self, branch: CbsNode, index: int, limits: PathConstraints) -> CbsNode | None:
        """The branch with other limits for one group."""
        way = self._way(self.groups[index], limits)
        return None if way is None else self._branch(_put(branch.ways, index, way))

    def _paths(self, ways: Sequence[AgentPath]) -> tuple[Path, ...]:
        """One for each lane."""
        return tuple(ways[index].path for index in self.group_of)

    # conflicts

    def _crowded_stage(self, branch: CbsNode) -> tuple[int, frozenset[int]] | None:
        """CC3: the stage most over its share, and its nodes."""
        stage = max(range(1, self.problem.stages), key=lambda each: branch.exposure[each])
        return (stage, frozenset(self.placement[stage])) if branch.exposure[stage] > self.share else None

    def _crowded_node(self, branch: CbsNode) -> tuple[int, frozenset[int]] | None:
        """TC1: the node most over its slots, with its stage."""
        node = max(branch.lanes, key=lambda each: (len(branch.lanes[each]) - self.slots[each], -each))
        over = len(branch.lanes[node]) > self.slots[node]
        return (self.stage[node], frozenset([node])) if over else None

    def _split(self, branch: CbsNode, stage: int, nodes: frozenset[int]) -> list[CbsNode]:
        """One group must not use these nodes of a stage; or it must, and the conflict is left to the others.

        The group is the one that gives way at the least cost.
        """
        others = frozenset(self.placement[stage]) - nodes
        cheapest: tuple[tuple[int, int], int, CbsNode | None] | None = None
        for index, way in enumerate(branch.ways):
            pledged = stage in way.limits.required and others <= way.limits.banned
            if pledged or nodes.isdisjoint(way.path):
                continue
            away = self._with(branch, index, replace(way.limits, banned=way.limits.banned | nodes))
            cost = (NO_WAY, 0)
            if away is not None:
                extra_ns = away.ways[index].alone_ns - way.alone_ns
                cost = (away.bound_ns, max(self.groups[index].lanes) * extra_ns)
            if cheapest is None or cost < cheapest[0]:
                cheapest = (cost, index, away)
        if cheapest is None:
            return []
        _, index, away = cheapest
        way = branch.ways[index]
        stay = replace(way.limits, banned=way.limits.banned | others, required=way.limits.required | {stage})
        held = replace(branch, ways=_put(branch.ways, index, replace(way, limits=stay)))
        return [child for child in (away, held) if child is not None and self._can_end(child)]

    def _can_end(self, branch: CbsNode) -> bool:
        """Do those who must visit a stage or a node fit into it, and can every stage still get its share?"""
        pledged = [0] * self.problem.stages
        open_to = [0] * self.problem.stages
        lanes: dict[int, int] = {}
        for group, way in zip(self.groups, branch.ways, strict=True):
            for stage, nodes in enumerate(self.placement):
                left = [node for node in nodes if node not in way.limits.banned]
                open_to[stage] += group.microbatches if left else 0
                if stage in way.limits.required:
                    pledged[stage] += group.microbatches
                    if len(left) == 1:
                        lanes[left[0]] = lanes.get(left[0], 0) + len(group.lanes)
        return (
            max(pledged[1:]) <= self.share <= min(open_to[1:])
            and all(count <= self.slots[node] for node, count in lanes.items())
        )  # fmt: skip

    # collisions

    def _simulated(self, paths: Sequence[Path]) -> int:
        rows, lengths = as_arrays(paths)
        return self.course.run(rows, lengths, np.array(self.microbatches)).iteration_ns

    def _estimated(self, ways: Sequence[AgentPath]) -> int:
        """Without the simulator: no lane waits for another, and the slowest ring starts when the last one is back."""
        ends_ns = [
            max(group.lanes) * way.least_ns + int(self.course.weight_ns[group.data_node])
            for group, way in zip(self.groups, ways, strict=True)
        ]
        return max(ends_ns) + max(self.course.averaging_ns) + self.course.step_ns

    def _apart(self, branch: CbsNode) -> list[CbsNode]:
        """TC2: for the longest wait of a first microbatch behind another group's, each of the two keeps away.

        From the node at that time; or, if that would only make it wait there, from the node.
        """
        collision = self._longest_wait(self._paths(branch.ways))
        children = []
        for index, interval in collision or ():
            way = branch.ways[index]
            limits = replace(way.limits, busy=(*way.limits.busy, interval))
            child = self._with(branch, index, limits)
            if child is None or child.ways[index].path == way.path:
                child = self._with(branch, index, replace(way.limits, banned=way.limits.banned | {interval[0]}))
            if child is not None:
                children.append(child)
        return children

    def _longest_wait(self, paths: Sequence[Path]) -> list[tuple[int, Interval]] | None:
        """Who collides, each with the interval that the other one has or wanted on the node."""
        rows, lengths = as_arrays(paths)
        each = all_steps(self.problem.visited, self.problem.split_backward)
        record = np.empty((len(rows) * each, 3), np.int64)
        self.course.run(rows, lengths, np.ones(len(rows), np.int64), record)
        tasks_on: dict[int, list[tuple[int, int, int, int]]] = {}
        for task, (ready, start, end) in enumerate(record.tolist()):
            lane, step = divmod(task, each)
            position = place(step, self.problem.visited)
            # nobody can keep away from its own data node, and nobody waits for weight gradients
            if position > 0 and not is_weights(step, self.problem.visited):
                tasks_on.setdefault(paths[lane][position], []).append((start, end, ready, self.group_of[lane]))
        longest, found = 0, None
        for node, tasks in tasks_on.items():
            for (start, end, _, ahead), (later, later_end, ready, waits) in pairwise(sorted(tasks)):
                if later - ready > longest and ahead != waits and ready < end:
                    longest = later - ready
                    wanted = (node, ready, ready + later_end - later)
                    found = [(waits, (node, start, end)), (ahead, wanted)]
        return found


def _put(ways: tuple[AgentPath, ...], index: int, way: AgentPath) -> tuple[AgentPath, ...]:
    return (*ways[:index], way, *ways[index + 1 :])
