"""A run in figures, tables and words, the same wherever they are shown; and marks on its curves, where nodes were lost
or came back. Iterations count from 1, as on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

from skippipe.report.summary import NOTHING, Table, scaled
from skippipe.runs.history import NodeOutage, NodeUtilization, RunHistory, Utilization
from skippipe.runs.records import MetricsRow
from skippipe.timeline import HUES

MEANINGS = {
    "lost": "a node was lost",
    "rerouted": "its microbatches went another way, within the iteration",
    "restarted": "the iteration was begun again",
    "replanned": "a new plan held from the next iteration on",
    "joined": "a node joined",
    "recovering": "it received the state of its stage",
    "recovered": "it had that state, and got microbatches from the next iteration on",
    "paused": "nothing could go on; nodes were waited for",
    "slow": "it was waited for, though it sent heartbeats; or speeds differ from the plan",
    "link-down": "a link was down; plans did without it for a while",
    "not-finite": "a gradient was not finite, and was left out",
    "refused": "a node, or what it sent, was refused",
    "checkpoint": "a checkpoint that was being made was given up",
    "checkpointed": "a checkpoint was complete",
    "validation": "an evaluation of held-out samples was given up, and is made up for later",
    "coordinator-restarted": "the coordinator was restarted",
    "ending": "the end of the run was requested",
    "storage": "the model could not be written, or could be in the end",
    "admitted": "a node that was invited got in with its own key",
    "revoked": "a member was shut out for good",
    "checked": "what a node that joins found out about its machine",
    "drill": "a node was killed on purpose, as a drill",
    "grown": "the model became deeper, as the recipe says; all nodes began anew",
}
NODES_IN_WORDS = """Busy: forward, head, backward and weight gradients. Idle: the rest of the iteration, averaging
included. Collisions: the waiting of all tasks that were ready, added up. Seconds of an iteration."""
UNLIKE = 2.0  # times what was planned, for all nodes
MOST_NAMED = 3  # nodes that are slow or waited for


def run_figures(history: RunHistory) -> list[tuple[str, str]]:
    """Key figures of a run."""
    last = history.rows[-1]
    return [
        ("iterations", _iterations(len(history.rows), history.rows[-1])),
        ("end", _end(history)),
        ("loss", _loss(history)),
        *([("held-out loss", _validation(history))] if history.validation else []),
        *([("learning rate", f"{last.learning_rate:.3g} at last")] if last.learning_rate is not None else []),
        ("an iteration", _seconds(history)),
        ("in all", _whole(history)),
        *([("left", f"some {duration(last.left_s)}")] if not history.ended and last.left_s else []),
        ("tokens", _tokens(history)),
        ("sent", f"{amount(history.sent_bytes)} of tensors" if history.sent_bytes else NOTHING),
        ("nodes lost", _outages(history.outages)),
        ("new plans", f"{sum(event.kind == 'replanned' for event in history.events)}"),
        *_notable_nodes(history),
    ]


def title(history: RunHistory) -> str:
    return f"{history.name}: {len(history.rows):,} iterations"


def seconds_title(history: RunHistory) -> str:
    return "Seconds, promised and measured" if history.is_promised else "Seconds"


def _iterations(known: int, last: MetricsRow) -> str:
    done = last.iteration + 1
    total_iterations = f" of {last.total_iterations:,}" if last.total_iterations is not None else ""
    return (
        f"{done:,}{total_iterations}" if known == done else f"{done:,}{total_iterations}, {known:,} of them on record"
    )


def _end(history: RunHistory) -> str:
    if history.ended is None:
        return "not known: its journal does not say"
    if not history.ended:
        return "broken off, or still going on"
    return (
        "as planned" if history.rows[-1].is_last or history.rows[-1].total_iterations is None else "early, on request"
    )


def _loss(history: RunHistory) -> str:
    known = history.losses
    return f"{known[0]:.3f} at first, {known[-1]:.3f} at last, {min(known):.3f} at best" if known else NOTHING


def _validation(history: RunHistory) -> str:
    found = history.validation
    iteration, best = min(found, key=lambda each: each[1])
    return (
        f"{found[0][1]:.3f} at first, {found[-1][1]:.3f} at last, {best:.3f} at best, after iteration {iteration + 1}"
    )


def _seconds(history: RunHistory) -> str:
    if history.typical_s is None:
        return NOTHING
    text = f"{history.typical_s:.2f} s (median)"
    if history.promised_s is None or history.over_promise is None:
        return text
    return f"{text}, {history.promised_s:.2f} s promised; {history.over_promise:.2f} times the promise, in the median"


def _whole(history: RunHistory) -> str:
    spent = history.rows[-1].elapsed_s or sum(row.seconds or 0.0 for row in history.rows)
    promised = sum(row.promised_s or 0.0 for row in history.rows)
    return duration(spent) + (f", {duration(promised)} promised" if promised else "")


def _tokens(history: RunHistory) -> str:
    tokens, per_s = history.rows[-1].tokens, history.tokens_per_s
    parts = [f"{tokens:,.0f}"] * (tokens is not None) + [f"{per_s or 0:,.0f} a second (median)"] * (per_s is not None)
    return ", ".join(parts) or NOTHING


def _outages(outages: list[NodeOutage]) -> str:
    times = Counter(outage.node for outage in outages)
    named = [f"{node} ({count} times)" if count > 1 else node for node, count in times.most_common()]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more or "none"


def _notable_nodes(history: RunHistory) -> list[tuple[str, str]]:
    """Nodes that are slow, that were waited for, and at which tasks queue."""
    utilization = history.utilization
    usual = median([use.slowdown for use in utilization if use.slowdown] or [1.0])  # if all are slow, it is the plan
    slow = sorted(
        (use for use in utilization if (use.slowdown or 0) > 1.05 * usual), key=lambda use: -(use.slowdown or 0)
    )
    waited = sorted((use for use in utilization if use.waited_for), key=lambda use: -use.waited_for)
    queues = sorted((use for use in utilization if _queue_s(use) > 0), key=lambda use: -_queue_s(use))
    lists = [
        ("slower at the end", [f"{use.name} ({use.slowdown:.2f} times)" for use in slow]),
        ("waited for", [f"{use.name} ({use.waited_for} times)" for use in waited]),
        ("most tasks queue at", [f"{use.name} ({short_s(_queue_s(use))} s an iteration)" for use in queues]),
    ]
    found = [(name, ", ".join(nodes[:MOST_NAMED])) for name, nodes in lists if nodes]
    if not 1 / UNLIKE < usual < UNLIKE:
        found.insert(0, ("nodes", f"took {usual:.2g} times as long as planned, in the median: the plan is for others"))
    return found


def _queue_s(use: NodeUtilization) -> float:
    """Seconds for which tasks queued at a node; 0 if that is less than a hundredth of the iteration."""
    found = use.measured
    return found.collision_s if found and found.collision_s > 0.01 * found.iteration_s else 0.0


def nodes_table(history: RunHistory) -> Table:
    headings = ("node", "stage")
    times: tuple[str, ...] = ("busy", "idle", "collisions")
    others: tuple[str, ...] = ("sent", "received")
    if history.is_promised:
        times = tuple(each for time in times for each in (f"{time}, planned", "measured"))
        others = ("tasks × planned, at the end", *others)
    rows = []
    for use in history.utilization:
        pairs = [
            _seconds_of(of, name)
            for name in ("busy_s", "idle_s", "collision_s")
            for of in ((use.planned, use.measured) if history.is_promised else (use.measured,))
        ]
        slowdown = [_slowdown(use)] if history.is_promised else []
        figures = [_stage(use), *pairs, *slowdown, amount(use.sent_bytes), amount(use.received_bytes)]
        rows.append([use.name, *figures])
    return Table(
        "How busy every node was", f"{NODES_IN_WORDS} {recorded_in_words(history)}", (*headings, *times, *others), rows
    )


def short_nodes_table(history: RunHistory) -> Table:
    """Utilization of every node, planned and measured, in a table that fits a terminal."""
    headings = ("node", "stage", "busy s", "idle s", "collisions s")
    names = ("busy_s", "idle_s", "collision_s")
    note = recorded_in_words(history)
    if not history.is_promised:
        rows = [
            [use.name, _stage(use), *(_seconds_of(use.measured, name) for name in names)] for use in history.utilization
        ]
        return Table("Seconds of an iteration, as measured", note, headings, rows)
    rows = [
        [
            *(use.name, _stage(use)),
            *(f"{_seconds_of(use.planned, name)} → {_seconds_of(use.measured, name)}" for name in names),
            _slowdown(use),
        ]
        for use in history.utilization
    ]
    return Table("Seconds of an iteration, planned → measured", note, (*headings, "× planned"), rows)


def _seconds_of(use: Utilization | None, name: str) -> str:
    return NOTHING if use is None else short_s(getattr(use, name))


def _stage(use: NodeUtilization) -> str:
    return NOTHING if use.stage is None else f"{use.stage}"


def _slowdown(use: NodeUtilization) -> str:
    return NOTHING if use.slowdown is None else f"{use.slowdown:.2f}"


def recorded_in_words(history: RunHistory) -> str:
    if not history.recorded:
        return "No iteration was recorded, so the planned figures are the plan's own and nothing is measured."
    numbers = ", ".join(str(recorded.iteration + 1) for recorded in history.compared)
    teaches = history.plan is not None and history.plan.workload.teacher
    passes = " Passes of the teacher are not recorded: their time is idle here." if teaches else ""
    return f"Means over the recorded iterations ({numbers}).{passes}"


def outages_table(history: RunHistory) -> Table:
    rows = [
        [loss.node, f"{loss.iteration + 1}", moment(loss.time), loss.why, loss.answer or NOTHING, loss.end]
        for loss in history.outages
    ]
    note = "" if rows else "None."
    return Table("Nodes that were lost", note, ("node", "iteration", "time", "why", "then", "in the end"), rows)


def events_table(history: RunHistory) -> Table:
    rows = [
        [f"{event.iteration + 1}", moment(event.time), event.kind, event.node, event.text, MEANINGS.get(event.kind, "")]
        for event in history.events
    ]
    headings = ("iteration", "time", "event", "node", "message", "what it means")
    return Table("Everything out of the ordinary", "" if rows else "Nothing.", headings, rows)


def run_json(history: RunHistory) -> dict[str, Any]:
    """All figures of a run as JSON; iterations count from 1, as on the screen and in the files."""
    known = history.losses
    return {
        "run": history.name,
        "iterations": len(history.rows),
        "last_iteration": history.rows[-1].iteration + 1,
        "iterations_asked": history.rows[-1].total_iterations,
        "ended": history.ended,
        "loss": {"first": known[0], "last": known[-1], "best": min(known)} if known else None,
        "validation": [[iteration, loss] for iteration, loss in history.validation],
        "learning_rate": history.rows[-1].learning_rate,
        "elapsed_s": history.rows[-1].elapsed_s,
        "left_s": history.rows[-1].left_s,
        "seconds": history.typical_s,
        "promised_s": history.promised_s,
        "over_promise": history.over_promise,
        "tokens": history.rows[-1].tokens,
        "tokens_per_s": history.tokens_per_s,
        "bytes_sent": history.sent_bytes,
        "links": [[*pair, sent] for pair, sent in sorted(history.links.items())],
        "recorded": [recorded.iteration + 1 for recorded in history.recorded],
        "nodes": [_node_json(use) for use in history.utilization],
        "losses": [{**loss._asdict(), "iteration": loss.iteration + 1} for loss in history.outages],
        "events": [{**event._asdict(), "iteration": event.iteration + 1} for event in history.events],
        "missing": list(history.missing),
    }


def _node_json(use: NodeUtilization) -> dict[str, Any]:
    return {
        **use._asdict(),
        "planned": use.planned and {**use.planned._asdict(), "idle_s": use.planned.idle_s},
        "measured": use.measured and {**use.measured._asdict(), "idle_s": use.measured.idle_s},
    }


def amount(count: float) -> str:
    """A number of bytes in the unit that makes it short."""
    short, unit = scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))
    return f"{short:.0f} {unit}" if unit == "B" or short >= 99.95 else f"{short:.1f} {unit}"


def short_s(value_s: float) -> str:
    return f"{value_s:.2f}" if value_s >= 0.1 else f"{value_s:.2g}"


def short_count(count: float) -> str:
    short, unit = scaled(count, ("", "K", "M", "B", "T"))
    return f"{short:.3g}{unit}"


def tokens_each(history: RunHistory) -> float:
    """Tokens that an iteration trains on; 0: not known."""
    last = history.rows[-1]
    return (last.tokens or 0.0) / (last.iteration + 1)


def steps_of(counts: Iterable[int]) -> list[float]:
    """Five steps from the least to the most of these numbers, even on a logarithmic scale."""
    known = list(counts)
    least, most = min(known), max(known)
    return [least * (most / least) ** (step / 4) for step in range(5)] if most > least else [float(most)]


def duration(whole_s: float) -> str:
    minutes, rest_s = divmod(round(whole_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{whole_s:.1f} s"


def moment(time: float) -> str:
    """A Unix time as the clock of this machine shows it."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else NOTHING


