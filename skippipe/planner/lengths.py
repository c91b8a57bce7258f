"""The same nodes on the same stages, with paths of another length."""

from __future__ import annotations

from dataclasses import replace

from skippipe.check import check
from skippipe.errors import Infeasible
from skippipe.plan import Plan
from skippipe.planner.problem import NO_FREEDOMS, Problem
from skippipe.planner.repair import repaired
from skippipe.planner.strategies import Request, Strategy, iteration_ns, make_plan
from skippipe.simulate import simulate
from skippipe.timeline import Timing


def with_paths_of(plan: Plan, length: int, strategy: Strategy, request: Request) -> Plan:
    """The faster of two: one that is made as plans are, and one that is made as plans are repaired.

    Infeasible if neither keeps every rule.
    """
    members = tuple(stage.nodes for stage in plan.stages)
    problem = Problem(
        plan.cluster,
        plan.workload,
        len(plan.stages),
        length,
        sizes=tuple(map(len, members)),
        dispatch=plan.dispatch,
        split_backward=plan.split_backward,
        layers=plan.layers,
        freedoms=NO_FREEDOMS,
    )
    other = repaired(plan, members, plan.stage_of, budget_s=request.budget_s, visited=length, clock=request.clock)
    rivals = [other] if other is not None and {len(lane.path) for lane in other.lanes} == {length} else []
    reason = None
    try:
        rivals.append(make_plan(problem, strategy, replace(request, placement=members)))
    except Infeasible as error:
        reason = error
    same = [
        replace(each, stages=plan.stages, expected=None, lower_bound_ns=None) for each in rivals
    ]  # also nodes that no lane uses
    promised = [each.promising(simulate(each, Timing.FULL)) for each in same if not check(each)]
    if not promised:
        raise reason or Infeasible(f"no paths of {length} stages were found that keep every rule")
    return min(promised, key=iteration_ns)
