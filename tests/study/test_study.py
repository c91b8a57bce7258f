"""Studies: paths by the rules, healing with a schedule of its own, runs that are not done twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from skippipe import constraints
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule, deal_lengths, donors, young_stages
from skippipe.stage_subset import draw_subsets
from skippipe.study.config import EvalSettings, Study, StudyRun, Variant, load_study, read_results
from skippipe.study.path_sampling import UNEVEN, group_by_stage, iteration_paths, sample_paths, sample_paths_of_lengths
from skippipe.study.runner import Runner, StudyDevice, chosen, locked
from tests.helpers.models import tiny

shapes = st.integers(2, 9).flatmap(lambda stages: st.tuples(st.just(stages), st.integers(2, stages)))


@given(shapes, st.integers(1, 40), st.integers(0, 99), st.sampled_from([0.0, 0.4, 1.0]))
def test_drawn_paths_keep_the_rules(shape: tuple[int, int], microbatches: int, seed: int, swaps: float) -> None:
    stages, visited = shape
    visits = sample_paths(default_rng(seed), microbatches, stages, visited, SkipSchedule("1/3", swaps=swaps))
    assert [len(each) for each in visits] == [visited] * microbatches
    for each in visits:
        assert constraints.cc1_broken_at(each) is None
        assert constraints.cc2_broken_at(each) is None
    counts = constraints.exposure(visits, [1] * microbatches, stages)[1:]
    assert max(counts) - min(counts) <= 1, "CC3, as far as it comes out even"
    if swaps == 0:
        assert visits == [tuple(sorted(each)) for each in visits]


def test_chance_evens_out_what_does_not_come_out_even() -> None:
    generator = default_rng(0)
    seen: Counter[int] = Counter()
    for _ in range(300):
        for each in sample_paths(generator, 4, 6, 4, SkipSchedule("1/3")):
            seen.update(each[1:])
    assert max(seen.values()) / min(seen.values()) < 1.1


def test_swaps_are_as_many_as_asked_for() -> None:
    visits = sample_paths(default_rng(1), 30, 6, 6, SkipSchedule("0", swaps=0.3))
    assert sum(list(each) != sorted(each) for each in visits) == 9


@pytest.mark.parametrize("rule", ["CC1", "CC2", "CC3"])
def test_a_rule_is_broken_on_purpose(rule: Any) -> None:
    visits = sample_paths(default_rng(2), 30, 6, 4, SkipSchedule("1/3"), rule)
    assert any(constraints.cc1_broken_at(each) is not None for each in visits) == (rule == "CC1")
    assert any(constraints.cc2_broken_at(each) is not None for each in visits) == (rule == "CC2")
    counts = constraints.exposure(visits, [1] * 30, 6)[1:]
    assert (max(counts) / min(counts) > UNEVEN / 2) == (rule == "CC3")


def test_exposure_follows_its_weights() -> None:
    visits = sample_paths(default_rng(3), 60, 6, 4, SkipSchedule("1/3", exposure=[3, 1, 1, 1, 1]))
    assert constraints.exposure(visits, [1] * 60, 6) == [60, 60, 30, 30, 30, 30], "nobody visits a stage twice"


@given(st.lists(st.permutations(range(5)).map(lambda each: tuple(each[:3])), min_size=1, max_size=8))
def test_together_everybody_keeps_its_own_order(visits: list[tuple[int, ...]]) -> None:
    passed: list[list[int]] = [[] for _ in visits]
    for stage, rows in group_by_stage(visits):
        for row in rows:
            passed[row].append(stage)
    assert [tuple(each) for each in passed] == visits


@pytest.mark.parametrize("breaks", ["", "CC1", "CC2", "CC3"])
def test_without_swaps_every_stage_comes_once(breaks: Any) -> None:
    for seed in range(20):
        steps = group_by_stage(sample_paths(default_rng(seed), 12, 6, 4, SkipSchedule("1/3"), breaks))
        assert sorted(stage for stage, _ in steps) == list(range(6))


@given(st.integers(1, 40), st.integers(0, 99))
def test_a_sandwich_keeps_the_rules(microbatches: int, seed: int) -> None:
    recipe = SkipSchedule("0 & 2 x 1/2")
    lengths = deal_lengths(recipe.mix(0, 1, 6, 6), microbatches)
    visits = sample_paths_of_lengths(default_rng(seed), lengths, 6, recipe)
    assert [len(each) for each in visits] == lengths
    assert visits[: lengths.count(6)] == [tuple(range(6))] * lengths.count(6)
    for each in visits:
        assert constraints.cc1_broken_at(each) is None
        assert constraints.cc2_broken_at(each) is None
    counts = constraints.exposure(visits, [1] * microbatches, 6)[1:]
    assert max(counts) - min(counts) <= 1, "CC3, as far as it comes out even"


def test_a_sandwich_that_comes_out_even_always_has_one_shape() -> None:
    study = Study("sandwich", [Variant("one", SkipSchedule("0 & 2 x 1/2"))], tokens=5 * 30_720)
    shapes = {
        tuple((stage, len(rows)) for stage, rows in group_by_stage(turn.visits))
        for turn in iteration_paths(study.runs[0])
    }
    assert shapes == {((0, 30), *((stage, 18) for stage in range(1, 6)))}


def test_healing_has_a_schedule_of_its_own() -> None:
    learning = OptimConfig(rate=1e-3, warmup=10, hold=0.5, floor=0.1)
    heal = Variant("heal", SkipSchedule("0 until 80%, 1/2", bridges=8, heal="80%"), tokens=125 * 30_720)
    faster = replace(heal, name="faster", heal_rate=3.0)
    study = Study("healing", [heal, faster, Variant("full")], tokens=100 * 30_720, learning=learning)
    healed, healed_faster, full = study.runs
    assert [healed.rate(number) for number in range(100)] == [full.rate(number) for number in range(100)]
    rates = [healed.rate(number) for number in range(100, 125)]
    assert max(rates) == 1e-3
    assert rates[-1] < 3e-4
    assert [healed_faster.rate(number) for number in range(100)] == [full.rate(number) for number in range(100)]
    assert [healed_faster.rate(number) for number in range(100, 125)] == [3.0 * rate for rate in rates]
    with pytest.raises(UserError, match=r"variant 'a': recipe\.heal: there is nothing to train"):
        Variant("a", SkipSchedule("0 until 90%, 1/2", heal="90%"))
    with pytest.raises(UserError, match=r"variant 'a': recipe\.heal: must be more than 0"):
        Variant("a", SkipSchedule("1/2", bridges=8, heal="0%"))


def test_healing_in_parts_keeps_the_rules_in_each() -> None:
    recipe = SkipSchedule("0 until 50%, 1/2", bridges=8, heal="50%")
    variant = Variant("heal", recipe, tokens=2 * 30_720, heal_split=3, heal_passes=2)
    run = Study("healing", [variant], seeds=[0]).runs[0]
    whole, healing = iteration_paths(run)
    assert whole.visits == [tuple(range(6))] * 30
    steps = [healing.visits[first : first + 10] for first in range(0, 60, 10)]
    for step in steps:
        assert Counter(stage for visits in step for stage in visits) == {0: 10, **dict.fromkeys(range(1, 6), 4)}
    assert len({tuple(step) for step in steps}) == 6, "other paths in every pass"
    assert run.lengths == {3: 2, 6: 1}
    with pytest.raises(UserError, match="30 microbatches do not divide into 4 equal parts"):
        Study("healing", [replace(variant, heal_split=4)])


def test_healing_goes_over_its_text_again() -> None:
    recipe = SkipSchedule("0 until 40%, 1/2", bridges=8, heal="40%")
    variant = Variant("heal", recipe, tokens=10 * 30_720, heal_epochs=3)
    run = Study("healing", [variant], seeds=[0]).runs[0]
    assert [run.text_of(number) for number in range(10)] == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5]
    paths = [tuple(each.visits) for each in iteration_paths(run)][4:]
    assert len(set(paths)) == 6, "on other paths each time"
    shorter = replace(variant, recipe=replace(recipe, skip="0 until 2/3, 1/2", heal="2/3"), tokens=6 * 30_720)
    once = Study("healing", [replace(shorter, heal_epochs=1)]).runs[0]
    assert once.frozen_key == run.frozen_key
    with pytest.raises(UserError, match=r"heal_epochs: add recipe\.heal"):
        Variant("whole", heal_epochs=2)


def test_text_is_drawn_anew_where_it_comes_again_or_all_along() -> None:
    recipe = SkipSchedule("0 until 40%, 1/2", bridges=8, heal="40%")
    variant = Variant("heal", recipe, tokens=10 * 30_720, heal_epochs=3, heal_drawn=0.3)

    def redrawn(variant: Variant, sent: int = 0) -> list[int]:
        run = Study("healing", [variant], seeds=[0]).runs[0]
        return [number for number in range(10) if run.is_redrawn(number, sent)]

    assert redrawn(variant) == [6, 7, 8, 9]
    assert redrawn(replace(variant, heal_epochs=1)) == [4, 5, 6, 7, 8, 9]
    twice = replace(variant, heal_epochs=1, heal_passes=2)
    assert [redrawn(twice, sent) for sent in range(2)] == [[], [4, 5, 6, 7, 8, 9]]
    assert not redrawn(replace(variant, heal_drawn=0.0))
    with pytest.raises(UserError, match=r"heal_drawn: add recipe\.heal"):
        Variant("whole", heal_drawn=0.3)


def test_results_from_before_bridges_are_still_known() -> None:
    """Their key is that of a run without."""
    study = Study("headline", [Variant("full"), Variant("bridged", SkipSchedule("1/2", bridges=8))])
    full, bridged = (run.settings["variant"]["recipe"] for run in study.runs)
    assert not {"bridges", "heal", "adapters", "adapters_by_hop", "adapters_shared"} & full.keys()
    assert not {"distill", "distill_hidden"} & full.keys()
    later = {"heal_rate", "heal_split", "heal_passes", "heal_epochs", "heal_fit", "heal_drawn"}
    assert not any(later & run.settings["variant"].keys() for run in study.runs)
    assert bridged["bridges"] == 8


def test_questions_make_another_run_of_the_same_weights() -> None:
    heal = Variant("heal", SkipSchedule("0 until 50%, 1/2", bridges=8, heal="50%"), tokens=2 * 30_720)
    (plain,) = (study := Study("asking", [heal])).runs
    (asked,) = replace(study, measuring=replace(study.measuring, questions=100)).runs
    assert "questions" not in plain.settings["measuring"], "as in results from before there were any"
    assert plain.key != asked.key
    assert plain.frozen_key == asked.frozen_key


def test_shares_to_keep_are_checked_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match=r"measuring\.keep: 'half' is not a share; write"):
        EvalSettings(keep=["1/2", "half"])


def test_a_model_that_grows() -> None:
    assert young_stages(6, 4) == (0, 1, 2, 5)
    assert donors(6, 4) == {3: 1, 4: 2}
    assert donors(9, 4) == {3: 1, 4: 2, 5: 1, 6: 2, 7: 1}
    assert donors(3, 2) == {1: 1}
    with pytest.raises(UserError, match="none after the first"):
        donors(6, 1)
    recipe = SkipSchedule("1/3 until 75%, 0", grow="50%")
    study = Study("growing", [Variant("grown", recipe)], tokens=8 * 30_720)
    (run,) = study.runs
    each = list(iteration_paths(run))
    assert [len(turn.there) for turn in each] == [4] * 4 + [6] * 4
    assert [bool(turn.born) for turn in each] == [False] * 4 + [True] + [False] * 3
    assert set(each[0].visits) == {(0, 1, 2, 5)}
    assert [len(turn.visits[0]) for turn in each] == [4] * 6 + [6] * 2
    with pytest.raises(UserError, match=r"recipe\.grow"):
        SkipSchedule("1/2 until 25%, 1/3 until 75%, 0", grow="50%")


def test_a_model_that_grows_in_two_steps() -> None:
    recipe = SkipSchedule("2/3 until 25%, 1/2 until 75%, 0", grow="25%, 75%")
    (run,) = Study("growing", [Variant("grown", recipe)], tokens=8 * 30_720).runs
    each = list(iteration_paths(run))
    assert [turn.there for turn in each] == [(0, 5)] * 2 + [(0, 1, 5)] * 4 + [tuple(range(6))] * 2
    assert [turn.born for turn in each if turn.born] == [{1: 5}, {2: 1, 3: 1, 4: 1}]
    assert [bool(turn.born) for turn in each] == [False, False, True, False, False, False, True, False]
    for skip, grow in (
        ("2/3 until 75%, 1/2", "25%, 20%"),
        ("1/2 until 50%, 2/3 until 75%, 0", "50%, 75%"),
    ):
        with pytest.raises(UserError, match=r"recipe\.grow: .*a model that grows again (does so later|skips less)"):
            SkipSchedule(skip, grow=grow)
    with pytest.raises(UserError, match=r"recipe\.grow_preserving: nothing grows"):
        SkipSchedule("0", grow_preserving=True)


@given(shapes, st.integers(1, 12), st.integers(0, 9))
@settings(max_examples=25)
def test_parts_keep_stage_0_and_differ(shape: tuple[int, int], draws: int, seed: int) -> None:
    stages, visited = shape
    found = draw_subsets(stages, visited, draws, seed)
    assert len(set(found)) == len(found) <= draws or visited == stages
    for each in found:
        assert each[0] == 0
        assert len(each) == visited
        assert list(each) == sorted(set(each))


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    config = tiny("qwen3_moe", num_hidden_layers=4, hidden_size=16)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    words = default_rng(0).choice(["stage", "lane", "path", "node", "hop"], 3000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    file = tmp_path / "study.toml"
    file.write_text(
        f"""
        name = "small"
        model = "{tmp_path}/config.json"
        train = ["{tmp_path}/text.txt"]
        tests = ["same={tmp_path}/text.txt"]
        vocabulary = 300
        tokens = 480
        seeds = [0, 1]
        batch = {{sequence = 8, samples = 2, microbatches = 3}}
        measuring = {{every = 4, tokens = 64, final_tokens = 128, part_tokens = 64, keep = ["1/2", "3/4"], draws = 2}}
        [[variant]]
        name = "full"
        stages = 4
        [[variant]]
        name = "quarter"
        stages = 4
        recipe = {{skip = "1/4 until 75%, 0", residual = "scaled"}}
        [[variant]]
        name = "smaller"
        stages = 3
        layers = 3
        seeds = [0]
        """
    )
    return file


def test_models_of_different_runs_are_not_kept_in_one_folder(study_file: Path, tmp_path: Path) -> None:
    study = load_study(study_file)
    full, *_ = study.variant
    study = replace(study, variant=[replace(full, name="skipping 1/3"), replace(full, name="skipping 1-3")])
    runner = Runner(study, tmp_path / "results.jsonl", StudyDevice(), lambda *_: None, tmp_path / "models")
    with pytest.raises(UserError, match="would be kept in one folder, 'small-skipping 1-3-0'"):
        runner.run()


def test_runs_are_done_once_and_give_the_same_again(study_file: Path, tmp_path: Path) -> None:
    study = load_study(study_file)
    results = tmp_path / "results.jsonl"
    told: list[str] = []

    def ran(count: int) -> list[dict[str, Any]]:
        told.clear()
        Runner(study, results, StudyDevice(), lambda run, share, how: told.append(run), tmp_path / "models").run()
        found = read_results(results)
        assert len(found) == count
        return found

    first = ran(5)
    assert [(run["variant"], run["seed"]) for run in first] == [
        ("full", 0), ("quarter", 0), ("smaller", 0), ("full", 1), ("quarter", 1)
    ]  # fmt: skip
    assert ran(5) == first
    assert not told, "nothing was left to do"
    results.write_text("".join(json.dumps(run) + "\n" for run in first[:3]))
    with pytest.raises(UserError, match="full-1: is not empty, and nothing in it is overwritten"):
        ran(5)
    shutil.rmtree(tmp_path / "models")
    again = ran(5)
    assert set(told) == {"full, seed 1", "quarter, seed 1"}
    for before, after in zip(first, again, strict=True):
        for name in ("curve", "whole", "parts", "lengths", "key"):
            assert before[name] == after[name], f"in a place where other runs were before: {name}"
    quarter = again[1]
    assert quarter["lengths"] == {"3": 8, "4": 2}
    assert [point[0] for point in quarter["curve"]] == [4, 8, 10]
    assert {tuple(part["stages"]) for part in quarter["parts"]} >= {(0, 1, 2, 3)}
    assert {len(part["stages"]) for part in quarter["parts"]} == {2, 3, 4}
    shares = quarter["routers"]["same"]
    assert len(shares) == 4, "one list of shares a layer"
    assert all(sum(layer) == pytest.approx(1, abs=1e-3) for layer in shares)
    kept = load(tmp_path / "models" / f"{study.name}-quarter-1")
    assert kept.layers == (1, 1, 1, 1)
    assert not torch.equal(*(kept.stages[stage].layers[0].self_attn.q_proj.weight for stage in (1, 2)))  # type: ignore[arg-type, union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "skip", ["1/4 until 25%, {} until 50%, 1/2", pytest.param("0 until 25%, 0 until 50%, 1/2", marks=pytest.mark.slow)]
)
def test_variants_that_heal_the_same_model_share_it(study_file: Path, tmp_path: Path, skip: str) -> None:
    base = load_study(study_file)
    recipe = SkipSchedule(skip.format("0 & 1/2"), bridges=3, heal="50%")
    longer = replace(recipe, skip=skip.replace("25%", "20%").replace("50%", "40%").format("0 & 1/2"), heal="40%")
    variants = [
        Variant("one", recipe, 4),
        Variant(
            "faster, in parts, twice",
            replace(recipe, adapters=4, distill=0.5),
            4,
            heal_rate=2.0,
            heal_split=3,
            heal_passes=2,
            heal_drawn=0.5,
        ),
        Variant("longer", longer, 4, tokens=600),  # the same iterations before
        Variant("fitted", recipe, 4, heal_fit=2),
        Variant("other", replace(recipe, gradients="all"), 4),
    ]
    study = replace(base, variant=variants, seeds=[0])
    assert {run.heals_at for run in study.runs} == {5}
    frozen = tmp_path / "frozen"

    def done(name: str, frozen: Path | None, study: Study = study) -> list[dict[str, Any]]:
        Runner(study, tmp_path / name, StudyDevice(), lambda run, share, how: None, None, frozen).run()
        return read_results(tmp_path / name)

    alone, shared = done("alone", None), done("shared", frozen)
    again = done("again", frozen, replace(study, variant=variants[:2]))
    assert len(list(frozen.iterdir())) == 2, "one for the first four"
    (one, fitted) = (next(each for each in alone if each["variant"] == name) for name in ("one", "fitted"))
    assert one["whole"] == fitted["whole"]
    assert one["parts"] != fitted["parts"]
    for some, results in ((alone, shared), (alone[:2], again)):
        for expected, found in zip(some, results, strict=True):
            for name in ("variant", "curve", "whole", "parts", "lengths", "key"):
                assert found[name] == expected[name], name


def test_weights_that_grew_another_way_are_not_shared(study_file: Path) -> None:
    recipe = SkipSchedule("1/2 until 30%, 0 until 60%, 1/2", grow="30%", adapters=4, heal="60%")
    other, healed = replace(recipe, grow_preserving=True), replace(recipe, distill=0.5)
    variants = [Variant(str(at), each, 4) for at, each in enumerate((recipe, other, healed))]
    keys = [run.frozen_key for run in replace(load_study(study_file), variant=variants, seeds=[0]).runs]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_bridges_and_adapters_may_have_an_optimizer_of_their_own(study_file: Path, tmp_path: Path) -> None:
    recipe = SkipSchedule("0 until 50%, 0 & 1/2", bridges=3, adapters=4, distill=0.5, heal="50%")
    variants = [Variant("adamw", recipe, 4), Variant("muon", recipe, 4, heal_optimizer="muon")]
    study, results = replace(load_study(study_file), variant=variants, seeds=[0]), tmp_path / "results.jsonl"
    Runner(study, results, StudyDevice(), lambda run, share, how: None, None, tmp_path / "frozen").run()
    adamw, muon = read_results(results)
    assert adamw["whole"] == muon["whole"], "the model is the same"
    assert adamw["parts"] != muon["parts"]
    assert len(list((tmp_path / "frozen").iterdir())) == 1


@pytest.mark.slow
def test_a_run_that_would_not_end_in_time_is_not_begun(study_file: Path, tmp_path: Path) -> None:
    study, results = load_study(study_file), tmp_path / "results.jsonl"
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 1.0  # a run asks when it begins and when it ends
        return now

    def done(limit_s: float) -> list[tuple[str, int]]:
        runner = Runner(study, results, StudyDevice(), lambda run, share, how: None, ends_at=now + limit_s, clock=clock)
        runner.run()
        return [(run["variant"], run["seed"]) for run in read_results(results)]

    assert done(2.0) == [("full", 0)], "of the first nobody knows how long it takes; the others would be too long"
    first = ("full", 0), ("quarter", 0), ("smaller", 0), ("full", 1)
    assert done(8.5) == [*first], "as many as fit, by what those before them took"
    assert done(50.0) == [*first, ("quarter", 1)]


class SharingRunner(Runner):
    """A runner in whose first run another one, with the same results, does what is left."""

    def one(self, run: StudyRun) -> dict[str, Any]:
        if run.variant.name == "full":
            Runner(self.study, self.results, StudyDevice(), lambda run, share, how: None).run()
        return super().one(run)


def test_processes_with_the_same_results_divide_the_runs(study_file: Path, tmp_path: Path) -> None:
    study, results = chosen(load_study(study_file), ["full", "smaller"]), tmp_path / "results.jsonl"
    study = replace(study, seeds=[0], measuring=EvalSettings(tokens=64, final_tokens=64, part_tokens=64, keep=[]))
    SharingRunner(study, results, StudyDevice(), lambda run, share, how: None).run()
    assert [run["variant"] for run in read_results(results)] == ["smaller", "full"], "each once"
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".lock")] == []


def test_a_run_waits_for_weights_that_another_process_is_training(study_file: Path, tmp_path: Path) -> None:
    """Others are done meanwhile; when that process ends, it has its turn."""
    recipe = SkipSchedule("0 until 50%, 0 & 1/2", bridges=3, adapters=4, distill=0.5, heal="50%")
    variants = [Variant("healed", recipe, 4), Variant("full", stages=4)]
    measuring = EvalSettings(tokens=64, final_tokens=64, part_tokens=64, keep=[])
    study = replace(load_study(study_file), variant=variants, seeds=[0], measuring=measuring)
    results, frozen = tmp_path / "results.jsonl", tmp_path / "frozen"
    other = ExitStack()
    assert other.enter_context(locked(frozen / f"{study.runs[0].frozen_key}.safetensors"))
    Runner(study, results, StudyDevice(), lambda run, share, how: other.close(), None, frozen).run()
    assert [run["variant"] for run in read_results(results)] == ["full", "healed"]
    assert [each.suffix for each in frozen.iterdir()] == [".safetensors"]


class FailingRunner(Runner):
    """A runner that has no memory for one of the variants."""

    def one(self, run: StudyRun) -> dict[str, Any]:
        if run.variant.name == "full":
            raise torch.OutOfMemoryError("out of memory")
        return super().one(run)


def test_a_run_that_fails_keeps_no_other_from_being_done(
    study_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, results = chosen(load_study(study_file), ["full", "smaller"]), tmp_path / "results.jsonl"
    study = replace(study, seeds=[0], measuring=EvalSettings(tokens=64, final_tokens=64, part_tokens=64, keep=[]))
    with pytest.raises(UserError, match=r"could be done: 'full', seed 0: out of memory$"):
        FailingRunner(study, results, StudyDevice(), lambda run, share, how: None).run()
    assert [run["variant"] for run in read_results(results)] == ["smaller"]
    assert "Traceback" in capsys.readouterr().err


def test_a_larger_model_is_expected_to_take_longer(study_file: Path, tmp_path: Path) -> None:
    """Or it would be begun when there is no time left for it."""
    wide = tiny("qwen3_moe", num_hidden_layers=4, hidden_size=64)
    (tmp_path / "wide.json").write_text(json.dumps(wide.to_dict()), encoding="utf-8")
    study = load_study(study_file)
    full = study.variant[0]
    study = replace(study, seeds=[0], variant=[full, replace(full, name="wide", model=str(tmp_path / "wide.json"))])
    runner, (small, large) = Runner(study, tmp_path / "none", StudyDevice(), lambda *_: None), study.runs
    assert runner._expected_s(small) == 0, "nothing was measured"
    runner._paces = [1e-9, 1e-9]
    assert runner._expected_s(large) > 3 * runner._expected_s(small) > 0


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"key": "a"}\n{"key": \n')
    with pytest.raises(UserError, match="line 2"):
        read_results(tmp_path / "results.jsonl")
