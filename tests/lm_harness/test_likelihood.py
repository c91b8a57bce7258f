"""Scoring without the harness: parts, questions, models from disk, likelihoods."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.locate import locate_checkpoint
from skippipe.cli import main
from skippipe.cli.eval import ENVIRONMENT
from skippipe.data.questions import QUESTION_KINDS, Prose, sentences_of
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel, exported_layers, load
from skippipe.inference.likelihood import LikelihoodRequest, SubsetModel
from skippipe.lm_harness.tasks import HarnessTask, build_tasks, parse_names, write_tasks
from skippipe.stage_subset import StageSubset, parse_subsets
from tests.helpers.model_folders import (
    LAYERS,
    TOKENIZER,
    checkpoint_in,
    export_to,
    plainly,
    replicas_that_begin_together,
)
from tests.helpers.quick import MOST_FAMILIES_SLOW

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scoring") / "model"
    export_to(place)
    return place


@pytest.fixture(scope="module")
def prose() -> Prose:
    return Prose.read("classics-val")


@pytest.fixture(scope="module")
def tasks(prose: Prose) -> dict[str, HarnessTask]:
    return {task.name: task for task in build_tasks(list(QUESTION_KINDS), prose, seed=3, limit=60)}


# ---- parts


def test_parts_by_share_and_by_stages() -> None:
    subsets = parse_subsets(6, ["0,2,3"], ["1", "1/2", "50%"], "scaled")
    assert subsets[0].name == "all 6"
    assert subsets[0].residual_scale == 1.0
    assert subsets[-1] == StageSubset((0, 2, 3), 6, 2.5)
    assert subsets[-1].name == "0,2,3 ×2.5"
    halves = subsets[1:-1]
    assert len(halves) == 1, "the same share and seed give the same part, and it is wanted once"
    assert len(halves[0].stages) == 3
    assert halves[0].stages[0] == 0


def test_shares_are_drawn_by_seed() -> None:
    drawn = [parse_subsets(9, [], ["1/2"], draws=4, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4
    assert parse_subsets(3, [], ["2/3"], draws=50) == [StageSubset((0, 1), 3), StageSubset((0, 2), 3)], "all there are"


def test_a_number_drives_only_what_misses_something() -> None:
    whole, subset = parse_subsets(4, ["0,3,1"], ["100%"], "1.4")
    assert (whole.residual_scale, subset.residual_scale, subset.stages) == (1.0, 1.4, (0, 3, 1))


@pytest.mark.parametrize(
    ("total", "stages", "keep", "residual_scale", "complaint"),
    [
        (4, "1,2", None, "plain", "begin with 0"),
        (4, "0,4", None, "plain", "the model has 4 stages, 0 to 3"),
        (4, "0,2,2", None, "plain", "name every stage once"),
        (4, "0,x", None, "plain", "not a list of whole numbers"),
        (4, None, "half", "plain", "--keep: 'half' is not a share"),
        (4, None, "3/2", "plain", "not between 0 and 1"),
        (4, "0,1", None, "strong", "'strong' is neither a number nor one of plain, scaled"),
        (4, None, None, "-1", "--residual-scale: -1 is out of range; give above 0 to 1,000"),
        (1, None, "1/2", "plain", "give its number of stages with --cut"),
    ],
)
def test_parts_that_cannot_be(
    total: int, stages: str | None, keep: str | None, residual_scale: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_subsets(total, [stages] if stages else [], [keep] if keep else [], residual_scale)


# ---- questions


def test_sentences() -> None:
    text = '"Oh!" cried\nMr. Weston. "Is it?--Yes." He left J. S. Bach at 3.5 miles.\n\nThen, no. 7 (the end.) Fin'
    assert [(each.text, each.paragraph) for each in sentences_of(text)] == [
        ('"Oh!" cried Mr. Weston.', 0),
        ('"Is it?--Yes."', 0),
        ("He left J. S. Bach at 3.5 miles.", 0),
        ("Then, no. 7 (the end.)", 1),
        ("Fin", 1),
    ]


def test_the_same_text_and_seed_give_the_same_questions(prose: Prose, tasks: dict[str, HarnessTask]) -> None:
    again = build_tasks(list(QUESTION_KINDS), Prose.read("classics-val"), seed=3, limit=60)
    assert {task.name: len(task.items) for task in again} == dict.fromkeys(QUESTION_KINDS, 60)
    assert again == list(tasks.values())
    for fewer, other in zip(
        build_tasks(list(QUESTION_KINDS), prose, 3, 9), build_tasks(list(QUESTION_KINDS), prose, 4, 9), strict=True
    ):
        assert fewer.items == tasks[fewer.name].items[:9]
        assert fewer.items != other.items


def test_cloze(tasks: dict[str, HarnessTask]) -> None:
    for item in tasks["cloze"].items:
        word = item["target"].removeprefix(" ")
        assert word.isalpha()
        assert len(word) >= 4
        assert word in item["context"]
        assert 59 <= len(item["context"].split()) <= 99
        assert item["context"] == item["context"].strip()
    assert 0.01 < tasks["cloze"].chance < 0.06


def test_choice(tasks: dict[str, HarnessTask], prose: Prose) -> None:
    whole = [" ".join(sentence.text for sentence in document) for document in prose.documents]
    labels = set()
    for item in tasks["choice"].items:
        assert len(set(item["choices"])) == 4
        context = " ".join(item["context"].split())
        follows = [any(f"{context} {choice}" in document for document in whole) for choice in item["choices"]]
        assert [index for index, true in enumerate(follows) if true] == [item["label"]]
        labels.add(item["label"])
    assert labels == {0, 1, 2, 3}


def test_order(tasks: dict[str, HarnessTask], prose: Prose) -> None:
    sentences = {sentence.text for document in prose.documents for sentence in document}
    for item in tasks["order"].items:
        assert len(set(item["choices"])) == 4
        true = item["choices"][item["label"]]
        assert true in sentences
        for other in set(item["choices"]) - {true}:
            moved = [(a, b) for a, b in zip(true.split(), other.split(), strict=True) if a != b]
            assert len(moved) == 2
            assert moved[0] == moved[1][::-1]


def test_files_for_the_harness(tmp_path: Path, tasks: dict[str, HarnessTask]) -> None:
    write_tasks(list(tasks.values()), tmp_path)
    for task in tasks.values():
        config = json.loads((tmp_path / f"skippipe_{task.name}.yaml").read_text())
        questions = Path(config["dataset_kwargs"]["data_files"]["test"])
        assert questions.is_absolute()
        assert [json.loads(line) for line in questions.read_text().splitlines()] == task.items


def test_texts_and_names_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short. By far.")
    with pytest.raises(UserError, match="no question of the kind 'choice'"):
        build_tasks(["choice"], Prose.read(str(tmp_path / "short.txt")))
    with pytest.raises(UserError, match="'riddle' is none of cloze, choice, order"):
        parse_names("cloze,riddle")


# ---- models from disk


def test_every_way_to_store_a_model_is_read(tmp_path: Path, folder: Path) -> None:
    stages = checkpoint_in(tmp_path / "run")
    assert locate_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "000007"
    expected = {name: each for stage in stages for name, each in stage.named_weights()}
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "000007", folder):
        found = load(place)
        assert found.layers == LAYERS
        assert found.prefix == TOKENIZER.end_id
        assert found.context == 64
        weights = {name: each for stage in found.stages for name, each in stage.named_weights()}
        assert weights.keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in weights.items())
    assert load(folder, cut="4").layers == (1, 1, 1, 2)
    assert load(folder, cut="3,2", context=9).context == 9


def test_a_run_without_checkpoints_has_its_model(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    assert locate_checkpoint(tmp_path) == tmp_path / "model"


def test_a_folder_of_others_is_in_one_piece(tmp_path: Path, folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    TOKENIZER.save(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert load(tmp_path / "sharded").layers == (5,)


def test_stages_are_seen_in_the_files() -> None:
    ours = {
        "model.embed_tokens.weight": "1",
        "model.norm.weight": "1",
        "model.layers.0.a": "1",
        "model.layers.1.a": "2",
    }
    assert exported_layers(ours) == (1, 1)
    assert exported_layers({**ours, "model.norm.weight": "2"}) == ()
    assert exported_layers({**ours, "model.layers.1.b": "1"}) == ()
    assert exported_layers({}) == ()


def test_what_cannot_be_loaded(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a checkpoint, nor a run's output folder"):
        load(tmp_path)
    for cut, complaint in (
        ("6", "at most 5 stages"),
        ("2,2", "has 5 layers"),
        ("0", "1 stage or more"),
        ("a", "whole"),
    ):
        with pytest.raises(UserError, match=complaint):
            load(folder, cut=cut)
    with pytest.raises(UserError, match="device 'tpu'"):
        load(folder, device="tpu")
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    (without / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load(without)
    shutil.copy(folder / "tokenizer.json", without)
    (without / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="transformers cannot load it"):
        load(without)
    checkpoint_in(tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "000007" / "stage-1.weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes instead of"):
        load(tmp_path / "run")


def test_without_the_harness(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "skippipe.lm_harness.adapter", raising=False)
    monkeypatch.setattr(sys, "argv", ["skippipe", "score", str(folder), "--text", "classics-val"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: scoring on tasks needs the package 'lm_eval': install it with pip install 'skippipe[harness]', or "
        "'.[harness]' in a checkout\n"
    )


# ---- likelihoods


def asked(count: int = 12) -> list[LikelihoodRequest]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(TOKENIZER.size, (4 + 3 * index,), generator=generator).tolist() for index in range(count)]
    return [LikelihoodRequest(row[: -1 - index % 3], row[-1 - index % 3 :]) for index, row in enumerate(rows)]


@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_likelihoods_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    export_to(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    subset = SubsetModel(load(tmp_path), StageSubset((0, 1, 2), 3), batch_tokens=64)
    for question, found in zip(asked(), subset.likelihoods(asked()), strict=True):
        row = [*question.context, *question.continuation[:-1]]
        with torch.no_grad():
            log, greedy = plainly(model(torch.tensor([row])).logits[0], question.continuation)
        assert found.log == pytest.approx(log, abs=1e-4)
        assert found.greedy == greedy


def test_a_part_is_what_its_stages_make(folder: Path) -> None:
    staged = load(folder)
    subset = SubsetModel(staged, StageSubset((0, 2), 3, 1.7), batch_tokens=64)
    whole = SubsetModel(staged, StageSubset((0, 1, 2), 3)).likelihoods(asked())
    first, _, last = staged.stages
    assert first.norm is not None
    assert first.head is not None
    for question, found, other in zip(asked(), subset.likelihoods(asked()), whole, strict=True):
        with torch.no_grad():
            given = first(first.embed(torch.tensor([[*question.context, *question.continuation[:-1]]])))
            driven = given + 1.7 * (last(given) - given)
            log, greedy = plainly(first.head(first.norm(driven))[0], question.continuation)
        assert found.log == pytest.approx(log, abs=1e-4)
        assert found.greedy == greedy
        assert abs(found.log - other.log) > 1e-3


def test_long_contexts_lose_their_beginning(folder: Path) -> None:
    (short,) = SubsetModel(load(folder, context=8), StageSubset((0, 1, 2), 3)).likelihoods(
        [LikelihoodRequest(range(20), [7, 8])]
    )
    (fitting,) = SubsetModel(load(folder), StageSubset((0, 1, 2), 3)).likelihoods(
        [LikelihoodRequest(range(13, 20), [7, 8])]
    )
    assert short.log == pytest.approx(fitting.log, abs=1e-5)
    with pytest.raises(UserError, match="looks at 8 tokens"):
        SubsetModel(load(folder, context=8), StageSubset((0, 1, 2), 3)).likelihoods([LikelihoodRequest([1], range(9))])


def test_values_that_are_not_finite(folder: Path) -> None:
    with pytest.raises(UserError, match="stages 0,1 ×1e\\+38 of the model compute values that are not finite"):
        SubsetModel(load(folder), StageSubset((0, 1), 3, 1e38)).likelihoods(asked())


def test_several_devices_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SubsetModel(load(folder), StageSubset((0, 2), 3, 1.7), batch_tokens=64).likelihoods(asked())
    first, *others = replicas_that_begin_together(folder, None, monkeypatch)
    calls: list[tuple[int, int]] = []
    several = SubsetModel(first, StageSubset((0, 2), 3, 1.7), batch_tokens=64, replicas=others)
    assert several.likelihoods(asked(), lambda *said: calls.append(said)) == alone
    assert calls == sorted(calls), "batches are taken in their order"
    assert calls[-1] == (12, 12)


def test_the_command_divides_requests_over_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    used: list[tuple[int, set[int]]] = []

    def model_of(staged: StagedModel, _subset: object, _progress: object, replicas: list[StagedModel]) -> None:
        models = [staged, *replicas]
        used.append((len({id(each) for each in models}), {each.context for each in models}))

    adapter = ModuleType("skippipe.lm_harness.adapter")  # in place of the harness
    adapter.SubsetLM = model_of  # type: ignore[attr-defined]
    adapter.score = lambda _model, tasks, _folder: {task.name: [] for task in tasks}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    words = [str(folder), "--text", "classics-val", "--limit", "2", "--context", "48", "--device", "cpu:3", "--json"]
    monkeypatch.setattr(sys, "argv", ["skippipe", "score", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, used) == (0, [(3, {48})])
    assert json.loads(capsys.readouterr().out)["layers"] == list(LAYERS)


def test_the_most_likely_token(folder: Path) -> None:
    subset = SubsetModel(load(folder), StageSubset((0, 1), 3), batch_tokens=32)
    rows = [list(question.context) for question in asked()]
    for row, token in zip(rows, subset.most_likely(rows), strict=True):
        assert subset.likelihoods([LikelihoodRequest(row, [token])])[0].greedy
