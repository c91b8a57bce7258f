"""A deeper model from a trained one: every layer is the copy that it should be, and training goes on with it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import MANIFEST, CheckpointOrigin, Checkpoints, verified
from skippipe.checkpoint.grown_state import donor_layers
from skippipe.checkpoint.manager import CheckpointManager
from skippipe.cli import main
from skippipe.codecs import encode
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.json_fields import json_text
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node_config import NodeConfig
from skippipe.training.depth_growth import check_job, grow, young_of
from skippipe.training.job_config import load_job
from skippipe.training.run import Run
from skippipe.workload import Workload
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster

torch.set_num_threads(1)

# Which layer is a copy of which


@pytest.mark.parametrize(
    ("young", "grown", "donors"),
    [
        ((2, 2, 2, 2), (2,) * 6, (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7)),
        ((1, 1, 1), (1,) * 6, (0, 1, 1, 1, 1, 2)),
        ((1, 1, 1, 1), (1,) * 7, (0, 1, 2, 1, 2, 1, 3)),
        ((2, 2), (2, 2, 2), (0, 1, 2, 3, 2, 3)),
        ((2, 2), (2,) * 4, (0, 1, 2, 3, 2, 3, 2, 3)),
        ((1, 3), (2, 2, 2), (0, 1, 2, 1, 2, 3)),
        ((4, 4), (3, 3, 3), (0, 1, 2, 3, 4, 5, 6, 1, 7)),
        ((2,), (1, 2), (0, 1, 1)),
        ((2,), (2, 2), None),
        ((1,), (1, 2), None),
    ],
)
def test_the_middle_is_repeated_as_a_block(
    young: tuple[int, ...], grown: tuple[int, ...], donors: tuple[int, ...] | None
) -> None:
    if donors is None:
        with pytest.raises(UserError, match=r"has none after the first \d to repeat"):
            donor_layers(young, grown)
    else:
        assert donor_layers(young, grown) == donors


cuts = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@st.composite
def growths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Layers of each stage before and after; half of them in equal stages."""
    if draw(st.booleans()):
        unit, before = draw(st.integers(1, 4)), draw(st.integers(2, 8))
        return [unit] * before, [unit] * draw(st.integers(before + 1, 20))
    young = draw(cuts.filter(lambda cut: sum(cut) > 1 and len(set(cut)) > 1))
    return young, young + draw(cuts)


@given(growths())
def test_first_and_last_stay_and_every_layer_is_used_in_order(growth: tuple[list[int], list[int]]) -> None:
    young, grown = growth
    donors = donor_layers(young, grown)
    unit = young[0] if len({*young, *grown}) == 1 else 1
    last = sum(young) - 1
    assert len(donors) == sum(grown)
    assert donors[: last + 1 - unit] == tuple(range(last + 1 - unit)), "as if nothing had been added, up to the last"
    assert donors[-unit:] == tuple(range(last + 1 - unit, last + 1))
    assert set(donors) == set(range(last + 1))
    for before, after in pairwise(donors):
        back_to_the_middle = before == last - unit and after == unit
        cut_short = after == last + 1 - unit
        assert after == before + 1 or back_to_the_middle or cut_short
    for layer, donor in enumerate(donors):
        assert layer % unit == donor % unit, "a layer keeps its place in the stage"


# A checkpoint of made-up numbers


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(["some words, and some more words"] * 20, 270)


def run_of(folder: Path, tokenizer: TextTokenizer, layers: Sequence[int], config: Any) -> Run:
    """Full paths over one node a stage."""
    spec = ModelSpec(config, seed=11)
    workload = Workload(spec.shape, 12, 2, 3)
    stages = tuple(Stage(count, (node,), (node,)) for node, count in enumerate(layers))
    plan = Plan(uniform_cluster(len(layers)), workload, stages, (Lane(tuple(range(len(layers))), 3),))
    node_config = NodeConfig(plan, config.to_dict(), 11, OptimConfig(warmup=2, iterations=20), "tokens", "0" * 64)
    return Run(node_config, spec, tokenizer, folder, CoordinatorSettings(node_config.learning, 20))


