"""Recipes: what people write, how long paths are then, and what that comes to."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.simulator import simulate
from skippipe.skip_schedule import Phase, SkipSchedule, deal_lengths, mean_repeats, path_length_text, visited_of
from skippipe.timeline import Timing
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import PipelineConfig
from skippipe.training.metrics import timetable_text, turn_text
from tests.helpers.single_node import long_plan

THIRD, HALF, WHOLE = Fraction(1, 3), Fraction(1, 2), Fraction(0)


@pytest.mark.parametrize(
    ("said", "phases"),
    [
        ("", []),
        ("  ", []),
        ("1/3", [(1, [THIRD])]),
        ("50%", [(1, [HALF])]),
        ("0.5", [(1, [HALF])]),
        ("1/3 until 90%, 0", [(Fraction(9, 10), [THIRD]), (1, [WHOLE])]),
        ("1/2 until 1/4, 1/3 until 75%, 0", [(Fraction(1, 4), [HALF]), (Fraction(3, 4), [THIRD]), (1, [WHOLE])]),
        ("3 x 1/3 + 0", [(1, [THIRD, THIRD, THIRD, WHOLE])]),
        ("2x 1/3 + 2 x 0", [(1, [THIRD, THIRD, WHOLE, WHOLE])]),
        ("1/3 until 75%, 0 + 1/2", [(Fraction(3, 4), [THIRD]), (1, [WHOLE, HALF])]),
        ("0 & 2 x 1/2", [(1, [(WHOLE, HALF, HALF)])]),
        ("1/3 until 75%, 2x 0 & 1/2 + 1/3", [(Fraction(3, 4), [THIRD]), (1, [(WHOLE, WHOLE, HALF), THIRD])]),
    ],
)
def test_what_people_write(said: str, phases: list[tuple[Fraction, list[Fraction | tuple[Fraction, ...]]]]) -> None:
    assert SkipSchedule(said).phases == tuple(
        Phase(Fraction(until), tuple(mix if isinstance(mix, tuple) else (mix,) for mix in turn))
        for until, turn in phases
    )


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("some", "'some' is not a share; write 0.33, 33% or 1/3"),
        ("1/0", "'1/0' is not a share"),
        ("1", "1 is not between 0 and 1"),
        ("-0.1", "-0.1 is not between 0 and 1"),
        ("1/3 until 90%", "'1/3 until 90%' ends before the run does: say what follows"),
        ("1/3, 0", "'1/3' has no end: write '1/3 until 75%'"),
        ("1/3 until 50%, 1/2 until 50%, 0", "'1/2 until 50%' ends no later than what comes before it"),
        ("1/3 until soon, 0", "'soon' is not a share"),
        ("1/3 +", "'' is not a share"),
        ("0 x 1/3", "a turn has from 1 to 10,000 iterations"),
        ("20000 x 1/3 + 0", "a turn has from 1 to 10,000 iterations"),
        ("0 &", "'' is not a share"),
        ("0 & 0 x 1/2", "microbatches are divided into 1 to 1,000 parts"),
        ("0 & 1000 x 1/2", "microbatches are divided into 1 to 1,000 parts"),
    ],
)
def test_what_they_should_not(said: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        SkipSchedule(said)
    assert str(caught.value).startswith("recipe.skip: ")
    assert complaint in str(caught.value)
    with pytest.raises(UserError, match=r"recipe\.early_exit: 1\.5"):
        SkipSchedule(early_exit=1.5)


shares = st.fractions(0, Fraction(2, 3), max_denominator=8)


@st.composite
def recipes(draw: st.DrawFn) -> SkipSchedule:
    ends = sorted(draw(st.sets(st.integers(1, 99), max_size=3)))
    turns = [draw(st.lists(st.tuples(st.integers(1, 4), shares), min_size=1, max_size=3)) for _ in [*ends, 100]]
    told = [" + ".join(f"{times} x {share}" for times, share in turn) for turn in turns]
    until = [f" until {end}%" for end in ends]
    return SkipSchedule(", ".join(turn + end for turn, end in zip(told, [*until, ""], strict=True)))


@settings(max_examples=30, deadline=None)
@given(recipes(), st.integers(1, 120), st.integers(3, 8))
def test_every_iteration_has_a_length_and_phases_come_in_order(
    recipe: SkipSchedule, iterations: int, stages: int
) -> None:
    found = [recipe.visited(number, iterations, stages, -1) for number in range(iterations)]
    lengths = recipe.lengths(iterations, stages, -1)
    assert lengths.total() == iterations
    assert all(1 <= length <= stages for length in lengths)
    start = 0
    for phase in recipe.phases:
        end = min(iterations, -(-phase.until.numerator * iterations // phase.until.denominator))
        turn = [visited_of(share, stages) for (share,) in phase.turn]
        assert found[start:end] == [turn[number % len(turn)] for number in range(start, end)]
        start = end
    assert start == iterations


@given(st.integers(1, 50), st.integers(2, 9), st.integers(2, 9))
def test_nothing_said_is_the_usual_all_along(iterations: int, stages: int, usual: int) -> None:
    recipe = SkipSchedule()
    assert recipe.lengths(iterations, stages, usual) == {usual: iterations}
    assert recipe.residual_scale(stages, usual) == 1.0
    assert [recipe.divisor(visits, 9) for visits in (0, 4, 9)] == [0, 4, 9]


def test_a_sandwich_has_the_same_lengths_in_every_iteration() -> None:
    recipe = SkipSchedule("1/3 until 50%, 0 & 2 x 1/2")
    assert recipe.mix(2, 6, 6, 0) == (4,)
    assert recipe.mix(3, 6, 6, 0) == recipe.mix(5, 6, 6, 0) == (6, 3, 3)
    assert [recipe.visited(number, 6, 6, 0) for number in (2, 3)] == [4, (6, 3, 3)]
    assert SkipSchedule("1/2 & 50%").visited(0, 6, 6, 0) == 3
    assert recipe.lengths(6, 6, 0) == {4: 3, 6: 1, 3: 2}
    assert recipe.path_lengths(6, 6, 0) == {4: 3, (6, 3, 3): 3}
    assert [path_length_text(each) for each in (4, (6, 3, 3), (6, 6, 3))] == ["4", "6 & 2 x 3", "2 x 6 & 3"]
    assert deal_lengths((6, 3, 3), 30) == [6] * 10 + [3] * 20
    assert deal_lengths((6, 3, 3), 31) == [6] * 11 + [3] * 20


def test_bridges_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"recipe\.bridges: they lead forward"):
        SkipSchedule("1/2", bridges=8, swaps=0.1)
    with pytest.raises(UserError, match=r"recipe\.bridges: -1 is out of range; give 0 to 100,000"):
        SkipSchedule("1/2", bridges=-1)
    with pytest.raises(UserError, match=r"recipe\.heal: 40% must be after"):
        SkipSchedule("1/2", bridges=8, heal="40%", grow="50%")
    with pytest.raises(UserError, match=r"recipe\.distill_hidden: there is no teacher"):
        SkipSchedule("1/2", distill_hidden=1.0)
    recipe = SkipSchedule("0 until 90%, 1/2", bridges=8, heal="90%")
    assert [recipe.heals(number, 10) for number in (0, 8, 9)] == [False, False, True]
    assert not SkipSchedule("1/2", bridges=8).heals(9, 10)


@pytest.mark.parametrize(("stages", "visited"), [(6, 3), (6, 2), (5, 5), (7, 1)])
def test_how_often_stages_are_repeated_on_average(stages: int, visited: int) -> None:
    for repeats in (0, 1, 2, 9):
        paths = [(0, *others, stages) for others in combinations(range(1, stages), visited - 1)]
        times = [min(repeats, b - a - 1) for path in paths for a, b in pairwise(path)]
        assert mean_repeats(stages, {visited: 1}, repeats) == pytest.approx(fmean(times))
    shares = SkipSchedule("0 & 2 x 1/2").path_shares(1, 4, 4)
    assert shares == {4: THIRD, 2: 2 * THIRD}
    assert mean_repeats(4, shares, 1) == pytest.approx((4 * 0 + 2 * 2 * mean_repeats(4, {2: 1}, 1)) / 8)


def test_what_makes_up_for_skipping() -> None:
    scaled = SkipSchedule(residual="scaled", gradients="all")
    assert [scaled.residual_scale(6, visited) for visited in (6, 4, 3)] == [1.0, 5 / 3, 5 / 2]
    assert [scaled.divisor(visits, 9) for visits in (0, 4, 9)] == [0, 9, 9], "nobody came: there is no step"


@pytest.mark.parametrize(
    ("recipe", "strategy", "skip", "complaint"),
    [
        (SkipSchedule(exposure=[1.0, 2.0]), "skippipe", "", "recipe.exposure: only studies draw paths by it"),
        (
            SkipSchedule(swaps=0.1),
            "skippipe",
            "",
            "recipe.swaps: only studies draw paths by it; in training the plan decides",
        ),
        (SkipSchedule("1/2", adapters=8), "skippipe", "", "recipe.adapters: only studies have it yet"),
        (SkipSchedule("1/2", bridges=8, heal="95%"), "skippipe", "", "recipe.heal: 95%: a run heals all along"),
        (SkipSchedule("1/3"), "skippipe", "1/3", "pipeline.skip and recipe.skip say the same thing"),
        (SkipSchedule("0"), "dtfm", "", "pipeline.strategy: 'dtfm' skips nothing"),
    ],
)
def test_recipes_that_a_job_refuses(recipe: SkipSchedule, strategy: str, skip: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        JobConfig(recipe=recipe, pipeline=PipelineConfig(strategy=strategy, skip=skip))  # type: ignore[arg-type]
    assert str(caught.value).startswith(complaint)


def test_what_a_run_comes_to() -> None:
    plan = long_plan()
    plan = plan.promising(simulate(plan, Timing.FULL))
    each_s = plan.promise.iteration_s
    lengths = SkipSchedule("9 x 1/4 + 0").path_lengths(1005, 4, 4)
    assert timetable_text(lengths, {3: plan, 4: plan}, 4) == (
        f"905 iterations through 3 of 4 stages at {each_s:.2f} s, "
        f"100 iterations through 4 of 4 stages at {each_s:.2f} s: {1005 * each_s:,.1f} s promised in all"
    )
    assert timetable_text({3: 1}, {}, 4, promised=False) == "1 iteration through 3 of 4 stages"


def test_a_sandwich_by_turns() -> None:
    turn = turn_text((6, 6, 6, 6, 6, 3, 4), 6)
    assert turn == "5 x 0 + 1/2 + 1/3"
    assert SkipSchedule(turn).path_lengths(70, 6, 6) == {6: 50, 3: 10, 4: 10}


@pytest.mark.parametrize("skip", ["", "1/3", "0 & 1/2 until 25%, 2 x 1/3 + 0 until 60%, 1/2"])
@pytest.mark.parametrize("first", [0, 3, 11, 20])
def test_lengths_of_what_is_left_of_a_run(skip: str, first: int) -> None:
    recipe = SkipSchedule(skip)
    expected = Counter(recipe.visited(number, 20, 6, 4) for number in range(first, 20))
    assert +recipe.path_lengths(20, 6, 4, first) == expected
