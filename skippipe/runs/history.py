"""A run from its first iteration to its last, read once when it is over; what is missing is listed.

Files may be missing or torn, and may have lines of another run, which do not count. Of lines for the same iteration
the last one counts, and it voids those of later iterations before it: a run that is resumed from a checkpoint does some
of them again.

From it follow the outages of nodes (what was done about them, and what became of the nodes) and their utilization, as
planned and as measured: means over the recorded iterations, those since the model has its last depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from skippipe.cluster import Cluster
from skippipe.cost_model import seconds
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runs import records
from skippipe.runs.records import EventRecord, MetricsRow, RecordedIteration, TraceBar, WalSummary
from skippipe.runs.tail import belongs_to, checkpoints_in, modification_time, run_id_of, traces_in
from skippipe.timeline import ranges_text

MOST_RECORDED = 20  # recorded iterations that are read, the newest ones
CLOCK_S = 2.0  # by which the time of a file may differ from the time in a line written with it
FILES = ("metrics.jsonl", "events.jsonl", "journal")
UNREAD, OF_OTHERS = "cannot be read", "of another run are passed over"
RESPONSES = ("rerouted", "restarted", "paused")
Read = TypeVar("Read")


@dataclass(frozen=True)
class RunHistory:
    """All that is on record of a run."""

    folder: Path
    rows: tuple[MetricsRow, ...]
    """Iterations that were done, in order; at least one."""
    links: dict[tuple[str, str], int]
    """Sender and receiver → bytes of tensors, over the whole run."""
    last_sent: dict[str, int]
    """Node → the last iteration in which it sent tensors."""
    plan: Plan | None
    """The plan that it began with."""
    last_plan: Plan | None
    """The plan that it ended with, if its journal has it."""
    measured: Cluster | None
    """The cluster as nodes and links were measured by the end."""
    ended: bool | None
    """The run ended in order, perhaps early on request, and was not broken off; None: not known."""
    events: tuple[EventRecord, ...]
    """Events in the order in which they happened, complete checkpoints among them."""
    recorded: tuple[RecordedIteration, ...]
    """Recorded iterations, in order."""
    missing: tuple[str, ...]
    """What is not on record or could not be read, a line for each."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def row(self) -> dict[int, MetricsRow]:
        """Iteration → its row."""
        return {row.iteration: row for row in self.rows}

    @cached_property
    def utilization(self) -> list[NodeUtilization]:
        """Utilization of every node, ordered by stage; nodes without a stage come last. Nothing counts as planned if
        the plan is for other machines."""
        plan = self.last_plan or self.plan
        stage_of = {plan.cluster.nodes[node].name: stage for node, stage in plan.stage_of.items()} if plan else {}
        planned, measured = _recorded(self)
        if not self.is_promised:
            planned = {}
        elif not planned and self.plan is not None:
            planned = _promised(self.plan)
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for (sender, receiver), count in self.links.items():
            sent[sender] += count
            received[receiver] += count
        waited_for = Counter(event.node for event in self.events if event.kind == "slow" and event.node)
        slowdowns = _slowdowns(self) if self.is_promised else {}
        names = dict.fromkeys([*stage_of, *planned, *measured, *sent, *received, *waited_for])
        found = [
            NodeUtilization(
                *(name, stage_of.get(name), planned.get(name), measured.get(name), slowdowns.get(name)),
                *(waited_for[name], sent[name], received[name]),
            )
            for name in names
        ]
        return sorted(found, key=lambda use: (use.stage is None, use.stage or 0))

    @cached_property
    def compared(self) -> tuple[RecordedIteration, ...]:
        """Recorded iterations since the model has grown for the last time, before which nodes had other stages; all, if
        there are none since."""
        grown = max((event.iteration for event in self.events if event.kind == "grown"), default=0)
        return tuple(recorded for recorded in self.recorded if recorded.iteration >= grown) or self.recorded

    @cached_property
    def outages(self) -> list[NodeOutage]:
        """Outages of nodes, in the order in which they happened."""
        found = []
        for place, event in enumerate(self.events):
            if event.kind == "lost":
                later = list(self.events[place + 1 :])
                again = [at for at, each in enumerate(later) if each.kind == "lost" and each.node == event.node]
                del later[again[0] + 1 if again else len(later) :]  # until it is lost again
                outage = (event.node, event.iteration, event.time, event.text, _response(later, event))
                found.append(NodeOutage(*outage, _end(later, event, self)))
        return found

    @property
    def losses(self) -> list[float]:
        """Training losses that are known and finite."""
        return [row.loss for row in self.rows if row.loss is not None]

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Iteration and held-out loss after it, of every evaluation."""
        return [(row.iteration, row.validation_loss) for row in self.rows if row.validation_loss is not None]

    @property
    def sent_bytes(self) -> int:
        return round(sum(row.sent_bytes or 0.0 for row in self.rows))

    @property
    def typical_s(self) -> float | None:
        """Median seconds of an iteration; the first one warms up."""
        return _median([row.seconds for row in self.rows[1:] or self.rows])

    @property
    def is_promised(self) -> bool:
        """Whether there was a promise that meant something: the plan was for the machines that it ran on."""
        return self.promised_s is not None

    @property
    def promised_s(self) -> float | None:
        return _median([row.promised_s for row in self.rows])

    @property
    def over_promise(self) -> float | None:
        """Median of seconds over promised seconds, iteration by iteration: plans may change on the way."""
        rows = self.rows[1:] or self.rows
        return _median([row.seconds / row.promised_s for row in rows if row.seconds and row.promised_s])

    @property
    def tokens_per_s(self) -> float | None:
        return _median([row.tokens_per_s for row in self.rows[1:] or self.rows])


def read_history(folder: Path) -> RunHistory:
    """Read the history of a run; UserError if no run has done an iteration there."""
    missing: list[str] = []
    run_id = run_id_of(folder)
    rows, links, last_sent = _read_metrics(folder, run_id, missing)
    if not rows:
        raise UserError(_no_run_error(folder))
    _report_gaps(rows, missing)
    if not any(links.values()):
        missing.append("bytes between nodes: none were sent, as in a run in one process, or none were written down")
    events = _read_events(folder, run_id, missing)
    start_time = rows[0].time or 0.0
    checkpoints = [
        records.checkpoint_event(*each) for each in sorted(checkpoints_in(folder, start_time - CLOCK_S).items())
    ]
    wal = _read_journal(folder, run_id, start_time, missing)
    ended = True if wal.done is None and rows[-1].is_last else wal.done
    if ended is None:
        missing.append("whether the run ended in order: nothing is in its journal")
    return RunHistory(
        folder=folder,
        rows=tuple(rows),
        links=links,
        last_sent=last_sent,
        plan=_or_missing(lambda: Plan.load(folder / "plan.json"), "the plan", missing),
        last_plan=_or_missing(
            lambda: Plan.from_json(wal.last.get("plan")) if wal.last else None,
            "the last plan in the journal cannot be read",
            missing,
        ),
        measured=_read_cluster(folder, start_time, missing),
        ended=ended,
        events=tuple(sorted([*events, *checkpoints], key=lambda event: event.time)),
        recorded=tuple(_read_recorded_iterations(folder, run_id, {row.iteration: row for row in rows}, missing)),
        missing=tuple(missing),
    )


def _no_run_error(folder: Path) -> str:
    if any((folder / name).exists() for name in FILES):
        return (
            f"{folder}: a run began here, but no iteration is on record; 'skippipe show {folder / 'plan.json'}' shows "
            f"its plan, and {folder / 'events.jsonl'} may say what happened"
        )
    if (folder / "plan.json").exists():
        return f"{folder}: has a plan, but no run; 'skippipe show {folder / 'plan.json'}' shows the plan"
    return f"{folder}: no run wrote this folder: there is no metrics.jsonl; name the output of a 'skippipe train'"


def _read_metrics(
    folder: Path, run_id: str | None, missing: list[str]
) -> tuple[list[MetricsRow], dict[tuple[str, str], int], dict[str, int]]:
    rows: list[MetricsRow] = []
    links: dict[tuple[str, str], int] = {}
    last_sent: dict[str, int] = {}
    unread = others = 0
    for line in reversed(_lines(folder / "metrics.jsonl", missing)):  # from the end: what counts is known at once
        found = records.metrics_of(line)
        if found is None:
            unread += 1
            continue
        if not belongs_to(run_id, found.run):
            others += 1
            continue
        if rows and found.row.iteration >= rows[-1].iteration:
            continue  # done again later
        rows.append(found.row)
        for sender, receiver, sent_bytes in found.links:
            links[sender, receiver] = links.get((sender, receiver), 0) + sent_bytes
            last_sent.setdefault(sender, found.row.iteration)
    _report_lines("metrics.jsonl", unread, UNREAD, missing)
    _report_lines("metrics.jsonl", others, OF_OTHERS, missing)
    return rows[::-1], links, last_sent


def _report_gaps(rows: Sequence[MetricsRow], missing: list[str]) -> None:
    gaps = set(range(rows[-1].iteration)) - {row.iteration for row in rows}
    if gaps:
        missing.append(f"iterations {ranges_text(number + 1 for number in gaps)}: metrics.jsonl has no line of them")
    if all(row.promised_s is None for row in rows):
        missing.append("promised seconds: none, as in one process, or on other machines than the plan is for")


def _read_events(folder: Path, run_id: str | None, missing: list[str]) -> list[EventRecord]:
    found = [records.event_of(line) for line in _lines(folder / "events.jsonl", missing)]
    _report_lines("events.jsonl", found.count(None), UNREAD, missing)
    ours = [each[0] for each in found if each is not None and belongs_to(run_id, each[1])]
    _report_lines("events.jsonl", len(found) - found.count(None) - len(ours), OF_OTHERS, missing)
    return ours


def _read_journal(folder: Path, run_id: str | None, start_time: float, missing: list[str]) -> WalSummary:
    """The run's journal; engines without one leave that of an earlier run as it is."""
    wal = WalSummary()
    made = modification_time(folder / "journal")
    if made is not None and made >= start_time - CLOCK_S:
        lines = _lines(folder / "journal", missing)
        _report_lines("journal", sum(not wal.add_line(line) for line in lines), UNREAD, missing)
    if wal.done is not None and not belongs_to(run_id, wal.run):
        missing.append("journal: is of another run")
        wal = WalSummary()
    if wal.done is None:
        missing.append("plans that were made on the way: nothing is in its journal")
    return wal


