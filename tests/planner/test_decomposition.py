"""Large clusters in parts."""

from __future__ import annotations

import math

import pytest

from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.search import decomposition
from skippipe.planner.search.decomposition import part_count, planned_in_parts
from skippipe.planner.strategies import make_plan
from skippipe.presets import preset
from skippipe.validate import validate
from skippipe.workload import Workload


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decomposition, "PART", 6)


def problem_of(cluster: str, microbatches: int) -> Problem:
    return Problem(preset(cluster), Workload(MODELS["llama-500m"], microbatches=microbatches, max_slots=3), 4, 3)


@pytest.mark.usefixtures("small_parts")
def test_plans_of_parts_make_one_that_keeps_every_rule() -> None:
    problem = problem_of("regions:19", 24)
    parts: list[tuple[Problem, Plan]] = []

    def plan_part(number: int, part: Problem) -> Plan:
        assert number == len(parts)
        plan = make_plan(part, Strategy.BEST, PlanRequest(budget_s=math.inf, changes=1))
        parts.append((part, plan))
        return plan

    plan = planned_in_parts(problem, plan_part)
    assert len(parts) == part_count(problem) == 3
    assert sorted(len(part.cluster) for part, _ in parts) == [6, 6, 7]
    names = [node.name for part, _ in parts for node in part.cluster.nodes]
    assert sorted(names) == sorted(node.name for node in problem.cluster.nodes)
    assert sum(each.microbatches for _, each in parts) == plan.microbatches == 24
    assert validate(plan) == []
    assert len({(each.dispatch, each.split_backward) for _, each in parts}) == 1
    where = {node.name: node.location for node in problem.cluster.nodes}
    apart = [len({where[node.name] for node in part.cluster.nodes}) for part, _ in parts]
    assert max(apart) < len(set(where.values())), "parts are of nodes near each other"


def test_few_nodes_are_planned_as_a_whole() -> None:
    assert part_count(problem_of("regions:42", 60)) == 1
    assert part_count(problem_of("regions:61", 6)) == 1


@pytest.mark.usefixtures("small_parts")
def test_a_search_that_begins_in_parts_keeps_the_rules_and_can_be_repeated() -> None:
    problem = problem_of("regions:19", 24)
    request = PlanRequest(budget_s=math.inf, changes=5_000)
    plan = make_plan(problem, Strategy.BEST, request)
    assert validate(plan) == []
    assert plan == make_plan(problem, Strategy.BEST, request), "the same seed and changes, the same plan"
