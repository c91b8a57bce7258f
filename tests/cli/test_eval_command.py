"""The command that measures perplexity: skippipe eval."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skippipe.cli import main
from skippipe.data.prepare import prepare
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.eval.perplexity import BatchLosses, Windows
from skippipe.inference.eval.tables import number
from tests.helpers.exact_training import FULL, plan_of
from tests.helpers.model_folders import TOKENIZER, by_itself, checkpoint_in, export_to, subset

torch.set_num_threads(1)
TEXT = 'Some words, and some more words: "Of what?" said Emma. ' * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("eval") / "model"
    export_to(place)
    return place


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    (tmp_path / "words.txt").write_text(TEXT)
    return tmp_path / "words.txt"


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["skippipe", "eval", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare(text, TOKENIZER, tmp_path / "tokens")
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png", "html")}
    files = [word for kind, path in out.items() for word in ("-o" if kind == "json" else f"--{kind}", path)]
    options = ["--stages", "0,2", "--ablation", "--tokens", 300, "--context", 32, *files]
    assert run(monkeypatch, folder, "--text", text, "--text", tmp_path / "tokens", *options) == 0
    printed = capsys.readouterr().out
    lines = [line.replace(" ", "") for line in printed.splitlines()]
    assert lines[0] == f"words:288tokens,spreadoverits{len(prepared):,},inwindowsof32"
    found = json.loads(out["json"].read_text())
    assert found["complete"]
    assert found["layers"] == [2, 1, 2]
    staged = load(folder)
    windows = Windows.of("words", prepared.ids, 32, 300)
    assert len(found["parts"]) == 4
    whole = by_itself(staged, subset(0, 1, 2, total=3), windows)
    for each in found["parts"]:
        loss = by_itself(staged, subset(*each["stages"], total=3), windows)
        assert each["texts"]["words"] == each["texts"]["tokens"], "a text is what was prepared of it"
        assert each["texts"]["words"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert each["texts"]["words"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert each["texts"]["words"]["increase"] == pytest.approx(math.exp(loss - whole) - 1, abs=1e-4)
    assert [len(found["ablation"][name]) for name in ("alone", "order", "best")] == [2, 2, 3]
    shown = {each["stages"].__repr__(): each["texts"]["words"] for each in found["parts"]}["[0, 2]"]
    row = f"{shown['loss']:.4f}│{number(shown['perplexity'])}│{100 * shown['increase']:+,.1f}%".replace("-", "−")
    assert any(line.startswith("│0,2│67%│") and line.count(row) == 2 for line in lines)
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    page = out["html"].read_text()
    assert "Dropping one after another" in page
    assert "http" not in page.split("<body>")[1]


def test_the_codec_on_hops_is_named_wherever_numbers_are(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    titles: list[str] = []
    monkeypatch.setattr("skippipe.inference.eval.plots.write_png", lambda _found, title, _path: titles.append(title))
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png", "html")}
    files = [word for kind, path in out.items() for word in ("-o" if kind == "json" else f"--{kind}", path)]
    common = [folder, "--text", text, "--tokens", 64, "--context", 32, "--overwrite", *files]
    for wire in ("int4", None):
        assert run(monkeypatch, *common, *(["--wire", wire] if wire else [])) == 0
        printed = capsys.readouterr().out
        assert ("Subsets, with codec int4 between stages" in printed) == bool(wire), "the table itself"
        assert json.loads(out["json"].read_text())["wire"] == wire
        for shown in (printed, titles.pop(), out["html"].read_text().split("<body>")[1].split("<script")[0]):
            assert ("codec int4" in shown) == bool(wire)


def test_a_run_is_measured_on_windows_of_its_plan(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_in(tmp_path / "run")
    plan, _ = plan_of(FULL)
    plan.save(tmp_path / "run" / "plan.json")
    assert run(monkeypatch, tmp_path / "run", "--text", text, "--tokens", 99, "--dtype", "bf16") == 0
    assert f"in windows of {plan.workload.sequence_tokens}" in capsys.readouterr().out


def test_ctrl_c_shows_what_is_done(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walk, calls = BatchLosses._losses, 0

    def interrupted(self: BatchLosses, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return walk(self, *given)

    monkeypatch.setattr(BatchLosses, "_losses", interrupted)
    text.write_text(TEXT * 20)
    assert run(monkeypatch, folder, "--text", text, "--tokens", 10_240, "--all") == 130
    printed = capsys.readouterr().out
    assert "words: 5,120 of 10,240 tokens" in printed
    assert "interrupted: this is what was found until then" in printed
    assert "0,1" in printed


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--context", "65"], "--context 65: the model has a context of 64 tokens; give that many or fewer"),
        (["--stages", "1,2"], "begin with 0"),
        (["--keep", "half"], "'half' is not a share"),
        (["--keep", "1/2", "--residual-scale", "harder"], "'harder' is neither a number nor one of"),
        (["--cut", "1", "--ablation"], "the model is in one piece: give its number of stages with --cut"),
        (["--cut", "9"], "at most 5 stages"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such text file"),
        (["-o", "."], ".: this is a folder; name a file in it"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_what_cannot_be(
    folder: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    assert run(monkeypatch, folder, "--text", text, *words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last


def test_tokens_of_another_tokenizer(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(text, 257, tmp_path / "others")
    assert run(monkeypatch, folder, "--text", tmp_path / "others") == 2
    assert "made with another tokenizer" in capsys.readouterr().err