def _or_missing(read: Callable[[], Read], what: str, missing: list[str]) -> Read | None:
    """What is read, or None with a line that says what cannot be."""
    try:
        return read()
    except UserError as error:
        missing.append(f"{what}: {error}")
        return None


def _read_cluster(folder: Path, start_time: float, missing: list[str]) -> Cluster | None:
    made = modification_time(folder / "cluster.json")
    if made is None or made < start_time - CLOCK_S:
        missing.append("what nodes and links took by the end: there is no cluster.json")
        return None
    return _or_missing(lambda: Cluster.load(folder / "cluster.json"), "what nodes and links took by the end", missing)


def _read_recorded_iterations(
    folder: Path, run_id: str | None, row: dict[int, MetricsRow], missing: list[str]
) -> list[RecordedIteration]:
    """Traces of this run: those written after the line of their iteration."""
    found = [each for each in traces_in(folder) if each.iteration in row]
    found = [each for each in found if each.made >= (row[each.iteration].time or 0.0) - CLOCK_S]
    found.sort(key=lambda each: each.iteration)
    if not found:
        missing.append("how busy nodes were: no iteration was recorded (report.recorded in the job)")
    elif len(found) > MOST_RECORDED:
        missing.append(f"{len(found)} iterations were recorded; the last {MOST_RECORDED} are counted here")
    recorded = []
    for each in found[-MOST_RECORDED:]:
        try:
            recorded.append(records.read_recorded(each.path, each.iteration, run_id))
        except (OSError, ValueError) as error:
            missing.append(f"traces/{each.path.name} cannot be read: {error}")
    return recorded


