"""Which (S, L) is best: the trade between seconds and share skipped, and plans for several numbers of stages."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from skippipe.errors import UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.problem_spec import PlanSpec, problem_of
from skippipe.planner.strategies import make_plan
from skippipe.planner.sweep import (
    InfeasiblePoint,
    SweepPoint,
    Trade,
    best,
    efficient,
    stage_counts,
    sweep,
    usual_run,
)
from skippipe.presets import five_sites
from skippipe.skip_schedule import USUAL, SkipSchedule
from skippipe.validate import validate
from skippipe.workload import Workload

ROWS = [
    SweepPoint(6, 6, 60, 30),  # 2.0 s, 0%
    SweepPoint(4, 4, 66, 30),  # 2.2 s, 0%: beaten by the one before
    SweepPoint(6, 5, 51, 30),  # 1.7 s, 17%
    SweepPoint(4, 3, 45, 30),  # 1.5 s, 25%
    SweepPoint(6, 4, 45, 30),  # 1.5 s, 33%: as fast as the one before, and skips more
    SweepPoint(3, 2, 27, 30),  # 0.9 s, 33%
    SweepPoint(6, 3, 33, 30),  # 1.1 s, 50%: beaten in both
]


def test_efficient_is_what_nothing_beats_in_both() -> None:
    assert efficient(ROWS) == [True, False, True, True, False, True, False]


def test_equal_points_are_both_efficient() -> None:
    assert efficient([SweepPoint(6, 4, 45, 30), SweepPoint(3, 2, 30, 20)]) == [True, True]


def test_a_penalty_changes_the_choice() -> None:
    assert best(ROWS, Trade()) == ROWS[5]
    assert best(ROWS, Trade(penalty=0.3)) == ROWS[5], "0.9 s and twice the tokens, against 2.0 s"
    assert best(ROWS, Trade(penalty=0.4)) == ROWS[0]
    assert best(ROWS, Trade(penalty=0.4, doubling=0.2)) == ROWS[5], "tokens are worth more"


def test_a_loss_of_one_doubling_takes_twice_the_tokens() -> None:
    trade = Trade(penalty=0.3, doubling=0.1)
    assert trade.tokens(Fraction(1, 3)) == pytest.approx(2)
    assert trade.tokens(Fraction(0)) == 1
    assert Trade().tokens(Fraction(1, 2)) == 1
    assert ROWS[4].same_loss_s(trade) == pytest.approx(3.0)


def test_the_usual_run_mixes_both_iterations() -> None:
    found = usual_run(ROWS, 6, doubling=0.04)
    assert found is not None
    assert found.microbatch_s == pytest.approx(0.65 * 1.5 + 0.35 * 2.0)
    assert found.to_same_loss == pytest.approx(2 * found.microbatch_s / 2.0), "its loss costs a doubling"
    assert usual_run(ROWS, 4, 0.1) is None, "no two thirds of four stages"
    lengths = [SkipSchedule(USUAL).visited(number, 100, 6, 6) for number in range(100)]
    assert (lengths.count(4), lengths.count(6)) == (65, 35)


@pytest.mark.parametrize(
    ("text", "counts"), [("6", [6]), ("4,6, 8", [4, 6, 8]), ("4-6", [4, 5, 6]), ("6,4-6,9", [6, 4, 5, 9])]
)
def test_stage_counts(text: str, counts: list[int]) -> None:
    assert stage_counts(text) == counts


@pytest.mark.parametrize("text", ["", "four", "4-", "6-4", "1", "4,,6", "2-99999", "²"])
def test_bad_stage_counts_are_named(text: str) -> None:
    with pytest.raises(UserError, match="stages: '"):
        stage_counts(text)


def test_several_stage_counts_and_what_cannot_be() -> None:
    """Two stages of an 8B model fit on no node, ten stages have too few nodes: both are told, the others planned."""
    cluster = five_sites(9)
    big = replace(cluster, nodes=tuple(replace(node, memory_bytes=70 * 2**30) for node in cluster.nodes))
    asked: list[Problem] = []

    def ask(stages: int, visited: int, microbatches: int | None) -> Problem:
        plan_spec = PlanSpec(stages=stages, visit=visited, microbatches=microbatches)
        return problem_of(big, Workload(MODELS["llama-8b"], samples_per_microbatch=1, sequence_tokens=512), plan_spec)

    def planned(problem: Problem) -> Plan:
        asked.append(problem)
        plan = make_plan(problem, Strategy.BEST, PlanRequest(budget_s=math.inf, changes=1))
        assert validate(plan) == []
        return plan

    found = sweep([2, 4, 10], 7, ask, planned)
    refused = {(each.stages, each.reason.split(" ")[0]) for each in found if isinstance(each, InfeasiblePoint)}
    assert refused == {(2, "stage"), (10, "10")}
    points = [each for each in found if isinstance(each, SweepPoint)]
    assert [(point.stages, point.visited) for point in points] == [(4, 4), (4, 3), (4, 2)]
    assert [problem.workload.microbatches for problem in asked] == [7, 9, 9], "rounded up where CC3 needs it"


def test_a_sweep_that_is_stopped_keeps_what_it_has() -> None:
    stop: list[bool] = []

    def ask(stages: int, visited: int, microbatches: int | None) -> Problem:
        plan_spec = PlanSpec(stages=stages, visit=visited, microbatches=microbatches)
        return problem_of(five_sites(6), Workload(MODELS["llama-30m"]), plan_spec)

    def planned(problem: Problem) -> Plan:
        stop.append(True)
        return make_plan(problem, Strategy.BEST, PlanRequest(budget_s=math.inf, changes=1))

    assert len(sweep([3, 4], None, ask, planned, lambda: bool(stop))) == 1
