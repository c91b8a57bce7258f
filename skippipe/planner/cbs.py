"""Path scheduling by conflict-based search (CBS), as the paper does it. The agents are groups of lanes that share a
path; conflicts are solved by constraints in the order CC3 (a stage is visited too often), TC1 (a node lies on too many
lanes), TC2 (a collision).

What differs from the textbook: a conflict of CC3 or TC1 branches on one agent into "must not" and "must", so no
combination is looked at twice; the tree is searched with a focal list (fewest conflicts first, among the bounds that
would be an improvement), so there is an answer early and better ones follow; and every conflict-free set of paths is
evaluated by the simulator, not by the estimate that led to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from skippipe.collectives.schedule import Averaging
from skippipe.collectives.transfers import after_ns
from skippipe.constraints import NodePath, lanes_through
from skippipe.constraints import exposure as exposure_of
from skippipe.cost_model import NEVER_NS
from skippipe.dispatch import all_steps, is_weights, place
from skippipe.planner.astar import INFINITE_NS, LABEL_LIMIT_REACHED, NEVER_BUSY, best_path
from skippipe.planner.problem import Budget, Placement, Problem, averagings
from skippipe.simulator import PlacementCosts, path_arrays
from skippipe.timeline import Timing

Interval = tuple[int, int, int]
"""A node, and from when until when."""


@dataclass(frozen=True)
class LaneAgent:
    """An agent of the search: lanes of one data node that share a path."""

    data_node: int
    lanes: tuple[int, ...]
    """Microbatches of each of its lanes."""
    begin_ns: int
    """When its first microbatch can start at the data node."""

    @property
    def microbatches(self) -> int:
        return sum(self.lanes)


@dataclass(frozen=True)
class PathConstraints:
    """Constraints on the path of one agent, from the conflicts solved so far."""

    banned: frozenset[int] = frozenset()
    """Nodes that the path must not visit."""
    required: frozenset[int] = frozenset()
    """Stages that the path must visit."""
    busy: tuple[Interval, ...] = ()
    """Intervals in which it must not use a node."""

    def ban(self, nodes: Set[int]) -> PathConstraints:
        return replace(self, banned=self.banned | nodes)


@dataclass(frozen=True)
class AgentPath:
    """The best path of an agent under its constraints."""

    constraints: PathConstraints
    path: NodePath
    alone_ns: int
    """Nanoseconds of a round trip without other traffic."""
    least_ns: int
    """Nanoseconds of a round trip on the best path if nodes were never busy: no path under these constraints is
    shorter."""


@dataclass(frozen=True, eq=False)
class CbsNode:
    """A node of the constraint tree: constraints and a path for every agent."""

    solution: tuple[AgentPath, ...]
    """One path for each agent."""
    bound_ns: int
    """Lower bound: no iteration under these constraints is shorter."""
    exposure: list[int]
    """Microbatches that visit each stage."""
    lanes: dict[int, list[int]]
    """Node → the lanes that it lies on."""
    excess: int
    """How many lanes and microbatches exceed the slots of their node or the share of their stage."""


class _Tree:
    """Open branches in a focal list: fewest conflicts first, among those whose bound lies under a threshold.

    The threshold is half way between the best bound and the best time so far. When no branch is left under it, or none
    was found under it for a while, it moves half way up to the best time; when that is nearly reached, it starts again.
    """

    STALLED_AFTER = 100  # branches

    def __init__(self, root: CbsNode) -> None:
        self._focal: list[tuple[int, int, int, int, CbsNode]] = []
        self._open: list[tuple[int, int, CbsNode]] = []
        self._order = count()
        self._least_ns = root.bound_ns
        self._threshold_ns = self._best_ns = 0
        self._taken = 0
        self.add(root)

    def add(self, branch: CbsNode) -> None:
        if branch.bound_ns <= self._threshold_ns:
            total = sum(agent_path.alone_ns for agent_path in branch.solution)
            heapq.heappush(self._focal, (branch.excess, branch.bound_ns, total, -next(self._order), branch))
        else:
            heapq.heappush(self._open, (branch.bound_ns, -next(self._order), branch))

    def take(self, best_ns: int) -> CbsNode | None:
        """The next branch whose bound is below the best time so far; None: there is none."""
        if best_ns != self._best_ns:
            self._best_ns = best_ns
            self._threshold(self._least_ns)
        while self._focal or self._open:
            self._taken += 1
            if self._taken > self.STALLED_AFTER:
                nearly = self._best_ns - self._threshold_ns < (self._best_ns - self._least_ns) // 64
                self._threshold(self._least_ns if nearly else self._threshold_ns)
            if not self._focal:
                self._threshold(max(self._threshold_ns, self._open[0][0]))
            branch = heapq.heappop(self._focal)[-1]
            if branch.bound_ns > self._threshold_ns:
                self.add(branch)
            elif branch.bound_ns < best_ns:
                return branch
        return None

    def _threshold(self, from_ns: int) -> None:
        """Set the threshold half way between a bound and the best time."""
        self._taken = 0
        self._threshold_ns = max(from_ns, (from_ns + self._best_ns) // 2)
        while self._open and self._open[0][0] <= self._threshold_ns:
            self.add(heapq.heappop(self._open)[-1])


OnImprovement = Callable[[tuple[NodePath, ...], int], None]
"""Called with a better set of paths, one for each lane, and its objective in nanoseconds."""


class PathSearch:
    """Conflict-based search over the paths of one placement."""

    def __init__(self, problem: Problem, placement: Placement, agents: Sequence[LaneAgent]) -> None:
        costs = problem.costs
        self.problem = problem
        self.placement = placement
        self.agents = tuple(agents)
        self.stage_of = {node: stage for stage, nodes in enumerate(placement) for node in nodes}
        each = averagings(problem, placement)
        self.costs = PlacementCosts.of(costs, each, problem.dispatch, problem.timing, problem.split_backward)
        self.tail_ns = {node: self._tail_ns(each[0], node) for node in each[0].order}
        self.slots = {node: int(self.costs.slots[node]) for node in self.stage_of}
        self.stage_array = np.full(costs.nodes, -1, np.int64)
        for node, stage in self.stage_of.items():
            self.stage_array[node] = stage
        self.hop_ns = costs.hop_ns
        self.stage_share = problem.workload.microbatches * (problem.visited - 1) // (problem.stages - 1)
        self.microbatches = [count for agent in agents for count in agent.lanes]
        self.agent_of = [index for index, agent in enumerate(agents) for _ in agent.lanes]
        self.cache: dict[tuple[int, int, PathConstraints], AgentPath | None] = {}

    def run(self, budget: Budget, on_improvement: OnImprovement, best_ns: int, avoid_collisions: bool) -> None:
        """Search until no better paths can exist or the budget is spent.

        With `avoid_collisions` paths are evaluated by the simulator; without (the paper's ablation) by their length.
        """
        root = self._root() if budget.spend() else None
        if root is None:
            return
        tree = _Tree(root)
        seen: set[tuple[NodePath, ...]] = set()
        while budget.spend():
            branch = tree.take(best_ns)
            if branch is None:
                return
            conflict = self._cc3_conflict(branch) or self._tc1_conflict(branch)
            if conflict:
                for child in self._branch_on(branch, *conflict):
                    tree.add(child)
                continue
            paths = self._paths(branch.solution)
            if paths in seen:
                continue
            seen.add(paths)
            value_ns = self._simulated(paths) if avoid_collisions else self._estimated(branch.solution)
            if value_ns < best_ns:
                best_ns = value_ns
                on_improvement(paths, value_ns)
            if avoid_collisions:
                for child in self._collision_branches(branch):
                    tree.add(child)

    # low level: the path of one agent

    def _agent_path(self, agent: LaneAgent, constraints: PathConstraints) -> AgentPath | None:
        """The best path of an agent under its constraints; None: there is none. Results are cached."""
        key = (agent.data_node, agent.begin_ns, constraints)
        if key not in self.cache:
            path = self._best_path(agent, constraints)
            alone_ns = self.costs.alone_ns(path) if path else NEVER_NS
            free = self._agent_path(agent, replace(constraints, busy=())) if constraints.busy else None
            agent_path = AgentPath(constraints, path, alone_ns, free.least_ns if free else alone_ns)
            self.cache[key] = agent_path if alone_ns < NEVER_NS else None  # longer: over a link that is not there
        return self.cache[key]

    def _best_path(self, agent: LaneAgent, constraints: PathConstraints) -> NodePath:
        allowed = np.ones(len(self.stage_array), np.bool_)
        allowed[list(constraints.banned)] = False
        required = np.zeros(self.problem.stages, np.bool_)
        required[list(constraints.required)] = True
        path = np.empty(self.problem.visited, np.int64)
        busy = np.array(constraints.busy, dtype=np.int64).reshape(-1, 3)
        for intervals in (busy, NEVER_BUSY):  # too many labels: then as if nodes were never busy
            back_ns = best_path(
                agent.data_node,
                self.problem.visited,
                self.problem.swaps,
                self.stage_array,
                allowed,
                required,
                self.costs.forward_ns,
                self.costs.backward_ns,
                int(self.costs.head_ns[agent.data_node]),
                self.hop_ns,
                agent.begin_ns,
                intervals,
                path,
            )
            if back_ns != LABEL_LIMIT_REACHED:
                break
        return () if back_ns in (INFINITE_NS, LABEL_LIMIT_REACHED) else tuple(path.tolist())

    # high level: branches

    def _tail_ns(self, averaging: Averaging, data_node: int) -> int:
        """Least time between the return of a lane's last microbatch and the end of the iteration: every lane ends on
        stage 0, which averages."""
        late_ns = 0
        if self.problem.timing is Timing.FULL:
            late_ns = after_ns(self.problem.costs, 0, averaging, data_node)
        return int(self.costs.weight_ns[data_node]) + late_ns + self.costs.step_ns

    def _root(self) -> CbsNode | None:
        found = [self._agent_path(agent, PathConstraints()) for agent in self.agents]
        solution = tuple(each for each in found if each is not None)
        return self._branch(solution) if len(solution) == len(found) else None

    def _branch(self, solution: tuple[AgentPath, ...]) -> CbsNode:
        lanes_ns = [
            max(agent.lanes) * agent_path.least_ns for agent, agent_path in zip(self.agents, solution, strict=True)
        ]
        bound_ns = max(ns + self.tail_ns[agent.data_node] for ns, agent in zip(lanes_ns, self.agents, strict=True))
        visits = [[self.stage_of[node] for node in agent_path.path] for agent_path in solution]
        exposure = exposure_of(visits, [agent.microbatches for agent in self.agents], self.problem.stages)
        lanes = lanes_through(self._paths(solution))
        excess = sum(max(0, count - self.stage_share) for count in exposure[1:])
        excess += sum(max(0, len(each) - self.slots[node]) for node, each in lanes.items())
        return CbsNode(solution, bound_ns, exposure, lanes, excess)

    def _with_constraints(self, branch: CbsNode, index: int, constraints: PathConstraints) -> CbsNode | None:
        """The branch with other constraints for one agent; None: it has no path then."""
        agent_path = self._agent_path(self.agents[index], constraints)
        return None if agent_path is None else self._branch(_replaced(branch.solution, index, agent_path))

    def _paths(self, solution: Sequence[AgentPath]) -> tuple[NodePath, ...]:
        """The path of each lane."""
        return tuple(solution[index].path for index in self.agent_of)

    # conflicts

    def _cc3_conflict(self, branch: CbsNode) -> tuple[int, frozenset[int]] | None:
        """CC3: the stage that exceeds its share most, and its nodes; None: no stage does."""
        stage = max(range(1, self.problem.stages), key=lambda each: branch.exposure[each])
        return (stage, frozenset(self.placement[stage])) if branch.exposure[stage] > self.stage_share else None

    def _tc1_conflict(self, branch: CbsNode) -> tuple[int, frozenset[int]] | None:
        """TC1: the node that exceeds its slots most, with its stage; None: no node does."""
        node = max(branch.lanes, key=lambda each: (len(branch.lanes[each]) - self.slots[each], -each))
        over = len(branch.lanes[node]) > self.slots[node]
        return (self.stage_of[node], frozenset([node])) if over else None

    def _branch_on(self, branch: CbsNode, stage: int, nodes: frozenset[int]) -> list[CbsNode]:
        """Two branches: one agent must not use these nodes of a stage; or it must, and the conflict is left to the
        others.

        The agent is the one that gives way at the least cost.
        """
        others = frozenset(self.placement[stage]) - nodes
        cheapest: tuple[tuple[int, int], int, CbsNode | None] | None = None
        for index, agent_path in enumerate(branch.solution):
            committed = stage in agent_path.constraints.required and others <= agent_path.constraints.banned
            if committed or nodes.isdisjoint(agent_path.path):
                continue
            away = self._with_constraints(branch, index, agent_path.constraints.ban(nodes))
            cost = (INFINITE_NS, 0)
            if away is not None:
                extra_ns = away.solution[index].alone_ns - agent_path.alone_ns
                cost = (away.bound_ns, max(self.agents[index].lanes) * extra_ns)
            if cheapest is None or cost < cheapest[0]:
                cheapest = (cost, index, away)
        if cheapest is None:
            return []
        _, index, away = cheapest
        agent_path = branch.solution[index]
        stay = replace(agent_path.constraints.ban(others), required=agent_path.constraints.required | {stage})
        held = replace(branch, solution=_replaced(branch.solution, index, replace(agent_path, constraints=stay)))
        return [child for child in (away, held) if child is not None and self._is_feasible(child)]

    def _is_feasible(self, branch: CbsNode) -> bool:
        """Whether the agents that must visit a stage or a node fit into it, and every stage can still get its share."""
        committed = [0] * self.problem.stages
        open_to = [0] * self.problem.stages
        lanes: dict[int, int] = {}
        for agent, agent_path in zip(self.agents, branch.solution, strict=True):
            for stage, nodes in enumerate(self.placement):
                left = [node for node in nodes if node not in agent_path.constraints.banned]
                open_to[stage] += agent.microbatches if left else 0
                if stage in agent_path.constraints.required:
                    committed[stage] += agent.microbatches
                    if len(left) == 1:
                        lanes[left[0]] = lanes.get(left[0], 0) + len(agent.lanes)
        slots_suffice = all(count <= self.slots[node] for node, count in lanes.items())
        return slots_suffice and max(committed[1:]) <= self.stage_share <= min(open_to[1:])

    # collisions

    def _simulated(self, paths: Sequence[NodePath]) -> int:
        rows, lengths = path_arrays(paths)
        return self.costs.run_iteration(rows, lengths, np.array(self.microbatches)).iteration_ns

    def _estimated(self, solution: Sequence[AgentPath]) -> int:
        """The iteration without the simulator: no lane waits for another, and the slowest ring starts when the last one
        is back."""
        ends_ns = [
            max(agent.lanes) * agent_path.least_ns + int(self.costs.weight_ns[agent.data_node])
            for agent, agent_path in zip(self.agents, solution, strict=True)
        ]
        return max(ends_ns) + max(self.costs.averaging_ns) + self.costs.step_ns

    def _collision_branches(self, branch: CbsNode) -> list[CbsNode]:
        """TC2: of the two agents in the longest wait of a first microbatch, each keeps away in one branch.

        It keeps away from the node at that time; or, if that would only make it wait there, from the node.
        """
        collision = self._longest_wait(self._paths(branch.solution))
        children = []
        for index, interval in collision or ():
            agent_path = branch.solution[index]
            constraints = replace(agent_path.constraints, busy=(*agent_path.constraints.busy, interval))
            child = self._with_constraints(branch, index, constraints)
            if child is None or child.solution[index].path == agent_path.path:
                child = self._with_constraints(branch, index, agent_path.constraints.ban({interval[0]}))
            if child is not None:
                children.append(child)
        return children

    def _longest_wait(self, paths: Sequence[NodePath]) -> list[tuple[int, Interval]] | None:
        """The two agents that collide, each with the interval that the other one has or wanted on the node."""
        rows, lengths = path_arrays(paths)
        each = all_steps(self.problem.visited, self.problem.split_backward)
        record = np.empty((len(rows) * each, 4), np.int64)
        self.costs.run_iteration(rows, lengths, np.ones(len(rows), np.int64), record)
        tasks_on: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}  # by node and device
        for task, (ready, start, end, device) in enumerate(record.tolist()):
            lane, step = divmod(task, each)
            position = place(step, self.problem.visited)
            # no lane can keep away from its data node, and none waits for weight gradients
            if position > 0 and not is_weights(step, self.problem.visited):
                mine = tasks_on.setdefault((paths[lane][position], device), [])
                mine.append((start, end, ready, self.agent_of[lane]))
        longest, found = 0, None
        for (node, _), tasks in tasks_on.items():
            for (start, end, _, ahead), (later, later_end, ready, waits) in pairwise(sorted(tasks)):
                if later - ready > longest and ahead != waits and ready < end:
                    longest = later - ready
                    wanted = (node, ready, ready + later_end - later)
                    found = [(waits, (node, start, end)), (ahead, wanted)]
        return found


def _replaced(solution: tuple[AgentPath, ...], index: int, agent_path: AgentPath) -> tuple[AgentPath, ...]:
    return (*solution[:index], agent_path, *solution[index + 1 :])