def _lines(path: Path, missing: list[str]) -> list[bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        missing.append(f"{path.name}: there is none")
        return []
    except OSError as error:
        missing.append(f"{path.name}: {error.strerror or error}")
        return []
    *lines, rest = content.split(b"\n")
    if rest:
        missing.append(f"{path.name}: its last line was cut short")
    return lines


def _report_lines(name: str, count: int, what: str, missing: list[str]) -> None:
    if count:
        missing.append(f"{name}: {count} line{'s' * (count > 1)} {what}")


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


class NodeOutage(NamedTuple):
    """A node that was lost."""

    node: str
    iteration: int
    """Iteration in which it was lost, from 0."""
    time: float
    why: str
    answer: str
    """What was done within the iteration; empty: nothing is on record."""
    end: str
    """What became of the node."""


def _response(later: Sequence[EventRecord], outage: EventRecord) -> str:
    for event in later:
        if event.kind in RESPONSES and event.node in (outage.node, "") and event.iteration == outage.iteration:
            return f"{event.kind}: {event.text}"
    return ""


def _end(later: Sequence[EventRecord], outage: EventRecord, history: RunHistory) -> str:
    mine = {event.kind: event for event in reversed(later) if event.node == outage.node}  # the first of each kind
    if "recovered" in mine:
        return f"back at work from iteration {mine['recovered'].iteration + 2} on"
    if any(event.kind == "coordinator-restarted" for event in later):
        return "membership began anew when the coordinator was restarted"
    if "lost" in mine:
        return f"came back, and was lost again in iteration {mine['lost'].iteration + 1}"
    came = mine.get("joined") or mine.get("recovering")
    if came is not None:
        return f"came back in iteration {came.iteration + 1}; no event says that it got microbatches"
    if history.last_sent.get(outage.node, -1) > outage.iteration:
        return f"at work again, as late as iteration {history.last_sent[outage.node] + 1}; no event says since when"
    return "did not come back"


class Utilization(NamedTuple):
    """What a node did in an iteration."""

    iteration_s: float
    busy_s: float
    collision_s: float
    """Seconds that ready tasks waited for the node, summed over the tasks."""

    @property
    def idle_s(self) -> float:
        return self.iteration_s - self.busy_s


class NodeUtilization(NamedTuple):
    """How busy a node was over a run."""

    name: str
    stage: int | None
    """Its stage in the last plan that is known; None: it has none there."""
    planned: Utilization | None
    measured: Utilization | None
    slowdown: float | None
    """How many times as long as planned its tasks took at the end: a running mean over recent tasks."""
    waited_for: int
    """How often an iteration took too long because of it."""
    sent_bytes: int
    received_bytes: int


def _recorded(history: RunHistory) -> tuple[dict[str, Utilization], dict[str, Utilization]]:
    """Node → its utilization as planned for recorded iterations, and as measured in them."""
    planned: dict[str, list[Utilization]] = {}
    measured: dict[str, list[Utilization]] = {}
    for recorded in history.compared:
        whole_s = history.row[recorded.iteration].seconds
        if recorded.planned:
            _add(planned, recorded, recorded.planned, max(bar.end_s for bar in recorded.planned))
        if recorded.measured and whole_s is not None:
            _add(measured, recorded, recorded.measured, whole_s)
    return _means(planned), _means(measured)


def _add(
    utilization: dict[str, list[Utilization]], recorded: RecordedIteration, bars: Sequence[TraceBar], iteration_s: float
) -> None:
    busy_s, collision_s = [0.0] * len(recorded.rows), [0.0] * len(recorded.rows)
    for bar in bars:
        if bar.kind in records.TASKS:
            busy_s[bar.row] += bar.end_s - bar.start_s
            collision_s[bar.row] += bar.waited_s
    for (_, name), *times in zip(recorded.rows, busy_s, collision_s, strict=True):
        utilization.setdefault(records.DEVICE.sub("", name), []).append(Utilization(iteration_s, *times))


def _means(utilization: dict[str, list[Utilization]]) -> dict[str, Utilization]:
    return {name: Utilization(*map(fmean, zip(*found, strict=True))) for name, found in utilization.items()}


def _promised(plan: Plan) -> dict[str, Utilization]:
    expected = plan.expected
    if expected is None:
        return {}
    return {
        plan.cluster.nodes[use.node].name: Utilization(
            expected.iteration_s, seconds(use.worker_busy_ns), seconds(use.collision_ns)
        )
        for use in expected.nodes
    }


def _slowdowns(history: RunHistory) -> dict[str, float]:
    if history.plan is None or history.measured is None:
        return {}
    measured = {node.name: node.flops_per_s for node in history.measured.nodes}
    held = {history.plan.cluster.nodes[number].name for number in history.plan.stage_of}
    return {
        node.name: node.flops_per_s / measured[node.name]
        for node in history.plan.cluster.nodes
        if node.name in held and measured.get(node.name)
    }
