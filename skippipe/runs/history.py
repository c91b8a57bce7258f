"""A run from its first iteration to its last, read once when it is over; what is not on record is said.

Files may be missing or torn, and may have lines of another run, which do not count. Of lines for the same iteration
the last one counts, and it voids those of later iterations before it: a run that is resumed from a checkpoint does some
of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.report.summary import ranges
from skippipe.runs.gantt_data import GanttData, read_gantt
from skippipe.runs.node_outages import NodeOutage, node_outages
from skippipe.runs.records import EventRecord, MetricsRow, WalSummary, checkpointed, event_of, metrics_of
from skippipe.runs.tail import checkpoints_in, is_of, modified, run_id_of, traces_in
from skippipe.runs.utilization import NodeUtilization, node_utilization

MOST_CHARTS = 20  # recorded iterations that are read, the newest ones
CLOCK_S = 2.0  # by which the time of a file may differ from the time in a line written with it
FILES = ("metrics.jsonl", "events.jsonl", "journal")


@dataclass(frozen=True)
class RunHistory:
    folder: Path
    rows: tuple[MetricsRow, ...]
    """Iterations that were done, in order; at least one."""
    links: dict[tuple[str, str], int]
    """Sender and receiver → bytes of tensors, over the whole run."""
    last_sent: dict[str, int]
    """Node → the last iteration in which it sent tensors."""
    plan: Plan | None
    """That it began with."""
    last_plan: Plan | None
    """That it ended with, if its journal says so."""
    measured: Cluster | None
    """What nodes and links really took, by the end."""
    ended: bool | None
    """In order, and not broken off; None: nothing says so. It may have been asked to end early."""
    events: tuple[EventRecord, ...]
    """In the order in which they happened, complete checkpoints among them."""
    charts: tuple[GanttData, ...]
    """Recorded iterations, in order."""
    missing: tuple[str, ...]
    """What is not on record or could not be read, in words."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def row(self) -> dict[int, MetricsRow]:
        """By iteration."""
        return {row.iteration: row for row in self.rows}

    @cached_property
    def uses(self) -> list[NodeUtilization]:
        return node_utilization(self)

    @cached_property
    def lost(self) -> list[NodeOutage]:
        return node_outages(self)

    @property
    def losses(self) -> list[float]:
        """That are known and finite."""
        return [row.loss for row in self.rows if row.loss is not None]

    @property
    def sent_bytes(self) -> int:
        return round(sum(row.sent_bytes or 0.0 for row in self.rows))

    @property
    def typical_s(self) -> float | None:
        """Median seconds of an iteration; the first one warms up."""
        return _median([row.seconds for row in self.rows[1:] or self.rows])

    @property
    def promised_s(self) -> float | None:
        return _median([row.promised_s for row in self.rows])

    @property
    def over_promise(self) -> float | None:
        """Seconds over promised seconds, iteration by iteration, in the median: plans may change on the way."""
        rows = self.rows[1:] or self.rows
        return _median([row.seconds / row.promised_s for row in rows if row.seconds and row.promised_s])

    @property
    def tokens_per_s(self) -> float | None:
        return _median([row.tokens_per_s for row in self.rows[1:] or self.rows])


def read_history(folder: Path) -> RunHistory:
    """UserError if no run has done an iteration there."""
    missing: list[str] = []
    run_id = run_id_of(folder)
    rows, links, last_sent = _read_metrics(folder, run_id, missing)
    if not rows:
        raise UserError(_nothing(folder))
    _say_gaps(rows, missing)
    if not any(links.values()):
        missing.append("bytes between nodes: none were sent, as in a run in one process, or none were written down")
    events = _read_events(folder, run_id, missing)
    began = rows[0].time or 0.0
    noted = _read_journal(folder, run_id, began, missing)
    ended = True if noted.done is None and rows[-1].is_last else noted.done
    if ended is None:
        missing.append("whether the run ended in order: nothing is in its journal")
    return RunHistory(
        folder=folder,
        rows=tuple(rows),
        links=links,
        last_sent=last_sent,
        plan=_read_plan(folder, missing),
        last_plan=_last_plan(noted, missing),
        measured=_read_cluster(folder, began, missing),
        ended=ended,
        events=tuple(sorted([*events, *_checkpoints(folder, began)], key=lambda event: event.time)),
        charts=tuple(_read_charts(folder, run_id, {row.iteration: row for row in rows}, missing)),
        missing=tuple(missing),
    )


