"""The command that writes: skippipe generate."""

from __future__ import annotations

import io
import lzma
import re
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from skippipe.checkpoint.locate import locate_checkpoint
from skippipe.cli import main
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.engine import GenerationEngine, TokenByToken
from skippipe.inference.request import GenerationRequest, SamplingParams, TokenOutput
from skippipe.stage_subset import StageSubset
from tests.helpers.model_folders import export_to
from tests.helpers.processes import Command

torch.set_num_threads(1)
WHOLE = StageSubset((0, 1, 2), 3)
WORD = re.compile(r"[a-z]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generating") / "model"
    export_to(place, max_position_embeddings=128)
    return place


@pytest.fixture
def generate(folder: Path, skippipe: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str, int]]:
    monkeypatch.setenv("TQDM_DISABLE", "1")  # in time for a process of its own, too late for this one
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)

    def run(*words: str) -> tuple[str, str, int]:
        """stdout, stderr and the exit code."""
        result = skippipe("generate", folder, *words)
        return result.out, result.err, result.code

    return run


def test_the_command(generate: Callable[..., tuple[str, str, int]], folder: Path) -> None:
    model = load(folder)
    prompt = tuple(model.tokenizer("some words")["input_ids"])
    decoder = TokenByToken(model, WHOLE, 1000)
    (generation,) = GenerationEngine(model, decoder).run([GenerationRequest(prompt, 20, SamplingParams(0.8, seed=3))])
    options = ("--max-tokens", "20", "--seed", "3")
    assert generate("some words", *options) == (generation.text + "\n", "", 0)
    text, stats, _ = generate("some words", *options, "--draft", "0,1", "--draft-tokens", "2", "--stats")
    assert text == generation.text + "\n"
    assert f"stages all 3: 2 tokens read, {len(generation.output_tokens)} written; the first after" in stats
    assert "drafts by stages 0,1: " in stats
    assert generate("some words", *options, "--draft", "auto")[0] == text
    assert generate("some words", *options, "--stop", generation.text[3:5])[0] == generation.text[:3] + "\n"
    assert generate("some words", *options, "--stages", "0,2", "--residual-scale", "scaled")[0] != text
    drawn = generate("some words", *options, "--keep", "2/3")[1]
    named = drawn.removeprefix("stages ").removesuffix(" of 3\n").replace(", ", ",")
    assert named in ("0,1", "0,2"), "stages that were drawn are named on stderr"
    alike = generate("some words", *options, "--stages", named)
    assert alike[1] == ""
    assert alike[0] == generate("some words", *options, "--keep", "2/3")[0]


def test_a_context_that_the_model_is_not_made_for(
    generate: Callable[..., tuple[str, str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    options = ("some words", "--max-tokens", "5", "--context")
    fitting = generate(*options, "128")
    assert caplog.text == ""
    assert generate(*options, "129") == fitting
    assert "--context 129: by its config the model is made for 128 tokens" in caplog.text


def test_several_prompts_and_stdin(
    generate: Callable[..., tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-tokens", "9", "--temperature", "0")
    one, other, new = (generate(*words, *options)[0] for words in (("some words",), ("Emma",), ()))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Emma\n"))
    text, _, _ = generate("some words", "-", "", *options, "--batch-size", "2")
    assert text == f"==> some words <==\n{one}\n==> Emma <==\n{other}\n==>  <==\n{new}"


def test_the_built_in_model_writes_english_also_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    with lzma.open(str(files("skippipe.data").joinpath("classics-train.txt.xz")), "rt", encoding="utf-8") as text:
        known = set(WORD.findall(text.read().lower()))
    for part in ((), ("--keep", "1/2")):
        asked = ["skippipe", "generate", "austen", "It is a truth", "--max-tokens", "40", "--temperature", "0.5"]
        monkeypatch.setattr(sys, "argv", [*asked, *part])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        words = WORD.findall(capsys.readouterr().out.lower())
        assert len(words) > 12
        assert sum(word in known for word in words) > 0.9 * len(words), words
    (tmp_path / "austen").mkdir()
    with pytest.raises(UserError, match="austen: neither a checkpoint"):  # a folder of yours goes first
        locate_checkpoint(Path("austen"))


def test_ctrl_c_keeps_what_was_said(
    generate: Callable[..., tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("some words", "Emma", "--max-tokens", "9", "--temperature", "0", "--stats")
    whole = generate(*options)[0]
    step, steps = GenerationEngine.step, iter([True, True, True, False])

    def impatient(self: GenerationEngine) -> list[TokenOutput]:
        if not next(steps):
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(GenerationEngine, "step", impatient)
    text, stats, code = generate(*options)
    first, second = text.split("\n\n==> Emma <==\n")
    assert whole.startswith(first)
    assert second.strip()
    assert second.strip("\n") in whole
    assert (stats.count("tokens read"), code) == (1, 130)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--stages", "0", "--keep", "1/2"), "give one of the two"),
        (("--draft-tokens", "2"), "give the stages that draft with --draft"),
        (("--draft", "0,7"), "some of the stages 0,1,2"),
        (("--top-p", "0"), "give above 0 to 1"),
        (("some words " * 100,), "the model looks at 128"),
        (("\udcff",), "not text in UTF-8"),
        (("--device", "tpu"), "device 'tpu'"),
    ],
)
def test_what_is_not_written(
    generate: Callable[..., tuple[str, str, int]], words: tuple[str, ...], complaint: str
) -> None:
    text, error, code = generate(*words)
    assert (text, code) == ("", 2)
    assert complaint in error
    assert error.count("\n") == 1
