"""Scores through the lm-evaluation-harness, beside the harness's own. Not part of the suite, since it is large:

make test-harness
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skippipe.cli import main
from skippipe.cli.eval import ENVIRONMENT
from skippipe.data.documents import source
from skippipe.data.questions import QUESTION_KINDS, Prose
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel, load
from skippipe.inference.likelihood import SubsetModel
from skippipe.lm_harness.tasks import HarnessTask, build_tasks, metrics_of, write_tasks
from skippipe.stage_subset import StageSubset
from skippipe.study.question_scores import QuestionSet
from tests.helpers import model_folders

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from skippipe.lm_harness.adapter import Score, SubsetLM, score

torch.set_num_threads(1)
WHOLE, PART = StageSubset((0, 1, 2), 3), StageSubset((0, 2), 3, 1.7)
QUESTIONS = 24


@pytest.fixture(scope="module", autouse=True)
def no_network() -> Iterator[None]:
    """Whoever calls out is refused."""

    def refuse(*to: Any) -> None:
        raise AssertionError(f"went to the network: {to[1:]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer for English; passages are longer than its context."""
    place = tmp_path_factory.mktemp("harness") / "model"
    text = [piece.text for piece in source("classics-val").pieces()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folders, "TOKENIZER", train_bpe(text, 700))
        model_folders.export_to(place, max_position_embeddings=160)
    return place


@pytest.fixture(scope="module")
def staged(folder: Path) -> StagedModel:
    return load(folder)


@pytest.fixture(scope="module")
def tasks() -> list[HarnessTask]:
    return build_tasks(list(QUESTION_KINDS), Prose.read("classics-val"), limit=QUESTIONS)