def made_up(run: Run, steps: Sequence[int]) -> CheckpointOrigin:
    """A checkpoint after 9 iterations, in which every number is another one."""
    keeper = CheckpointManager(run.checkpoints, run.node_config, run.spec, run.tokenizer)
    layers = run.node_config.plan.layers
    for stage in range(len(layers)):
        size = sum(place.size for place in layout_of_stage(run.spec, layers, stage))
        keeper.save(stage, 0, encode(torch.rand(3 * size), "fp32"))
        keeper.save(stage, 1, None)
    keeper.saved(9, steps)
    keeper.close()
    return young_of(run.output)


def tensors_in(place: Path) -> dict[str, Tensor]:
    files = verified(place).files
    return {name: tensor for file in files for name, tensor in load_file(place / file.name).items()}


def assert_copied(young: Path, grown: Path, donors: Sequence[int]) -> None:
    """Every tensor, weights and means alike."""
    theirs, ours = tensors_in(young), tensors_in(grown)
    expected = {name: tensor for name, tensor in theirs.items() if ".layers." not in name}
    for layer, donor in enumerate(donors):
        here, there = f"model.layers.{layer}.", f"model.layers.{donor}."
        expected |= {name.replace(there, here): tensor for name, tensor in theirs.items() if there in name}
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("family", "young", "grown", "steps"),
    [
        ("llama", (2, 2, 2), (2, 2, 2, 2), (9, 7, 7, 8)),  # stages 0 1 1 2
        ("llama-tied", (1, 3), (2, 2, 2), (7, 7, 7)),  # layers 0 1 | 2 1 | 2 3
        ("qwen3_moe", (1, 1, 2), (4, 1), (7, 8)),  # layers 0 1 2 1 | 3
    ],
)
def test_every_tensor_is_copied_however_stages_are_cut(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    family: str,
    young: tuple[int, ...],
    grown: tuple[int, ...],
    steps: tuple[int, ...],
) -> None:
    before = run_of(tmp_path / "young", tokenizer, young, tiny(family, num_hidden_layers=sum(young)))
    after = run_of(tmp_path / "grown", tokenizer, grown, tiny(family, num_hidden_layers=sum(grown)))
    origin = made_up(before, (9, 7, 8)[: len(young)])
    made = grow(origin, after)
    assert made.donors == donor_layers(young, grown)
    assert_copied(origin.place, made.place, made.donors)
    manifest = verified(made.place)
    assert (manifest.iterations, manifest.layers, manifest.steps) == (9, grown, steps)
    assert TextTokenizer.load(made.place).fingerprint == tokenizer.fingerprint
    assert replace(after, resumed=True).first == 9


