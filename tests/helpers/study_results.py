"""Results of a study, by hand, and times of its iterations."""

from __future__ import annotations

import json
from typing import Any

from skippipe.skip_schedule import SkipSchedule
from skippipe.study.config import EvalSettings, PlanSettings, Study, StudyBatch, StudyRun, Variant
from skippipe.study.planned_time import (
    PlannedIteration,
    PlannedTime,
    PlannedTimes,
)

FULL = Variant("full", stages=6)

THIRD = Variant("third", SkipSchedule("1/3 until 75%, 0"), stages=6)

SMALL = Variant("small", stages=4, layers=8)

STUDY = Study(
    "by hand",
    [FULL, THIRD, SMALL],
    tokens=8_000_000,
    seeds=[0, 1],
    batch=StudyBatch(sequence=1000, samples=10, microbatches=100),
    measuring=EvalSettings(every=2),
    planned=PlanSettings(budget_s=0.1),
)

PROMISES = {
    PlannedIteration(stages=6, layers=24, visited=6, placed_for=6, early_exit=False): PlannedTime(100.0),
    PlannedIteration(stages=6, layers=24, visited=4, placed_for=4, early_exit=False): PlannedTime(50.0),
    PlannedIteration(stages=6, layers=24, visited=6, placed_for=4, early_exit=False): PlannedTime(120.0),
    PlannedIteration(stages=4, layers=16, visited=4, placed_for=4, early_exit=False): PlannedTime(60.0),
}

TIMES = PlannedTimes(STUDY.planned, seed=0, model_layers=12, workload_layers=24, published_s=200.0, plans=PROMISES)


def result(variant: Variant, seed: int, losses: list[float], **changes: Any) -> dict[str, Any]:
    """Of eight iterations, looked at after 2, 4, 6 and 8 of them."""
    run = StudyRun(STUDY, variant, seed)
    made = {
        "variant": variant.name,
        "seed": seed,
        "key": run.key,
        "settings": run.settings,
        "parameters": 46_300_000,
        "tokens": 8_000_000,
        "lengths": run.lengths,
        "curve": [[2 * at, 2_000_000 * at, 9.0, loss] for at, loss in enumerate(losses, start=1)],
        "whole": {"books": losses[-1], "code": losses[-1] + 1},
        "parts": [],
        "routers": None,
    }
    found: dict[str, Any] = json.loads(json.dumps({**made, **changes}))  # as a file gives it back
    return found


RESULTS = [
    result(FULL, 0, [5.0, 4.0, 3.5, 3.0]),
    result(THIRD, 0, [4.8, 3.8, 3.2, 2.9]),
    result(SMALL, 0, [5.0, 4.2, 3.6, 3.3]),
    result(FULL, 1, [5.0, 4.0, 3.5, 3.2]),
    result(THIRD, 1, [4.8, 3.8, 3.4, 3.3]),
]
