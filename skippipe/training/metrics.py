"""Callbacks that record a run in its folder: metrics, events, traces, measured cluster.

A callback is called after every iteration. `metrics.jsonl` always gets a line; what the job wants beside it is in
`trackers`. A recorded iteration becomes a Chrome trace of what every node did when, beside the plan.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from skippipe.checkpoint.format import run_field
from skippipe.checkpoint.storage import LineFile, WriteFailures
from skippipe.cluster import Cluster
from skippipe.cost_model import ns
from skippipe.errors import UserError
from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.report.gantt import copy_events, merged_traces, trace_events
from skippipe.runs.records import COUNTED, metrics_of
from skippipe.runs.tail import trace_name
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport, ValidationReport
from skippipe.simulator import node_use
from skippipe.skip_schedule import PathLength, parts_of, path_length_text
from skippipe.timeline import LinkUse, Task, Timeline, Timing
from skippipe.whole_paths import planned_teacher_paths

if TYPE_CHECKING:
    from skippipe.training.job_config import JobConfig

log = logging.getLogger(__name__)
MOST_SAMPLED = 200  # iterations that the time left is reckoned from
RECENT = 20  # iterations that tell how long those to come will take


def recorded_timeline(plan: Plan, report: IterationReport) -> Timeline:
    """A recorded iteration of a plan as a timeline, beside the promised one.

    A report goes out before the nodes step: the optimizer step at its end took as long as the one before it.
    """
    tasks = tuple(
        sorted(
            (task for node, rows in report.tasks.items() for task in _recorded_tasks(plan, node, rows)),
            key=lambda task: task.start_ns,
        )
    )
    averaging = []
    for stage in plan.stages:
        times = [report.closing[node] for node in stage.nodes if node in report.closing]
        begun_ns = max((begun for begun, *_ in times), default=0)  # when all its nodes are done, as in a plan
        ended_ns = max((ended for _, ended, _ in times), default=0) if len(stage.nodes) > 1 else begun_ns
        averaging.append((begun_ns, ended_ns))
    step_ns = {node: took_ns for node, (*_, took_ns) in report.closing.items()}
    uses = node_use(plan, tasks, planned_teacher_paths(plan))
    return Timeline(
        timing=Timing.FULL,
        iteration_ns=ns(report.seconds),
        last_backward_ns=max(task.end_ns for task in tasks),
        averaging_ns=tuple(averaging) if report.closing else (),
        nodes=tuple(use._replace(optimizer_ns=step_ns.get(use.node, 0)) for use in uses),
        links=tuple(LinkUse(a, b, count) for (a, b), count in sorted(report.sent_bytes.items())),
        tasks=tasks,
    )


def _recorded_tasks(plan: Plan, node: int, rows: Sequence[Sequence[int]]) -> Iterator[Task]:
    """The tasks of a node. If its devices are not those of the plan, because one was lost or there are more of them,
    they get numbers of the plan."""
    whole = [Task(lane, microbatch, step, node, *rest) for lane, microbatch, step, *rest in rows]
    workers = plan.workers[node]
    devices = sorted({task.device for task in whole})
    for task in whole:
        yield task if devices[-1] < workers else task._replace(device=min(devices.index(task.device), workers - 1))


class CallbackList(Callback):
    """Calls several callbacks. One that fails is no reason to stop training; it is logged once.

    A function that makes them is called before the first: by then nodes are forked, and threads may start.
    """

    def __init__(self, callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]]) -> None:
        self._given = callbacks
        self._warned: set[str] = set()

    def iteration_done(self, report: IterationReport) -> None:
        self._call(lambda callback: callback.iteration_done(report))

    def validated(self, report: ValidationReport) -> None:
        self._call(lambda callback: callback.validated(report))

    def happened(self, event: Event) -> None:
        self._call(lambda callback: callback.happened(event))

    def measured(self, cluster: Cluster) -> None:
        self._call(lambda callback: callback.measured(cluster))

    def close(self) -> None:
        if "_callbacks" in vars(self):  # else nothing was ever recorded
            self._call(lambda callback: callback.close())

    @cached_property
    def _callbacks(self) -> Sequence[Callback]:
        return self._given() if callable(self._given) else self._given

    def _call(self, method: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                method(callback)
            except Exception as error:  # whatever the library of a tracker says
                known = isinstance(error, (OSError, UserError))
                line = f"{type(callback).__name__}: {'' if known else type(error).__name__ + ': '}{error}"
                if line not in self._warned:
                    self._warned.add(line)
                    log.warning("%s", line)


def promised_left(depths: Sequence[tuple[JobConfig, Plan, Mapping[PathLength, Plan]]]) -> Callable[[int], float]:
    """A function that gives the promised seconds of all iterations that are left when so many are done; 0: nothing is
    promised. For each depth that the model has on the way: its job, which ends where the model grows, its plan, and a
    plan for each length of paths."""
    promised = [
        {length: each.expected.iteration_s for length, each in plans.items() if each.expected is not None}
        for *_, plans in depths
    ]

    def left_s(done: int) -> float:
        if any(len(known) < len(plans) for known, (*_, plans) in zip(promised, depths, strict=True)):
            return 0.0
        whole_s, begin = 0.0, done
        for known, (job, plan, _) in zip(promised, depths, strict=True):
            count = job.iterations - begin
            if count > 0:
                drawn = range(begin, job.iterations, -(-count // MOST_SAMPLED))
                stages = len(plan.stages)
                lengths = [job.followed.visited(each, job.iterations, stages, plan.visited) for each in drawn]
                whole_s += count * fmean(known[each] for each in lengths)
            begin = max(begin, job.iterations)
        return whole_s

    return left_s


def timetable_text(
    lengths: Mapping[PathLength, int], plans: Mapping[PathLength, Plan], stages: int, *, promised: bool = True
) -> str:
    """What a run comes to, from the number of iterations and the plan for each length of paths, shortest first; seconds
    if they are promised."""
    parts = {
        length: f"{count:,} iteration{'s' * (count != 1)} through {path_length_text(length)} of {stages} stages"
        for length, count in sorted(lengths.items(), key=lambda each: parts_of(each[0]))
    }
    if not promised:
        return ", ".join(parts.values())
    each_s = {length: plan.expected.iteration_s if plan.expected else 0.0 for length, plan in plans.items()}
    timed = [f"{text} at {each_s[length]:.2f} s" for length, text in parts.items()]
    whole_s = sum(count * each_s[length] for length, count in lengths.items())
    return f"{', '.join(timed)}: {whole_s:,.1f} s promised in all"


def turn_text(lengths: Sequence[int], stages: int) -> str:
    """The recipe by which iterations have paths of these lengths by turns, as in "2 x 0 + 1/2"."""
    shares = groupby(Fraction(stages - each, stages) for each in lengths)
    counts = [(share, len(list(same))) for share, same in shares]
    return " + ".join(f"{count} x {share}" if count > 1 else str(share) for share, count in counts)


class IterationMetrics:
    """The metrics of an iteration, as they go into files and onto the terminal."""

    def __init__(
        self,
        plan: Plan,
        iterations: int = 0,
        elapsed_s: float = 0.0,
        promised_left_s: Callable[[int], float] = lambda done: 0.0,
        *,
        promised: bool = True,
    ) -> None:
        """`iterations` is the length of the whole run, `elapsed_s` what it took before it was resumed;
        `promised_left_s` gives the promised seconds of all iterations that are left when so many are done. Without
        `promised`, the plan is for other machines, and what it promises is left out."""
        work = plan.workload
        self.plan = plan
        self.promised = promised
        self.iterations = iterations
        self.tokens = plan.microbatches * work.samples_per_microbatch * work.sequence_tokens
        self.elapsed_s = elapsed_s
        self._promised_left_s = promised_left_s
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Seconds of the last iterations, and what was promised for each; 0: nothing was."""
        self._counted: IterationReport | ValidationReport | None = None

    def _count(self, report: IterationReport | ValidationReport) -> None:
        """Every callback asks for the same report: it counts once."""
        if report is not self._counted:
            self._counted = report
            self.elapsed_s += report.seconds
            if isinstance(report, IterationReport):
                self._recent.append((report.seconds, report.promised_s or 0.0))

    def left_s(self, done: int) -> float:
        """Seconds until the end of the run, by the last iterations; where plans differ, in proportion to promises."""
        seconds, promised = sum(each for each, _ in self._recent), sum(each for _, each in self._recent)
        left_s = self._promised_left_s(done)
        known = left_s > 0 and all(each > 0 for _, each in self._recent)
        each_s = seconds / len(self._recent)
        return left_s * seconds / promised if known else max(0, self.iterations - done) * each_s

    def of_validation(self, report: ValidationReport) -> dict[str, float]:
        self._count(report)
        return {"validation_loss": report.loss, "elapsed_s": self.elapsed_s}

    def of(self, report: IterationReport) -> dict[str, float]:
        self._count(report)
        metrics = {
            "iteration": report.iteration + 1,
            "loss": report.loss,
            "gradient_norm": report.norm,
            "learning_rate": report.rate,
            "seconds": report.seconds,
            "tokens_per_s": self.tokens / report.seconds,
            "tokens": self.tokens * (report.iteration + 1),
            "bytes_sent": sum(report.sent_bytes.values()),
            "elapsed_s": self.elapsed_s,
            "left_s": self.left_s(report.iteration + 1),
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
        self._last: tuple[int, dict[str, Any]] = (-1, {})
        """The last iteration, and its line."""
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
        self._write(report.iteration, row | {"links": links, "visits": list(report.stage_microbatches), **self._run})

    def validated(self, report: ValidationReport) -> None:
        """The line of the iteration is written again, with the held-out loss."""
        iteration, row = self._last
        if iteration == report.iteration:
            self._write(iteration, {**row, **self._metrics.of_validation(report), "time": time.time()})

    def _write(self, iteration: int, row: dict[str, Any]) -> None:
        self._last = iteration, row
        self._file.cut(self._begin_row(iteration, self._file.size))
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
        tracks[0]["traceEvents"] += copy_events(plan, report.copies)
        if plan.expected is not None:
            tracks.insert(0, trace_events(plan, plan.expected, "planned"))
        trace = merged_traces(tracks)
        trace["otherData"] = {**trace.get("otherData", {}), **self._run}
        with self._failures.tolerated(self._folder, "recorded iterations are left out"):
            write_text(self._folder / trace_name(report.iteration), json.dumps(trace, ensure_ascii=False) + "\n")
