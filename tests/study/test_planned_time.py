"""Planned times of studies: what an iteration takes, and from that what runs take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skippipe.errors import UserError
from skippipe.skip_schedule import SkipSchedule
from skippipe.study import tables
from skippipe.study.config import PlanSettings, Study, Variant
from skippipe.study.planned_time import (
    PlannedIteration,
    PlannedTime,
    PlannedTimes,
    TimedPhase,
    elapsed_s,
    most_frequent,
    planned_times,
    times_file,
)
from tests.helpers.study_results import FULL, PROMISES, RESULTS, STUDY, TIMES, result


def test_elapsed_follows_the_recipe_on_one_placement() -> None:
    assert elapsed_s(RESULTS[0], TIMES) == [200, 400, 600, 800]
    assert elapsed_s(RESULTS[1], TIMES) == [100, 200, 300, 540]  # six iterations of 4 stages, two of 6, placed for 4
    assert elapsed_s(RESULTS[2], TIMES) == [120, 240, 360, 480]  # 8 of 12 layers are 16 of 24


def test_healing_in_several_passes_takes_as_many_times_as_long() -> None:
    recipe = SkipSchedule("0 until 75%, 1/3", bridges=8, heal="75%")
    once, thrice = (replace(FULL, recipe=recipe, heal_passes=passes) for passes in (1, 3))
    losses = [5.0, 4.0, 3.5, 3.0]  # nodes have other places from then on: 4 stages take 50 s
    assert elapsed_s(result(once, 0, losses), TIMES) == [200, 400, 600, 700]
    assert elapsed_s(result(thrice, 0, losses), TIMES) == [200, 400, 600, 900]


def test_a_teacher_and_repeats_take_time() -> None:
    """Where two of six stages are missing, stages take the place of 1.6 others in the mean, beside the 4 visits."""
    recipe = SkipSchedule("0 until 75%, 1/3", adapters=8, distill=0.9, heal="75%")
    mixed = {PlannedIteration(6, 24, (6, 4), (6, 4), early_exit=False): PlannedTime(80.0)}
    for change, heals_s in (
        ({}, 50 + 100 / 3),
        ({"repeats": 1}, 50 * (1 + 1.6 / 4) + 100 / 3),
        ({"skip": "0 until 75%, 0 & 1/3"}, 80 + 100 / 6),
    ):
        run = result(replace(FULL, recipe=replace(recipe, **change)), 0, [5.0, 4.0, 3.5, 3.0])
        found = elapsed_s(run, replace(TIMES, plans=PROMISES | mixed))
        assert found == pytest.approx([200, 400, 600, 600 + 2 * heals_s])


def test_an_iteration_with_paths_of_several_lengths_has_one_plan(tmp_path: Path) -> None:
    mixed = (6, 6, 3)
    planned = {
        PlannedIteration(6, 24, mixed, mixed, early_exit=False): PlannedTime(90.0),
        PlannedIteration(6, 24, 6, mixed, early_exit=False): PlannedTime(110.0),
    }
    times = replace(TIMES, plans=PROMISES | planned)
    variant = replace(FULL, recipe=SkipSchedule("2 x 0 & 1/2 until 75%, 0"))
    assert elapsed_s(result(variant, 0, [5.0, 4.0, 3.5, 3.0]), times) == [180, 360, 540, 760]
    times.save(tmp_path / "times.json")
    assert PlannedTimes.load(tmp_path / "times.json", times.model_layers) == times
    table = tables.iterations({"sandwich": {0: result(variant, 0, [5.0, 4.0, 3.5, 3.0])}}, times)
    assert table is not None
    assert [row[1:4] for row in table.rows] == [("2 x 6 & 3 of 6", "75%", "90.00"), ("6 of 6", "25%", "110.00")]


def test_what_was_not_planned_has_no_time() -> None:
    refused = {
        work: PlannedTime(None, refusal="too little memory") for work in PROMISES if work.placed_for != work.visited
    }
    assert elapsed_s(RESULTS[1], replace(TIMES, plans={**PROMISES, **refused})) is None
    assert elapsed_s(RESULTS[0], replace(TIMES, plans={})) is None
    exiting = replace(FULL, recipe=SkipSchedule("0", early_exit=0.1))
    assert elapsed_s(result(exiting, 0, [5.0, 4.0, 3.5, 3.0]), TIMES) is None


def test_the_longest_of_the_most_frequent_lengths() -> None:
    assert most_frequent({TimedPhase(4): 5, TimedPhase(5): 3, TimedPhase(6): 5}) == TimedPhase(6)
    assert most_frequent({TimedPhase(4): 6, TimedPhase(5): 3, TimedPhase(6): 5}) == TimedPhase(4)
    assert most_frequent({TimedPhase(4, young=True): 9, TimedPhase(6): 5}) == TimedPhase(6)
    assert most_frequent({TimedPhase(3, heals=True): 9, TimedPhase(6): 5}) == TimedPhase(6)


@pytest.fixture(scope="module")
def little() -> Study:
    return replace(STUDY, model="llama-tiny", planned=PlanSettings("datacentre:8", budget_s=0.2))


def test_times_are_planned_once_and_kept(little: Study, tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "times.json"
    times = planned_times(little, file, lambda what, share: said.append(what))
    assert said == [
        "4 of 4 stages, 16 layers",
        "4 of 6 stages, 24 layers",
        "6 of 6 stages, 24 layers",
        "6 of 6 stages, 24 layers, nodes placed for 4",
    ]
    assert PlannedTimes.load(file, times.model_layers) == times
    seconds = {str(work): plan_time.iteration_s for work, plan_time in times.plans.items()}
    assert all(seconds.values())
    settled, own = (times.plans[work].placement for work in times.plans if (work.stages, work.placed_for) == (6, 4))
    assert [len(nodes) for nodes in settled] == [len(nodes) for nodes in own]
    assert planned_times(little, file, lambda what, share: pytest.fail(what)) == times
    more = replace(little, variant=[*little.variant, Variant("steps", SkipSchedule("1/2 until 50%, 1/3"), stages=6)])
    planned_times(more, file, lambda what, share: said.append(what))
    assert said[4:] == ["3 of 6 stages, 24 layers", "3 of 6 stages, 24 layers, nodes placed for 4"]
    other = replace(little, planned=replace(little.planned, timing="full"))
    with pytest.raises(UserError, match=r"contention-only.* asks for .*full.*; remove it"):
        planned_times(other, file, lambda what, share: None)


def test_a_model_of_another_depth_shares_the_file(little: Study, tmp_path: Path) -> None:
    """8 of 12 layers are as large a share as 16 of 24."""
    file = tmp_path / "times.json"
    shallow = replace(little, variant=[Variant("smaller", stages=4, layers=8)])
    deep = replace(little, model="llama-300m", variant=[Variant("smaller", stages=4, layers=16)])
    plans = planned_times(shallow, file, lambda what, share: None).plans
    assert planned_times(deep, file, lambda what, share: pytest.fail(what)).plans == plans


def test_times_with_codecs_have_a_file_of_their_own_and_fewer_bytes_to_wait_for(little: Study, tmp_path: Path) -> None:
    full = replace(little, planned=PlanSettings("regions:6", "full", budget_s=0.2), variant=[Variant("full", stages=3)])
    small = replace(full, planned=replace(full.planned, wire="int8", gradients="int4"))
    files = [times_file(tmp_path, each.planned) for each in (little, full, small)]
    assert [each.name for each in files] == [
        "times.json",
        "times-full.json",
        "times-full-int8-hops-int4-gradients.json",
    ]
    usual, fewer = (
        planned_times(each, file, lambda what, share: None) for each, file in zip((full, small), files[1:], strict=True)
    )
    (usual_s,), (fewer_s,) = ([each.iteration_s or 0 for each in times.plans.values()] for times in (usual, fewer))
    assert 0 < fewer_s < usual_s
    assert PlannedTimes.load(files[2], fewer.model_layers) == fewer
    with pytest.raises(UserError, match=r"full, int8 hops, int4 gradients.* asks for .*full, 0\.2 s.*; remove it"):
        planned_times(full, files[2], lambda what, share: None)


def test_what_cannot_be_planned_is_said_and_not_tried_again(little: Study, tmp_path: Path) -> None:
    too_deep = replace(little, variant=[Variant("deep", stages=9)])
    times = planned_times(too_deep, tmp_path / "times.json", lambda what, share: None)
    (plan_time,) = times.plans.values()
    assert plan_time.iteration_s is None
    assert "9 stages need at least 9 nodes" in plan_time.refusal
    assert PlannedTimes.load(tmp_path / "times.json", times.model_layers) == times
