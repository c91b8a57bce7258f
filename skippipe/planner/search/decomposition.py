"""A large problem in parts: nodes that are near each other are planned by themselves, and their plans are put together.

A search of the whole tries each change in a simulation of all nodes, some ten times slower than one of twenty. What
parts cannot see, averaging over all of them and paths from one to another, is left to a search that begins with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from skippipe.cost_model import NEVER_NS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import Problem, averagings

PART = 20  # nodes of a part, about
FEWEST_PARTS = 3  # two do no better than the whole


def part_count(problem: Problem) -> int:
    """How many parts the cluster makes; 1: it is planned as a whole."""
    parts = min(round(len(problem.cluster) / PART), problem.workload.microbatches // problem.lane_unit)
    return parts if parts >= FEWEST_PARTS else 1


def planned_in_parts(problem: Problem, plan_part: Callable[[int, Problem], Plan]) -> Plan:
    """Plans of all parts as one. It may break rules, if parts cannot keep them; Infeasible if one has no plan.

    The first part decides what all share: dispatch, whether the backward is split, and activation checkpointing.
    """
    groups = _near_each_other(problem)
    plans: list[Plan] = []
    open_ = replace(problem.decision_variables, layers=False)
    for nodes, microbatches in zip(groups, _microbatches(problem, groups), strict=True):
        part = replace(
            problem,
            cluster=problem.cluster.only(nodes),
            workload=replace(problem.workload, microbatches=microbatches),
            sizes=(),
            decision_variables=open_,
        )
        if plans:
            part = _following(part, plans[0])
        plans.append(plan_part(len(plans), part))
    return _joined(problem, groups, plans)


def _near_each_other(problem: Problem) -> list[list[int]]:
    """Groups of nodes, nearly of one size: again and again the node that is the furthest from those left, with those
    nearest to it, by the time of a hop there and back."""
    hop_ns = np.minimum(problem.costs.transmit_ns[0], NEVER_NS).astype(np.float64) + problem.costs.flight_ns
    hop_ns = hop_ns + hop_ns.T
    left = np.arange(len(problem.cluster))
    groups = []
    for parts in range(part_count(problem), 0, -1):
        first = left[hop_ns[np.ix_(left, left)].mean(axis=1).argmax()]
        nearest = sorted(left.tolist(), key=lambda node: (node != first, hop_ns[first, node], node))
        groups.append(sorted(nearest[: len(left) // parts]))
        left = np.setdiff1d(left, groups[-1])
    return groups


def _microbatches(problem: Problem, groups: Sequence[Sequence[int]]) -> list[int]:
    """Microbatches for each group by what its nodes compute, in the multiples in which lanes come."""
    units = problem.workload.microbatches // problem.lane_unit
    workers = problem.costs.workers.max(axis=0)
    speed = np.array(
        [sum(problem.cluster.nodes[node].flops_per_s * workers[node] for node in group) for group in groups]
    )
    exact = speed / speed.sum() * (units - len(groups))  # one for each beforehand
    found = np.floor(exact).astype(int)
    found[np.argsort(found - exact, kind="stable")[: units - len(groups) - found.sum()]] += 1
    return [int(1 + each) * problem.lane_unit for each in found]


def _following(part: Problem, first: Plan) -> Problem:
    recomputes = first.workload.activation_checkpointing
    return replace(
        part,
        workload=replace(part.workload, activation_checkpointing=recomputes),
        dispatch=first.dispatch,
        split_backward=first.split_backward,
        decision_variables=replace(part.decision_variables, dispatch=False, split_backward=False, checkpointing=False),
    )


def _joined(problem: Problem, groups: Sequence[Sequence[int]], plans: Sequence[Plan]) -> Plan:
    first = plans[0]
    members = tuple(
        tuple(group[node] for group, plan in zip(groups, plans, strict=True) for node in plan.stages[stage].nodes)
        for stage in range(problem.stages)
    )
    whole = replace(problem, workload=replace(first.workload, microbatches=problem.workload.microbatches))
    lanes = [
        Lane(tuple(group[node] for node in lane.path), lane.microbatches)
        for group, plan in zip(groups, plans, strict=True)
        for lane in plan.lanes
    ]
    return Plan(
        cluster=problem.cluster,
        workload=whole.workload,
        stages=tuple(map(Stage.of, first.layers, averagings(whole, members))),
        lanes=tuple(lanes),
        dispatch=first.dispatch,
        split_backward=first.split_backward,
    )
