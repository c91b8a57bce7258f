"""Callbacks that record a run: metrics, events, traces, measured cluster, TensorBoard, Prometheus.

A callback is called after every iteration. `metrics.jsonl` always gets a line; TensorBoard and Prometheus are there if
the job wants them. A recorded iteration becomes a Chrome trace of what every node did when, beside the plan.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from skippipe.checkpoint.format import run_field
from skippipe.checkpoint.storage import LineFile, WriteFailures
from skippipe.cluster import Cluster
from skippipe.cost_model import ns
from skippipe.errors import UserError
from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.report.gantt import merged_traces, trace_events
from skippipe.runs.records import COUNTED, metrics_of
from skippipe.runs.tail import trace_name
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport
from skippipe.simulator import node_use
from skippipe.timeline import LinkUse, Task, Timeline, Timing

log = logging.getLogger(__name__)


def recorded_timeline(plan: Plan, report: IterationReport) -> Timeline:
    """A recorded iteration of a plan as a timeline, beside the promised one.

    A report goes out before the nodes step: the optimizer step at its end took as long as the one before it.
    """
    tasks = tuple(
        sorted(
            (Task(lane, microbatch, step, node, *times) for node, rows in report.tasks.items()
             for lane, microbatch, step, *times in rows),
            key=lambda task: task.start_ns,
        )
    )  # fmt: skip
    averaging = []
    for stage in plan.stages:
        times = [report.closing[node] for node in stage.nodes if node in report.closing]
        begun_ns = max((begun for begun, *_ in times), default=0)  # when all its nodes are done, as in a plan
        ended_ns = max((ended for _, ended, _ in times), default=0) if len(stage.nodes) > 1 else begun_ns
        averaging.append((begun_ns, ended_ns))
    step_ns = {node: took_ns for node, (*_, took_ns) in report.closing.items()}
    return Timeline(
        timing=Timing.FULL,
        iteration_ns=ns(report.seconds),
        last_backward_ns=max(task.end_ns for task in tasks),
        averaging_ns=tuple(averaging) if report.closing else (),
        nodes=tuple(use._replace(optimizer_ns=step_ns.get(use.node, 0)) for use in node_use(plan, tasks)),
        links=tuple(LinkUse(a, b, count) for (a, b), count in sorted(report.sent_bytes.items())),
        tasks=tasks,
    )


class CallbackList(Callback):
    """Calls several callbacks. One that fails is no reason to stop training; it is logged once.

    A function that makes them is called before the first: by then nodes are forked, and threads may start.
    """

    def __init__(self, callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]]) -> None:
        self._given = callbacks
        self._warned: set[str] = set()

    def iteration_done(self, report: IterationReport) -> None:
        self._call(lambda callback: callback.iteration_done(report))

    def happened(self, event: Event) -> None:
        self._call(lambda callback: callback.happened(event))

    def measured(self, cluster: Cluster) -> None:
        self._call(lambda callback: callback.measured(cluster))

    @cached_property
    def _callbacks(self) -> Sequence[Callback]:
        return self._given() if callable(self._given) else self._given

    def _call(self, method: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                method(callback)
            except (OSError, UserError) as error:
                line = f"{type(callback).__name__}: {error}"
                if line not in self._warned:
                    self._warned.add(line)
                    log.warning("%s", line)


class IterationMetrics:
    """The metrics of an iteration, as they go into files and onto the terminal."""

    def __init__(self, plan: Plan, *, promised: bool = True) -> None:
        """Without `promised`, the plan is for other machines, and what it promises is left out."""
        work = plan.workload
        self.plan = plan
        self.promised = promised
        self.tokens = plan.microbatches * work.samples_per_microbatch * work.sequence_tokens

    def of(self, report: IterationReport) -> dict[str, float]:
        metrics = {
            "iteration": report.iteration + 1,
            "loss": report.loss,
            "gradient_norm": report.norm,
            "learning_rate": report.rate,
            "seconds": report.seconds,
            "tokens_per_s": self.tokens / report.seconds,
            "tokens": self.tokens * (report.iteration + 1),
            "bytes_sent": sum(report.sent_bytes.values()),
        }
        return metrics | ({"promised_s": report.promised_s} if self.promised and report.promised_s else {})


class MetricsFile(Callback):
    """One JSON object a line, on disk before the next iteration is done.

    A run that goes on keeps the lines that there are; if it has to repeat iterations, the newer lines count.
    """

    def __init__(
        self, path: Path, metrics: IterationMetrics, iterations: int, *, resumed: bool = False, run_id: str = ""
    ) -> None:
        """`iterations` is the length of the whole run."""
        self._metrics = metrics
        self._iterations = iterations
        self._run = run_field(run_id)
        self._names = [node.name for node in metrics.plan.cluster.nodes]
        self._starts: dict[int, int] = {}
        """Iteration → offset of its line in the file."""
        *lines, _ = path.read_bytes().split(b"\n") if resumed and path.exists() else [b""]
        at = 0
        for line in lines:
            found = metrics_of(line)
            if found is not None and found.run == run_id:
                self._begin_row(found.row.iteration, at)
                self._starts[found.row.iteration] = at
            at += len(line) + 1
        self._file = LineFile(path, at)  # what follows was torn

    def iteration_done(self, report: IterationReport) -> None:
        links = [[self._names[a], self._names[b], count] for (a, b), count in sorted(report.sent_bytes.items())]
        counted = {**COUNTED, **self._metrics.of(report), "iterations": self._iterations}
        row: dict[str, Any] = {**counted, "time": time.time()}
        row |= {"links": links, "visits": list(report.visits), **self._run}
        self._file.cut(self._begin_row(report.iteration, self._file.size))
        self._file.add(json.dumps({name: _plain(value) for name, value in row.items()}))

    def _begin_row(self, iteration: int, at: int) -> int:
        """Offset of an iteration's line: that of the first line that it replaces, else `at`."""
        while self._starts and next(reversed(self._starts)) >= iteration:
            _, at = self._starts.popitem()
        self._starts[iteration] = at
        return at


