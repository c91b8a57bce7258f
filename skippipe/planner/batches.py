"""How many microbatches an iteration should have, where that is open: as many as train the most samples a second.

A longer iteration spreads its beginning, its end and the averaging of gradients over more samples, until memory or slow
lanes hold it up. A few numbers get a look each, and the best of them the rest of the effort.
"""

from __future__ import annotations

from dataclasses import replace

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.problem import Problem
from skippipe.planner.strategies import Request, Strategy, make_plan

MOST_LOOKS = 6
LOOKING = 0.5  # of the effort, for all looks together


def batch_sizes(fewest: int, most: int, unit: int) -> list[int]:
    """Some from the fewest to the most, evenly apart; multiples of the unit, so that all stages are visited equally."""
    first, last = -(-fewest // unit), most // unit
    if first > last:
        raise UserError(
            f"from {fewest} to {most} microbatches: none can visit all stages equally often (CC3); "
            f"multiples of {unit} can"
        )
    looks = min(MOST_LOOKS, last - first + 1)
    steps = [round(first + (last - first) * look / max(1, looks - 1)) for look in range(looks)]
    return [unit * step for step in dict.fromkeys(steps)]


def free_batch(problem: Problem, most: int, request: Request) -> tuple[Plan, list[Plan]]:
    """The plan that trains the most samples a second, and those of a first look at each size, smallest first.

    The problem's own number of microbatches is the fewest. The plans are of the strategy `best`.
    """
    sizes = batch_sizes(problem.workload.microbatches, most, problem.lane_unit)
    part = LOOKING / len(sizes)
    looks: list[Plan] = []
    for number, size in enumerate(sizes):
        if request.stopped() and looks:
            break

        def progress(what: str, share: float, best_s: float | None, number: int = number, size: int = size) -> None:
            request.progress(f"{size} microbatches: {what}", (number + share) * part, best_s)

        look = replace(_share(request, part), progress=progress)
        looks.append(make_plan(_with(problem, size), Strategy.BEST, look))
    chosen = max(looks, key=lambda each: each.samples_per_s)
    rest = replace(_share(request, 1 - LOOKING), bound_s=request.bound_s, start=chosen, robust=request.robust)
    return make_plan(_with(problem, chosen.microbatches), Strategy.BEST, rest), looks


def _with(problem: Problem, microbatches: int) -> Problem:
    return replace(problem, workload=replace(problem.workload, microbatches=microbatches))


def _share(request: Request, share: float) -> Request:
    """That much of the effort, without a bound and by what is promised."""
    return replace(request, budget_s=share * request.budget_s, changes=share * request.changes, bound_s=0.0, robust=0.0)
