"""All that a run writes into its output folder, as one state that is kept up to date.

The files belong to a run that goes on: any of them may be missing, half-written, replaced or begun anew, and a line
that cannot be read is counted and passed over. Each source has a number that grows when it has changed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runs.gantt_data import LARGEST_BYTES, GanttData, read_gantt
from skippipe.runs.records import (
    EventRecord,
    Links,
    MetricsRow,
    WalSummary,
    count,
    event_of,
    items,
    metrics_of,
    object_of,
)
from skippipe.runs.tail import FileTail, checkpoints_in, is_of, run_id_of, traces_in

MOST_EVENTS = 300  # kept; older ones are in the file
SLOW_FOR = 1  # iterations after it was last waited for

Source = Literal["plan", "metrics", "events", "trace"]
SOURCES: tuple[Source, ...] = get_args(Source)
NodeStatus = Literal["lost", "here", "learning"]
STANDINGS: dict[str, NodeStatus | None] = {"gone": "lost", "joined": "here", "learning": "learning", "able": None}
"""What an event makes of a node; None: as the plan has it."""


@dataclass
class RunState:
    """What is known of a run by now."""

    plan: Plan | None = None
    """In use."""
    learning: frozenset[str] = frozenset()
    """Nodes of the plan that do not have the state of their stage yet."""
    done: bool | None = None
    """The run has ended, and said so; None: it has no journal in which it would."""
    rows: list[MetricsRow] = field(default_factory=list)
    links: Links = field(default_factory=list)
    """In the last iteration."""
    visits: list[int] = field(default_factory=list)
    """Microbatches in the gradient of each stage, in the last iteration."""
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    happened: int = 0
    """Events in all."""
    standing: dict[str, NodeStatus] = field(default_factory=dict)
    """Of nodes that are not just as the plan has them."""
    slow: dict[str, int] = field(default_factory=dict)
    """Node → the iteration in which it was last waited for."""
    checkpoints: dict[int, float] = field(default_factory=dict)
    """Iterations that were done → when it was complete (Unix)."""
    chart: GanttData | None = None
    """The last recorded iteration."""
    unread: Counter[str] = field(default_factory=Counter)
    """File → lines that nobody understands."""
    versions: Counter[Source] = field(default_factory=Counter)


class RunFollower:
    def __init__(self, folder: Path, since: float = 0.0) -> None:
        """What was written before `since` (Unix) is of an earlier run in the same folder, and is not shown."""
        self.folder = folder
        self.state = RunState()
        self._since = since
        self._run_id: str | None = None
        """What has another id is of another run, and is not shown; None: it is not known."""
        self._begin()

    def _begin(self) -> None:
        """With nothing read."""
        self._metrics = FileTail(self.folder / "metrics.jsonl", self._since)
        self._events = FileTail(self.folder / "events.jsonl", self._since)
        self._wal = FileTail(self.folder / "journal", self._since)
        self._noted = WalSummary()
        self._stood_at: dict[str, float] = {}
        """Node → the time of the last event that says where it stands."""
        self._plan_stamp: tuple[int, int] | None = None
        self._trace_stamp: tuple[str, int, int] | None = None

    def look(self) -> bool:
        """Take in what is new; whether there is more to read at once."""
        run_id = run_id_of(self.folder)
        if run_id != self._run_id:  # another run is there now: nothing that was read counts
            versions = self.state.versions + Counter(dict.fromkeys(SOURCES, 1))
            self._run_id, self.state = run_id, RunState(versions=versions)
            self._begin()
        more = [self._look_at_events(), self._look_at_metrics(), self._look_at_journal()]
        if self._noted.last is None:
            self._look_at_plan_file()
        self._look_at_checkpoints()
        self._look_at_traces()
        return any(more)

    def _look_at_metrics(self) -> bool:
        state, look = self.state, self._metrics.look()
        if look.anew:
            state.rows, state.links, state.visits = [], [], []
            state.unread["metrics.jsonl"] = 0
        for line in look.lines:
            found = metrics_of(line)
            if found is None:
                state.unread["metrics.jsonl"] += 1
                continue
            if not is_of(self._run_id, found.run):
                continue
            while state.rows and state.rows[-1].iteration >= found.row.iteration:  # done again: the newer line counts
                state.rows.pop()
            state.rows.append(found.row)
            state.links, state.visits = found.links, found.visits
        if look.lines or look.anew:
            state.versions["metrics"] += 1
        self._forgive()
        return look.more

    def _forgive(self) -> None:
        """Whoever is not waited for any more is slow no more; whoever sends is there.

        A coordinator that goes on from a checkpoint has all nodes again, and no event says so.
        """
        state = self.state
        last, when = (state.rows[-1].iteration, state.rows[-1].time or 0.0) if state.rows else (0, 0.0)
        senders = {sender for sender, _, _ in state.links}
        back = {name for name in senders if state.standing.get(name) == "lost" and when > self._stood_at[name]}
        forgiven = {name for name, iteration in state.slow.items() if iteration < last - SLOW_FOR}
        for name in back:
            del state.standing[name]
        for name in forgiven:
            del state.slow[name]
        if back or forgiven:
            state.versions["events"] += 1

    def _look_at_events(self) -> bool:
        state, look = self.state, self._events.look()
        if look.anew:
            state.events.clear()
            state.standing, state.slow, state.happened = {}, {}, 0
            state.unread["events.jsonl"] = 0
        for line in look.lines:
            found = event_of(line)
            if found is None:
                state.unread["events.jsonl"] += 1
            elif is_of(self._run_id, found[1]):
                self._take(found[0])
        if look.lines or look.anew:
            state.versions["events"] += 1
        return look.more

    def _take(self, event: EventRecord) -> None:
        state = self.state
        state.events.append(event)
        state.happened += 1
        if event.kind == "recovered":
            state.standing = {}
        if event.kind == "slow" and event.node:
            state.slow[event.node] = event.iteration
        if event.kind in STANDINGS and event.node:
            standing = STANDINGS[event.kind]
            state.standing.pop(event.node, None)
            state.slow.pop(event.node, None)
            if standing is not None:
                state.standing[event.node] = standing
            self._stood_at[event.node] = event.time

    def _look_at_journal(self) -> bool:
        """Of plans that were repaired on the way, it has the one in use."""
        state, look = self.state, self._wal.look()
        before = self._noted.last, state.done
        if look.anew:
            self._noted, self._plan_stamp = WalSummary(), None
            state.unread["journal"] = 0
        for line in look.lines:
            if not self._noted.take(line):
                state.unread["journal"] += 1
        ours = is_of(self._run_id, self._noted.run)
        last, state.done = (self._noted.last, self._noted.done) if ours else (None, None)
        if (last, state.done) != before:
            if last is not None and last is not before[0]:
                self._use(last.get("plan"), items(last.get("learning")), "journal")
            state.versions["plan"] += 1
        return look.more

    def _look_at_plan_file(self) -> None:
        path = self.folder / "plan.json"
        try:
            status = path.stat()
        except OSError:
            return
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp == self._plan_stamp or status.st_mtime < self._since or status.st_size > LARGEST_BYTES:
            return
        self._plan_stamp = stamp
        try:
            content = path.read_bytes()
        except OSError:
            return
        self.state.unread["plan.json"] = 0
        self._use(object_of(content), [], "plan.json")

    def _use(self, plan: Any, learning: list[Any], source: str) -> None:
        state = self.state
        try:
            state.plan = Plan.from_json(plan)
        except UserError:
            state.unread[source] += 1  # the last one that could be read is shown
        else:
            nodes = state.plan.cluster.nodes
            numbers = [count(each) for each in learning]
            state.learning = frozenset(nodes[each].name for each in numbers if each is not None and each < len(nodes))
        state.versions["plan"] += 1

    def _look_at_checkpoints(self) -> None:
        found = checkpoints_in(self.folder, self._since)
        if any(number not in self.state.checkpoints for number in found):
            self.state.checkpoints |= found  # also those that are deleted by now were made
            self.state.versions["events"] += 1

    def _look_at_traces(self) -> None:
        """The newest, of iterations that this run has done: a folder may have some of an earlier run too."""
        state = self.state
        last = state.rows[-1].iteration if state.rows else -1
        found = [each for each in traces_in(self.folder, self._since) if each.iteration <= last]
        if not found:
            if state.chart is not None and not state.rows:
                state.chart, self._trace_stamp = None, None
                state.versions["trace"] += 1
            return
        _, iteration, path = max(found)
        try:
            status = path.stat()
            stamp = (path.name, status.st_mtime_ns, status.st_size)
            if stamp == self._trace_stamp:
                return
            state.chart = read_gantt(path, iteration, self._run_id)
        except (OSError, ValueError):  # being written: the next look will tell
            return
        self._trace_stamp = stamp
        state.versions["trace"] += 1
