"""Bridges and adapters at inference: what stages that are left make with them is what the study's engine measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skippipe.codecs import decode
from skippipe.errors import UserError
from skippipe.inference import checkpoint_loader
from skippipe.inference.cached_stage import BatchRows, StageChain, convert, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel, load, load_replicas, load_stage, read_outline
from skippipe.inference.engine import TokenByToken
from skippipe.inference.eval.perplexity import PerplexityMeter, Windows
from skippipe.inference.likelihood import SubsetModel
from skippipe.inference.speculative import Speculator, pick_draft
from skippipe.model.spread_layers import weight_bytes
from skippipe.model.stand_ins import is_bridge, is_stand_in
from skippipe.runtime.messages import RunStep
from skippipe.serving.executor import ServingExecutor
from skippipe.serving.step_protocol import ForwardStep, NodeInfo, parse_step
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import StageSubset, Visits
from tests.helpers.healed_folders import REPEATS, healed
from tests.helpers.model_folders import LAYERS, TOKENIZER, export_to
from tests.helpers.quick import others_slow
from tests.helpers.staged_models import asked, output_tokens

torch.set_num_threads(1)
PARTS: list[Visits] = [(0,), (0, 1), (0, 2), (0, 1, 2)]
RECIPES = [
    SkipSchedule("1/3", bridges=3),
    SkipSchedule("1/3", adapters=4),
    SkipSchedule("1/3", bridges=2, adapters=5, adapters_by_hop=True),
    SkipSchedule("1/3", adapters=5, adapters_by_hop=True, adapters_shared=2),
    REPEATS,
]
IDS = ["bridges", "adapters", "adapters by hop over bridges", "adapters by hop and shared", "repeats"]


@pytest.mark.parametrize(
    ("name", "bridge", "stand_in"),
    [
        ("bridges.0.down", True, True),
        ("exp_avg.bridges.0.down", True, True),
        ("adapters.model.layers.0.mlp.up_proj.up", False, True),
        ("momentum_buffer.adapters.0.gates", False, True),
        ("exp_avg_sq.model.layers.0.mlp.up_proj.weight", False, False),
        ("model.layers.0.adapters.up.weight", False, False),
        ("model.bridges.weight", False, False),
    ],
)
def test_weights_that_stand_in_are_known_by_their_names(name: str, bridge: bool, stand_in: bool) -> None:
    """Also the optimizer's state for them, and not weights of a model that has parts of such names."""
    assert (is_bridge(name), is_stand_in(name)) == (bridge, stand_in)


