"""What is written down while training: metrics, traces, and whatever else watches.

A watcher is told of every iteration when it is done. `metrics.jsonl` always gets a line; TensorBoard and Prometheus
are there if asked for. Of recorded iterations, what every node did when goes into a Chrome trace beside the plan.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skippipe.cluster import Cluster
from skippipe.costs import ns
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.report.trace import merged, trace_events
from skippipe.runtime.coordinator import Event, IterationReport, Watcher
from skippipe.simulate import node_use
from skippipe.timeline import LinkUse, Task, Timeline, Timing

log = logging.getLogger(__name__)


def measured(plan: Plan, report: IterationReport) -> Timeline:
    """A recorded iteration of a plan as a timeline, beside the promised one."""
    tasks = tuple(
        sorted(
            (Task(lane, microbatch, step, node, *times) for node, rows in report.tasks.items()
             for lane, microbatch, step, *times in rows),
            key=lambda task: task.start_ns,
        )
    )  # fmt: skip
    return Timeline(
        timing=Timing.FULL,
        iteration_ns=ns(report.seconds),
        last_backward_ns=max(task.end_ns for task in tasks),
        averaging_ns=(),
        nodes=node_use(plan, tasks),
        links=tuple(LinkUse(a, b, count) for (a, b), count in sorted(report.sent_bytes.items())),
        tasks=tasks,
    )


class Everybody(Watcher):
    """Tells several watchers."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def iteration_done(self, report: IterationReport) -> None:
        for watcher in self._watchers:
            with _tolerating(watcher):
                watcher.iteration_done(report)

    def happened(self, event: Event) -> None:
        for watcher in self._watchers:
            with _tolerating(watcher):
                watcher.happened(event)

    def measured(self, cluster: Cluster) -> None:
        for watcher in self._watchers:
            with _tolerating(watcher):
                watcher.measured(cluster)


@contextmanager
def _tolerating(watcher: Watcher) -> Iterator[None]:
    """A full disk is no reason to stop training."""
    try:
        yield
    except (OSError, UserError) as error:
        log.warning("%s: %s", type(watcher).__name__, error)


class Late(Watcher):
    """A watcher that is made when it is first told something."""

    def __init__(self, made: Callable[[], Watcher]) -> None:
        self._made = made
        self._watcher: Watcher | None = None

    def iteration_done(self, report: IterationReport) -> None:
        self._there().iteration_done(report)

    def happened(self, event: Event) -> None:
        self._there().happened(event)

    def measured(self, cluster: Cluster) -> None:
        self._there().measured(cluster)

    def _there(self) -> Watcher:
        if self._watcher is None:
            self._watcher = self._made()
        return self._watcher


class Figures:
    """An iteration in a few numbers, as they go into files and onto screens."""

    def __init__(self, plan: Plan) -> None:
        work = plan.workload
        self.plan = plan
        self.tokens = plan.microbatches * work.samples_per_microbatch * work.sequence_tokens

    def of(self, report: IterationReport) -> dict[str, float]:
        figures = {
            "iteration": report.iteration,
            "loss": report.loss,
            "gradient_norm": report.norm,
            "learning_rate": report.rate,
            "seconds": report.seconds,
            "tokens_per_s": self.tokens / report.seconds,
            "tokens": self.tokens * (report.iteration + 1),
            "bytes_sent": sum(report.sent_bytes.values()),
        }
        return figures | ({"promised_s": report.promised_s} if report.promised_s else {})


class MetricsFile(Watcher):
    """One JSON object a line, on disk before the next iteration is done.

    A run that goes on keeps the lines that there are; if it has to repeat iterations, the newer lines count.
    """

    def __init__(self, path: Path, figures: Figures, iterations: int, *, resumed: bool = False) -> None:
        """Of a run that is to do so many iterations."""
        self._path = path
        self._figures = figures
        self._iterations = iterations
        self._names = [node.name for node in figures.plan.cluster.nodes]
        lines = path.read_text(encoding="utf-8").splitlines() if resumed and path.exists() else []
        self._rows = {row["iteration"]: line for line in lines if (row := _row(line))}
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(f"{line}\n" for line in self._rows.values())
        self._file.flush()

    def iteration_done(self, report: IterationReport) -> None:
        links = [[self._names[a], self._names[b], count] for (a, b), count in sorted(report.sent_bytes.items())]
        row: dict[str, Any] = {**self._figures.of(report), "iterations": self._iterations, "time": time.time()}
        row |= {"links": links, "visits": list(report.visits)}
        if self._rows and report.iteration <= max(self._rows):
            self._rows = {number: line for number, line in self._rows.items() if number < report.iteration}
            self._file.seek(0)
            self._file.truncate()
            self._file.writelines(f"{line}\n" for line in self._rows.values())
        self._rows[report.iteration] = json.dumps({name: _plain(value) for name, value in row.items()})
        self._file.write(self._rows[report.iteration] + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(line: str) -> dict[str, Any] | None:
    """None for a line that was torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "iteration" in row else None


class EventsFile(Watcher):
    """Everything out of the ordinary, one JSON object a line: who was lost, who came, what was done about it."""

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self._file = path.open("a" if resumed else "w", encoding="utf-8")

    def happened(self, event: Event) -> None:
        self._file.write(json.dumps({**asdict(event), "time": time.time()}) + "\n")
        self._file.flush()


class ClusterFile(Watcher):
    """What nodes and links really take, for the next plan."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def measured(self, cluster: Cluster) -> None:
        cluster.save(self._path)


class Traces(Watcher):
    """Recorded iterations as Chrome traces, the plan and what became of it as two tracks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def iteration_done(self, report: IterationReport) -> None:
        plan = report.plan
        if plan is None or not report.tasks:
            return
        tracks = [trace_events(plan, measured(plan, report), "measured")]
        if plan.expected is not None:
            tracks.insert(0, trace_events(plan, plan.expected, "planned"))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"iteration-{report.iteration:06d}.json"
        path.write_text(json.dumps(merged(tracks), ensure_ascii=False) + "\n", encoding="utf-8")


class TensorBoard(Watcher):
    def __init__(self, folder: Path, figures: Figures) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("report.tensorboard: needs tensorboard; pip install 'skippipe[tensorboard]'") from None
        self._figures = figures
        self._writer: Any = SummaryWriter(str(folder))

    def iteration_done(self, report: IterationReport) -> None:
        for name, value in self._figures.of(report).items():
            if name != "iteration":
                self._writer.add_scalar(name, value, report.iteration)
        self._writer.flush()


class Prometheus(Watcher):
    """Gauges on http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int, figures: Figures) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError:
            raise UserError("report.prometheus: needs prometheus-client; pip install 'skippipe[prometheus]'") from None
        self._figures = figures
        registry = CollectorRegistry()
        try:
            start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(f"report.prometheus: port {port}: {error.strerror}; choose another") from None
        self._registry = registry
        self._gauge = Gauge
        self._gauges: dict[str, Any] = {}

    def iteration_done(self, report: IterationReport) -> None:
        for name, value in self._figures.of(report).items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(f"skippipe_{name}", "Of the last iteration.", registry=self._registry)
            self._gauges[name].set(value)
