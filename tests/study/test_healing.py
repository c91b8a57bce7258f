"""Healing of a finished model: the whole stays, its parts get better, and what is written is what was measured."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.bridges_file import BRIDGES_FILE, bridges_info, write_bridges
from skippipe.errors import UserError
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel, load
from skippipe.inference.likelihood import SubsetModel
from skippipe.model.model_files import INDEX
from skippipe.model.stand_ins import StageAdapters, bridges_of
from skippipe.stage_subset import StageSubset
from skippipe.study.healing import Healing, HealSettings, begin_healing, heal, redrawn, usual_stages
from tests.helpers.model_folders import LAYERS, TOKENIZER, by_itself, checkpoint_in, export_to, subset
from tests.helpers.processes import Command

torch.set_num_threads(1)
SOME_WORDS = ("some", "words", "of", "what", "said", "Emma", "and", "more")
QUICK = HealSettings(rank=8, bridges=4, sequence=16, tokens=8_000, rate=1e-2)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippipe.study.healing.STEP_TOKENS", 256)
    monkeypatch.setattr("skippipe.study.healing.HELD_OUT_TOKENS", 512)


@pytest.fixture
def text(tmp_path: Path) -> str:
    random = Random(0)
    (tmp_path / "text.txt").write_text(" ".join(random.choice(SOME_WORDS) for _ in range(1500)))
    return str(tmp_path / "text.txt")


def test_parts_get_better_and_the_whole_model_stays(tmp_path: Path, text: str) -> None:
    folder, output = tmp_path / "model", tmp_path / "healed"
    export_to(folder)
    said: list[str] = []
    found = heal(folder, [text], output, None, QUICK, (), lambda what, done, of: said.append(f"{what} {done}/{of}"))
    whole, one = found["perplexity"]
    assert (whole["missing"], one["missing"]) == (0, 1)
    assert whole["before"] == whole["after"]
    assert one["before"] != one["after"]
    assert found["steps"] == found["steps_wanted"] == 8_000 // (found["tokens"] // found["steps"])
    assert any(each.startswith("healing, loss") for each in said)
    theirs = AutoModelForCausalLM.from_pretrained(output)  # an ordinary model to others
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        assert torch.equal(theirs(tokens).logits, expected)
    before, after = load(folder), load(output)
    assert after.layers == LAYERS
    rows = torch.tensor(TOKENIZER.encode(Path(text).read_text())[:256]).view(16, 16)

    def guesses(staged: StagedModel, *stages: int) -> torch.Tensor:
        return logits(staged.stages[0], SubsetModel(staged, StageSubset(stages, 3)).hidden(rows)).argmax(-1)

    whole_guesses = guesses(before, 0, 1, 2)
    assert torch.equal(guesses(after, 0, 1, 2), whole_guesses)
    for part in ((0, 1), (0, 2)):
        agreed = [float((guesses(staged, *part) == whole_guesses).float().mean()) for staged in (before, after)]
        assert agreed[1] > agreed[0] + 0.1, "the whole model is the teacher"


def test_a_text_that_comes_again_is_partly_drawn_from_the_whole_model(tmp_path: Path, text: str) -> None:
    export_to(tmp_path / "model")
    healing = begin_healing(tmp_path / "model", [text], None, QUICK)
    engine, rows = healing.engine, healing.train.rows(list(range(32)))
    inputs, labels = rows[:, :-1], rows[:, 1:]
    stage = engine.stages[0]
    assert stage.norm is not None and stage.head is not None
    for weight in stage.norm.parameters():
        weight.data *= 1e6  # sure of what comes next
    likeliest = stage.head(stage.norm(engine.hidden_of(inputs, (0, 1, 2), 1.0))).argmax(-1)
    new_inputs, new_labels = redrawn(engine, inputs, labels, 0.5, (0, 1))
    assert torch.equal(new_inputs[:, 1:], new_labels[:, :-1]) and torch.equal(new_inputs[:, 0], inputs[:, 0])
    drawn = new_labels != labels
    assert torch.equal(new_labels[drawn], likeliest[drawn])
    assert 0.4 < drawn.sum() / (likeliest != labels).sum() < 0.6
    assert torch.equal(redrawn(engine, inputs, labels, 0.5, (0, 1))[1], new_labels)
    assert not torch.equal(redrawn(engine, inputs, labels, 0.5, (0, 2))[1], new_labels)
    order = healing._rows()
    again = [next(order)[1] for _ in range(2 * len(healing.train.numbers) // len(healing.lengths))]
    assert again == sorted(again) and 0 < sum(again) < len(again), "not the first time"
    engine._low_precision = True  # as on a GPU: matrices in bf16, norms in fp32
    for each in engine.stages:
        each.frozen_to(torch.bfloat16)
    in_bf16 = redrawn(engine, inputs, labels, 0.5, (0, 1))[1]
    assert (in_bf16 == new_labels).float().mean() > 0.9


def folder_with_bridges(folder: Path, hop_rank: int = 0) -> list[torch.Tensor]:
    """As a run with recipe.bridges leaves it behind, and with adapters if some of their rank is for hops; the weights
    of these."""
    spec, stages = export_to(folder)
    bridges = bridges_of(len(LAYERS), spec.config.hidden_size, rank=4, seed=3)
    adapters = [StageAdapters(stage, 6, 3) for stage in stages] if hop_rank else []
    weights: list[torch.Tensor] = [each for held in (*bridges, *adapters) for each in held.parameters()]
    for each in weights:
        torch.nn.init.normal_(each, std=0.1)
    write_bridges(folder, LAYERS, bridges, adapters, hop_rank=hop_rank)
    return weights


def learned_by(healing: Healing) -> list[torch.Tensor]:
    return [each for held in (*healing.engine.bridges, *healing.engine.adapters) for each in held.parameters()]


def test_bridges_that_were_trained_with_the_model_are_trained_further(tmp_path: Path, text: str) -> None:
    folder, output = tmp_path / "model", tmp_path / "healed"
    trained = folder_with_bridges(folder)
    for asked, repeats, fitted in ((None, 0, ""), (4, 0, ""), (4, 1, " (fitted anew, beside repeats)")):
        healing = begin_healing(folder, [text], None, replace(QUICK, bridges=asked, repeats=repeats))
        assert healing.begins_with == f"begins with the model's bridges of rank 4{fitted} and new adapters of rank 8"
        assert all(map(torch.equal, learned_by(healing), trained))
        for part in ((0, 1), (0, 2)):
            expected = by_itself(load(folder), subset(*part, total=3), healing.held_out)
            assert healing._loss(part) == pytest.approx(expected, rel=1e-4)
    said: list[str] = []
    settings = replace(QUICK, bridges=None, repeats=0, tokens=1, rate=1e-5)
    found = heal(folder, [text], output, None, settings, tell=said.append)
    assert (found["bridges"], found["new_bridges"], found["new_adapters"]) == (4, False, True)
    assert said == ["begins with the model's bridges of rank 4 and new adapters of rank 8"]
    for before, after in zip(trained, learned_by(begin_healing(output, [text], None, QUICK)), strict=False):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-4)  # not fitted anew
        assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(QUICK, bridges=2), "new bridges of rank 2 (the model's are of rank 4) and new adapters of rank 8"),
        (replace(QUICK, bridges=0), "no bridges (the model's are of rank 4) and new adapters of rank 8"),
        (
            replace(QUICK, cut="1,2,2"),
            "new bridges of rank 4 (the model's are for stages of 2,1,2 layers) and new adapters of rank 8",
        ),
    ],
)
def test_bridges_of_another_kind_than_asked_for_are_new(
    tmp_path: Path, text: str, settings: HealSettings, words: str
) -> None:
    folder_with_bridges(tmp_path / "model")
    settings = replace(settings, repeats=0, tokens=1, rate=1e-6)
    healing = begin_healing(tmp_path / "model", [text], None, settings)
    assert healing.begins_with == f"begins with {words}"
    assert not any(each.up.any() for each in healing.engine.bridges), "nothing is added before they are fitted"
    healing.run((), lambda what, done, of: None)
    assert all(each.up.abs().max() > 1e-3 for each in healing.engine.bridges)


def test_without_training_what_is_new_is_fitted(tmp_path: Path, text: str, skippipe: Command) -> None:
    export_to(tmp_path / "model")
    settings, said = HealSettings("5", rank=96, sequence=16, tokens=0), list[str]()
    found = heal(tmp_path / "model", [text], tmp_path / "fitted", text, settings, tell=said.append)
    assert said == ["begins with new bridges of rank 8 and new adapters of rank 96; fits them without training"]
    assert (found["steps"], found["steps_wanted"], found["tokens"]) == (0, 0, 0)
    whole, one, _ = found["perplexity"]
    assert whole["before"] == whole["after"]
    damage = [abs(one[when] - whole["before"]) for when in ("before", "after")]
    assert damage[1] < 0.1 * damage[0], "of full rank, the repeat is the missing stage"
    with pytest.raises(UserError, match="--tokens 0: there are no new bridges or repeats to fit"):
        begin_healing(tmp_path / "fitted", [text], text, settings)
    words = f"--data {text} --held-out {text} --sequence 16 --bridges 4 --tokens 0".split()
    ran = skippipe("heal", str(tmp_path / "fitted"), *words, "-o", str(tmp_path / "again"))
    assert ran.code == 0 and ran.out.startswith("fitted without training, "), ran.err


@pytest.mark.parametrize(
    ("layers", "stages"),
    [(1, 1), (5, 5), (11, 6), (12, 6), (16, 8), (22, 6), (24, 6), (28, 7), (32, 8), (40, 5), (80, 5)],
)
def test_models_in_one_piece_get_stages_of_as_many_layers(layers: int, stages: int) -> None:
    assert usual_stages(layers) == stages


def test_a_healed_model_is_healed_further(tmp_path: Path, text: str) -> None:
    export_to(tmp_path / "model")
    short = replace(QUICK, tokens=1000)
    first = heal(tmp_path / "model", [text], tmp_path / "once", text, short)
    second = heal(tmp_path / "once", [text], tmp_path / "twice", text, replace(short, rank=None, bridges=None))
    assert (second["bridges"], second["adapters"]) == (QUICK.bridges, QUICK.rank)
    assert first["repeats"] == second["repeats"] == 1
    assert not second["new_bridges"] and not second["new_adapters"]
    for before, after in zip(first["perplexity"], second["perplexity"], strict=True):
        assert after["before"] == pytest.approx(before["after"], rel=1e-4)
    missing = second["perplexity"][1]
    assert missing["after"] != missing["before"]


def test_adapters_by_hop_stay_so(tmp_path: Path, text: str) -> None:
    trained = folder_with_bridges(tmp_path / "model", hop_rank=4)
    healing = begin_healing(tmp_path / "model", [text], None, HealSettings(sequence=16))
    assert healing.begins_with == "begins with the model's bridges of rank 4 and the model's adapters of rank 6"
    assert all(map(torch.equal, learned_by(healing), trained))
    assert healing._loss((0, 2)) == pytest.approx(
        by_itself(load(tmp_path / "model"), subset(0, 2, total=3), healing.held_out), rel=1e-4
    )
    healing.write(tmp_path / "healed")
    assert bridges_info(tmp_path / "healed", 5) == bridges_info(tmp_path / "model", 5)
    anew = begin_healing(tmp_path / "model", [text], None, replace(QUICK, bridges=4))
    assert anew.engine.recipe.hop_rank == 0


def test_what_is_written_is_what_was_measured(tmp_path: Path, text: str, skippipe: Command) -> None:
    """A model in one file gets stages by the file of its bridges, and an index, by which others leave that file out."""
    folder, output = tmp_path / "model", tmp_path / "healed"
    export_to(tmp_path / "parts")
    AutoModelForCausalLM.from_pretrained(tmp_path / "parts").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "parts" / name, folder / name)
    assert not (folder / INDEX).exists()
    words = f"{folder} --data {text} --held-out {text} -o {output} --cut 5 --tokens 2000 --sequence 16 --json"
    ran = skippipe("heal", *words.split())
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["layers"] == [1] * 5
    assert [each["missing"] for each in found["perplexity"]] == [0, 1, 2]
    assert (output / INDEX).is_file()
    words = f"{output} --text {text} --context 16 --tokens 512 --keep 3/5 --draws 8 --json"
    measured = skippipe("eval", *words.split())
    assert measured.code == 0, measured.err
    (sizes,) = measured.json["sizes"].values()
    assert [each["kept"] for each in sizes] == [5, 3]
    for mine, theirs in zip((sizes[0], sizes[1]), (found["perplexity"][0], found["perplexity"][2]), strict=True):
        assert (mine["parts"], theirs["parts"]) in ((1, 1), (6, 6))
        assert mine["mean"] == pytest.approx(theirs["after"], rel=1e-4)


def test_an_interruption_keeps_what_is_learned(tmp_path: Path, text: str) -> None:
    export_to(tmp_path / "model")
    stopped: list[bool] = []

    def stop(what: str, done: int, of: int) -> None:
        if what.startswith("healing") and done < of:
            stopped.append(True)

    found = heal(tmp_path / "model", [text], tmp_path / "healed", None, QUICK, stopped, stop)
    assert 0 < found["steps"] < found["steps_wanted"]
    assert found["perplexity"][1]["after"] != found["perplexity"][1]["before"]
    assert (tmp_path / "healed" / BRIDGES_FILE).is_file()
    with pytest.raises(KeyboardInterrupt):
        heal(tmp_path / "model", [text], tmp_path / "other", None, QUICK, [True])
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_healed_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    export_to(tmp_path / "model")
    export_to(tmp_path / "experts", "qwen3_moe")
    checkpoint_in(tmp_path / "run")
    short = tmp_path / "short.txt"
    short.write_text("some words")
    for folder, data, settings, reason in (
        ("experts", text, QUICK, "a mixture of experts cannot be healed yet"),
        ("run", text, QUICK, "is a checkpoint; 'skippipe export"),
        ("model", str(short), QUICK, "tokens are too little to learn from"),
        ("model", text, HealSettings(sequence=1000), "--sequence 1000: the model attends to 64 tokens"),
        ("model", text, HealSettings(rank=7, repeats=1), "--rank 7: 2 turns share it"),
        ("model", text, HealSettings(cut="1"), "of one stage none can be missing"),
        ("model", text, HealSettings(rank=0, bridges=0), "leave nothing that could learn"),
        ("model", text, HealSettings(device="cuda:99"), "device .cuda:99.: "),
    ):
        with pytest.raises(UserError, match=reason) as error:
            begin_healing(tmp_path / folder, [data], None, settings)
        assert "\n" not in str(error.value)