def _plain(value: Any) -> Any:
    """None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventsFile(Callback):
    """Events, one JSON object a line: nodes that were lost or joined, and what was done about it."""

    def __init__(self, path: Path, *, resumed: bool = False, run_id: str = "") -> None:
        self._run = run_field(run_id)
        kept = path.read_bytes().rfind(b"\n") + 1 if resumed and path.exists() else 0
        self._file = LineFile(path, kept)

    def happened(self, event: Event) -> None:
        row = {**COUNTED, **asdict(event), "iteration": event.iteration + 1}
        self._file.add(json.dumps({**row, "time": time.time(), **self._run}))


class ClusterFile(Callback):
    """The cluster as nodes and links were measured, for the next plan."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures = WriteFailures()

    def measured(self, cluster: Cluster) -> None:
        with self._failures.tolerated(self._path, "it stays as it was"):
            cluster.save(self._path)


class TraceFiles(Callback):
    """Recorded iterations as Chrome traces, planned and measured as two tracks."""

    def __init__(self, folder: Path, run_id: str = "") -> None:
        self._folder = folder
        self._run = run_field(run_id)
        self._failures = WriteFailures()

    def iteration_done(self, report: IterationReport) -> None:
        plan = report.plan
        if plan is None or not report.tasks:
            return
        tracks = [trace_events(plan, recorded_timeline(plan, report), "measured")]
        if plan.expected is not None:
            tracks.insert(0, trace_events(plan, plan.expected, "planned"))
        trace = merged_traces(tracks)
        trace["otherData"] = {**trace.get("otherData", {}), **self._run}
        with self._failures.tolerated(self._folder, "recorded iterations are left out"):
            write_text(self._folder / trace_name(report.iteration), json.dumps(trace, ensure_ascii=False) + "\n")


class TensorBoard(Callback):
    def __init__(self, folder: Path, metrics: IterationMetrics) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._metrics = metrics
        self._writer: Any = SummaryWriter(str(folder))

    def iteration_done(self, report: IterationReport) -> None:
        for name, value in self._metrics.of(report).items():
            if name != "iteration":
                self._writer.add_scalar(name, value, report.iteration + 1)
        self._writer.flush()


class Prometheus(Callback):
    """Gauges on http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int, metrics: IterationMetrics) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._metrics = metrics
        registry = CollectorRegistry()
        try:
            start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(f"report.prometheus: port {port}: {error.strerror}; choose another") from None
        self._new_gauge = partial(Gauge, documentation="Of the last iteration.", registry=registry)
        self._gauges: dict[str, Gauge] = {}

    def iteration_done(self, report: IterationReport) -> None:
        for name, value in self._metrics.of(report).items():
            if name not in self._gauges:
                self._gauges[name] = self._new_gauge(f"skippipe_{name}")
            self._gauges[name].set(value)
