"""All that a run writes into its output folder, as one state that is kept up to date.

The files belong to a run that goes on: any of them may be missing, half-written, replaced or begun anew, and a line
that cannot be read is counted and passed over. Each source has a number that grows when it has changed.

The page gets the state as JSON, a panel at a time, so that only what has changed is sent. Names and texts go out as
they are: the page puts them in as text, never as markup.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runs import records
from skippipe.runs.records import EventRecord, LinkBytes, MetricsRow, RecordedIteration, TraceBar, WalSummary
from skippipe.runs.tail import FileTail, belongs_to, checkpoints_in, parse_object, run_id_of, traces_in
from skippipe.timeline import HUES

MOST_EVENTS = 300  # kept; older ones are in the file
SLOW_FOR = 1  # iterations for which a node that was waited for is shown as slow

FileSource = Literal["plan", "metrics", "events", "trace"]
SOURCES: tuple[FileSource, ...] = get_args(FileSource)
NodeStatus = Literal["lost", "here", "recovering"]
STATUS_OF_EVENT: dict[str, NodeStatus | None] = {
    "lost": "lost",
    "joined": "here",
    "recovering": "recovering",
    "recovered": None,
}
"""Kind of event → the status of its node; None: as the plan has it."""
MOST_POINTS = 300  # of a curve; more cannot be told apart on a screen
MOST_LINKS = 5000  # of a map; those with the fewest bytes are left out
CURVES = ("loss", "tokens_per_s", "sent_bytes", "seconds", "promised_s")
FIGURES = ("time", "tokens", "learning_rate", "elapsed_s", "left_s")

Panel = dict[str, Any]


@dataclass
class RunState:
    """What is known of a run by now."""

    plan: Plan | None = None
    """The plan in use."""
    recovering: frozenset[str] = frozenset()
    """Nodes of the plan that are still receiving the state of their stage."""
    done: bool | None = None
    """The run has ended in order, by its journal; None: it has none."""
    rows: list[MetricsRow] = field(default_factory=list)
    links: LinkBytes = field(default_factory=list)
    """Bytes between nodes in the last iteration."""
    stage_microbatches: list[int] = field(default_factory=list)
    """Microbatches in the gradient of each stage, in the last iteration."""
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    events_total: int = 0
    """All events, also those that are not kept."""
    status: dict[str, NodeStatus] = field(default_factory=dict)
    """Node → its status, where that is not as the plan has it."""
    slow: dict[str, int] = field(default_factory=dict)
    """Node → the last iteration that was late because of it."""
    checkpoints: dict[int, float] = field(default_factory=dict)
    """Iterations that were done → when the checkpoint was complete (Unix)."""
    gantt: RecordedIteration | None = None
    """The last recorded iteration."""
    unread: Counter[str] = field(default_factory=Counter)
    """File → lines that cannot be parsed."""
    versions: Counter[FileSource] = field(default_factory=Counter)
    """Source → a number that grows when it has changed."""


class RunFollower:
    """Keeps a `RunState` up to date with the files of a run."""

    def __init__(self, folder: Path, since: float = 0.0) -> None:
        """What was written before `since` (Unix) is of an earlier run in the same folder, and is not shown."""
        self.folder = folder
        self.state = RunState()
        self._since = since
        self._run_id: str | None = None
        """Files with another id are of another run, and are not shown; None: it is not known."""
        self._begin()

    def _begin(self) -> None:
        """Start over, with nothing read."""
        self._metrics = FileTail(self.folder / "metrics.jsonl", self._since)
        self._events = FileTail(self.folder / "events.jsonl", self._since)
        self._wal_file = FileTail(self.folder / "journal", self._since)
        self._wal = WalSummary()
        self._status_times: dict[str, float] = {}
        """Node → the time of the event that gave it its status."""
        self._plan_stamp: tuple[int, int] | None = None
        self._trace_stamp: tuple[str, int, int] | None = None

    def poll(self) -> bool:
        """Take in what is new; True if there is more to read right away."""
        run_id = run_id_of(self.folder)
        if run_id != self._run_id:  # another run is there now: nothing that was read counts
            versions = self.state.versions + Counter(dict.fromkeys(SOURCES, 1))
            self._run_id, self.state = run_id, RunState(versions=versions)
            self._begin()
        more = [self._read_events(), self._read_metrics(), self._read_wal()]
        if self._wal.last is None:
            self._read_plan_file()
        self._read_checkpoints()
        self._read_newest_trace()
        return any(more)

    def _read_metrics(self) -> bool:
        state, new = self.state, self._metrics.poll()
        if new.reset:
            state.rows, state.links, state.stage_microbatches = [], [], []
            state.unread["metrics.jsonl"] = 0
        for line in new.lines:
            found = records.metrics_of(line)
            if found is None:
                state.unread["metrics.jsonl"] += 1
                continue
            if not belongs_to(self._run_id, found.run):
                continue
            while state.rows and state.rows[-1].iteration >= found.row.iteration:  # done again: the newer line counts
                state.rows.pop()
            state.rows.append(found.row)
            state.links, state.stage_microbatches = found.links, found.stage_microbatches
        if new.lines or new.reset:
            state.versions["metrics"] += 1
        self._clear_stale_status()
        return new.more

    def _clear_stale_status(self) -> None:
        """Drop the status of nodes that are no longer slow, and of lost ones that send again.

        A coordinator that goes on from a checkpoint has all nodes again, and no event says so.
        """
        state = self.state
        last, when = (state.rows[-1].iteration, state.rows[-1].time or 0.0) if state.rows else (0, 0.0)
        senders = {sender for sender, _, _ in state.links}
        back = {name for name in senders if state.status.get(name) == "lost" and when > self._status_times[name]}
        recovered = {name for name, iteration in state.slow.items() if iteration < last - SLOW_FOR}
        for name in back:
            del state.status[name]
        for name in recovered:
            del state.slow[name]
        if back or recovered:
            state.versions["events"] += 1

    def _read_events(self) -> bool:
        state, new = self.state, self._events.poll()
        if new.reset:
            state.events.clear()
            state.status, state.slow, state.events_total = {}, {}, 0
            state.unread["events.jsonl"] = 0
        for line in new.lines:
            found = records.event_of(line)
            if found is None:
                state.unread["events.jsonl"] += 1
            elif belongs_to(self._run_id, found[1]):
                self._take(found[0])
        if new.lines or new.reset:
            state.versions["events"] += 1
        return new.more

    def _take(self, event: EventRecord) -> None:
        state = self.state
        state.events.append(event)
        state.events_total += 1
        if event.kind == "coordinator-restarted":
            state.status = {}
        if event.kind == "slow" and event.node:
            state.slow[event.node] = event.iteration
        if event.kind in STATUS_OF_EVENT and event.node:
            status = STATUS_OF_EVENT[event.kind]
            state.status.pop(event.node, None)
            state.slow.pop(event.node, None)
            if status is not None:
                state.status[event.node] = status
            self._status_times[event.node] = event.time

    def _read_wal(self) -> bool:
        """The journal has the plan in use, also when it was repaired on the way."""
        state, new = self.state, self._wal_file.poll()
        before = self._wal.last, state.done
        if new.reset:
            self._wal, self._plan_stamp = WalSummary(), None
            state.unread["journal"] = 0
        for line in new.lines:
            if not self._wal.add_line(line):
                state.unread["journal"] += 1
        ours = belongs_to(self._run_id, self._wal.run)
        last, state.done = (self._wal.last, self._wal.done) if ours else (None, None)
        if (last, state.done) != before:
            if last is not None and last is not before[0]:
                self._set_plan(last.get("plan"), records.as_list(last.get("recovering")), "journal")
            state.versions["plan"] += 1
        return new.more

    def _read_plan_file(self) -> None:
        path = self.folder / "plan.json"
        try:
            status = path.stat()
        except OSError:
            return
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp == self._plan_stamp or status.st_mtime < self._since or status.st_size > records.LARGEST_BYTES:
            return
        self._plan_stamp = stamp
        try:
            content = path.read_bytes()
        except OSError:
            return
        self.state.unread["plan.json"] = 0
        self._set_plan(parse_object(content), [], "plan.json")

    def _set_plan(self, plan: Any, recovering: list[Any], source: str) -> None:
        state = self.state
        try:
            state.plan = Plan.from_json(plan)
        except UserError:
            state.unread[source] += 1  # the last one that could be read is shown
        else:
            nodes = state.plan.cluster.nodes
            numbers = [records.as_count(each) for each in recovering]
            state.recovering = frozenset(nodes[each].name for each in numbers if each is not None and each < len(nodes))
        state.versions["plan"] += 1

    def _read_checkpoints(self) -> None:
        found = checkpoints_in(self.folder, self._since)
        if any(number not in self.state.checkpoints for number in found):
            self.state.checkpoints |= found  # also those that are deleted by now were made
            self.state.versions["events"] += 1

    def _read_newest_trace(self) -> None:
        """The newest trace of an iteration that this run has done: a folder may have some of an earlier run too."""
        state = self.state
        last = state.rows[-1].iteration if state.rows else -1
        found = [each for each in traces_in(self.folder, self._since) if each.iteration <= last]
        if not found:
            if state.gantt is not None and not state.rows:
                state.gantt, self._trace_stamp = None, None
                state.versions["trace"] += 1
            return
        _, iteration, path = max(found)
        try:
            status = path.stat()
            stamp = (path.name, status.st_mtime_ns, status.st_size)
            if stamp == self._trace_stamp:
                return
            state.gantt = records.read_recorded(path, iteration, self._run_id)
        except (OSError, ValueError):  # being written: the next poll will tell
            return
        self._trace_stamp = stamp
        state.versions["trace"] += 1


class Panels:
    """The panels as text, made anew where their sources have changed."""

    def __init__(self, follower: RunFollower) -> None:
        self.follower = follower
        self.texts: dict[str, str] = {}
        """Panel → its JSON, in one line."""
        self._made_of: dict[str, tuple[int, ...]] = {}

    def poll(self) -> bool:
        """Read what is new in the files; True if there is more to read right away."""
        more = self.follower.poll()
        state, texts = self.follower.state, dict(self.texts)
        for name, (made, sources) in PANELS.items():
            made_of = tuple(state.versions[source] for source in sources)
            if self._made_of.get(name) != made_of:
                text = json.dumps(made(state, self.follower.folder), allow_nan=False)
                if text != texts.get(name):
                    texts[name] = text
                self._made_of[name] = made_of
        self.texts = texts  # replaced as a whole: other threads may be reading
        return more


def run_panel(state: RunState, folder: Path) -> Panel:
    """What is trained, and the progress of the run."""
    last = state.rows[-1] if state.rows else None
    is_last = last is not None and last.is_last
    return {
        "folder": folder.name or str(folder),
        "done": is_last if state.done is None else state.done,
        "stopped": bool(state.done) and not is_last and (last is None or last.total_iterations is not None),
        "resumable": bool(state.checkpoints),
        "iterations": last.iteration + 1 if last else 0,
        "total": last.total_iterations if last else None,
        **{name: getattr(last, name, None) for name in (*CURVES, *FIGURES)},
        "validation_loss": next((loss for row in reversed(state.rows) if (loss := row.validation_loss)), None),
        "unread": {file: count for file, count in sorted(state.unread.items()) if count},
        **(_plan_figures(state.plan) if state.plan else {}),
    }


def _plan_figures(plan: Plan) -> Panel:
    return {
        "model": plan.workload.model.name,
        "parameters": plan.workload.model.parameters,
        "cluster": plan.cluster.name,
        "nodes": len(plan.stage_of),
        "stages": len(plan.stages),
        "visited": plan.visited,
        "microbatches": plan.microbatches,
        "strategy": plan.strategy,
    }


def map_panel(state: RunState, _folder: Path) -> Panel:
    """The nodes on their stages, and the lanes. Places in `nodes` stand for nodes, here and in `load_panel`."""
    plan = state.plan
    if plan is None:
        return {"nodes": [], "stages": [], "lanes": []}
    lanes_of = [0] * len(plan.cluster.nodes)
    for lane in plan.lanes:
        for node in lane.path:
            lanes_of[node] += 1
    data_nodes = list(dict.fromkeys(lane.path[0] for lane in plan.lanes))
    return {
        "nodes": [
            {
                "name": node.name,
                "location": node.location,
                "stage": plan.stage_of.get(number),
                "lanes": lanes_of[number],
                "slots": plan.slots.get(number),
                "status": _status(state, node.name, number in plan.stage_of),
            }
            for number, node in enumerate(plan.cluster.nodes)
        ],
        "stages": [{"layers": stage.layers, "nodes": list(stage.nodes)} for stage in plan.stages],
        "lanes": [
            {
                "path": list(lane.path),
                "stages": list(plan.visits(lane)),
                "microbatches": lane.microbatches,
                "hue": HUES[data_nodes.index(lane.path[0]) % len(HUES)],
            }
            for lane in plan.lanes
        ],
    }


def _status(state: RunState, name: str, planned: bool) -> str:
    """lost, here (has joined and waits for a stage), recovering, slow, works, or spare (it never joined)."""
    known = state.status.get(name)
    if known is not None:
        return known
    if not planned:
        return "spare"
    if name in state.recovering:
        return "recovering"
    return "slow" if name in state.slow else "works"


def load_panel(state: RunState, _folder: Path) -> Panel:
    """Bytes between nodes in the last iteration; both directions of a link stand together."""
    numbers = state.plan.cluster.number if state.plan else {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for sender, receiver, sent in state.links:
        if sender in numbers and receiver in numbers and sent:
            a, b = numbers[sender], numbers[receiver]
            pairs.setdefault((min(a, b), max(a, b)), [0, 0])[int(a > b)] += sent
    links = sorted(([a, b, *sent] for (a, b), sent in pairs.items()), key=lambda link: -link[2] - link[3])
    return {
        "iteration": state.rows[-1].iteration if state.rows else None,
        "links": links[:MOST_LINKS],
        "left_out": max(0, len(links) - MOST_LINKS),
        "visits": state.stage_microbatches,
    }


def curves_panel(state: RunState, _folder: Path) -> Panel:
    """Loss, speed and bytes of every iteration; of long runs, means of neighbours."""
    size, rows = records.downsample(state.rows, MOST_POINTS)
    columns = {name: [getattr(row, name) for row in rows] for name in CURVES}
    return {
        "mean_of": size,
        "iteration": [row.iteration for row in rows],
        **{name: [value and float(f"{value:.7g}") for value in column] for name, column in columns.items()},
        "validation_loss": list(accumulate((row.validation_loss for row in rows), _newer)),
    }


def _newer(before: float | None, now: float | None) -> float | None:
    """What is known by now: a held-out loss holds until the next evaluation."""
    return before if now is None else now


def gantt_panel(state: RunState, _folder: Path) -> Panel:
    gantt = state.gantt
    if gantt is None:
        return {"iteration": None}
    return {
        "iteration": gantt.iteration,
        "kinds": [str(kind) for kind in records.KINDS],
        "rows": [{"stage": stage, "name": name} for stage, name in gantt.rows],
        "hues": gantt.hues,
        "planned": list(map(_plain, gantt.planned)),
        "measured": list(map(_plain, gantt.measured)),
    }


def _plain(bar: TraceBar) -> list[float]:
    start_s, end_s = (round(time, 6) if math.isfinite(time) else 0.0 for time in (bar.start_s, bar.end_s))
    return [bar.row, bar.kind, start_s, end_s, bar.lane, bar.microbatch, bar.step]


def events_panel(state: RunState, _folder: Path) -> Panel:
    """Events, the newest first; checkpoints that are complete are among them."""
    made = [records.checkpoint_event(number, time) for number, time in state.checkpoints.items()]
    shown = [event._asdict() for event in (*state.events, *made)]
    shown.sort(key=lambda event: float(event["time"]), reverse=True)
    return {"events": shown, "in_all": state.events_total + len(made)}


PANELS: dict[str, tuple[Callable[[RunState, Path], Panel], tuple[FileSource, ...]]] = {
    "run": (run_panel, ("plan", "metrics", "events")),
    "map": (map_panel, ("plan", "events")),
    "load": (load_panel, ("plan", "metrics")),
    "chart": (gantt_panel, ("trace",)),
    "curves": (curves_panel, ("metrics",)),
    "events": (events_panel, ("events",)),
}
"""Panel → the function that makes it, and the sources that it is made of."""
