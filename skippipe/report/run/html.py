"""A run that is over as one page: what it cost, what it gave, what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly import graph_objects as go

from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.report import html
from skippipe.report.gantt import Gantt, RecordedGantt, pale
from skippipe.report.run import summary
from skippipe.report.summary import plan_figures, timeline_figures
from skippipe.runs.history import RunHistory
from skippipe.runs.records import RecordedIteration, downsample
from skippipe.simulator import simulate
from skippipe.timeline import HUES, Timing

MOST_POINTS = 3000  # of a curve
MOST_TICKS = 6
MEASURED, PROMISED, IDLE, BUSY = HUES[0], HUES[1], "#D9D9D9", HUES[0]
LOSS_IN_WORDS = """Training loss, the mean over the microbatches of an iteration; above, tokens so far. Dots are the
loss on text that is not trained on, with all stages."""
PROMISE_IN_WORDS = """What every iteration took, since the one before was done, and what its plan promised. Marks stand
at iterations in which something happened; point at one to read what."""
SECONDS_IN_WORDS = """What every iteration took, since the one before was done. Marks stand at iterations in which
something happened; point at one to read what."""
RECORDED_IN_WORDS = """For every node as planned above (pale), as measured below. Light bars go forward, dark bars go
backward, hatched ones are head and loss; numbers are lanes; dotted is averaging, and dark grey the optimizer step, as
long as the one before it. Every node counts from its own beginning of the iteration. Drag to zoom in, double-click to
zoom out."""
NODES_IN_WORDS = """Every node in two bars, planned above measured: the filled part computes. A diamond is how long
tasks waited for the node, all together."""
LINKS_IN_WORDS = """Over the whole run, from the node of the row to the node of the column: tensors, averaging included.
Steps of colour are even on a logarithmic scale."""


def write_run_html(history: RunHistory, path: Path) -> None:
    sections = [
        html.key_figures(summary.run_figures(history)),
        _missing(history),
        html.section("Loss", LOSS_IN_WORDS, html.figure_html(_loss(history))),
        html.section(
            summary.seconds_title(history),
            PROMISE_IN_WORDS if history.is_promised else SECONDS_IN_WORDS,
            html.figure_html(_seconds(history)),
        ),
        *(_recorded(history.recorded[-1]) if history.recorded else ()),
        html.section("Who computes, who waits", NODES_IN_WORDS, html.figure_html(_busy(history))),
        html.table_html(summary.nodes_table(history)),
        *_links(history),
        html.table_html(summary.outages_table(history), names=6),
        html.table_html(summary.events_table(history), names=6),
        *_plans(history),
    ]
    write_text(path, html.page(summary.title(history), sections))


def _missing(history: RunHistory) -> str:
    if not history.missing:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in history.missing)
    return f"<h2>What is not on record</h2>\n<ul>{items}</ul>"


def _loss(history: RunHistory) -> go.Figure:
    size, rows = downsample(history.rows, MOST_POINTS)
    figure = go.Figure()
    tokens = ["" if row.tokens is None else f"<br>{row.tokens:,.0f} tokens" for row in rows]
    figure.add_scatter(
        x=[row.iteration + 1 for row in rows],
        y=[row.loss for row in rows],
        mode=_mode(rows),
        line={"color": MEASURED},
        name="loss" + _means(size),
        customdata=tokens,
        hovertemplate="iteration %{x}<br>loss %{y:.4f}%{customdata}<extra></extra>",
    )
    if history.validation:
        figure.add_scatter(
            x=[iteration + 1 for iteration, _ in history.validation],
            y=[loss for _, loss in history.validation],
            mode="lines+markers",
            line={"color": PROMISED},
            name="held-out loss",
            hovertemplate="after iteration %{x}<br>held-out loss %{y:.4f}<extra></extra>",
        )
    each = summary.tokens_each(history)
    if each:  # a second axis needs a curve of its own, which is not seen
        ticks = _round_ticks(each * (rows[-1].iteration + 1))
        at = [tokens / each for tokens in ticks]
        figure.add_scatter(x=at, y=[None] * len(at), xaxis="x2", showlegend=False, hoverinfo="skip")
        named = [summary.short_count(tokens) for tokens in ticks]
        side = {"overlaying": "x", "side": "top", "matches": "x", "showgrid": False, "title": "tokens"}
        figure.update_layout(xaxis2={**side, "tickvals": at, "ticktext": named})
    figure.update_layout(xaxis_title="iteration", yaxis_title="loss", height=400)
    return figure


def _round_ticks(last: float) -> list[float]:
    """Ticks up to `last`, six at most; their distance has 1, 2 or 5 as its first digit."""
    power = 10.0 ** math.floor(math.log10(last / MOST_TICKS))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * MOST_TICKS >= last)
    return [step * number for number in range(1, math.floor(last / step) + 1)]


def _seconds(history: RunHistory) -> go.Figure:
    size, rows = downsample(history.rows, MOST_POINTS)
    figure = go.Figure()
    at = [row.iteration + 1 for row in rows]
    hover = "iteration %{x}<br>%{y:.3f} s<extra></extra>"
    if any(row.promised_s is not None for row in rows):
        line = {"color": PROMISED, "shape": "hvh", "dash": "dash"}
        promised = [row.promised_s for row in rows]
        name = "promised" + _means(size)
        figure.add_scatter(x=at, y=promised, mode="lines", line=line, name=name, hovertemplate=hover)
    seconds, name, line = [row.seconds for row in rows], "measured" + _means(size), {"color": MEASURED}
    figure.add_scatter(x=at, y=seconds, mode=_mode(rows), line=line, name=name, hovertemplate=hover)
    top_s = max((row.seconds or 0.0 for row in history.rows), default=0.0)
    for kind, marks in summary.marks_of(history):
        figure.add_scatter(
            x=[mark.iteration + 1 for mark in marks],
            y=[top_s * (1.08 + 0.07 * mark.height) for mark in marks],
            mode="markers",
            marker={"symbol": kind.plotly, "color": kind.colour, "size": 10},
            name=kind.name,
            hovertext=[f"iteration {mark.iteration + 1}<br>" + html.hover_html(mark.text) for mark in marks],
            hoverinfo="text",
        )
    figure.update_layout(xaxis_title="iteration", yaxis_title="seconds", height=420)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _recorded(recorded: RecordedIteration) -> list[str]:
    if not (recorded.planned or recorded.measured):
        return []
    gantt, figure = RecordedGantt(recorded), go.Figure()
    for name, half in gantt.halves.items():
        if half:
            bars, places = zip(*half, strict=True)
            figure.add_trace(html.bar_trace(bars, places, name))
    html.lay_out_gantt(figure, gantt.rows, 1.6 * html.ROW_PX, gantt.shown_until_s)
    figure.update_layout(showlegend=False)
    return [
        html.section(
            f"Iteration {recorded.iteration + 1}, planned and measured", RECORDED_IN_WORDS, html.figure_html(figure)
        )
    ]


def _busy(history: RunHistory) -> go.Figure:
    utilization = history.utilization
    figure = go.Figure()
    for offset, which in ((-0.2, "planned"), (0.2, "measured")):
        known = [(at, use.name, getattr(use, which)) for at, use in enumerate(utilization) if getattr(use, which)]
        if not known:
            continue
        tone = pale if which == "planned" else str
        ys = [at + offset for at, _, _ in known]
        for what, colour in (("busy", BUSY), ("idle", IDLE), ("collisions", HUES[1])):
            field = "collision_s" if what == "collisions" else f"{what}_s"
            took_s = [getattr(use, field) for *_, use in known]
            hover = [
                f"{escape(name)}: {what} {each_s:.3f} s, {which}"
                for each_s, (_, name, _) in zip(took_s, known, strict=True)
            ]
            drawn = {"x": took_s, "y": ys, "name": f"{what}, {which}", "hovertext": hover, "hoverinfo": "text"}
            if what == "collisions":
                mark = {"symbol": "diamond", "color": tone(colour), "size": 8, "line": {"width": 1}}
                figure.add_scatter(mode="markers", marker=mark, **drawn)
            else:
                base = [0.0 if what == "busy" else use.busy_s for *_, use in known]
                figure.add_bar(orientation="h", base=base, width=0.36, marker={"color": tone(colour)}, **drawn)
    labels = [escape(use.name if use.stage is None else f"stage {use.stage} · {use.name}") for use in utilization]
    figure.update_xaxes(title="seconds of an iteration", rangemode="tozero")
    figure.update_yaxes(
        tickvals=list(range(len(utilization))), ticktext=labels, range=[len(utilization) - 0.4, -0.6], showgrid=False
    )
    figure.update_layout(barmode="overlay", height=140 + int(1.4 * html.ROW_PX * len(utilization)))
    return figure


def _links(history: RunHistory) -> list[str]:
    if not any(history.links.values()):
        return []
    names = [use.name for use in history.utilization if use.sent_bytes or use.received_bytes]
    sent = {pair: count for pair, count in history.links.items() if count}
    steps = summary.steps_of(sent.values())
    bar = {"tickvals": [math.log10(count) for count in steps], "ticktext": [summary.amount(count) for count in steps]}
    amounts = [[summary.amount(sent.get((a, b), 0)) for b in names] for a in names]
    hover = "from %{y}<br>to %{x}<br>%{customdata}<extra></extra>"
    table = [[math.log10(sent[a, b]) if (a, b) in sent else None for b in names] for a in names]
    figure = html.heat_figure(names, table, "", colorbar=bar, customdata=amounts, hovertemplate=hover)
    return [html.section("How much every link carried", LINKS_IN_WORDS, html.figure_html(figure))]


def _plans(history: RunHistory) -> list[str]:
    """The plan that the run began with and, if that is another, the one that it ended with."""
    found: list[str] = []
    if history.plan is not None:
        others = sorted(path.name for path in history.folder.glob("plan-*.json"))
        note = f"Paths of other lengths have their own: {', '.join(others)}." if others else ""
        found += _plan("The plan that it began with", note, history.plan)
    if history.last_plan is not None and history.last_plan != history.plan:
        found += _plan("The plan that it ended with", "", history.last_plan)
    return found


def _plan(title: str, note: str, plan: Plan) -> list[str]:
    timeline = plan.expected or simulate(plan, Timing.FULL)
    figures = html.key_figures([*plan_figures(plan), *timeline_figures(timeline)])
    return [html.section(title, note, figures), *html.picture_sections(Gantt(plan, timeline))]


def _mode(rows: Sequence[object]) -> str:
    return "lines+markers" if len(rows) <= 60 else "lines"


def _means(size: int) -> str:
    return f", means of {size}" if size > 1 else ""
