"""Output folders of runs, written by what writes them while training; and the page over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from skippipe import web
from skippipe.dashboard import server as dashboard_server
from skippipe.dashboard.routes import application
from skippipe.dashboard.run_state import Panels, RunFollower
from skippipe.plan import Lane, Plan, Stage
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import Event, EventKind, IterationReport
from skippipe.runtime.coordinator.recovery import StageProgress
from skippipe.runtime.coordinator.wal_records import commit_record, plan_record
from skippipe.simulator import simulate
from skippipe.training.metrics import EventsFile, IterationMetrics, MetricsFile, TraceFiles
from skippipe.web import ApiSettings
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster

TIMEOUT_S = 60.0
HOSTILE = "<img src=x onerror=alert(1)>"
LANES = 2  # of a data node


def plan_of(nodes: int = 8, stages: int = 4, names: Sequence[str] = ()) -> Plan:
    """Nodes dealt to the stages in turn; every path leaves out a quarter of the stages."""
    cluster = uniform_cluster(nodes, flops_per_s=3e7)
    called = [*names, *(f"node-{number}" for number in range(len(names), nodes))]
    cluster = replace(cluster, nodes=tuple(map(replace_name, cluster.nodes, called)))
    held = [tuple(range(stage, nodes, stages)) for stage in range(stages)]
    lanes = []
    for number in range(LANES * len(held[0])):
        left_out = {1 + (number + skipped) % (stages - 1) for skipped in range(stages // 4)}
        on_path = [held[stage] for stage in range(stages) if stage not in left_out]
        lanes.append(Lane(tuple(each[number % len(each)] for each in on_path), 2))
    workload = Workload(TINY, 32, 1, 2 * len(lanes), max_slots=None)
    plan = Plan(cluster, workload, tuple(Stage(8 // stages, each, each) for each in held), tuple(lanes))
    return plan.promising(simulate(plan))


def replace_name(node: Any, name: str) -> Any:
    return replace(node, name=name)


class RunFolder:
    """What a run has written so far."""

    def __init__(self, folder: Path, plan: Plan, *, resumed: bool = False, run_id: str = "") -> None:
        self.folder = folder
        self.plan = plan
        plan.save(folder / "plan.json")
        self._run_id = run_id
        self._metrics = MetricsFile(
            folder / "metrics.jsonl", IterationMetrics(plan), 1000, resumed=resumed, run_id=run_id
        )
        self._events = EventsFile(folder / "events.jsonl", resumed=resumed, run_id=run_id)

    def iteration(self, number: int, loss: float = 3.0, *, recorded: bool = False) -> None:
        expected = self.plan.promise
        tasks: dict[int, list[list[int]]] = {}
        for task in expected.tasks if recorded else ():
            times = (round(1.1 * time) for time in (task.ready_ns, task.start_ns, task.end_ns))  # a tenth slower
            tasks.setdefault(task.node, []).append([task.lane, task.microbatch, task.step, *times])
        closing: dict[int, tuple[int, ...]] = {}
        for node, stage in self.plan.stage_of.items():
            begun_ns, ended_ns = expected.averaging_ns[stage]
            closing[node] = (round(1.1 * begun_ns), round(1.1 * ended_ns), 10**7)
        report = IterationReport(
            number,
            loss,
            norm=1.0,
            rate=1e-3,
            seconds=1.1 * expected.iteration_s,
            sent_bytes={(use.sender, use.receiver): use.sent_bytes for use in expected.links},
            tasks=tasks,
            stage_microbatches=tuple(self.plan.exposure),
            plan=self.plan,
            closing=closing if recorded else {},
        )
        self._metrics.iteration_done(report)
        TraceFiles(self.folder / "traces", self._run_id).iteration_done(report)

    def event(self, kind: EventKind, text: str = "", node: str = "", iteration: int = 0) -> None:
        self._events.happened(Event(kind, iteration, text, node))

    def wal(self, *records: dict[str, Any]) -> None:
        """Adds them to the journal."""
        wal = WriteAheadLog(self.folder / "journal")
        for record in records:
            wal.write(record)
        wal.close()

    def checkpoint(self, iterations: int) -> None:
        place = self.folder / "checkpoints" / f"{iterations:06d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")


def plan_line(plan: Plan, recovering: Sequence[int] = ()) -> dict[str, Any]:
    return plan_record(plan, recovering, StageProgress.nothing(len(plan.stages)), plan.visited)


def committed(plan: Plan, iteration: int) -> dict[str, Any]:
    return commit_record(iteration, 1e-3, 1.0, 3.0, plan.exposure, StageProgress.nothing(len(plan.stages)))


def panels(folder: Path) -> dict[str, Any]:
    """What the page shows, after looking at everything."""
    page = Panels(RunFollower(folder))
    while page.poll():
        pass
    return parsed(page)


def parsed(page: Panels) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in page.texts.items()}


@contextmanager
def shown(folder: Path, token: str = "") -> Iterator[str]:
    """The page's address."""
    settings = ApiSettings(tokens=(token,) if token else (), loopback=True)
    with dashboard_server.listen("127.0.0.1", 0, "--port") as listener:
        port = listener.getsockname()[1]
        app = application(Panels(RunFollower(folder)), settings, stopping=lambda: server.should_exit)
        server = web.server(app, "127.0.0.1", port)
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
