"""What a study is told to have found: figures by hand, from results by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skippipe.report.summary import Table
from skippipe.study import part_tables, tables
from skippipe.study.config import StudyRun, Traffic, Variant
from skippipe.study.part_tables import increases
from skippipe.study.plots import charts, line_styles, squeezed, subset_bands
from skippipe.study.results import Runs, outdated_variants, runs_of, spread
from skippipe.study.tables import first_reach, loss_at
from tests.helpers.processes import Command
from tests.helpers.study_results import FULL, RESULTS, SMALL, STUDY, THIRD, TIMES, result


@pytest.fixture
def runs() -> Runs:
    return runs_of(RESULTS, STUDY)


def cells(table: Table | None, variant: str) -> list[str]:
    assert table is not None
    (row,) = (row for row in table.rows if row[0] == variant)
    return list(row[1:])


def test_headline(runs: Runs) -> None:
    table = tables.headline(runs, TIMES)
    assert cells(table, "full") == ["46.3M", "2", "8M", "0%", "3.1000 ± 0.1414", "–", "1.00"]
    assert cells(table, "third")[2:] == ["8M", "25%", "3.1000 ± 0.2828", "+0.0000 ± 0.1414", "0.68"]  # 540 of 800
    assert cells(table, "small")[1:] == ["1", "8M", "0%", "3.3000", "+0.3000", "0.60"]
    without = tables.headline(runs, None)
    assert without is not None
    assert "time / full" not in without.headings


def test_several_texts_side_by_side(runs: Runs) -> None:
    table = tables.texts(runs)
    assert cells(table, "small") == ["3.3000 (+0.3000)", "4.3000 (+0.3000)"]
    assert cells(table, "full")[1] == "4.1000 ± 0.1414"
    one_text = [{**each, "whole": {"books": each["whole"]["books"]}} for each in RESULTS]
    assert tables.texts(runs_of(one_text, STUDY)) is None


def part(text: str, stages: list[int], drive: float, loss: float) -> dict[str, Any]:
    return {"text": text, "stages": stages, "drive": drive, "loss": loss}


def test_parts_against_the_whole_with_the_drive_that_is_best_on_the_first_text() -> None:
    whole = list(range(6))
    first, second = [0, 1, 2, 3, 4], [0, 2, 3, 4, 5]
    log = math.log
    measured = [
        part("books", whole, 0.0, 3.0),
        part("code", whole, 0.0, 4.0),
        *(part("books", each, 0.0, 3 + log(1.5)) for each in (first, second)),
        part("books", first, 0.5, 3 + log(1.1)),
        part("books", second, 0.5, 3 + log(1.3)),
        *(part("books", each, 1.0, 3 + log(1.4)) for each in (first, second)),
        *(part("code", each, 0.0, 4 + log(1.2)) for each in (first, second)),  # would be best here
        *(part("code", each, drive, 4 + log(1.25)) for each in (first, second) for drive in (0.5, 1.0)),
    ]
    without_whole = [each for each in measured if len(each["stages"]) < 6]
    runs = runs_of(
        [
            result(FULL, 0, [3.0], parts=measured),
            result(FULL, 1, [3.0], parts=[{**each, "loss": each["loss"] + 1} for each in measured]),
            result(THIRD, 0, [3.0], parts=without_whole),  # nothing to compare with
        ],
        STUDY,
    )
    on_books, on_code = increases(runs["full"])
    assert (on_books.kept, on_books.stages, on_books.drive, on_code.drive) == (5, 6, 0.5, 0.5)
    assert on_books.means == pytest.approx([0.2, 0.2])
    assert on_books.bests == pytest.approx([0.1, 0.1])
    assert on_books.worsts == pytest.approx([0.3, 0.3])
    assert on_books.undriven == pytest.approx([0.5, 0.5])
    assert on_code.means == pytest.approx([0.25, 0.25])
    assert on_code.undriven == pytest.approx([0.2, 0.2])
    table = part_tables.parts(runs)
    assert table is not None
    assert list(table.rows[0]) == [
        "full", "books", "5 of 6", "0.5", "+20.0% ± 0.0%", "+10.0% ± 0.0%", "+30.0% ± 0.0%", "+50.0% ± 0.0%"
    ]  # fmt: skip
    assert {row[0] for row in table.rows} == {"full"}
    (band, _) = subset_bands(runs)
    assert band.kept == pytest.approx([100, 500 / 6])
    assert band.worsts == pytest.approx([0, 0.3])


def test_first_reach_lies_on_the_line_between_two_looks() -> None:
    assert first_reach([10, 20, 30], [5.0, 4.0, 3.0], 3.75) == pytest.approx(22.5)
    assert first_reach([10, 20, 30], [5.0, 3.0, 4.0], 3.0) == 20
    assert first_reach([10, 20], [5.0, 4.0], 6.0) == 10  # no look before the first
    assert first_reach([10, 20], [5.0, 4.0], 3.9) is None


def test_loss_between_two_looks_and_after_the_last() -> None:
    assert loss_at([10, 20], [5.0, 4.0], 12.5) == 4.75
    assert loss_at([10, 20], [5.0, 4.0], 99) == 4.0
    assert loss_at([10, 20], [5.0, 4.0], 9) is None


def test_time_to_loss_seed_by_seed(runs: Runs) -> None:
    table = tables.time_to_loss(runs, TIMES)
    assert cells(table, "full") == ["1.000, 1.000", "1.000 ± 0.000", "0.500 ± 0.000"]
    # 3.0 lies two thirds of the way from 3.2 (after 300 s) to 2.9 (after 540 s): 460 s of 800, or of 1600
    assert cells(table, "third") == [
        "0.575, not reached (closest 3.3000, +0.1000)",
        "0.575 (1 of 2 seeds)",
        "0.287 (1 of 2 seeds)",
    ]
    assert cells(table, "small") == ["not reached (closest 3.3000, +0.3000)", "–", "–"]
    elsewhere = tables.time_to_loss(runs, replace(TIMES, published_s=None))
    assert len(cells(elsewhere, "full")) == 2


def test_equal_time_at_the_end_of_each_dense_variant(runs: Runs) -> None:
    table = tables.equal_time(runs, TIMES)
    assert table is not None
    assert list(table.headings) == ["variant", "at the end of 'full'", "at the end of 'small'"]
    assert cells(table, "full") == ["3.1000 ± 0.1414", "3.8000 ± 0.0000"]  # 480 s: two fifths from 4.0 to 3.5
    assert cells(table, "small") == ["3.3000 (ends at 60%)", "3.3000"]
    assert cells(table, "third")[0].endswith("(ends at 68%)")


def test_curves_have_a_column_for_every_look_if_these_are_few(runs: Runs) -> None:
    table = tables.curves(runs)
    assert table is not None
    assert list(table.headings) == ["variant", "iteration 2", "iteration 4", "iteration 6", "iteration 8"]
    assert cells(table, "small") == ["5.0000", "4.2000", "3.6000", "3.3000"]
    shorter = runs_of([*RESULTS[:2], result(SMALL, 0, [5.0, 4.2])], STUDY)
    assert cells(tables.curves(shorter), "small") == ["5.0000", "4.2000", "–", "–"]


def test_routers_are_even_or_specialised() -> None:
    even, one = [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]
    used = {"books": [even, one], "code": [even, [0.5, 0.5, 0.0, 0.0]]}
    table = tables.routers(runs_of([result(FULL, 0, [3.0], routers=used)], STUDY))
    assert table is not None
    assert [list(row) for row in table.rows] == [
        ["full", "books", "0.500", "2.50", "0.250"],
        ["full", "code", "0.750", "1.50", "0.250"],
    ]


def test_without_the_full_variant_and_without_times_there_is_less_to_say() -> None:
    runs = runs_of(RESULTS[1:2], STUDY)
    assert [table.title for table in tables.all_tables(runs, TIMES)] == [
        "Variants", "Texts", "While training", "Iterations"
    ]  # fmt: skip
    assert cells(tables.headline(runs, TIMES), "third")[-2:] == ["–", "–"]
    assert tables.all_tables({}, TIMES) == []


def test_runs_with_other_settings_count_only_where_there_are_no_better_ones() -> None:
    longer = replace(STUDY, tokens=80_000_000)
    ahead = result(FULL, 0, [1.0]) | {"key": "of another day"}
    extra = result(Variant("extra"), 5, [1.0])
    runs = runs_of([ahead, extra, *RESULTS], STUDY)
    assert list(runs) == ["full", "third", "small", "extra"]
    assert runs["full"][0]["whole"]["books"] == 3.0
    assert outdated_variants(runs, STUDY) == ["extra"]
    assert outdated_variants(runs_of(RESULTS, longer), longer) == ["full", "third", "small"]
    again = result(FULL, 1, [2.0])
    assert runs_of([*RESULTS, again], STUDY)["full"][1] == again


def test_spread() -> None:
    assert spread([], ".2f") == "–"
    assert spread([-0.5], "+.2f") == "−0.50"
    assert spread([1.0, 2.0], "+.2f") == "+1.50 ± 0.71"


def test_markdown_keeps_bars_in_names_apart() -> None:
    text = Table("Title", "Note.", ("a", "b"), [("x|y", "1")]).markdown()
    assert text == "## Title\n\n| a | b |\n| --- | --- |\n| x\\|y | 1 |\n\nNote.\n"


def test_pictures_show_every_seed_and_their_mean(runs: Runs) -> None:
    by_tokens, by_time = charts(runs, TIMES)
    assert [(curve.variant, curve.seed) for curve in by_tokens.curves][:2] == [("full", 0), ("full", 1)]
    assert by_time.mean_curves[1].xs == pytest.approx([100 / 3600, 200 / 3600, 300 / 3600, 540 / 3600])
    assert by_time.mean_curves[1].losses == pytest.approx([4.8, 3.8, 3.3, 3.1])
    assert [len(chart.curves) for chart in charts(runs, None)] == [5]


def test_every_variant_looks_different() -> None:
    names = ["full", *(f"variant {number}" for number in range(20))]
    assert len(set(line_styles(names).values())) == 21


def test_small_increases_are_drawn_as_they_are() -> None:
    none, little, more, less = squeezed([0, 0.001, 0.002, -0.001])
    assert none == 0
    assert more == pytest.approx(2 * little, rel=0.01)
    assert less == -little


STUDY_FILE = """
name = "by hand"
tokens = 8_000_000
seeds = [0, 1]
batch = {sequence = 1000, samples = 10, microbatches = 100}
measuring = {every = 2}
planned = {cluster = "datacentre:8", budget_s = 0.1}
[[variant]]
name = "full"
[[variant]]
name = "third"
recipe = {skip = "1/3 until 75%, 0"}
[[variant]]
name = "small"
stages = 4
layers = 8
"""


def test_report(tmp_path: Path, skippipe: Command) -> None:
    study, lines, out = tmp_path / "study.toml", tmp_path / "results.jsonl", tmp_path / "out"
    study.write_text(STUDY_FILE)
    refused = skippipe("study", "report", lines, "--study", study)
    assert (refused.code, "no such file; 'skippipe study run" in refused.err) == (2, True)
    lines.write_text("".join(json.dumps(each) + "\n" for each in RESULTS))
    study.write_text(STUDY_FILE.replace("8_000_000", "9_000_000"))
    made = skippipe("study", "report", lines, "--study", study, "--output", out, "--no-times")
    assert (made.code, made.err) == (0, "Made with other settings than study.toml has now: full, third, small.\n")
    assert "| third | 46.3M | 2 |" in made.out
    assert sorted(path.name for path in out.iterdir()) == ["loss-tokens.png", "report.html", "tables.md"]
    assert "Made with other settings" in (out / "tables.md").read_text()
    assert not (tmp_path / "times.json").exists()
    study.write_text(STUDY_FILE)
    made = skippipe("study", "report", lines, "--study", study, "-o", out, "--overwrite")
    assert made.code == 0
    assert "planning 6 of 6 stages, 24 layers, nodes placed for 4" in made.err
    assert "Made with other settings" not in made.err
    assert "time / full" in made.out
    assert "## Time to the full model's loss" in (out / "tables.md").read_text()
    assert (out / "loss-time.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "times.json").exists()


def test_codecs_beside_the_same_recipe_without() -> None:
    control = replace(THIRD, name="control", traffic=Traffic(replicas=2))
    hops = replace(THIRD, name="hops", traffic=Traffic("int4", gradients="rank 8", replicas=2))
    whole, half = list(range(6)), [0, 2, 4]

    def parts(*losses: float) -> list[dict[str, Any]]:
        drives = zip((0.0, 0.0, 1.0), (whole, half, half), losses, strict=True)
        return [part("books", stages, drive, loss) for drive, stages, loss in drives]

    measured = {"parts": parts(3.0, 4.0, 3.5), "parts_by_wire": {"int4": parts(3.01, 3.0, 3.52)}}
    results = [result(control, 0, [5.0, 3.0]), result(control, 1, [5.0, 3.2])]
    results += [result(hops, seed, [5.0, 3.25], **measured) for seed in (0, 1)]
    runs = runs_of(results, replace(STUDY, variant=[control, hops]))
    in_training = tables.codecs(runs)
    assert in_training is not None
    assert [row[0] for row in in_training.rows] == ["hops"]
    assert cells(in_training, "hops")[:3] == ["int4", "int4-stochastic", "rank 8"]
    assert cells(in_training, "hops")[-1] == "+0.1500 ± 0.1414"
    after = part_tables.parts_by_wire(runs)
    assert after is not None
    assert [row[1:] for row in after.rows] == [
        ("int4", "books", "6 of 6", "+1.01% ± 0.00%"),
        ("int4", "books", "3 of 6", "+2.02% ± 0.00%"),
    ], "at the drive that is best without a codec"
    assert tables.codecs(runs_of(RESULTS, STUDY)) is part_tables.parts_by_wire(runs_of(RESULTS, STUDY)) is None


def test_questions_of_the_whole_model_and_of_parts() -> None:
    def asked(*cloze: float) -> dict[str, Any]:
        stages = ([0, 1, 2, 3, 4, 5], [0, 2, 4], [0, 1, 5])
        parts = [
            {"text": "books", "stages": each, "drive": 0.0, "scores": {"cloze": {"acc": share}}}
            for each, share in zip(stages, cloze, strict=True)
        ]
        return {"asked": {"books": {"cloze": {"count": 9, "chance": 0.02}}}, "parts": parts, "seconds": 1.0}

    results = [
        result(FULL, seed, [5.0, 3.0], questions=asked(0.4, 0.2, share)) for seed, share in enumerate((0.1, 0.3))
    ]
    table = part_tables.questions(runs_of([*results, *RESULTS[1:2]], STUDY))
    assert table is not None
    assert [tuple(row) for row in table.rows] == [
        ("full", "books", "6 of 6", "0.400 ± 0.000", "–", "–"),
        ("full", "books", "3 of 6", "0.200 ± 0.071", "–", "–"),
    ]
    assert "books: 9 cloze (guessing: 0.02)" in table.note
    assert table.note.endswith("a share of one part has a standard error of up to 0.167.")
    assert part_tables.questions(runs_of(RESULTS, STUDY)) is None


def test_the_regime_in_which_skipping_is_ahead_of_a_smaller_model() -> None:
    """The smaller one takes 60 s an iteration; the one that skips 540 s for eight, which is 9 of those."""

    def longer(variant: Variant, times: int, loss: float) -> dict[str, Any]:
        more = replace(variant, name=f"{variant.name}, {times}", tokens=times * 1_000_000)
        run = StudyRun(STUDY, more, 0)
        last = [[run.iterations, times * 1_000_000, 9.0, loss]]
        return result(more, 0, [loss]) | {"tokens": times * 1_000_000, "curve": last, "settings": run.settings}

    results = [
        *(longer(THIRD, times, loss) for times, loss in ((8, 3.2), (16, 3.0), (32, 2.8), (64, 2.6))),
        *(longer(SMALL, times, loss) for times, loss in ((9, 3.1), (36, 2.9))),
        longer(FULL, 8, 3.1),
    ]
    runs: Runs = {each["variant"]: {0: each} for each in results}
    table = tables.regime(runs, TIMES)
    assert table is not None
    assert [row[-1] for row in table.rows] == ["+0.1000", "+0.0000", "−0.1000"], "64 take longer than any smaller one"
    assert [row[2] for row in table.rows] == ["0.173", "0.346", "0.691"]
    assert table.rows[0][5:7] == ("3.1000", "–")
    assert "behind below 0.346 tokens a parameter, and then not." in table.note
    # of the same length, but no dense models: neither are they rivals, nor do they belong to the others
    others = [
        longer(replace(SMALL, traffic=Traffic(wire="int4")), 10, 1.0),
        longer(replace(SMALL, rate=0.1), 12, 1.0),
        longer(replace(THIRD, recipe=replace(THIRD.recipe, bridges=8)), 20, 2.0),
    ]
    with_others: Runs = runs | {f"{each['variant']}, other": {0: each} for each in others}
    table = tables.regime(with_others, TIMES)
    assert table is not None
    assert [row[-1] for row in table.rows[:3]] == ["+0.1000", "+0.0000", "−0.1000"]
    assert [row[0] for row in table.rows[3:]] == ["third, 20, other"]
    to_and_fro = [*results[:2], longer(THIRD, 32, 3.1), *results[4:]]
    table = tables.regime({each["variant"]: {0: each} for each in to_and_fro}, TIMES)
    assert table is not None and "to and fro from there on" in table.note
    assert tables.regime(runs_of(RESULTS, STUDY), TIMES) is None, "no smaller one takes as long"
