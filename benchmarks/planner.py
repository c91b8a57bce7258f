"""How good the published planner's plans of published20 are, and how soon it has them.

python -m benchmarks.planner [SEEDS]
"""

from __future__ import annotations

import sys
import time

from benchmarks.best import problem_of
from skippipe.planner.problem import Placement, PlanRequest, Strategy
from skippipe.planner.published import published20
from skippipe.planner.strategies import make_plan

GOAL_S = 32.8


def planned(placement: Placement | None, seed: int, budget_s: float) -> tuple[float, float | None, float]:
    """Iteration seconds of the plan, when the goal was first seen to be reached, and how long planning took."""
    began = time.monotonic()
    reached: list[float] = []

    def progress(_: str, __: float, best_s: float | None) -> None:
        if best_s is not None and best_s <= GOAL_S and not reached:
            reached.append(time.monotonic() - began)

    plan = make_plan(problem_of(published20()), Strategy.SKIPPIPE, PlanRequest(seed, budget_s, placement, progress))
    took_s = time.monotonic() - began
    if plan.promise.iteration_s <= GOAL_S and not reached:
        reached.append(took_s)
    return plan.promise.iteration_s, reached[0] if reached else None, took_s


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("| stages | seed | budget | iteration (contention-only) | ≤ 32.8 s after | planning took |")
    print("|---|---|---|---|---|---|")
    for name, placement, budget_s in (("published", published20().placement, 30.0), ("our own", None, 60.0)):
        for seed in range(seeds):
            iteration_s, reached_s, took_s = planned(placement, seed, budget_s)
            soon = "not reached" if reached_s is None else f"{reached_s:.1f} s"
            print(f"| {name} | {seed} | {budget_s:.0f} s | {iteration_s:.2f} s | {soon} | {took_s:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
