"""What is written down while training: metrics, traces, and whatever else watches.

A watcher is told of every iteration when it is done. `metrics.jsonl` always gets a line; TensorBoard and Prometheus
are there if asked for. Of recorded iterations, what every node did when goes into a Chrome trace beside the plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skippipe.costs import ns
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.report.trace import merged, trace_events
from skippipe.runtime.coordinator import IterationReport, Watcher
from skippipe.simulate import node_use
from skippipe.timeline import LinkUse, Task, Timeline, Timing


def measured(plan: Plan, report: IterationReport) -> Timeline:
    """A recorded iteration as a timeline, beside the promised one."""
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


class Everybody:
    """Tells several watchers."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def iteration_done(self, report: IterationReport) -> None:
        for watcher in self._watchers:
            watcher.iteration_done(report)


class Late:
    """A watcher that is made when it is first told something."""

    def __init__(self, made: Callable[[], Watcher]) -> None:
        self._made = made
        self._watcher: Watcher | None = None

    def iteration_done(self, report: IterationReport) -> None:
        if self._watcher is None:
            self._watcher = self._made()
        self._watcher.iteration_done(report)


class Figures:
    """An iteration in a few numbers, as they go into files and onto screens."""

    def __init__(self, plan: Plan) -> None:
        work = plan.workload
        self.plan = plan
        self.tokens = plan.microbatches * work.samples_per_microbatch * work.sequence_tokens
        self.promised_s = plan.expected.iteration_s if plan.expected else None

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
        return figures | ({"promised_s": self.promised_s} if self.promised_s else {})


class MetricsFile:
    """One JSON object a line, on disk before the next iteration is done.

    A run that goes on from a checkpoint keeps the lines up to there.
    """

    def __init__(self, path: Path, figures: Figures, first: int = 0) -> None:
        self._figures = figures
        self._names = [node.name for node in figures.plan.cluster.nodes]
        before = path.read_text(encoding="utf-8").splitlines() if first and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(f"{line}\n" for line in before if json.loads(line)["iteration"] < first)

    def iteration_done(self, report: IterationReport) -> None:
        links = [[self._names[a], self._names[b], count] for (a, b), count in sorted(report.sent_bytes.items())]
        line: dict[str, Any] = {**self._figures.of(report), "time": time.time(), "links": links}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Traces:
    """Recorded iterations as Chrome traces, the plan and what became of it as two tracks."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan

    def iteration_done(self, report: IterationReport) -> None:
        if not report.tasks:
            return
        tracks = [trace_events(self._plan, measured(self._plan, report), "measured")]
        if self._plan.expected is not None:
            tracks.insert(0, trace_events(self._plan, self._plan.expected, "planned"))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"iteration-{report.iteration:06d}.json"
        path.write_text(json.dumps(merged(tracks), ensure_ascii=False) + "\n", encoding="utf-8")


class TensorBoard:
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


class Prometheus:
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
