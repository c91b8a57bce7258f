"""Questions at the end of a study's run: those of `skippipe score`, answered as a model from disk answers them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skippipe.data.questions import QUESTION_KINDS, Prose, questions_of
from skippipe.data.token_file import TokenFile
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.likelihood import SubsetModel
from skippipe.stage_subset import StageSubset
from skippipe.study.config import load_study, read_results
from skippipe.study.evaluate import SubsetLoss
from skippipe.study.question_scores import best_driven, encoded, metrics_of, pairs_of, part_scores
from skippipe.study.runner import Runner, StudyDevice
from tests.helpers.models import tiny

QUESTIONS = 5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents in sentences."""
    sentences = [each.text for document in Prose.read("classics-val").documents for each in document][:900]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n<|endoftext|>\n".join((" ".join(sentences[:500]), " ".join(sentences[500:]))))
    return file


@pytest.fixture(scope="module")
def study_file(text: Path) -> Path:
    config = tiny("llama", num_hidden_layers=3, hidden_size=16, max_position_embeddings=256)
    (text.parent / "config.json").write_text(json.dumps(config.to_dict()))
    file = text.parent / "study.toml"
    file.write_text(
        f"""
        name = "asking"
        model = "{text.parent}/config.json"
        train = ["{text}"]
        tests = ["book={text}"]
        vocabulary = 400
        tokens = 3_072
        batch = {{sequence = 256, samples = 1, microbatches = 4}}
        measuring = {{every = 3, tokens = 512, final_tokens = 512, part_tokens = 512, keep = ["2/3"], draws = 2}}
        [[variant]]
        name = "bridged"
        stages = 3
        recipe = {{skip = "0 & 1/3", bridges = 2, adapters = 2}}
        """
    )
    return file


def test_decoded_tokens_make_the_questions_of_their_text(text: Path, study_file: Path, tmp_path: Path) -> None:
    runner = Runner(load_study(study_file), tmp_path / "results.jsonl", StudyDevice(), lambda run, share, how: None)
    tokens = TokenFile.open(runner.train.folder)
    decoded, read = Prose.decoded(tokens), Prose.read(str(text))
    assert decoded.documents == read.documents
    assert len(decoded.documents) == 2


def test_answers_are_those_of_the_model_on_disk(study_file: Path, tmp_path: Path) -> None:
    study = load_study(study_file)
    study = replace(study, measuring=replace(study.measuring, questions=QUESTIONS))
    runner = Runner(
        study, tmp_path / "results.jsonl", StudyDevice(), lambda run, share, how: None, models=tmp_path / "models"
    )
    runner.run()
    (result,) = read_results(tmp_path / "results.jsonl")
    found = result["questions"]
    (engine,) = runner._engines.values()
    for each in engine._learned:
        each.values.copy_(each.values.bfloat16())  # as the model on disk
    losses = [SubsetLoss(**{**part, "stages": tuple(part["stages"])}) for part in result["parts"]]
    rounded = part_scores(engine, runner._questions, losses)
    assert {kind: each["count"] for kind, each in found["asked"]["book"].items()} == dict.fromkeys(
        QUESTION_KINDS, QUESTIONS
    )
    assert [part["stages"] for part in found["parts"]] == [[0, 1, 2], [0, 1], [0, 2]]
    staged = load(tmp_path / "models" / "asking-bridged-0")
    tokenizer, prose = runner.train.tokenizer(), Prose.decoded(runner.train)
    assert [part["stages"] for part in rounded] == [part["stages"] for part in found["parts"]]
    for part in rounded:
        scale = StageSubset(tuple(part["stages"]), 3, 2.0 ** part["drive"] if len(part["stages"]) < 3 else 1.0)
        model = SubsetModel(staged, scale)
        for kind in QUESTION_KINDS:
            right: dict[str, list[bool]] = {}
            for question in questions_of(kind, prose, 0, QUESTIONS):
                conditional, alone = pairs_of(question)
                likelihoods = model.likelihoods(encoded(tokenizer, [*conditional, *alone]))
                answers = likelihoods[: len(conditional)], likelihoods[len(conditional) :]
                for metric, value in metrics_of(question, *answers).items():
                    right.setdefault(metric, []).append(value)
            shares = {metric: sum(values) / QUESTIONS for metric, values in right.items()}
            assert part["scores"][kind] == pytest.approx(shares, abs=1e-4)


def test_parts_are_asked_with_the_drive_that_is_best_for_their_size() -> None:
    measured = [
        SubsetLoss("book", (0, 1, 2), 0.0, 3.0),
        SubsetLoss("other", (0, 1, 2), 0.0, 9.0),
        SubsetLoss("book", (0, 1), 0.0, 4.0),
        SubsetLoss("other", (0, 1), 0.0, 1.0),
        SubsetLoss("book", (0, 1), 1.0, 4.1),
        SubsetLoss("book", (0, 2), 0.0, 5.0),
        SubsetLoss("book", (0, 2), 1.0, 4.5),
    ]
    assert best_driven(measured) == [((0, 1, 2), 0.0), ((0, 1), 1.0), ((0, 2), 1.0)]


def test_a_text_without_sentences_is_refused_before_anything_is_trained(study_file: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("stage lane path " * 200)
    study = load_study(study_file)
    other = replace(study, tests=[f"words={tmp_path}/words.txt"], measuring=replace(study.measuring, questions=5))
    with pytest.raises(UserError, match="no question can be made of 'words'"):
        Runner(other, tmp_path / "results.jsonl", StudyDevice(), lambda run, share, how: None)