def test_layers_of_another_kind_are_not_copied(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    kinds = ["sliding_attention", "full_attention"]

    def run(name: str, layers: Sequence[int], family: str = "qwen3", **others: Any) -> Run:
        config = tiny(family, num_hidden_layers=sum(layers), **others)
        return run_of(tmp_path / name, tokenizer, layers, config)

    young = made_up(run("masks", (1,) * 5, layer_types=kinds * 2 + kinds[:1], sliding_window=6), (9,) * 5)
    grown = run("masks-7", (1,) * 7, layer_types=kinds * 3 + kinds[:1], sliding_window=6)
    with pytest.raises(
        UserError, match=r"layer 4 \(sliding_attention\) cannot be a copy of layer 1 \(full_attention\)"
    ):
        grow(young, grown)
    young = made_up(run("experts", (1,) * 5, "qwen3_moe", decoder_sparse_step=2), (9,) * 5)
    with pytest.raises(
        UserError, match=r"'model\.layers\.4\.mlp\..* \[48, 32\] cannot be a copy of 'model\.layers\.1\."
    ):
        grow(young, run("experts-7", (1,) * 7, "qwen3_moe", decoder_sparse_step=2))
    assert not Checkpoints(tmp_path / "masks-7" / "checkpoints").complete()


# From job files, on real runs

TEXT = "It is a truth universally acknowledged, that a node in possession of a good stage must be in want of a lane. "
JOB = """
output = "{folder}/{name}"
iterations = {iterations}
seed = 4
cluster = "{cluster}"
[model]
config = "{folder}/{config}"
[data]
texts = "{folder}/text.txt"
vocabulary = 300
folder = "{folder}/tokens"
[batch]
sequence = 16
samples = 1
microbatches = {microbatches}
[pipeline]
stages = {stages}
skip = "0"
budget_s = 0.2
[learning]
rate = 3e-3
warmup = 2
iterations = 6
[report]
recorded = 0
"""


@dataclass(frozen=True)
class Shop:
    """A folder with a small model that was trained for 4 iterations, and a job for a larger one."""

    folder: Path

    def skippipe(self, *words: str | Path) -> tuple[int, str]:
        """Exit code, and what was said."""
        with pytest.MonkeyPatch.context() as patch, (self.folder / "said").open("w+") as said:
            patch.setattr(sys, "argv", ["skippipe", *map(str, words)])
            patch.setattr(sys, "stdout", said)
            patch.setattr(sys, "stderr", said)
            code = 0
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            said.seek(0)
            return code, said.read()

    def job(self, name: str, **others: Any) -> Path:
        said = {
            "folder": self.folder,
            "name": name,
            "cluster": "datacentre:6",
            "config": "12.json",
            "iterations": 6,
            "microbatches": 4,
            "stages": 6,
            **others,
        }
        file = self.folder / f"{name}.toml"
        file.write_text(JOB.format(**said))
        return file

    def model(self, file: str, layers: int, **others: Any) -> str:
        config = tiny("llama", num_hidden_layers=layers, **others)
        (self.folder / file).write_text(json_text(config.to_dict()))
        return file

    def complaint(self, *words: str | Path) -> str:
        code, said = self.skippipe("grow", *words)
        assert code == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "text.txt").write_text(" ".join(f"{number} {TEXT}" for number in range(200)))
    made = Shop(folder)
    made.model("8.json", 8)
    made.model("12.json", 12)
    young = made.job("young", config="8.json", iterations=4, stages=4, cluster="datacentre:4")
    code, said = made.skippipe("train", young, "--engine", "virtual")
    assert code == 0, said
    return made


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_goes_on_with_the_deeper_model(shop: Shop) -> None:
    whole = shop.job("whole")
    code, said = shop.skippipe("grow", shop.folder / "young", whole)
    assert code == 0, said
    assert "8 layers become 12, copies of 0 1 2 3 4 5 2 3 4 5 6 7\n" in said
    assert f"goes on after 4 iterations with: skippipe train {whole} --resume" in said
    assert "warning" not in said
    young, grown = (shop.folder / name / "checkpoints" / "000004" for name in ("young", "whole"))
    assert_copied(young, grown, (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7))
    assert verified(grown).steps == (4,) * 6
    plan = Plan.load(shop.folder / "whole" / "plan.json")
    assert plan.layers == (2,) * 6

    code, said = shop.skippipe("train", whole, "--engine", "virtual", "--resume")
    assert code == 0, said
    assert Plan.load(shop.folder / "whole" / "plan.json").stages == plan.stages
    before, after = metrics(shop.folder / "young"), metrics(shop.folder / "whole")
    assert [row["iteration"] for row in before + after] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["loss"]) for row in after)
    assert after[0]["loss"] < before[0]["loss"], "what was learned is still there"
    rates = [load_job(whole).schedule.rate_at(number) for number in range(6)]
    assert [row["learning_rate"] for row in before + after] == rates, "as if it were one run"
    assert verified(shop.folder / "whole" / "checkpoints" / "000006").steps == (6,) * 6
    model = AutoModelForCausalLM.from_pretrained(shop.folder / "whole" / "model")
    assert model.config.num_hidden_layers == 12
    assert len(model.model.layers) == 12