def rows_of(count: int = 4, length: int = 17) -> torch.Tensor:
    return torch.randint(0, TOKENIZER.size, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", others_slow(RECIPES[2:], RECIPES[:2]))
def test_losses_of_parts_are_those_of_the_study(tmp_path: Path, recipe: SkipSchedule) -> None:
    plain = tmp_path / "plain"
    export_to(plain)
    engine, without = healed(tmp_path / "healed", recipe), load(plain)
    staged, rows = load(tmp_path / "healed"), rows_of()
    assert staged.stand_ins
    assert not without.stand_ins
    subsets = [StageSubset(part, 3, scale) for part in PARTS for scale in ((1.0, 1.3) if len(part) == 2 else (1.0,))]
    windows = Windows("rows", rows.flatten().numpy(), 16, None, (0, 1, 2, 3))
    given = windows.rows(range(4))
    meter = PerplexityMeter(staged, [windows])
    meter.measure(subsets)
    for subset in subsets:
        expected = float(engine.loss_of(given[:, :-1], given[:, 1:], subset.stages, subset.residual_scale))
        values = logits(staged.stages[0], SubsetModel(staged, subset).hidden(given[:, :-1]))
        alone = float(torch.nn.functional.cross_entropy(values.flatten(0, 1), given[:, 1:].flatten()))
        assert alone == pytest.approx(expected, rel=1e-5), subset
        assert meter.losses[subset]["rows"].mean == pytest.approx(expected, rel=1e-5), subset
        same = torch.equal(
            SubsetModel(staged, subset).hidden(given[:, :-1]), SubsetModel(without, subset).hidden(given[:, :-1])
        )
        assert same == (len(subset.stages) == 3), "the whole model is as it was, to the last bit"


@pytest.mark.parametrize("recipe", others_slow(RECIPES[2:], RECIPES[:2]))
def test_texts_token_by_token_and_with_drafts(tmp_path: Path, recipe: SkipSchedule) -> None:
    healed(tmp_path, recipe, "mistral")
    staged, rows = load(tmp_path), rows_of(3, 12)
    for part in PARTS:
        subset = StageSubset(part, 3)
        chain = StageChain(staged.stages, part, 1.0, 200, subset.hops)
        expected, made = SubsetModel(staged, subset).hidden(rows), []
        for start, count in ((0, 5), (5, 1), (6, 1), (7, 5)):
            batch = BatchRows((0, 1, 2), (start,) * 3, (count,) * 3)
            made.append(chain.forward(embed(staged.stages[0], rows[:, start : start + count].tolist()), batch))
        torch.testing.assert_close(torch.cat(made, 1), expected, rtol=1e-4, atol=1e-4)
    whole, half = StageSubset((0, 1, 2), 3), StageSubset((0, 2), 3)
    for subset, drafts in ((whole, PARTS[:3]), (half, PARTS[:1])):
        requests = asked(count=3)
        expected_tokens = output_tokens(staged, TokenByToken(staged, subset, 1000), requests)
        for draft in drafts:
            speculator = Speculator(staged, subset, StageSubset(draft, 3), 1000, draft_tokens=3)
            assert output_tokens(staged, speculator, requests) == expected_tokens
    pick_draft(staged, whole, rows[0].tolist())


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_a_node_goes_over_its_bridge(tmp_path: Path, recipe: SkipSchedule) -> None:
    """Two nodes for the first and the last stage, none for the one between."""
    healed(tmp_path, recipe)
    outline, rows = read_outline(tmp_path), rows_of(1, 6)
    stage_of = (0, 2)
    given: Any = None
    for number, stage in enumerate(stage_of):
        tokens = rows.tolist() if number == 0 else []
        sampling: Any = [[[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]], [0], [6], [[]], [0], [""]] if number == 0 else [[], []]
        message = RunStep(1, 1, [0, 1], [[0, 0, 6]], [], tokens, *sampling)
        step = parse_step(message, NodeInfo(number, 3, stage_of, TOKENIZER.size, 512))
        executor = ServingExecutor(stage, load_stage(outline, stage).eval(), cache_tokens=512, wire_dtype="fp32")
        given = executor.run(ForwardStep(step, number, step.tokens if number == 0 else given))
    expected = SubsetModel(load(tmp_path), StageSubset((0, 2), 3)).hidden(rows)
    torch.testing.assert_close(decode(given), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_devices_are_chosen_by_all_that_is_loaded(
    tmp_path: Path, recipe: SkipSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridges and adapters take memory too, unless they are not read."""
    sizes: list[int] = []

    def noted(_device: str, needed_bytes: int) -> list[Any]:
        sizes.append(needed_bytes)
        return ["cpu"] if len(sizes) < 3 else [["cpu"]]

    monkeypatch.setattr(checkpoint_loader, "inference_devices", noted)
    monkeypatch.setattr(checkpoint_loader, "replica_devices", noted)
    healed(tmp_path, recipe)
    models = [load(tmp_path), load(tmp_path, stand_ins=False), *load_replicas(tmp_path)]
    assert sizes == [sum(map(weight_bytes, each.stages)) for each in models]
    assert sizes[0] == sizes[2] > sizes[1]


def test_bf16_and_another_cut(tmp_path: Path) -> None:
    healed(tmp_path, RECIPES[2])
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "index")
    assert read_outline(tmp_path).layers == LAYERS, "the file says what the stages are"
    (tmp_path / "index").rename(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UserError, match=r"--cut 5: .*bridges.safetensors is for stages of 2,1,2 layers"):
        load(tmp_path, "5")

    def half(staged: StagedModel) -> torch.Tensor:
        return SubsetModel(staged, StageSubset((0, 2), 3)).hidden(rows_of()).float()

    exact, coarse = load(tmp_path, "2,1,2"), load(tmp_path)
    convert(coarse, "bf16")
    assert {each.dtype for stage in coarse.stages for each in stage.parameters()} == {torch.bfloat16}
    difference = (half(coarse) - half(exact)).norm() / half(exact).norm()
    assert 0 < difference < 0.05