class MarkKind(NamedTuple):
    """A kind of mark on the curves of a run."""

    name: str
    kinds: tuple[str, ...]
    colour: str
    plotly: str
    """Its symbol in plotly."""
    matplotlib: str
    """Its symbol in matplotlib."""


MARK_KINDS = (
    MarkKind("lost: a node or a link", ("lost", "link-down"), HUES[2], "x", "X"),
    MarkKind("begun again, or paused", ("restarted", "paused", "coordinator-restarted"), HUES[1], "triangle-up", "^"),
    MarkKind("repaired: another way or plan", ("rerouted", "replanned"), HUES[5], "diamond", "D"),
    MarkKind("back at work", ("recovered",), HUES[3], "circle", "o"),
    MarkKind("slow, or not finite", ("slow", "not-finite"), HUES[4], "square", "s"),
)


class Mark(NamedTuple):
    """Events of one kind in an iteration."""

    iteration: int
    height: int
    """How many marks of the same iteration are below it."""
    text: str


def marks_of(history: RunHistory) -> list[tuple[MarkKind, list[Mark]]]:
    """The kinds of marks that occur, each with one mark for all its events in an iteration."""
    heights: dict[int, int] = {}
    found = []
    for kind in MARK_KINDS:
        text: dict[int, list[str]] = {}
        for event in history.events:
            if event.kind in kind.kinds:
                who = f"'{event.node}' " if event.node else ""
                text.setdefault(event.iteration, []).append(f"{event.kind}: {who}{event.text}")
        marks = []
        for iteration, lines in sorted(text.items()):
            marks.append(Mark(iteration, heights.get(iteration, 0), "\n".join(lines)))
            heights[iteration] = heights.get(iteration, 0) + 1
        if marks:
            found.append((kind, marks))
    return found
