"""A batch that is open, and types on the wire of which any will do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippipe.errors import UserError
from skippipe.planner.problem import PlanRequest, Problem
from skippipe.planner.problem_spec import fastest_of
from skippipe.planner.sweep import batch_sizes, choose_batch_size
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.processes import Command


def test_sizes_divide_over_the_stages_and_reach_both_ends() -> None:
    assert batch_sizes(30, 60, 5) == [30, 35, 40, 50, 55, 60]
    assert batch_sizes(28, 44, 5) == [30, 35, 40]
    assert batch_sizes(10, 10, 5) == [10]
    assert batch_sizes(1, 1000, 1)[0] == 1 and batch_sizes(1, 1000, 1)[-1] == 1000


def test_no_size_divides() -> None:
    with pytest.raises(UserError, match="multiples of 5"):
        batch_sizes(31, 34, 5)


@pytest.mark.slow
def test_where_averaging_takes_long_the_largest_batch_trains_most_a_second() -> None:
    work = Workload(TINY, sequence_tokens=16, microbatches=6, max_slots=2)
    problem = Problem(uniform_cluster(9, bandwidth=1e6), work, 4, 3)
    found, looks = choose_batch_size(problem, 24, PlanRequest(changes=24_000))
    assert [each.microbatches for each in looks] == batch_sizes(6, 24, problem.lane_unit)
    assert found.microbatches == 24
    assert found.samples_per_s >= max(each.samples_per_s for each in looks)
    assert validate(found) == []


def test_it_is_the_same_again() -> None:
    work = Workload(TINY, sequence_tokens=16, microbatches=6, max_slots=2)
    problem = Problem(uniform_cluster(6), work, 4, 3)
    once, again = (choose_batch_size(problem, 12, PlanRequest(changes=4_000)) for _ in range(2))
    assert once == again


def test_stopped_at_once_there_is_a_plan_all_the_same() -> None:
    problem = Problem(uniform_cluster(6), Workload(TINY, sequence_tokens=16, microbatches=6), 4, 3)
    found, looks = choose_batch_size(problem, 60, PlanRequest(stopped=lambda: True))
    assert len(looks) == 1
    assert replace(found, strategy="") == replace(looks[0], strategy="")


def test_command(skippipe: Command) -> None:
    ran = skippipe(
        *("plan", "datacentre:6", "--model", "llama-30m", "-s", "4", "-m", "6", "--most-microbatches", "12"),
        *("--search-steps", "2000", "--wire", "bf16,int8", "--json"),
    )
    assert ran.code == 0
    told = ran.json
    assert told["plan"]["workload"]["wire_dtype"] == "int8"
    assert set(told["batches"]) == {"6", "9", "12"}
    assert told["samples_per_s"] >= max(told["batches"].values())


def test_any_type_that_will_do() -> None:
    assert fastest_of("bf16", "--wire") == "bf16"
    assert fastest_of("bf16, fp32", "--wire") == "bf16"
    assert fastest_of("fp32,int8,bf16", "--wire") == "int8"
    assert fastest_of("bf16,int4,fp8", "--wire") == "int4"
    assert fastest_of(None, "--wire") is None
    with pytest.raises(UserError, match="'fp7' is none of fp32, bf16, int8"):
        fastest_of("bf16,fp7", "--wire")
