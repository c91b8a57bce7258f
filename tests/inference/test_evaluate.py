"""Perplexity, of a model and of its parts: held to transformers, to each part by itself, and to what must come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from skippipe.codecs import CODECS
from skippipe.errors import UserError
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel, load
from skippipe.inference.eval.evaluate import (
    Evaluation,
    ResidualScaling,
    Selection,
    StageAblation,
    ablation_order,
    all_subsets,
    evaluate,
)
from skippipe.inference.eval.perplexity import EXPONENTS, PerplexityMeter, TextLoss, Windows, best_exponents
from skippipe.inference.eval.plots import EXACT, MEAN, ORDER, PlotPanel, PlotPoint, panels, ticks
from skippipe.inference.eval.tables import as_json, notes, number, tables
from skippipe.inference.likelihood import SubsetModel
from skippipe.model import spread_layers
from skippipe.stage_subset import StageSubset, Visits, residual_scale_of
from tests.helpers.model_folders import TOKENIZER, by_itself, export_to, replicas_that_begin_together, subset
from tests.helpers.quick import MOST_FAMILIES_SLOW, others_slow

torch.set_num_threads(1)
IDS = default_rng(3).integers(0, TOKENIZER.size, 500).astype(np.uint16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evaluating") / "model"
    export_to(place)
    return place


@pytest.fixture(scope="module")
def staged(folder: Path) -> StagedModel:
    """Five stages of a layer each."""
    return load(folder, cut="5")


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows.of("random", IDS, context=16, tokens=200)


def losses(
    staged: StagedModel, windows: Windows, subsets: Sequence[StageSubset], **others: Any
) -> dict[StageSubset, float]:
    meter = PerplexityMeter(staged, [windows], **others)
    meter.measure(subsets)
    return {subset: found[windows.text].mean for subset, found in meter.losses.items()}


# ---- losses


@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_the_whole_model_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    export_to(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    windows = Windows.of("random", IDS, context=30, tokens=300)
    total = torch.zeros((), dtype=torch.float64)
    for row in windows.rows(windows.numbers):
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        total += functional.cross_entropy(logits, row[1:], reduction="sum").double()
    (found,) = losses(load(tmp_path), windows, [subset(0, 1, 2, total=3)], batch_tokens=90).values()
    assert found == pytest.approx(float(total) / windows.tokens, abs=1e-5)


@pytest.mark.parametrize("residual_scale", ["plain", "scaled", "0.7"])
def test_every_part_is_what_its_stages_make(staged: StagedModel, windows: Windows, residual_scale: str) -> None:
    subsets = [StageSubset(stages, 5, residual_scale_of(residual_scale, 5, len(stages))) for stages in all_subsets(5)]
    found = losses(staged, windows, [*subsets, subset(0, 4, 2, residual_scale=1.3)])
    assert len(found) == 17
    assert len(set(found.values())) == 17
    for each, loss in found.items():
        assert loss == pytest.approx(by_itself(staged, each, windows), abs=1e-5)


class Counting:
    """Counts how often a stage is visited."""

    def __init__(self, staged: StagedModel) -> None:
        self.count = 0
        self._hooks = [stage.register_forward_hook(self._seen) for stage in staged.stages]

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _seen(self, *_call: object) -> None:
        self.count += 1


def test_shared_work_changes_no_bit(staged: StagedModel, windows: Windows) -> None:
    subsets = [subset(*stages) for stages in all_subsets(5)]
    with Counting(staged) as shared:
        together = losses(staged, windows, subsets)
    with Counting(staged) as single:
        alone = {each: losses(staged, windows, [each])[each] for each in subsets}
    assert together == alone
    assert (shared.count, single.count) == (16, 48)


def test_driven_parts_share_what_they_can(staged: StagedModel, windows: Windows) -> None:
    subsets = [subset(0, 2, residual_scale=residual_scale) for residual_scale in (1.0, 1.5, 2.0)] + [
        subset(0, 2, 3, residual_scale=1.5),
        subset(0),
    ]
    with Counting(staged) as visits:
        together = losses(staged, windows, subsets)
    assert visits.count == 3
    assert together == {each: losses(staged, windows, [each])[each] for each in subsets}


def test_batches_do_not_matter_nor_does_the_order(staged: StagedModel, windows: Windows) -> None:
    subsets = [subset(0, 1), subset(0, 3, 4), subset(0, 1, 2, 3, 4)]
    one = losses(staged, windows, subsets)
    for each, loss in losses(staged, windows, subsets[::-1], batch_tokens=40).items():
        assert loss == pytest.approx(one[each], abs=1e-6)


@pytest.fixture
def replicas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[StagedModel]:
    return replicas_that_begin_together(folder, "5", monkeypatch)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
@pytest.mark.parametrize(("dtype", "wire"), others_slow([("fp32", ""), ("fp32", "int4")], [("bf16", "")]))
def test_several_devices_change_no_bit(
    staged: StagedModel, replicas: list[StagedModel], windows: Windows, dtype: Any, wire: str
) -> None:
    selection = Selection(everything=True)
    alone = evaluate(staged, [windows], selection, dtype, batch_tokens=32, wire=wire)
    first, *others = replicas
    calls: list[tuple[object, ...]] = []
    progress: Any = lambda *said: calls.append(said)  # noqa: E731
    found = evaluate(first, [windows], selection, dtype, progress, batch_tokens=32, wire=wire, replicas=others)
    assert found.losses == alone.losses
    assert [each[1] for each in calls] == [16 * done for done in range(1, 7)]


def test_an_interruption_of_several_devices(staged: StagedModel, replicas: list[StagedModel], windows: Windows) -> None:
    first, *others = replicas
    selection = Selection(named=["0,2"])
    found = evaluate(first, [windows], selection, progress=stop_after(1), batch_tokens=64, replicas=others)
    assert found.interrupted
    tokens = [loss.tokens for each in found.wanted for loss in found.losses[each].values()]
    assert tokens == [128, 128], "of the first two batches, which are those that one device begins with"
    alone = evaluate(staged, [windows], selection, progress=stop_after(2 * 2), batch_tokens=64)
    assert alone.losses == found.losses


def test_a_model_is_on_each_device_that_can_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda:0": 30, "cuda:1": 8, "cuda:2": 8, "cuda:3": 8, "cuda:4": 8}
    monkeypatch.setattr(spread_layers, "parse_devices", lambda text: list(free) if text == "cuda" else [text])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 0))
    assert spread_layers.replica_devices("cuda", 6) == [[device] for device in free]
    assert spread_layers.replica_devices("cuda", 12) == [["cuda:0"], ["cuda:1", "cuda:2"], ["cuda:3", "cuda:4"]]
    assert spread_layers.replica_devices("cuda", 19) == [["cuda:0"], ["cuda:1", "cuda:2", "cuda:3"]]
    assert spread_layers.replica_devices("cuda", 99) == [list(free)]
    assert spread_layers.replica_devices("cuda:7", 99) == [["cuda:7"]]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
def test_bfloat16_comes_near(staged: StagedModel, windows: Windows) -> None:
    subsets = [subset(0, 1, 2, 3, 4), subset(0, 2, residual_scale=1.5)]
    exact, near = (losses(staged, windows, subsets, dtype=dtype) for dtype in ("fp32", "bf16"))
    for each in subsets:
        assert exact[each] != near[each]
        assert exact[each] == pytest.approx(near[each], rel=0.01)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_codec_rounds_on_every_hop_also_on_the_one_back_to_the_head(
    staged: StagedModel, windows: Windows, wire: str
) -> None:
    subsets = [subset(*stages) for stages in ((0,), (0, 2), (0, 1, 3), (0, 1, 2, 3, 4))]
    found = losses(staged, windows, subsets, wire=wire)
    rows = windows.rows(windows.numbers)
    for each in subsets:
        hidden = staged.stages[0].embed(rows[:, :-1])
        for stage in each.stages:
            hidden = staged.stages[stage](hidden)
            if each.stages != (0,):
                hidden = CODECS[wire].rounded(hidden)
        expected = functional.cross_entropy(logits(staged.stages[0], hidden).flatten(0, 1), rows[:, 1:].flatten())
        assert found[each] == pytest.approx(float(expected), abs=1e-5)
    plain = losses(staged, windows, subsets)
    assert found[subsets[0]] == plain[subsets[0]]
    assert all(found[each] != plain[each] for each in subsets[1:])


def test_values_without_bounds(staged: StagedModel, windows: Windows) -> None:
    with pytest.raises(UserError, match="stages 0,1 ×1e\\+38 of the model compute values beyond all bounds"):
        losses(staged, windows, [subset(0, 1, residual_scale=1e38)])


def test_the_best_drive_is_the_best(staged: StagedModel, windows: Windows) -> None:
    sizes: dict[int, list[Visits]] = {4: [(0, 1, 2, 3), (0, 2, 3, 4)], 2: [(0, 4)]}
    found = best_exponents(PerplexityMeter(staged, [windows]), sizes, 5)
    assert found.keys() == sizes.keys()
    for kept, exponent in found.items():
        tried = {
            each: sum(
                by_itself(staged, StageSubset(stages, 5, (4 / (kept - 1)) ** each), windows) for stages in sizes[kept]
            )
            for each in EXPONENTS
        }
        assert exponent == min(tried, key=tried.__getitem__)


# ---- which stages to lose


def test_greedy_may_be_beaten() -> None:
    known: dict[Visits, float] = {
        (0, 1, 2, 3): 1.0,
        (0, 1, 2): 1.3,
        (0, 1, 3): 1.2,
        (0, 2, 3): 1.1,  # 1 goes first
        (0, 1): 1.5,  # … though it would be best to keep
        (0, 2): 1.8,
        (0, 3): 1.9,
        (0,): 3.0,
    }
    order = list(ablation_order(4, lambda subsets: [known[stages] for stages in subsets]))
    assert order == [StageAblation(1, (0, 2, 3)), StageAblation(3, (0, 2)), StageAblation(2, (0,))]
    scaling, ones = ResidualScaling(4, "plain"), (1, 1, 1, 1)
    losses = {scaling.subset(stages): {"t": TextLoss(loss, 9)} for stages, loss in known.items()}
    evaluation = Evaluation([], ones, ones, list(losses), losses, scaling, order, ablation=True, interrupted=False)
    best = {kept: found.stages for kept, found in evaluation.best_by_size("t").items()}
    assert best == {4: (0, 1, 2, 3), 3: (0, 2, 3), 2: (0, 1), 1: (0,)}
    del losses[scaling.subset((0, 3))]
    assert replace(evaluation, losses=losses).best_by_size("t") == {}, "one might be better"


WEIGHT = {1: 1.0, 2: 0.0, 3: 0.5, 4: 0.2}
"""What stages add, as a share of what they added."""
ORDER_OF_WEIGHT = [2, 4, 3, 1]


@pytest.fixture(scope="module")
def weighted(folder: Path) -> StagedModel:
    staged = load(folder, cut="5")
    with torch.no_grad():
        for number, weight in WEIGHT.items():
            for name, each in staged.stages[number].named_weights():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    each.mul_(weight)
    return staged


@pytest.fixture(scope="module")
def spoken(weighted: StagedModel) -> Windows:
    """A text by the model itself, so that nothing predicts it better than the whole of it."""
    model, generator = SubsetModel(weighted, subset(0, 1, 2, 3, 4)), torch.Generator().manual_seed(2)
    rows = torch.full((64, 1), TOKENIZER.end_id)
    for _ in range(24):
        chances: Tensor = logits(weighted.stages[0], model.hidden(rows)[:, -1]).softmax(-1)
        rows = torch.cat([rows, torch.multinomial(chances, 1, generator=generator)], 1)
    ids = rows[:, 1:].flatten().numpy().astype(np.uint16)
    return Windows.of("spoken", ids, context=24, tokens=len(ids), beginning=TOKENIZER.end_id)


@pytest.fixture(scope="module")
def lost(weighted: StagedModel, spoken: Windows) -> Evaluation:
    return evaluate(weighted, [spoken], Selection(ablation=True))


def test_stages_go_by_what_they_add(lost: Evaluation) -> None:
    assert [drop.stage for drop in lost.order] == ORDER_OF_WEIGHT
    assert [stage for stage, _ in lost.single_ablations()] == ORDER_OF_WEIGHT[::-1]
    costs = [lost.increase(lost.subset(drop.remaining), "spoken") for drop in lost.order]
    assert costs[0] == 0.0
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)
    assert lost.best_by_size("spoken") == {5: lost.whole} | {
        len(drop.remaining): lost.subset(drop.remaining) for drop in lost.order
    }


def test_many_stages_are_dropped_without_measuring_all(
    weighted: StagedModel, spoken: Windows, lost: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skippipe.inference.eval.evaluate.MAX_EXACT_SUBSETS", 8)
    found = evaluate(weighted, [spoken], Selection(ablation=True))
    assert found.order == lost.order
    assert found.single_ablations() == lost.single_ablations()
    assert found.best_by_size("spoken") == {}
    assert len(found.losses) == 1 + 4 + 3 + 2 + 1
    assert all(found.losses[each] == lost.losses[each] for each in found.losses)
    assert [table.title for table in tables(found)] == ["Subsets", "Losing one stage", "Dropping one after another"]


# ---- evaluations


def test_sizes_are_summed_up(staged: StagedModel, windows: Windows) -> None:
    found = evaluate(staged, [windows], Selection(everything=True))
    assert [len(each.stages) for each in found.wanted] == [5, *[4] * 4, *[3] * 6, *[2] * 4, 1]
    (three,) = (size for size in found.sizes("random") if size.kept == 3)
    own = {each: math.exp(by_itself(staged, each, windows)) for each in found.wanted if len(each.stages) == 3}
    assert three.mean == pytest.approx(sum(own.values()) / 6, rel=1e-5)
    assert (three.subsets, three.best, three.worst) == (6, min(own, key=own.__getitem__), max(own, key=own.__getitem__))
    assert found.share_of_parameters(found.whole) == 1.0
    assert found.share_of_parameters(subset(0)) == pytest.approx(1 - 4 * found.parameters[1] / sum(found.parameters))


def test_shares_are_drawn_and_driven(staged: StagedModel, windows: Windows) -> None:
    selection = Selection(named=["0,3,1"], shares=["3/5"], draws=4, residual_scale="best")
    found = evaluate(staged, [windows], selection)
    kept = [each for each in found.wanted if each != found.whole]
    assert [len(each.stages) for each in kept] == [3] * 5
    assert {each.residual_scale for each in kept} == {2 ** found.scaling.exponents[3]}
    assert found.scaling.tokens == 8 * 16
    assert any("the best of 0, 0.25, 0.5, 0.75, 1 on 128 tokens of random" in note for note in notes(found))
    assert evaluate(staged, [windows], selection).losses == found.losses


def test_nothing_missing_needs_no_drive(staged: StagedModel, windows: Windows) -> None:
    found = evaluate(staged, [windows], Selection(residual_scale="best"))
    assert found.wanted == [subset(0, 1, 2, 3, 4)]
    assert not found.scaling.exponents


def stop_after(batches: int) -> Any:
    calls = 0

    def progress(*_said: object) -> None:
        nonlocal calls
        calls += 1
        if calls > batches:
            raise KeyboardInterrupt

    return progress


def test_an_interruption_leaves_what_was_found(staged: StagedModel, windows: Windows) -> None:
    other = Windows.of("other", IDS[::-1].copy(), context=16, tokens=200)
    selection = Selection(named=["0,2"])
    found = evaluate(staged, [windows, other], selection, progress=stop_after(3), batch_tokens=64)
    assert found.interrupted
    assert [loss.tokens for subset in found.wanted for loss in found.losses[subset].values()] == [64, 64]
    assert notes(found)[:2] == [
        "random: 64 of 192 tokens, spread over its 500, in windows of 16",
        "other: none of 192 tokens, spread over its 500, in windows of 16",
    ]
    assert tables(found)[0].rows[1][-3:] == ["–", "–", "–"]
    assert not as_json(found)["complete"]
    assert [panel.text for panel in panels(found)] == ["random"]
    with pytest.raises(KeyboardInterrupt):
        evaluate(staged, [windows], selection, progress=stop_after(1), batch_tokens=64)


def test_an_interruption_while_dropping(
    weighted: StagedModel, spoken: Windows, lost: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skippipe.inference.eval.evaluate.MAX_EXACT_SUBSETS", 8)
    found = evaluate(weighted, [spoken], Selection(ablation=True), progress=stop_after(1 + 4 + 3 + 1))
    assert found.interrupted
    assert found.order == lost.order[:2]
    assert len(found.losses) == 1 + 4 + 3
    assert len(panels(found)[0].lines[ORDER]) == 3


def test_pictures_show_parts_means_and_orders(lost: Evaluation) -> None:
    (panel,) = panels(lost)
    assert len(panel.points) == 16
    assert panel.points[0].kept == 100
    assert {name: len(line) for name, line in panel.lines.items()} == {MEAN: 5, ORDER: 5, EXACT: 5}
    assert [point.mark for point in panel.lines[ORDER]] == ["", "−2", "−4", "−3", "−1"]
    low, high = (kind(point.perplexity for point in panel.points) for kind in (min, max))
    marked = list(ticks(panel))
    assert len(marked) >= 3
    assert 0.97 * low <= marked[0] <= marked[-1] <= 1.03 * high


def test_ticks_are_round() -> None:
    near, far = (
        PlotPanel("", [PlotPoint(100, low, ""), PlotPoint(50, high, "")], {}) for low, high in ((57, 93), (57, 2300))
    )
    assert list(ticks(near).values()) == ["60", "70", "80", "90"]
    assert list(ticks(far).values()) == ["100", "200", "500", "1,000", "2,000"]


def test_perplexities_are_short() -> None:
    assert [number(each) for each in (3.14159, 999.99, 12345.6, 1.5e12)] == ["3.14", "999.99", "12,346", "1.5e+12"]


def test_parts_without_a_drive_of_their_own() -> None:
    assert ResidualScaling(5, "best", {3: 0.5}).subset((0, 1, 2)).residual_scale == 2**0.5
    assert ResidualScaling(5, "best").subset((0, 1, 2)).residual_scale == 1.0
    assert ResidualScaling(5, "scaled").subset((0, 1, 2)).residual_scale == 2.0
    assert ResidualScaling(5, "1.4").subset((0, 1, 2, 3, 4)).residual_scale == 1.0


def test_too_many_parts() -> None:
    with pytest.raises(UserError, match=r"--all: 12 stages have 2,048 subsets, more than 1,024; draw some with --keep"):
        Selection(everything=True).stages(12)
    assert len(Selection(everything=True).stages(11)) == 1024
    assert len(Selection(ablation=True).for_ablation(8)) == 128
    assert len(Selection(ablation=True).for_ablation(9)) == 8
