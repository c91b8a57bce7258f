"""How soon a plan is put right after a loss, and how good it is then.

    python -m benchmarks.repair [SCRATCH_S]

Prints a table in Markdown: seconds that a repair takes, and the iteration of the repaired plan beside the iteration
before and beside that of a plan made from scratch for the nodes left, in SCRATCH_S seconds (20 if not said).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.best import iteration_s
from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of
from skippipe.planner.repair.repair import compile_repair, repaired
from skippipe.planner.repair.stage_assignment import StageAssignment
from skippipe.planner.strategies import make_plan
from skippipe.validate import validate
from skippipe.workload import Workload

SETTINGS = (
    # cluster, seconds for a repair, losses of one node that are tried
    ("regions:20", 0.5, 20),  # not published20, where two nodes left alone in a ring may average for hours
    ("random:20", 0.5, 20),
    ("published42", 1.0, 8),
    ("random:100", 3.0, 5),
    ("regions:100", 3.0, 5),
)
MADE_S = 20.0  # for the plan before


@dataclass(frozen=True)
class Outcome:
    took_s: float
    iteration_s: float


def repair(plan: Plan, members: Sequence[set[int]], budget_s: float) -> Outcome:
    able = set().union(*members)
    began = time.monotonic()
    found = repaired(plan, members, able, budget_s=budget_s)
    took_s = time.monotonic() - began
    assert found is not None
    assert {violation.rule for violation in validate(found)} <= {"CC3", "stages"}
    return Outcome(took_s, iteration_s(found))


def scratch_s(plan: Plan, lost: set[int], stages: int, visited: int, budget_s: float) -> float | None:
    """A plan for the nodes left, which may all change places; None if it would need other microbatches."""
    left = [node for node in range(len(plan.cluster)) if node not in lost]
    try:
        problem = Problem(plan.cluster.only(left), plan.workload, stages, visited)
        return iteration_s(make_plan(problem, Strategy.SKIPPIPE, PlanRequest(budget_s=budget_s)))
    except Infeasible:
        return None


def made(name: str) -> Plan:
    cluster, example = cluster_named(name)
    work = example.workload if example else Workload(MODELS["llama-1.5b"], max_slots=3)
    return make_plan(problem_of(cluster, work, PlanSpec(), example), Strategy.SKIPPIPE, PlanRequest(budget_s=MADE_S))


def row(name: str, what: str, outcomes: Sequence[Outcome], before_s: float, scratch: Sequence[float | None]) -> None:
    took = [outcome.took_s for outcome in outcomes]
    ratios = [outcome.iteration_s / before_s for outcome in outcomes]
    beside = [o.iteration_s / s for o, s in zip(outcomes, scratch, strict=False) if s is not None]
    print(
        f"| {name} | {what} | {mean(took):.2f} / {max(took):.2f} s | {before_s:.1f} s "
        f"| {mean(ratios):.2f} / {max(ratios):.2f} | {f'{mean(beside):.2f}' if beside else '–'} |",
        flush=True,
    )


def main() -> None:
    from_scratch_s = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    compile_repair()
    print("| cluster | what happened | repair took, mean / worst | before | after ÷ before, mean / worst | ÷ scratch |")
    print("|---|---|---|---|---|---|")
    for name, budget_s, losses in SETTINGS:
        plan = made(name)
        members = [set(stage.nodes) for stage in plan.stages]
        visited = len(plan.lanes[0].path)
        row(name, "nothing", [repair(plan, members, budget_s)], iteration_s(plan), [])
        nodes = sorted(plan.stage_of)
        sample = nodes[:: max(1, len(nodes) // losses)][:losses]
        single = [repair(plan, [each - {node} for each in members], budget_s) for node in sample]
        few = sample[:: max(1, len(sample) // 3)][:3]
        scratch = [scratch_s(plan, {node}, len(members), visited, from_scratch_s) for node in few]
        row(name, f"a node lost ({len(sample)} tried)", single, iteration_s(plan), [])
        compared = [single[sample.index(node)] for node in few]
        row(name, f"the same ({len(few)} of them)", compared, iteration_s(plan), scratch)
        gone = [
            [set() if stage == lost else each for stage, each in enumerate(members)] for lost in range(1, len(members))
        ]
        row(name, "a stage lost (each but 0)", [repair(plan, each, budget_s) for each in gone], iteration_s(plan), [])
        node = sample[len(sample) // 2]
        short = [each - {node} for each in members]
        able = set().union(*short)
        without = repaired(plan, short, able, budget_s=budget_s)
        assert without is not None
        staff = StageAssignment(without, visited, short, able, able)
        began = time.monotonic()
        best = staff.using([node])
        decided_s = time.monotonic() - began
        assert best is not None
        joined = [each | {node} if index == best.stage else each for index, each in enumerate(short)]
        used = "used" if best.helps else "a spare"
        row(name, f"a node joins ({used})", [repair(without, joined, budget_s)], iteration_s(without), [])
        began = time.monotonic()
        moved = staff.moving(iterations=1000)
        decisions = [Outcome(decided_s, best.after_s), Outcome(time.monotonic() - began, (moved or best).after_s)]
        row(name, "decided: a newcomer, a move", decisions, iteration_s(without), [])


if __name__ == "__main__":
    main()
