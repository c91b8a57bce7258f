"""Whether plans for many nodes are good, with queues and averaging counted (full timing).

    python -m benchmarks.large losses [SECONDS [CLUSTER…]]      42, 100 nodes: repaired after one loss / before
    python -m benchmarks.large longer [SECONDS [CLUSTER…]]      100 nodes: the plan after 60 s / after SECONDS (1,200)
    python -m benchmarks.large thousand [SECONDS [CLUSTER…]]    1,000 nodes: the first plan, and after SECONDS (300)

A plan that a repair makes faster, or that twenty minutes make much faster, was not good. Tables in Markdown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.best import iteration_s
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of
from skippipe.planner.repair.repair import compile_repair, repaired
from skippipe.planner.strategies import compile_search, make_plan
from skippipe.workload import Workload

PLANNING_S = 60.0
HUNDRED = ("random:100", "regions:100")
LOSSES = 10  # of one node, that are tried: those in the middle of all stages
REPAIR_S_EACH_20 = 0.5  # as the coordinator has it


def problem(name: str) -> Problem:
    cluster, example = cluster_named(name)
    workload = example.workload if example else Workload(MODELS["llama-1.5b"], max_slots=3)
    return problem_of(cluster, workload, PlanSpec(checkpointing=None), example)


def planned(name: str, budget_s: float, bound_s: float = 0.0) -> Plan:
    return make_plan(problem(name), Strategy.BEST, PlanRequest(seed=1, budget_s=budget_s, bound_s=bound_s))


def losses(budget_s: float, clusters: Sequence[str]) -> None:
    compile_repair()
    print("| cluster | the plan | repaired after one loss / before: least, mean, most |\n|---|---|---|")
    for name in clusters or ("published42", *HUNDRED):
        plan = planned(name, budget_s)
        members = [set(stage.nodes) for stage in plan.stages]
        used = sorted(plan.stage_of)
        ratios = []
        for node in used[:: max(1, len(used) // LOSSES)][:LOSSES]:
            left = [each - {node} for each in members]
            repair_s = REPAIR_S_EACH_20 * len(plan.cluster) / 20
            found = repaired(plan, left, set().union(*left), budget_s=repair_s)
            assert found is not None
            ratios.append(iteration_s(found) / iteration_s(plan))
        ends = f"{min(ratios):.2f}, {sum(ratios) / len(ratios):.2f}, {max(ratios):.2f}"
        print(f"| {name} | {iteration_s(plan):.1f} s | {ends} |", flush=True)


def longer(budget_s: float, clusters: Sequence[str]) -> None:
    print(f"| cluster | after {PLANNING_S:.0f} s | after {budget_s:.0f} s | ratio |\n|---|---|---|---|")
    for name in clusters or HUNDRED:
        first_s, last_s = (iteration_s(planned(name, seconds)) for seconds in (PLANNING_S, budget_s))
        print(f"| {name} | {first_s:.1f} s | {last_s:.1f} s | {first_s / last_s:.2f} |", flush=True)


def thousand(budget_s: float, clusters: Sequence[str]) -> None:
    print("| cluster | first plan in | it | after | it | no plan is under |\n|---|---|---|---|---|---|")
    for name in clusters or ("regions:1000",):
        began = time.monotonic()
        first_s = iteration_s(planned(name, 0.0))
        took_s = time.monotonic() - began
        plan = planned(name, budget_s, bound_s=PLANNING_S)
        bound = f"{plan.lower_bound_ns / 1e9:.1f} s" if plan.lower_bound_ns else "–"
        print(f"| {name} | {took_s:.1f} s | {first_s:.1f} s | {budget_s:.0f} s | {iteration_s(plan):.1f} s | {bound} |")


PARTS: dict[str, tuple[Callable[[float, Sequence[str]], None], float]] = {
    "losses": (losses, PLANNING_S),
    "longer": (longer, 1200.0),
    "thousand": (thousand, 300.0),
}


def main() -> None:
    compile_search()
    part, seconds = PARTS[sys.argv[1] if len(sys.argv) > 1 else "losses"]
    part(float(sys.argv[2]) if len(sys.argv) > 2 else seconds, sys.argv[3:])


if __name__ == "__main__":
    main()
