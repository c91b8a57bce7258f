"""Studies: paths by the rules, training that equals one process, runs that are not done twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from skippipe import rules
from skippipe.errors import UserError
from skippipe.inference.loading import load
from skippipe.learning import Learning
from skippipe.parts import drawn_parts
from skippipe.plan import Lane
from skippipe.recipe import Recipe, donors, young_stages
from skippipe.study.engine import Engine
from skippipe.study.paths import UNEVEN, drawn, together, turns
from skippipe.study.runner import Device, Runner
from skippipe.study.settings import Study, Variant, load_study, read_results
from skippipe.training.oneprocess import OneProcess
from tests.models import tiny
from tests.test_exact import FULL, SKIPPED, SWAPPED, plan_of, sampler_of

COARSE = Learning(
    rate=3e-3, warmup=2, iterations=5, clip=1.0, epsilon=1e-3
)  # so that Adam sees how large gradients are
shapes = st.integers(2, 9).flatmap(lambda stages: st.tuples(st.just(stages), st.integers(2, stages)))


@given(shapes, st.integers(1, 40), st.integers(0, 99), st.sampled_from([0.0, 0.4, 1.0]))
def test_drawn_paths_keep_the_rules(shape: tuple[int, int], microbatches: int, seed: int, swaps: float) -> None:
    stages, visited = shape
    visits = drawn(default_rng(seed), microbatches, stages, visited, Recipe("1/3", swaps=swaps))
    assert [len(each) for each in visits] == [visited] * microbatches
    for each in visits:
        assert rules.cc1_broken_at(each) is None
        assert rules.cc2_broken_at(each) is None
    counts = rules.exposure(visits, [1] * microbatches, stages)[1:]
    assert max(counts) - min(counts) <= 1, "CC3, as far as it comes out even"
    if swaps == 0:
        assert visits == [tuple(sorted(each)) for each in visits]


def test_chance_evens_out_what_does_not_come_out_even() -> None:
    generator = default_rng(0)
    seen: Counter[int] = Counter()
    for _ in range(300):
        for each in drawn(generator, 4, 6, 4, Recipe("1/3")):
            seen.update(each[1:])
    assert max(seen.values()) / min(seen.values()) < 1.1


def test_swaps_are_as_many_as_asked_for() -> None:
    visits = drawn(default_rng(1), 30, 6, 6, Recipe("0", swaps=0.3))
    assert sum(list(each) != sorted(each) for each in visits) == 9


@pytest.mark.parametrize("rule", ["CC1", "CC2", "CC3"])
def test_a_rule_is_broken_on_purpose(rule: Any) -> None:
    visits = drawn(default_rng(2), 30, 6, 4, Recipe("1/3"), rule)
    assert any(rules.cc1_broken_at(each) is not None for each in visits) == (rule == "CC1")
    assert any(rules.cc2_broken_at(each) is not None for each in visits) == (rule == "CC2")
    counts = rules.exposure(visits, [1] * 30, 6)[1:]
    assert (max(counts) / min(counts) > UNEVEN / 2) == (rule == "CC3")


def test_exposure_follows_its_weights() -> None:
    visits = drawn(default_rng(3), 60, 6, 4, Recipe("1/3", exposure=[3, 1, 1, 1, 1]))
    assert rules.exposure(visits, [1] * 60, 6) == [60, 60, 30, 30, 30, 30], "nobody visits a stage twice"


@given(st.lists(st.permutations(range(5)).map(lambda each: tuple(each[:3])), min_size=1, max_size=8))
def test_together_everybody_keeps_its_own_order(visits: list[tuple[int, ...]]) -> None:
    passed: list[list[int]] = [[] for _ in visits]
    for stage, rows in together(visits):
        for row in rows:
            passed[row].append(stage)
    assert [tuple(each) for each in passed] == visits


@pytest.mark.parametrize("breaks", ["", "CC1", "CC2", "CC3"])
def test_without_swaps_every_stage_comes_once(breaks: Any) -> None:
    for seed in range(20):
        steps = together(drawn(default_rng(seed), 12, 6, 4, Recipe("1/3"), breaks))
        assert sorted(stage for stage, _ in steps) == list(range(6))


@pytest.mark.parametrize(
    ("lanes", "family", "recipe"),
    [
        (FULL, "llama", Recipe("0")),
        (SKIPPED, "llama", Recipe("1/4", residual="scaled", early_exit=0.4)),
        (SKIPPED, "llama-tied", Recipe("1/4", gradients="all")),
        (SWAPPED, "mistral", Recipe("0")),
    ],
    ids=["full", "scaled with an early exit", "gradients over all", "swapped"],
)
def test_the_engine_is_one_process(lanes: tuple[Lane, ...], family: str, recipe: Recipe) -> None:
    plan, blueprint = plan_of(lanes, family=family)
    sampler = sampler_of(plan)
    visits = [plan.visits(lane) for lane in plan.lanes for _ in range(lane.microbatches)]
    alone = OneProcess(
        plan,
        blueprint,
        COARSE,
        sampler,
        recipe=Recipe(residual=recipe.residual, gradients=recipe.gradients, early_exit=recipe.early_exit),
    )
    engine = Engine(blueprint, plan.layers, COARSE, recipe)
    for number in range(4):
        batches = [sampler.batch(number, microbatch) for microbatch in range(plan.microbatches)]
        inputs, labels = (torch.cat([torch.from_numpy(batch[side]) for batch in batches]) for side in (0, 1))
        loss = engine.iteration(number, inputs, labels, visits)
        assert float(loss) == pytest.approx(alone.iteration(number).loss, rel=1e-5)
    expected = alone.weights()
    for stage in engine.stages:
        for name, each in stage.named_weights():
            torch.testing.assert_close(each.detach(), expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_that_grows() -> None:
    assert young_stages(6, 4) == (0, 1, 2, 5)
    assert donors(6, 4) == {3: 1, 4: 2}
    assert donors(9, 4) == {3: 1, 4: 2, 5: 1, 6: 2, 7: 1}
    with pytest.raises(UserError, match="none between"):
        donors(6, 2)
    recipe = Recipe("1/3 until 75%, 0", grow="50%")
    study = Study("growing", [Variant("grown", recipe)], tokens=8 * 30_720)
    (run,) = study.runs
    each = list(turns(run))
    assert [len(turn.there) for turn in each] == [4] * 4 + [6] * 4
    assert [bool(turn.born) for turn in each] == [False] * 4 + [True] + [False] * 3
    assert set(each[0].visits) == {(0, 1, 2, 5)}
    assert [len(turn.visits[0]) for turn in each] == [4] * 6 + [6] * 2
    with pytest.raises(UserError, match=r"recipe\.grow"):
        Recipe("1/2 until 25%, 1/3 until 75%, 0", grow="50%")


def test_new_stages_are_copies() -> None:
    plan, blueprint = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4})
    engine = Engine(blueprint, plan.layers, COARSE, Recipe("1/4", grow="50%", residual="scaled"))
    tokens = torch.randint(0, 97, (4, 6))
    young = young_stages(4, 3)
    engine.iteration(0, tokens, tokens, [young] * 4, young=True)
    untouched = engine.weights[2].values.clone()
    engine.iteration(1, tokens, tokens, [young] * 4, young=True)
    torch.testing.assert_close(engine.weights[2].values, untouched)
    engine.grow(donors(4, 3))
    for new, old in zip(engine.weights[2].state, engine.weights[1].state, strict=True):
        torch.testing.assert_close(new, old)
    assert engine.weights[2].steps == 2


@given(shapes, st.integers(1, 12), st.integers(0, 9))
@settings(max_examples=50)
def test_parts_keep_stage_0_and_differ(shape: tuple[int, int], draws: int, seed: int) -> None:
    stages, visited = shape
    found = drawn_parts(stages, visited, draws, seed)
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


def test_runs_are_done_once_and_give_the_same_again(study_file: Path, tmp_path: Path) -> None:
    study = load_study(study_file)
    results = tmp_path / "results.jsonl"
    told: list[str] = []

    def ran(count: int) -> list[dict[str, Any]]:
        told.clear()
        Runner(study, results, Device(), lambda run, share, how: told.append(run), tmp_path / "models").run()
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


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"key": "a"}\n{"key": \n')
    with pytest.raises(UserError, match="line 2"):
        read_results(tmp_path / "results.jsonl")
