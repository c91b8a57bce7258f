"""A plan as one page: what every node does, which way lanes go, how busy nodes and links are.

Also what all pages have in common. They open anywhere, also without a network: everything is inside the file. The
drawing library and the figures are packed, gzip in base 85, and `page.js` unpacks them: or each page would have 5 MB.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from skippipe.cost_model import seconds
from skippipe.json_fields import write_text
from skippipe.plan import Plan
from skippipe.report.gantt import NEUTRAL, Gantt, GanttBar
from skippipe.report.path_map import HALF_WIDTH, HEIGHT, path_map
from skippipe.report.summary import Table, lanes_named, plan_figures, timeline_figures
from skippipe.timeline import TASK_KINDS, BarKind, Timeline

Place = tuple[float, float]
"""The middle of a bar, and its height."""
SHORT = 24  # characters of a name that stay on one line
STYLE = """
:root { color-scheme: light dark; --text: #222; --paper: #fff; --line: #e6e6e6; }
@media (prefers-color-scheme: dark) { :root { --text: #d8dee6; --paper: #161a1f; --line: #39424d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper); margin: 2em auto; }
body { padding: 0 1em; max-width: 1400px; overflow-wrap: break-word; } p { max-width: 60em; }
@media (max-width: 40rem) { body { margin: 1em 0; padding: 0 .7em; } }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.scroll { overflow-x: auto; }
@media (max-width: 40rem) { .scroll table { width: max-content; max-width: 60em; } }
.figure { min-height: 200px; }
table { border-collapse: collapse; }
th, td { padding: .15em .9em .15em 0; text-align: left; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
.short { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""
ROW_PX = 24
STATION_PX = 70
COLUMN_PX = 90  # at least, for names in boxes
GANTT_IN_WORDS = """Light bars go forward, dark bars go backward, hatched ones are head and loss; numbers are lanes.
Where the backward is split, the darkest bars are its weight gradients. A grey strip under a row is time in which a task
was ready but had to wait (a collision). Drag to zoom in, double-click to zoom out, click a name in the legend to
hide it."""
MAP_IN_WORDS = """A lane starts at its data node at the left and comes back to it at the right. It passes between the
nodes of the stages that it skips. A dashed arrow to the left is a swap: the later stage is visited first."""
BUSY_IN_WORDS = """Busy: forward, head, backward and weight gradients. Idle: the rest of the iteration, averaging
included. Collisions: the waiting of all tasks on their way together, so that three tasks that wait for a second make
three seconds."""
LINKS_IN_WORDS = "In one iteration, from the node of the row to the node of the column."


def write_html(plan: Plan, timeline: Timeline, path: Path) -> None:
    picture = Gantt(plan, timeline)
    title = f"{plan.cluster.name}: an iteration of {timeline.iteration_s:.1f} s, {plan.strategy}"
    sections = [
        key_figures([*plan_figures(plan), *timeline_figures(timeline)]),
        *picture_sections(picture),
        table_html(_busy(picture)),
        section("How much every link carries", LINKS_IN_WORDS, figure_html(_links(picture))),
    ]
    write_text(path, page(title, sections))


def picture_sections(picture: Gantt) -> list[str]:
    """The Gantt chart and the path map of a plan, as sections of a page."""
    columns = len(picture.plan.stages) + 1
    beyond = f"<p>The picture opens on the passes: {picture.beyond}.</p>\n" if picture.beyond else ""
    return [
        section("What every node does", GANTT_IN_WORDS, beyond + figure_html(_gantt(picture))),
        section("Which way every lane goes", MAP_IN_WORDS, figure_html(_map(picture), columns * COLUMN_PX)),
    ]


def _gantt(picture: Gantt) -> go.Figure:
    figure = go.Figure()
    named = picture.plan.cluster.nodes
    for node in picture.data_nodes:
        lanes = {number for number, lane in enumerate(picture.plan.lanes) if lane.path[0] == node}
        bars = [bar for bar in picture.bars if bar.kind in TASK_KINDS and bar.lane in lanes]
        bars.sort(key=lambda bar: bar.kind is not BarKind.BACKWARD)  # the legend takes the colour of the first
        figure.add_trace(bar_trace(bars, _places(picture, bars), f"from {escape(named[node].name)}"))
    for kind in NEUTRAL:
        bars = [bar for bar in picture.bars if bar.kind is kind]
        if bars:
            figure.add_trace(bar_trace(bars, _places(picture, bars), str(kind)))
    figure.add_vline(x=seconds(picture.timeline.last_backward_ns), line={"dash": "dash", "width": 1, "color": "#888"})
    lay_out_gantt(figure, [(row.label, row.y) for row in picture.rows], ROW_PX, picture.shown_until_s)
    figure.update_layout(legend={"title": {"text": "microbatches"}})
    if picture.beyond:
        views = {"The passes": picture.shown_until_s, "The whole iteration": picture.timeline.iteration_s}
        buttons = [{"label": k, "method": "relayout", "args": [{"xaxis.range": [0, end]}]} for k, end in views.items()]
        place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "showactive": False}
        figure.update_layout(updatemenus=[{"type": "buttons", "direction": "right", "buttons": buttons, **place}])
    return figure


def lay_out_gantt(figure: go.Figure, rows: Sequence[tuple[str, float]], row_px: float, until_s: float) -> None:
    """The axes of a Gantt chart: a label at the middle of every row, and seconds up to so many."""
    last = rows[-1][1]
    height = 140 + int(row_px * (last + 2))
    figure.update_layout(barmode="overlay", height=height, uniformtext={"minsize": 7, "mode": "hide"})
    figure.update_xaxes(title="seconds since the iteration began", range=[0, until_s])
    labels, ys = [escape(label) for label, _ in rows], [y for _, y in rows]
    figure.update_yaxes(tickvals=ys, ticktext=labels, range=[last + 0.8, -0.8], showgrid=False)


def _places(picture: Gantt, bars: Sequence[GanttBar]) -> list[Place]:
    strip = {BarKind.WAITING: (0.44, 0.16)}  # (below the middle of its row, height)
    offsets = (strip.get(bar.kind, (-0.06, 0.78)) for bar in bars)
    return [(picture.rows[bar.row].y + low, high) for bar, (low, high) in zip(bars, offsets, strict=True)]


def bar_trace(bars: Sequence[GanttBar], places: Sequence[Place], name: str) -> go.Bar:
    dots = ["#8a939e" if bar.kind is BarKind.AVERAGING else "white" for bar in bars]
    patterns = [{BarKind.HEAD: "/", BarKind.AVERAGING: "."}.get(bar.kind, "") for bar in bars]
    return go.Bar(
        orientation="h",
        name=name,
        y=[middle for middle, _ in places],
        base=[bar.start_s for bar in bars],
        x=[bar.end_s - bar.start_s for bar in bars],
        width=[height for _, height in places],
        marker={
            "color": [bar.colour for bar in bars],
            "pattern": {"shape": patterns, "fgcolor": dots, "size": 5},
            "line": {"width": 0.5, "color": "rgba(128,128,128,0.4)"},
            "opacity": 0.55 if bars[0].kind is BarKind.WAITING else 1,
        },
        text=["" if bar.lane is None or bar.kind in (BarKind.HEAD, BarKind.WAITING) else bar.lane for bar in bars],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 10},
        hovertext=[hover_html(bar.hover) for bar in bars],
        hoverinfo="text",
    )


def _map(picture: Gantt) -> go.Figure:
    figure = go.Figure()
    paths = path_map(picture)
    for line in paths.lines:
        name = escape(f"{lanes_named(list(line.lanes))} of {picture.plan.cluster.nodes[line.data_node].name}")
        for number, hop in enumerate(line.hops):
            xs, ys = zip(*hop.points, strict=True)
            figure.add_scatter(
                x=xs,
                y=ys,
                mode="lines+markers" if hop.swapped else "lines",
                line={"color": line.hue, "width": 1 + len(line.lanes), "dash": "dash" if hop.swapped else "solid"},
                marker={"symbol": "arrow", "size": [0, 14], "angleref": "previous", "color": line.hue},
                name=name,
                legendgroup=name,
                showlegend=number == 0,
                hovertext=hover_html(line.hover),
                hoverinfo="text",
            )
    shapes, names = [], []  # all at once: each one that is added alone checks all before it
    for station in paths.stations:
        box = {"x0": station.x - HALF_WIDTH, "x1": station.x + HALF_WIDTH}
        box |= {"y0": station.y - HEIGHT / 2, "y1": station.y + HEIGHT / 2}
        edge = {"color": station.hue or "#888", "width": 2 if station.hue else 1}
        shapes.append({"type": "rect", "fillcolor": "rgba(128,128,128,0.12)", "line": edge, **box})
        place = {"x": station.x, "y": station.y, "showarrow": False, "font": {"size": 12}}
        names.append({"text": escape(station.name), **place})
    figure.update_layout(shapes=shapes, annotations=names)
    figure.update_xaxes(
        tickvals=list(range(len(paths.columns))), ticktext=paths.columns, side="top", showgrid=False, zeroline=False
    )
    figure.update_yaxes(range=[paths.height + 0.2, -0.2], visible=False)
    figure.update_layout(height=120 + int(STATION_PX * (paths.height + 0.5)))
    return figure


def _links(picture: Gantt) -> go.Figure:
    sent = {(use.sender, use.receiver): use.sent_bytes / 1e6 for use in picture.timeline.links}
    table = [[sent.get((a.node, b.node)) for b in picture.rows] for a in picture.rows]
    hover = "from %{y}<br>to %{x}<br>%{z:,.1f} MB<extra></extra>"
    return heat_figure([row.label for row in picture.rows], table, "MB", zmin=0, hovertemplate=hover)


def heat_figure(names: Sequence[str], table: Sequence[Sequence[float | None]], unit: str, **look: Any) -> go.Figure:
    """A heat map of senders and receivers, in this order; no colour where nothing was sent."""
    labels = [escape(name) for name in names]
    figure = go.Figure(go.Heatmap(z=table, x=labels, y=labels, colorscale="Cividis_r", xgap=1, ygap=1, **look))
    figure.data[0].colorbar.title.text = unit
    figure.update_yaxes(autorange="reversed", title="sender")
    figure.update_xaxes(tickangle=-60, title="receiver")
    figure.update_layout(height=280 + ROW_PX * len(labels))
    return figure


def key_figures(figures: Sequence[tuple[str, str]]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures)
    return f"<table>{''.join(rows)}</table>"


def _busy(picture: Gantt) -> Table:
    whole_ns = max(1, picture.timeline.iteration_ns)
    uses = {use.node: use for use in picture.timeline.nodes}
    headings = ("node", "busy, s", "idle, s", "busy, % of the iteration", "collisions, s", "memory slots")
    rows = []
    for node, stage in {row.node: row.stage for row in picture.rows}.items():
        use, label = uses[node], f"stage {stage} · {picture.plan.cluster.nodes[node].name}"
        times = use.worker_busy_ns, picture.timeline.idle_ns(use), use.collision_ns
        busy_s, idle_s, collision_s = map(seconds, times)
        share = f"{100 * use.worker_busy_ns / whole_ns:.1f}"
        rows.append([label, f"{busy_s:.2f}", f"{idle_s:.2f}", share, f"{collision_s:.2f}", f"{use.slots}"])
    return Table("How busy every node is", BUSY_IN_WORDS, headings, rows)


def hover_html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def page(title: str, sections: Sequence[str]) -> str:
    """A whole HTML file; the sections are HTML, the title is text."""
    named = escape(title)
    head = f"""<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{named}</title>
<style>{STYLE}</style>"""
    code = files("skippipe.report").joinpath("page.js").read_text(encoding="utf-8")
    packed = f'<script type="text/plain" id="plotly">{_packed_plotly()}</script>'
    body = "\n".join([f"<h1>{named}</h1>", *sections, packed, f'<script type="module">\n{code}</script>'])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


@cache
def _packed_plotly() -> str:
    return pack(get_plotlyjs())


def pack(text: str) -> str:
    """Text for `unpacked` in page.js: its length when compressed, then that; without `<`, so that it ends no script."""
    content = gzip.compress(text.encode(), mtime=0)
    digits = base64.b85encode(len(content).to_bytes(4, "big") + content, pad=True)
    return digits.decode("ascii").replace("<", ",")


def section(title: str, note: str, content: str) -> str:
    """A section of a page; the content is HTML, the others are text."""
    paragraph = f"<p>{escape(note)}</p>\n" if note else ""
    return f"<h2>{escape(title)}</h2>\n{paragraph}{content}"


def table_html(table: Table, names: int = 1) -> str:
    """A table as a section; the first `names` columns are aligned left, figures right."""

    def row(cells: Sequence[str], tag: str) -> str:
        named = (f"<{tag}{' class=short' * (len(cell) <= SHORT)}>{escape(cell)}</{tag}>" for cell in cells[:names])
        figures = (f"<{tag} class=number>{escape(cell)}</{tag}>" for cell in cells[names:])
        return f"<tr>{''.join([*named, *figures])}</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    content = f"<div class=scroll><table>{row(table.headings, 'th')}{rows}</table></div>" if rows else ""
    return section(table.title, table.note, content)


def figure_html(figure: go.Figure, least_px: int = 0) -> str:
    """A figure of a page; where there is less room than `least_px`, it scrolls."""
    figure.update_layout(template="none")  # the page has its own, one for light and one for dark
    packed = f'<script type="text/plain">{pack(str(figure.to_json()))}</script>'
    return f'<div class=scroll><div class="figure" style="min-width: {least_px}px">{packed}</div></div>'
