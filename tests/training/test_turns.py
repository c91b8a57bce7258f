"""Iterations with paths of several lengths, held against turns before training starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippipe.errors import Infeasible
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Strategy
from skippipe.planner.strategies import has_lengths
from skippipe.training.backends import BACKENDS
from skippipe.training.train_job import run_job
from tests.helpers.jobs import tiny_job


def no_plans(*_: Any) -> float:
    raise Infeasible("there are none")


def fast(plan: Plan, length: tuple[int, ...], strategy: Strategy, request: PlanRequest) -> float:
    assert has_lengths(plan, length)
    assert (length, strategy, request.budget_s) == ((3, 3, 2), Strategy.BEST, 0.1)
    return 1e-6


@pytest.mark.parametrize(
    ("engine", "turns_s", "skip", "said"),
    [
        ("virtual", fast, "2 x 0 & 1/3", True),
        ("virtual", lambda *given: 1e6, "2 x 0 & 1/3", False),
        ("virtual", no_plans, "2 x 0 & 1/3", False),
        ("virtual", fast, "2 x 0 + 1/3", False),
        ("one-process", fast, "2 x 0 & 1/3", False),
    ],
    ids=["turns are faster", "slower", "not feasible", "turns already", "nothing is promised"],
)
def test_training_says_when_turns_would_be_faster(
    engine: str,
    turns_s: Callable[..., float],
    skip: str,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = tiny_job(
        tmp_path,
        iterations=1,
        cluster="regions:4",
        pipeline={"stages": 3, "budget_s": 0.1},
        recipe={"skip": skip},
        checkpoint={"every": 0},
    )
    monkeypatch.setattr("skippipe.planner.strategies.turns_s", turns_s)
    run_job(job, BACKENDS[engine])
    line = r'note: by turns, "2 x 0 \+ 1/3", an iteration would take 0\.00 s on average instead of \d+\.\d\d s\n'
    assert len(re.findall(line, capsys.readouterr().out)) == said
