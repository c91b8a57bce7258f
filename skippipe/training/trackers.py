"""Callbacks that give the metrics of a run to tools that people have: TensorBoard, Prometheus, W&B, MLflow.

Each is a field of [report], and its library is imported when it is wanted. A tool that fails is no reason to stop
training: what it says is logged once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from skippipe.errors import UserError, install_command
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport, ValidationReport

if TYPE_CHECKING:
    from skippipe.training.job_config import JobConfig
    from skippipe.training.job_tables import ReportConfig
    from skippipe.training.metrics import IterationMetrics

log = logging.getLogger(__name__)
CLOSE_S = 20.0  # for the last metrics to reach a server

Values = dict[str, float]


class Tracker(Callback):
    """Gives numbers by name to a tool, iteration by iteration."""

    def __init__(self, metrics: IterationMetrics) -> None:
        self._metrics = metrics

    def iteration_done(self, report: IterationReport) -> None:
        found = self._metrics.of(report)
        self.write({name: value for name, value in found.items() if name != "iteration"}, report.iteration + 1)

    def validated(self, report: ValidationReport) -> None:
        self.write(self._metrics.of_validation(report), report.iteration + 1)

    @abstractmethod
    def write(self, values: Values, iteration: int) -> None: ...


class TensorBoard(Tracker):
    def __init__(self, folder: Path, metrics: IterationMetrics) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(metrics)
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, values: Values, iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()


class Prometheus(Tracker):
    """Gauges on http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int, metrics: IterationMetrics) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        super().__init__(metrics)
        registry = CollectorRegistry()
        try:
            start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(f"report.prometheus: port {port}: {error.strerror}; choose another") from None
        self._new_gauge = partial(Gauge, documentation="Of the last iteration.", registry=registry)
        self._gauges: dict[str, Gauge] = {}

    def write(self, values: Values, iteration: int) -> None:
        for name, value in {**values, "iteration": float(iteration)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._new_gauge(f"skippipe_{name}")
            self._gauges[name].set(value)


class WeightsAndBiases(Tracker):
    """A run of a W&B project; its id is the run's, so that a resumed run goes on there."""

    def __init__(
        self, project: str, folder: Path, run_id: str, config: dict[str, Any], metrics: IterationMetrics
    ) -> None:
        import wandb

        super().__init__(metrics)
        quiet = wandb.Settings(silent=True, console="off")
        try:
            self._run: Any = wandb.init(
                project=project,
                name=folder.resolve().name,
                dir=str(folder),
                id=run_id or None,
                resume="allow" if run_id else None,
                config=config,
                settings=quiet,
            )
        except Exception as error:  # whatever the library or its server says
            raise UserError(f"report.wandb: {error}; training goes on without it") from None

    def write(self, values: Values, iteration: int) -> None:
        self._run.log({**values, "iteration": iteration})  # by its own steps: a second row of an iteration is taken too

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of an MLflow experiment, on MLFLOW_TRACKING_URI or else in the run's folder.

    A thread of its own talks to the server, which may be slow or away: training does not wait for it.
    """

    def __init__(
        self, experiment: str, folder: Path, run_id: str, config: dict[str, Any], metrics: IterationMetrics
    ) -> None:
        super().__init__(metrics)
        self._queue: SimpleQueue[tuple[Values, int, int] | None] = SimpleQueue()
        self._config = {name: str(value) for name, value in config.items()}
        self._names = experiment, folder, run_id
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, values: Values, iteration: int) -> None:
        self._queue.put((values, iteration, int(time.time() * 1000)))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("report.mlflow: its server has not taken all metrics in %.0f s", CLOSE_S)

    def _send(self) -> None:
        try:
            from mlflow.entities import Metric

            client, run = self._start()
            while (found := self._queue.get()) is not None:
                values, iteration, at_ms = found
                client.log_batch(run, [Metric(name, value, at_ms, iteration) for name, value in values.items()])
            client.set_terminated(run)
        except Exception as error:  # whatever the library or its server says
            log.warning("report.mlflow: %s; training goes on without it", error)

    def _start(self) -> tuple[Any, str]:
        """A client, and the id of the run there: of a run that is resumed, the one that it had."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        experiment, folder, run_id = self._names
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri())
        known = client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else client.create_experiment(experiment)
        query = f"tags.`skippipe.run` = '{run_id}'"
        found = client.search_runs([place], query, max_results=1) if run_id else []
        if found:
            return client, str(found[0].info.run_id)
        tags = {"skippipe.run": run_id} if run_id else {}
        run = str(client.create_run(place, run_name=folder.resolve().name, tags=tags).info.run_id)
        client.log_batch(run, params=[Param(name, value) for name, value in self._config.items()])
        return client, run


def check_trackers(config: ReportConfig) -> None:
    """UserError unless the library of every tool that the job wants is there, and its port is free."""
    for wanted, package, name in (
        (config.tensorboard, "tensorboard", "tensorboard"),
        (config.prometheus > 0, "prometheus_client", "prometheus"),
        (bool(config.wandb), "wandb", "wandb"),
        (bool(config.mlflow), "mlflow", "mlflow"),
    ):
        if wanted and find_spec(package) is None:
            raise UserError(f"report.{name}: needs another package; {install_command(name)}")
    if config.prometheus:
        try:
            socket.create_server(("127.0.0.1", config.prometheus)).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"report.prometheus: port {config.prometheus}: {error}; choose another") from None


def trackers_of(job: JobConfig, run_id: str, metrics: IterationMetrics) -> list[Callback]:
    """The trackers that the job wants. One that cannot be started is left out, with a warning."""
    plan, folder, config = metrics.plan, Path(job.output), job.report
    about = {
        "model": plan.workload.model.name,
        "parameters": plan.workload.model.parameters,
        "nodes": len(plan.stage_of),
        "stages": len(plan.stages),
        "cluster": plan.cluster.name,
        "iterations": job.iterations,
        "microbatches": plan.microbatches,
        "sequence": plan.workload.sequence_tokens,
        "seed": job.seed,
        "skip": job.followed.skip,
        **{f"learning.{name}": value for name, value in job.schedule.to_json().items()},
    }
    makers: list[tuple[object, Callable[[], Tracker]]] = [
        (config.tensorboard, lambda: TensorBoard(folder / "tensorboard", metrics)),
        (config.prometheus, lambda: Prometheus(config.prometheus, metrics)),
        (config.wandb, lambda: WeightsAndBiases(config.wandb, folder, run_id, about, metrics)),
        (config.mlflow, lambda: MLflow(config.mlflow, folder, run_id, about, metrics)),
    ]
    found: list[Callback] = []
    for wanted, make in makers:
        try:
            found += [make()] if wanted else []
        except UserError as error:
            log.warning("%s", error)
    return found