@pytest.fixture(scope="module")
def questions(tasks: list[HarnessTask], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("questions")
    write_tasks(tasks, place)
    return place


def evaluated(model: Any, questions: Path, **others: Any) -> Any:
    """By the harness itself, from the task files alone."""
    known = TaskManager(include_path=str(questions), include_defaults=False)
    return simple_evaluate(model=model, tasks=["skippipe"], task_manager=known, bootstrap_iters=0, **others)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def test_the_harness_gives_the_same_scores_to_its_own_model(staged: StagedModel, folder: Path, questions: Path) -> None:
    ours = evaluated(SubsetLM(staged, WHOLE), questions)
    theirs = evaluated(
        "hf", questions, model_args={"pretrained": str(folder), "dtype": "float32"}, device="cpu", batch_size=8
    )
    assert set(ours["results"]) == {f"skippipe_{name}" for name in QUESTION_KINDS}
    for kind in QUESTION_KINDS:
        name = f"skippipe_{kind}"
        assert len(theirs["samples"][name]) == QUESTIONS
        for one, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert one["doc"] == other["doc"]
            for (log, greedy), (expected, likewise) in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
                assert log == pytest.approx(expected, abs=1e-4)
                assert greedy == likewise
        for metric in metrics_of(kind):
            value, expected = (each["results"][name][f"{metric},none"] for each in (ours, theirs))
            assert value == pytest.approx(expected, rel=1e-4 if metric == "perplexity" else 0)


def test_a_study_gives_the_scores_of_the_harness(staged: StagedModel, folder: Path, questions: Path) -> None:
    expected = evaluated(SubsetLM(staged, WHOLE), questions)["results"]
    asked = QuestionSet(Prose.read("classics-val"), TextTokenizer.load(folder), QUESTIONS, staged.context, "cpu")
    scores = asked.scores(staged.stages[0], SubsetModel(staged, WHOLE).hidden)
    assert scores.keys() == QUESTION_KINDS.keys()
    for kind, shares in scores.items():
        for metric, share in shares.items():
            assert share == pytest.approx(expected[f"skippipe_{kind}"][f"{metric},none"], abs=1e-5), f"{kind}, {metric}"


def pairs_of(tasks: list[HarnessTask]) -> list[tuple[str, str]]:
    cloze = next(task for task in tasks if task.name == "cloze")
    return [*((item["context"], item["target"]) for item in cloze.items), ("", "Emma laughed."), ("Mr. ", "Weston")]


def as_tokens(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """What the model sees, and what it is to say; 160 tokens are seen at most."""
    if context:
        ids = tokenizer.encode(context + continuation)
        count = len(ids) - len(tokenizer.encode(context.rstrip()))
    else:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(continuation)]
        count = len(ids) - 1
    return ids[-161:-1], ids[-count:]


def test_likelihoods_are_those_of_transformers(staged: StagedModel, folder: Path, tasks: list[HarnessTask]) -> None:
    """With plain code, a text at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = pairs_of(tasks)
    seen = [as_tokens(tokenizer, *pair) for pair in pairs]
    assert max(len(row) for row, _ in seen) == 160, "some are too long for the model"
    found = SubsetLM(staged, WHOLE).loglikelihood(requests("loglikelihood", *pairs))
    for (row, output_tokens), (log, greedy) in zip(seen, found, strict=True):
        with torch.no_grad():
            expected = model_folders.plainly(model(torch.tensor([row])).logits[0], output_tokens)
        assert log == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_a_part_is_what_its_stages_make(staged: StagedModel, tasks: list[HarnessTask]) -> None:
    first, _, last = staged.stages
    assert first.norm is not None
    assert first.head is not None
    pairs = pairs_of(tasks)
    found = SubsetLM(staged, PART).loglikelihood(requests("loglikelihood", *pairs))
    whole = SubsetLM(staged, WHOLE).loglikelihood(requests("loglikelihood", *pairs))
    for pair, (log, greedy), (other, _) in zip(pairs, found, whole, strict=True):
        row, output_tokens = as_tokens(staged.tokenizer, *pair)
        with torch.no_grad():
            given = first(first.embed(torch.tensor([row])))
            driven = given + PART.residual_scale * (last(given) - given)
            expected = model_folders.plainly(first.head(first.norm(driven))[0], output_tokens)
        assert log == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]
        assert abs(log - other) > 1e-3


def test_whole_texts_and_generated_ones_are_those_of_the_harness(staged: StagedModel, folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    ours = SubsetLM(staged, WHOLE)
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    long = " ".join(sentence.text for sentence in Prose.read("classics-val").documents[0][:40])
    texts = requests("loglikelihood_rolling", (long,), ("Emma laughed.",), (long[:900],))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    (free,) = theirs.generate_until(requests("generate_until", (long, {"until": [], "max_gen_toks": 24})))
    assert len(free) > 12
    asked = requests(
        "generate_until",
        (long, {"until": [], "max_gen_toks": 24}),
        (long, {"until": [free[6:8], free[5:8]], "max_gen_toks": 24}),
        ("Mr. Knightley", {"until": "e", "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
        ("Emma", {"max_gen_toks": 3}),
    )
    written = ours.generate_until(asked)
    assert written == theirs.generate_until(asked)
    assert written[0] == free
    assert free[5:8] not in written[1]
    with pytest.raises(UserError, match="greedily"):
        ours.generate_until(requests("generate_until", ("Emma", {"do_sample": True})))
    with pytest.raises(UserError, match="160 tokens to generate leave none of 160"):
        ours.generate_until(requests("generate_until", ("Emma", {"max_gen_toks": 160})))


def test_a_text_ends_where_the_model_ends_it(staged: StagedModel) -> None:
    asked = requests("generate_until", ("Emma", {"until": [], "max_gen_toks": 8}))
    row = staged.tokenizer.encode("Emma")
    for _ in range(5):
        row += SubsetLM(staged, PART).subset.most_likely([row])
    *output_tokens, end = row[len(row) - 5 :]
    assert end not in output_tokens

    class Ending(SubsetLM):
        eot_token_id = end

    assert Ending(staged, PART).generate_until(asked) == [staged.tokenizer.decode(output_tokens)]


def test_our_way_to_ask_is_the_harness_own(staged: StagedModel, tasks: list[HarnessTask], questions: Path) -> None:
    expected = evaluated(SubsetLM(staged, PART), questions)["results"]
    found = score(SubsetLM(staged, PART), tasks, questions)
    assert {name: [each.metric for each in scores] for name, scores in found.items()} == {
        "cloze": ["acc", "perplexity"],
        "choice": ["acc", "acc_norm", "acc_mutual_info"],
        "order": ["acc"],
    }
    for name, scores in found.items():
        for metric, value, error in scores:
            assert value == expected[f"skippipe_{name}"][f"{metric},none"]
            assert error is not None
            assert error >= 0


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    words = ["score", folder, "--text", "classics-val", "--tasks", "cloze,order", "--limit", "6", "-o"]
    words += [
        tmp_path / "scores.json",
        "--keep",
        "1",
        "--stages",
        "0,2",
        "--residual-scale",
        "scaled",
        "--write",
        tmp_path / "t",
    ]
    monkeypatch.setattr(sys, "argv", ["skippipe", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    printed = capfd.readouterr()
    assert "all 3" in printed.out
    assert "0,2 ×2" in printed.out
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert [(subset["stages"], subset["residual_scale"]) for subset in scores["parts"]] == [
        ([0, 1, 2], 1.0),
        ([0, 2], 2.0),
    ]
    asked = build_tasks(["cloze", "order"], Prose.read("classics-val"), limit=6)
    again = score(SubsetLM(load(folder), StageSubset((0, 2), 3, 2.0)), asked, tmp_path / "t")
    for name, found in scores["parts"][1]["tasks"].items():
        assert found["questions"] == 6
        assert [Score(**each) for each in found["scores"]] == again[name]


def test_several_devices_change_no_score(
    folder: Path, staged: StagedModel, tasks: list[HarnessTask], questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = score(SubsetLM(staged, PART), tasks, questions)
    first, *others = model_folders.replicas_that_begin_together(folder, None, monkeypatch)
    assert score(SubsetLM(first, PART, replicas=others), tasks, questions) == alone