def test_the_exported_configuration_with_another_number_will_do(shop: Shop) -> None:
    config = json.loads((shop.folder / "young" / "model" / "config.json").read_text())
    (shop.folder / "exported.json").write_text(json_text({**config, "num_hidden_layers": 10}))
    check_job(young_of(shop.folder / "young"), load_job(shop.job("exported", config="exported.json")))
    job = shop.job("layers", config="young/model")
    assert "has 8 layers, " in shop.complaint(shop.folder / "young", job)
    job.write_text(job.read_text().replace("[model]", "[model]\nlayers = 10"))
    check_job(young_of(shop.folder / "young"), load_job(job))


def test_what_does_not_fit_is_one_line(shop: Shop) -> None:
    young = shop.folder / "young"
    nowhere = shop.folder / "nowhere"
    assert f"{nowhere}: has no sound checkpoint to grow from" in shop.complaint(nowhere, shop.job("a"))
    same = shop.complaint(young, shop.job("young"), "--force")
    assert "is where " in same
    assert "name another folder" in same
    grows = shop.job("grows")
    grows.write_text(
        grows.read_text()
        .replace('skip = "0"', "")
        .replace("[learning]", '[recipe]\nskip = "1/2 until 50%, 0"\ngrow = "50%"\n[learning]')
    )
    assert "recipe.grow: a model that grows by itself begins small" in shop.complaint(young, grows)
    few = shop.complaint(young, shop.job("b", iterations=4))
    assert "iterations: 4 in the job, and " in few
    assert "000004 is 4 iterations on; say how long the whole run is to be" in few
    for layers in (4, 8):
        said = shop.complaint(young, shop.job("c", config=shop.model("c.json", layers)))
        assert f"has {layers} layers, {young}/checkpoints/000004 has 8: it takes more" in said
    wide = shop.model("d.json", 12, hidden_size=64, tie_word_embeddings=True)
    said = shop.complaint(young, shop.job("d", config=wide))
    assert "only the number of layers may differ" in said
    assert "hidden_size 32 there, 64 here" in said
    assert "tie_word_embeddings False there, True here" in said
    assert "vocab" not in said
    (shop.folder / "e.json").write_text(json_text(tiny("qwen3", num_hidden_layers=12).to_dict()))
    assert "model_type llama there, qwen3 here\n" in shop.complaint(young, shop.job("e", config="e.json"))
    job = shop.job("f")
    job.write_text(job.read_text().replace("seed = 4", "seed = 5"))
    assert "seed: 5 in the job, 4 in " in shop.complaint(young, job)
    job = shop.job("g")
    job.write_text(job.read_text().replace("300", "290").replace("/tokens", "/other-tokens"))
    said = shop.complaint(young, job)
    assert "data: other tokens (" in said
    assert "a vocabulary of 290) than" in said
    assert ", 300); name the same texts" in said


def test_checkpoints_that_are_there_stay_unless_forced(shop: Shop) -> None:
    young, job = shop.folder / "young", shop.job("taken", microbatches=6)
    checkpoints = Checkpoints(shop.folder / "taken" / "checkpoints")
    shutil.copytree(young / "checkpoints" / "000004", checkpoints.folder / "000005")
    said = shop.complaint(young, job)
    assert "taken holds a run, 5 iterations on; " in said
    assert "--force" in said
    code, said = shop.skippipe("grow", young, job, "--force")
    assert code == 0, said
    assert [place.name for place in checkpoints.complete()] == ["000004"], "one that went further would be gone on from"
    (aside,) = shop.folder.glob("taken.old-*")
    assert (aside / "checkpoints" / "000005" / MANIFEST).exists()
    batches = "an iteration had 4 microbatches of 1 x 16 tokens and now has 6 microbatches of 1 x 16 tokens"
    assert f"warning: {batches}: some text is left out or repeated" in said


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    run = run_of(tmp_path, tokenizer, (1,) * 3, tiny("llama", num_hidden_layers=3))
    made_up(run, (9,) * 3)
    newer = tmp_path / "checkpoints" / "000010"
    newer.mkdir()
    (newer / MANIFEST).write_text("{}")
    assert young_of(tmp_path).place.name == "000009"
