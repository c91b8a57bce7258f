"""A job with [validation]: text that is held out, its loss wherever metrics go, the best checkpoint, and its export."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import Checkpoints
from skippipe.checkpoint.hf_export import SCORE_FILE, ModelFolder, hub_api, push
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.engine import GenerationEngine, TokenByToken
from skippipe.inference.request import GenerationRequest, SamplingParams
from skippipe.optim.config import OptimConfig
from skippipe.runs.history import read_history
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport, ValidationReport
from skippipe.stage_subset import StageSubset
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    ReportConfig,
    TransportConfig,
    ValidationConfig,
)
from skippipe.training.metrics import CallbackList, IterationMetrics, MetricsFile
from skippipe.training.run import RunOptions
from skippipe.training.trackers import MLflow, Tracker, check_trackers
from tests.helpers.model_folders import LAYERS, TOKENIZER, flat, made
from tests.helpers.processes import MODEL

TEXT = "It is a truth universally acknowledged, that a node in possession of a good stage must be in want of a lane. "
ITERATIONS = 5
_Language: Any = AutoModelForCausalLM


def job_in(folder: Path, validation: ValidationConfig, **others: Any) -> JobConfig:
    text, config = folder / "text.txt", folder / "config.json"
    text.write_text(" ".join(f"{number} {TEXT}" for number in range(100)))
    config.write_text(json.dumps(MODEL))
    return replace(
        JobConfig(
            cluster="datacentre:4",
            output=str(folder / "run"),
            iterations=ITERATIONS,
            model=ModelConfig(str(config)),
            data=DataConfig([str(text)], vocabulary=300, folder=str(folder / "tokens")),
            batch=BatchConfig(sequence=16, samples=2, microbatches=4),
            pipeline=PipelineConfig(stages=3, skip="0", strategy="dtfm-skip", budget_s=0.1),
            transport=TransportConfig(wire="fp32"),
            checkpoint=CheckpointConfig(every=ITERATIONS, keep=1),
            learning=OptimConfig(rate=0.3, warmup=1, clip=1.0, iterations=6),
            validation=validation,
        ),
        **others,
    )


class Seen(Tracker):
    """What any tool is given."""

    def __init__(self, metrics: IterationMetrics) -> None:
        super().__init__(metrics)
        self.values: list[tuple[int, dict[str, float]]] = []

    def write(self, values: dict[str, float], iteration: int) -> None:
        self.values.append((iteration, values))


class Reports(Callback):
    def __init__(self) -> None:
        self.found: list[ValidationReport] = []

    def validated(self, report: ValidationReport) -> None:
        self.found.append(report)


def trained(run_setup: RunSetup, engine: str) -> tuple[Seen, list[ValidationReport]]:
    reports = Reports()
    output = Path(run_setup.job.output)
    run_setup.save_plans()
    metrics = IterationMetrics(run_setup.plan, run_setup.job.iterations)
    seen = Seen(metrics)
    file = MetricsFile(output / "metrics.jsonl", metrics, run_setup.job.iterations, run_id=run_setup.run_id)
    BACKENDS[engine](run_setup, CallbackList([file, seen, reports]), lambda: 0)
    return seen, reports.found


def test_a_share_is_held_out_and_its_best_checkpoint_stays(tmp_path: Path) -> None:
    """A rate so high that the loss goes up again: the best is not the last."""
    job = job_in(tmp_path, ValidationConfig(share=0.2, every=1, samples=8))
    run_setup = build_run(job, options=RunOptions(run_id="r1"))
    sampler, held_out = run_setup.node_config.sampler(), run_setup.node_config.held_out_sampler()
    assert held_out is not None and held_out.microbatches == 4
    windows = {held_out.window(0, microbatch, sample) for microbatch in range(4) for sample in range(2)}
    trained_on = {
        sampler.window(iteration, microbatch, sample)
        for iteration in range(2 * sampler.windows)
        for microbatch in range(4)
        for sample in range(2)
    }
    assert len(windows) == 8 and len(trained_on) == sampler.windows
    assert min(windows) > max(trained_on), "its end is held out"

    seen, reports = trained(run_setup, "virtual")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"id": "r1"}))
    losses = [report.loss for report in reports]
    best = min(range(ITERATIONS), key=losses.__getitem__)
    assert [report.iteration for report in reports] == list(range(ITERATIONS))
    assert best + 1 < ITERATIONS, f"the best is not the last: {losses}"
    checkpoints = Checkpoints.of_run(tmp_path / "run")
    assert [int(each.name) for each in checkpoints.complete()] == [ITERATIONS, best + 1], "the newest, and the best"
    found = checkpoints.best()
    assert found is not None and found.manifest.validation_loss == losses[best]
    longer = build_run(replace(job, iterations=ITERATIONS + 1), options=RunOptions(run_id="r1", resumed=True))
    assert longer.run.resumed_settings.validation.best == (best + 1, losses[best])

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert [row["validation_loss"] for row in rows] == losses
    assert all(row["learning_rate"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert rows[-1]["left_s"] == 0 < rows[0]["left_s"]
    taken_s = sum(row["seconds"] for row in rows) + sum(report.seconds for report in reports)
    assert rows[-1]["elapsed_s"] == pytest.approx(taken_s)
    assert read_history(tmp_path / "run").validation == list(enumerate(losses))
    assert [iteration for iteration, values in seen.values if "validation_loss" in values] == [
        row["iteration"] for row in rows
    ]
    assert {"loss", "learning_rate", "elapsed_s", "left_s", "tokens_per_s"} <= seen.values[0][1].keys()


def test_the_held_out_loss_of_the_pipeline_is_that_of_transformers(tmp_path: Path) -> None:
    """Another text, the model as it is in the end."""
    (tmp_path / "other.txt").write_text(TEXT[::-1] * 20)
    validation = ValidationConfig([str(tmp_path / "other.txt")], every=10, samples=6)
    job = job_in(tmp_path, validation, iterations=2)
    run_setup = build_run(job, options=RunOptions(run_id="r2"))
    _, (report,) = trained(run_setup, "virtual")
    held_out = run_setup.node_config.held_out_sampler()
    assert held_out is not None
    model = _Language.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    losses = []
    for microbatch in range(3):
        inputs, labels = (torch.from_numpy(each) for each in held_out.batch(0, microbatch))
        with torch.no_grad():
            logits = model(inputs).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert report.iteration == 1
    assert report.loss == pytest.approx(float(np.mean(losses)), rel=1e-5)
    alone = build_run(replace(job, output=str(tmp_path / "alone")), options=RunOptions(run_id="r3"))
    _, (one,) = trained(alone, "one-process")
    assert one.loss == pytest.approx(report.loss, rel=1e-4)

    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"Held-out loss ({tmp_path / 'other.txt'}): {report.loss:.4f}" in card
    for fact in ("base_model" not in card, "| iterations | 2 |" in card, str(tmp_path / "text.txt") in card):
        assert fact, card
    assert "Not measured." in card


def test_transformers_writes_what_we_write_from_an_exported_folder(tmp_path: Path) -> None:
    """Greedily, to the end of the text, without being told which token that is."""
    sizes = {"classics-val": [{"kept": 2, "parts": 2, "mean": 9.5, "best": 9.0, "worst": 10.0}]}
    (tmp_path / SCORE_FILE).write_text(json.dumps({"sizes": sizes}))
    spec, stages = made()
    folder = tmp_path / "out"
    model = ModelFolder(folder, LAYERS, spec, TOKENIZER, run=tmp_path)
    for number in range(len(LAYERS)):
        model.store_flat(number, flat(spec, stages, number))
    assert "| classics-val | 2 of 3 | 9.50 | 9.00 | 10.00 |" in (folder / "README.md").read_text()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == TOKENIZER.end_id

    prompt = tuple(TOKENIZER.encode("some words, and"))
    loaded = _Language.from_pretrained(folder, dtype=torch.float32)
    found = loaded.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()[len(prompt) :]
    assert found[-1] == TOKENIZER.end_id and 3 < len(found) < 12, "the text ends by itself"
    staged = load(folder)
    decoder = TokenByToken(staged, StageSubset((0, 1, 2), 3), 64)
    (ours,) = GenerationEngine(staged, decoder, 1).run([GenerationRequest(prompt, 12, SamplingParams(temperature=0))])
    assert ours.output_tokens == found


def test_what_cannot_be_pushed_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login"):
        hub_api("me/model")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_nothing")
    with pytest.raises(UserError, match="is no name of a model"):
        hub_api("a/b/c")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    api = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{port}", token="hf_nothing")  # where nobody listens
    with pytest.raises(UserError) as caught:
        push(api, tmp_path, "me/model", private=True)
    assert "\n" not in str(caught.value) and f"hf upload me/model {tmp_path}" in str(caught.value)


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        (ValidationConfig(["a.txt"], share=0.1), "leave out one of them"),
        (ValidationConfig(every=7), "nothing is held out"),
        (ValidationConfig(patience=2), "nothing is held out"),
    ],
)
def test_a_validation_that_would_have_no_effect_is_refused(validation: ValidationConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        JobConfig(validation=validation)


def test_too_little_to_hold_out_is_said(tmp_path: Path) -> None:
    run_setup = build_run(job_in(tmp_path, ValidationConfig()), options=RunOptions(run_id="r5"))
    job = replace(run_setup.job, validation=ValidationConfig(share=0.0005))
    with pytest.raises(UserError, match=r"validation.share: 0 of [\d,]+ samples of 16 tokens"):
        _ = replace(run_setup, job=job).node_config


def test_a_tracker_that_is_not_installed_or_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("skippipe.training.trackers.find_spec", lambda name: None)
    for name, config in (("wandb", ReportConfig(wandb="mine")), ("mlflow", ReportConfig(mlflow="mine"))):
        with pytest.raises(UserError, match=rf"report.{name}: needs .* pip install 'skippipe\[{name}\]'"):
            check_trackers(config)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)  # an import of it fails
    run_setup = build_run(job_in(tmp_path, ValidationConfig()), options=RunOptions(run_id="r6"))
    tracker = MLflow("mine", tmp_path, "r6", {}, IterationMetrics(run_setup.plan, 2))
    tracker.iteration_done(IterationReport(0, math.nan, 1.0, 0.1, 1.0, {}, {}))
    tracker.close()
    assert "report.mlflow" in caplog.text and "training goes on without it" in caplog.text


def test_a_callback_that_fails_is_named_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Callback):
        """As the library of a tracker does whose own process has ended."""

        def validated(self, report: ValidationReport) -> None:
            raise RuntimeError(f"the service is gone that had {report.loss}")

    seen: list[ValidationReport] = []
    last = Callback()
    last.validated = seen.append  # type: ignore[method-assign,assignment]
    callbacks, report = CallbackList([Failing(), last]), ValidationReport(0, 3.0, True, 1.0)
    for _ in range(2):
        callbacks.validated(report)
    assert seen == [report, report]
    assert [each.getMessage() for each in caplog.records] == ["Failing: RuntimeError: the service is gone that had 3.0"]
