"""Stages that nodes have too little memory for, or too few slots: what is missing, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.planner.problem import PlanRequest, Problem, Strategy, full_pipeline
from skippipe.planner.strategies import make_plan
from skippipe.presets import datacentre, regions
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster

QUICK = PlanRequest(seed=0, budget_s=60)


def test_memory_too_small_says_how_many_stages_would_fit() -> None:
    work = Workload(MODELS["llama-8b"], samples_per_microbatch=1, microbatches=30)
    with pytest.raises(Infeasible, match=r"stage 0 needs [\d.]+ GiB .* use \d+ stages, a smaller microbatch"):
        Problem(datacentre(32), work, 2, 2)
    with pytest.raises(Infeasible, match="nodes with more memory"):
        Problem(regions(8), replace(work, samples_per_microbatch=64, microbatches=32), 8, 8)


def test_too_few_slots_for_the_lanes_are_named() -> None:
    work = Workload(TINY, sequence_tokens=16, microbatches=10, max_slots=1)
    problem = Problem(uniform_cluster(6), work, 6, 4)
    said = []
    for call in (
        lambda: make_plan(problem, Strategy.SKIPPIPE, QUICK),
        lambda: problem.lanes_of(tuple((node,) for node in range(6))),
    ):
        with pytest.raises(Infeasible) as error:
            call()
        said.append(str(error.value))
    (line,) = set(said)
    assert line == (
        "stage 0 is on 1 node with room for 1 microbatch at a time, and paths through 4 of 6 stages need room for 5 "
        "there, so that each stage is visited equally often: add nodes, or give --max-slots 5 or --skip 0 (in a job: "
        "pipeline.max_slots, recipe.skip)"
    )


def test_too_few_slots_are_found_before_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> None:
        raise AssertionError("too early")

    monkeypatch.setattr("skippipe.planner.strategies.compile_search", compiled)
    memory = Problem(regions(4), Workload(MODELS["llama-1.5b"], microbatches=6), 4, 3)
    with pytest.raises(Infeasible, match=r"for 2 microbatches .* need room for 3 there.* --samples 1 or .*--skip 0"):
        make_plan(memory, Strategy.BEST, QUICK)
    with pytest.raises(AssertionError, match="too early"):
        make_plan(full_pipeline(memory), Strategy.BEST, QUICK)
