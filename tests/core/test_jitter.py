"""Iterations on nodes and links that vary."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from skippipe.errors import UserError
from skippipe.jitter import Jitter, Spread, spread_of
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner import strategies
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.published import published20, published_plan
from skippipe.planner.strategies import CHOOSING_SEED, make_plan
from skippipe.presets import random_cluster
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.processes import Command


@cache
def published() -> Plan:
    return published_plan(published20(), "skippipe")


@pytest.mark.parametrize("timing", list(Timing))
@pytest.mark.parametrize("split", [False, True])
def test_no_jitter_is_the_plain_simulation(timing: Timing, split: bool) -> None:
    plan = replace(published(), split_backward=split)
    plain_ns = simulate(plan, timing).iteration_ns
    assert spread_of(plan, timing, Jitter(0, draws=3)).iterations_ns == (plain_ns,) * 3


def test_same_seed_same_figures() -> None:
    first, again, other = (spread_of(published(), Timing.FULL, Jitter(0.2, 50, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_more_draws_contain_fewer() -> None:
    few, many = (spread_of(published(), Timing.FULL, Jitter(0.2, draws)) for draws in (10, 20))
    assert set(few.iterations_ns) < set(many.iterations_ns)


@pytest.mark.parametrize("timing", list(Timing))
def test_figures_are_in_order_and_grow_with_the_jitter(timing: Timing) -> None:
    plain_s = simulate(published(), timing).iteration_s
    before = plain_s
    for spread in (0.1, 0.2, 0.4):
        figures = spread_of(published(), timing, Jitter(spread, 100)).to_json()
        assert figures["median_s"] <= figures["p95_s"] <= figures["worst_s"]
        assert figures["mean_s"] > plain_s, "the slowest of many lanes sets the time"
        assert figures["p95_s"] > before
        before = figures["p95_s"]


def test_percentiles_are_those_of_the_draws() -> None:
    spread = Spread(tuple(range(1, 201)))
    assert (spread.reached_ns(0.5), spread.tail_ns, spread.reached_ns(1)) == (100, 190, 200)
    assert Spread((7,)).tail_ns == 7


def test_factors_have_the_spread_that_was_asked_for() -> None:
    """One microbatch alone: nobody is waited for, so its time is a sum of tasks and hops, each with a mean of 1."""
    plan = published()
    lane = replace(plan.lanes[0], microbatches=1)
    alone = replace(plan, lanes=(lane,))
    factors = np.array(spread_of(alone, Timing.CONTENTION_ONLY, Jitter(0.2, 400)).iterations_ns)
    factors = factors / simulate(alone, Timing.CONTENTION_ONLY).iteration_ns
    assert factors.mean() == pytest.approx(1, abs=0.02)
    assert 0.03 < factors.std() < 0.2, "sums of independent factors vary less than each"


@pytest.mark.parametrize("spread", [-0.1, 2.5, math.nan])
def test_impossible_jitter(spread: float) -> None:
    with pytest.raises(UserError, match="jitter"):
        Jitter(spread)


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> int:
    """By which plans are chosen."""
    draws = 40
    monkeypatch.setattr(strategies, "CHOOSING_DRAWS", draws)
    return draws


def test_a_robust_plan_holds_and_promises_what_it_takes_without_jitter(few_draws: int) -> None:
    problem = Problem(random_cluster(8, 3), Workload(MODELS["llama-1.5b"], microbatches=12), 4, 3)
    request = PlanRequest(budget_s=math.inf, changes=3_000)
    plans = {robust: make_plan(problem, Strategy.BEST, replace(request, robust=robust)) for robust in (0.0, 0.3)}
    for plan in plans.values():
        assert validate(plan) == []
        assert plan.expected == simulate(plan, problem.timing)
    assert plans[0.3].expected and plans[0.0].expected
    assert plans[0.3].expected.iteration_ns >= plans[0.0].expected.iteration_ns
    choosing = Jitter(0.3, few_draws, CHOOSING_SEED)
    tails = {robust: spread_of(plan, problem.timing, choosing).tail_ns for robust, plan in plans.items()}
    assert tails[0.3] <= tails[0.0], "by the draws that it was chosen by"


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_commands_plan_for_it_and_draw_it(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned = skippipe("plan", "five-sites:6", "--search-steps", "500", "--robust", "0.3", "-o", file, "--json").json
    assert skippipe("check", file).code == 0
    words = ["simulate", file, "--jitter", "0.3"]
    simulated = skippipe(*words, "--json").json
    assert simulated["iteration_s"] == planned["iteration_s"], "the promise is without jitter"
    assert simulated["jitter"] == planned["jitter"]
    assert skippipe(*words, "--seed", "1", "--json").json["jitter"] != planned["jitter"]
    assert f"95th percentile {planned['jitter']['p95_s']:.3f} s" in skippipe(*words).out