def _nothing(folder: Path) -> str:
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
        found = metrics_of(line)
        if found is None:
            unread += 1
            continue
        if not is_of(run_id, found.run):
            others += 1
            continue
        if rows and found.row.iteration >= rows[-1].iteration:
            continue  # done again later
        rows.append(found.row)
        for sender, receiver, sent_bytes in found.links:
            links[sender, receiver] = links.get((sender, receiver), 0) + sent_bytes
            last_sent.setdefault(sender, found.row.iteration)
    _say_unread("metrics.jsonl", unread, missing)
    _say_others("metrics.jsonl", others, missing)
    return rows[::-1], links, last_sent


def _say_gaps(rows: Sequence[MetricsRow], missing: list[str]) -> None:
    gaps = set(range(rows[-1].iteration)) - {row.iteration for row in rows}
    if gaps:
        missing.append(f"iterations {ranges(number + 1 for number in gaps)}: metrics.jsonl has no line of them")
    if all(row.promised_s is None for row in rows):
        missing.append("promised seconds: no plan with a promise was followed, as in a run in one process")


def _read_events(folder: Path, run_id: str | None, missing: list[str]) -> list[EventRecord]:
    found = [event_of(line) for line in _lines(folder / "events.jsonl", missing)]
    _say_unread("events.jsonl", found.count(None), missing)
    ours = [each[0] for each in found if each is not None and is_of(run_id, each[1])]
    _say_others("events.jsonl", len(found) - found.count(None) - len(ours), missing)
    return ours


def _checkpoints(folder: Path, began: float) -> list[EventRecord]:
    found = checkpoints_in(folder, began - CLOCK_S)
    return [checkpointed(iterations, made) for iterations, made in sorted(found.items())]


def _read_journal(folder: Path, run_id: str | None, began: float, missing: list[str]) -> WalSummary:
    """Engines without one leave that of an earlier run as it is."""
    noted = WalSummary()
    made = modified(folder / "journal")
    if made is not None and made >= began - CLOCK_S:
        lines = _lines(folder / "journal", missing)
        _say_unread("journal", sum(not noted.take(line) for line in lines), missing)
    if noted.done is not None and not is_of(run_id, noted.run):
        missing.append("journal: is of another run")
        noted = WalSummary()
    if noted.done is None:
        missing.append("plans that were made on the way: nothing is in its journal")
    return noted


def _last_plan(noted: WalSummary, missing: list[str]) -> Plan | None:
    if noted.last is None:
        return None
    try:
        return Plan.from_json(noted.last.get("plan"))
    except UserError as error:
        missing.append(f"the last plan in the journal cannot be read: {error}")
        return None


def _read_plan(folder: Path, missing: list[str]) -> Plan | None:
    try:
        return Plan.load(folder / "plan.json")
    except UserError as error:
        missing.append(f"the plan: {error}")
        return None


def _read_cluster(folder: Path, began: float, missing: list[str]) -> Cluster | None:
    made = modified(folder / "cluster.json")
    if made is None or made < began - CLOCK_S:
        missing.append("what nodes and links took by the end: there is no cluster.json")
        return None
    try:
        return Cluster.load(folder / "cluster.json")
    except UserError as error:
        missing.append(f"what nodes and links took by the end: {error}")
        return None


def _read_charts(folder: Path, run_id: str | None, row: dict[int, MetricsRow], missing: list[str]) -> list[GanttData]:
    """Those of this run: written after the line of their iteration."""
    found = sorted(
        (
            each
            for each in traces_in(folder)
            if each.iteration in row and each.made >= (row[each.iteration].time or 0.0) - CLOCK_S
        ),
        key=lambda each: each.iteration,
    )
    if not found:
        missing.append("how busy nodes were: no iteration was recorded (report.recorded in the job)")
    elif len(found) > MOST_CHARTS:
        missing.append(f"{len(found)} iterations were recorded; the last {MOST_CHARTS} are counted here")
    charts = []
    for each in found[-MOST_CHARTS:]:
        try:
            charts.append(read_gantt(each.path, each.iteration, run_id))
        except (OSError, ValueError) as error:
            missing.append(f"traces/{each.path.name} cannot be read: {error}")
    return charts


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


def _say_unread(name: str, unread: int, missing: list[str]) -> None:
    if unread:
        missing.append(f"{name}: {unread} line{'s' * (unread > 1)} cannot be read")


def _say_others(name: str, others: int, missing: list[str]) -> None:
    if others:
        missing.append(f"{name}: {others} line{'s' * (others > 1)} of another run are passed over")


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
