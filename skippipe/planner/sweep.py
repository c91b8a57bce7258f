"""Sweeps over the shape of a problem: numbers of stages and of skipped ones, batch sizes, and what codecs may cost.

Skipping makes an iteration shorter and trains the model a little less in it. Both are put into one figure, the time to
the same loss: what skipping adds to the loss has to be made up by more tokens. How much it adds, and what tokens take
off, are parameters; `skippipe study` measures the first.

Where the number of microbatches is open, the best is what trains the most samples a second. A longer iteration spreads
its beginning, its end and the averaging of gradients over more samples, until memory or slow lanes hold it up. A few
sizes get a short search each, and the best of them the rest of the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.codec_choice import choose_codecs
from skippipe.planner.codec_prices import CodecBudget, plan_nats
from skippipe.planner.problem import PlanRequest, Problem, Strategy, iteration_ns, lane_unit
from skippipe.planner.strategies import make_plan
from skippipe.skip_schedule import USUAL, SkipSchedule

MOST_STAGES = 1_000
USUAL_NATS = 0.04  # that the usual recipe of training adds to the loss (docs/results-learning.md)

ProblemFor = Callable[[int, int, int | None], Problem]
"""Makes the problem for (stages, stages on a path, microbatches; None: the default number)."""


@dataclass(frozen=True)
class Trade:
    """How loss trades against tokens."""

    penalty: float = 0.0
    """Nats that skipping would add to the loss per share of the stages, for the same tokens: with 0.3, a third costs
    0.1."""
    doubling: float = 0.1
    """Nats that twice as many tokens take off the loss."""

    def tokens(self, skipped: Fraction) -> float:
        """How many times as many tokens it takes to get to the same loss as without skipping."""
        return float(2 ** (self.penalty * float(skipped) / self.doubling))


@dataclass(frozen=True)
class SweepPoint:
    """A plan of the sweep: its stages, stages on a path, and iteration."""

    stages: int
    visited: int
    iteration_s: float
    microbatches: int

    @property
    def skipped(self) -> Fraction:
        return 1 - Fraction(self.visited, self.stages)

    @property
    def microbatch_s(self) -> float:
        """Seconds of an iteration for each of its microbatches."""
        return self.iteration_s / self.microbatches

    @property
    def name(self) -> str:
        return f"{self.visited} of {self.stages}"

    def same_loss_s(self, trade: Trade) -> float:
        """Seconds a microbatch, times the tokens that it takes to the same loss."""
        return self.microbatch_s * trade.tokens(self.skipped)


@dataclass(frozen=True)
class InfeasiblePoint:
    """A combination of stages and stages on a path for which there is no plan."""

    stages: int
    visited: int
    reason: str

    @property
    def skipped(self) -> Fraction:
        return 1 - Fraction(self.visited, self.stages)


def stage_counts(text: str) -> list[int]:
    """Parse `6`, `4,6,8`, `4-8`, or these together: each number once, in the order given."""
    counts: list[int] = []
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise UserError(f"stages: '{text}' is neither a number, a list such as 4,6,8, nor a range such as 4-8")
        first, last = int(ends[0]), int(ends[-1])
        if not 2 <= first <= last <= MOST_STAGES:
            raise UserError(f"stages: '{part.strip()}': give numbers from 2 to {MOST_STAGES}, the smaller one first")
        counts += range(first, last + 1)
    return list(dict.fromkeys(counts))


def sweep(
    stages: Iterable[int],
    microbatches: int | None,
    problem_for: ProblemFor,
    planned: Callable[[Problem], Plan],
    stopped: Callable[[], bool] = lambda: False,
) -> list[SweepPoint | InfeasiblePoint]:
    """A plan for every number of stages, visited by paths of every length, from all of them to two.

    All iterations have about as many microbatches: as given, or the default of the first problem that can be made;
    rounded up to where all stages can be visited equally often (CC3).
    """
    found: list[SweepPoint | InfeasiblePoint] = []
    for count, visited in [(each, visited) for each in stages for visited in range(each, 1, -1)]:
        if stopped():
            break
        try:
            if microbatches is None:
                microbatches = problem_for(count, visited, None).workload.microbatches
            unit = lane_unit(count, visited)
            plan = planned(problem_for(count, visited, -(-microbatches // unit) * unit))
        except UserError as error:  # too many stages for the model, the cluster or its memory
            found.append(InfeasiblePoint(count, visited, str(error)))
            continue
        found.append(SweepPoint(count, visited, plan.promise.iteration_s, plan.microbatches))
    return found


@dataclass(frozen=True)
class UsualRun:
    """A run by the usual recipe of training (`skip_schedule.USUAL`)."""

    microbatch_s: float
    """Seconds of an iteration for each of its microbatches, on average over the run."""
    to_same_loss: float
    """Its time to the same loss as that of the full pipeline, which is 1."""


def usual_run(points: Sequence[SweepPoint], stages: int, doubling: float) -> UsualRun | None:
    """What follows for such a run from the plans that visit all of so many stages, and two thirds; None: one of them is
    not there."""
    seconds = {point.skipped: point.microbatch_s for point in points if point.stages == stages}
    first = SkipSchedule(USUAL).phases[0]
    ((skipped,),) = first.turn
    if not {Fraction(0), skipped} <= seconds.keys():
        return None
    whole_s, until = seconds[Fraction(0)], float(first.until)
    mean_s = until * seconds[skipped] + (1 - until) * whole_s
    return UsualRun(mean_s, mean_s / whole_s * 2 ** (USUAL_NATS / doubling))


def efficient(points: Sequence[SweepPoint]) -> list[bool]:
    """For each point whether it is Pareto-efficient in the share skipped and the seconds a microbatch."""

    def beaten(point: SweepPoint) -> bool:
        return any(
            other.skipped <= point.skipped
            and other.microbatch_s <= point.microbatch_s
            and (other.skipped, other.microbatch_s) != (point.skipped, point.microbatch_s)
            for other in points
        )

    return [not beaten(point) for point in points]


def best(points: Sequence[SweepPoint], trade: Trade) -> SweepPoint:
    """The fastest point at the same loss; of equals the one that skips least."""
    return min(points, key=lambda point: (point.same_loss_s(trade), point.skipped))


@dataclass(frozen=True)
class CodecPoint:
    """The plan for a budget of nats."""

    budget: float
    nats: float
    """What the codecs of the plan cost."""
    plan: Plan

    @property
    def iteration_s(self) -> float:
        return self.plan.promise.iteration_s


def sweep_codecs(
    problem: Problem,
    budgets: Sequence[CodecBudget],
    planned: Callable[[Problem], Plan],
    stopped: Callable[[], bool] = lambda: False,
) -> list[CodecPoint]:
    """A plan for each budget, the least first. Each may take over the paths that were found for a larger one, with
    codecs for its own, and a plan for a smaller one as it is: more nats never make it slower."""
    points: list[CodecPoint] = []
    for budget in sorted(budgets, key=lambda each: -each.nats):
        if points and stopped():
            break
        rivals = [planned(replace(problem, codec_budget=budget))]
        rivals += [choose_codecs(point.plan, budget, problem.timing) for point in points[-1:]]
        best = min(rivals, key=iteration_ns)
        points.append(CodecPoint(budget.nats, plan_nats(best, budget.prices), best))
    points.reverse()
    for at, (less, point) in enumerate(pairwise(points), 1):
        if less.iteration_s < point.iteration_s:
            points[at] = replace(points[at - 1], budget=point.budget)
    return points


MOST_SIZES = 6
FIRST_PASS_SHARE = 0.5  # of the budget, for the first short searches together


def batch_sizes(fewest: int, most: int, unit: int) -> list[int]:
    """Numbers of microbatches from the fewest to the most, evenly apart; multiples of the unit, for CC3."""
    first, last = -(-fewest // unit), most // unit
    if first > last:
        raise UserError(
            f"from {fewest} to {most} microbatches: none can visit all stages equally often (CC3); "
            f"multiples of {unit} can"
        )
    number = min(MOST_SIZES, last - first + 1)
    steps = [round(first + (last - first) * nth / max(1, number - 1)) for nth in range(number)]
    return [unit * step for step in dict.fromkeys(steps)]


def choose_batch_size(problem: Problem, most: int, request: PlanRequest) -> tuple[Plan, list[Plan]]:
    """The plan that trains the most samples a second, and those of the first short search at each size, smallest first.

    The problem's own number of microbatches is the fewest. The plans are of the strategy `best`.
    """
    sizes = batch_sizes(problem.workload.microbatches, most, problem.lane_unit)
    part = FIRST_PASS_SHARE / len(sizes)
    first_plans: list[Plan] = []
    for number, size in enumerate(sizes):
        if request.stopped() and first_plans:
            break

        def progress(what: str, portion: float, best_s: float | None, number: int = number, size: int = size) -> None:
            request.progress(f"{size} microbatches: {what}", (number + portion) * part, best_s)

        first_request = replace(_portion(request, part), progress=progress)
        first_plans.append(make_plan(_with(problem, size), Strategy.BEST, first_request))
    chosen = max(first_plans, key=lambda each: each.samples_per_s)
    rest = replace(
        _portion(request, 1 - FIRST_PASS_SHARE), bound_s=request.bound_s, start=chosen, robust=request.robust
    )
    return make_plan(_with(problem, chosen.microbatches), Strategy.BEST, rest), first_plans


def _with(problem: Problem, microbatches: int) -> Problem:
    return replace(problem, workload=replace(problem.workload, microbatches=microbatches))


def _portion(request: PlanRequest, portion: float) -> PlanRequest:
    """The request with this portion of its budget, without a bound or jitter."""
    return replace(
        request, budget_s=portion * request.budget_s, changes=portion * request.changes, bound_s=0.0, robust=0.0
    )
