"""W&B and MLflow, the libraries themselves, without a network: `make test-trackers`.

W&B runs offline and keeps its metrics in the output folder; MLflow has its store there. Both get what metrics.jsonl
gets, and a run that is resumed goes on in the same MLflow run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow import MlflowClient

from skippipe.runtime.coordinator.interfaces import IterationReport, ValidationReport
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import ReportConfig
from skippipe.training.metrics import CallbackList, IterationMetrics
from skippipe.training.trackers import trackers_of
from tests.helpers.fault_scenarios import wide

ITERATIONS = 3


def record(folder: Path, config: ReportConfig, first: int = 0) -> None:
    """A run of a few iterations, whose loss is known."""
    job = JobConfig(output=str(folder), report=config)
    callbacks = CallbackList(lambda: trackers_of(job, "abc123", IterationMetrics(wide(False), ITERATIONS)))
    for number in range(first, first + ITERATIONS):
        callbacks.iteration_done(IterationReport(number, 4.0 - number, 1.0, 1e-3, 0.5, {(0, 1): 10}, {}))
    callbacks.validated(ValidationReport(first + ITERATIONS - 1, 2.5, True, 0.1))
    callbacks.close()


def test_mlflow_has_every_metric_and_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record(tmp_path, ReportConfig(mlflow="mine"))
    record(tmp_path, ReportConfig(mlflow="mine"), first=ITERATIONS)
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == [
        (step + 1, 4.0 - step) for step in range(2 * ITERATIONS)
    ]
    assert run.data.metrics["validation_loss"] == 2.5
    assert {"learning_rate", "elapsed_s", "left_s", "tokens_per_s"} <= run.data.metrics.keys()
    assert run.data.params["stages"] == "4"
    assert run.info.status == "FINISHED"


def test_a_server_that_is_away_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    record(tmp_path, ReportConfig(mlflow="mine"))
    assert "report.mlflow" in caplog.text


def test_wandb_keeps_every_metric_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    record(tmp_path, ReportConfig(wandb="mine"))
    wandb.teardown()  # its process ends, and then all is in the file
    (file,) = tmp_path.glob("wandb/offline-run-*-abc123/run-abc123.wandb")
    rows = list(rows_of(file))
    assert [(row["iteration"], row["loss"]) for row in rows if "loss" in row] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert [(row["iteration"], row["validation_loss"]) for row in rows if "validation_loss" in row] == [(3, 2.5)]
    assert all(row["learning_rate"] == 1e-3 for row in rows if "loss" in row)


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The history in a file of W&B: blocks of 32 KiB with parts of records, as in the logs of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if at % 2**15 > 2**15 - 7:  # no header fits into the rest of the block
            at += -at % 2**15
            continue
        _, size, part = struct.unpack("<IHB", content[at : at + 7])
        whole, at = whole + content[at + 7 : at + 7 + size], at + 7 + size
        if part in (2, 3):  # it goes on
            continue
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
