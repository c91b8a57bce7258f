"""A plan as an image: the iteration and the paths. Also what all PNG images have in common; no display is needed."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from skippipe.cost_model import seconds
from skippipe.json_fields import write_bytes
from skippipe.plan import Plan
from skippipe.report.gantt import NEUTRAL, Gantt, GanttBar, shade
from skippipe.report.path_map import HALF_WIDTH, HEIGHT, PathLine, PathMap, Station, path_map, spacing
from skippipe.timeline import BarKind, Timeline, ranges_text

DPI = 130
INK = "#222222"
GRID = "#E4E4E4"
LINE_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
"""Plotly's name of a line style → matplotlib's."""
WIDTH_IN = 17.0
ROW_IN = 0.24
STATION_IN = 0.72  # from one station of the path map to the next
NAME_CHARACTERS = 18  # of a node, before its name takes a second line on the path map
FAINT = "#888888"
DIGIT_IN = 0.06  # what a lane number on a bar needs for each of its digits
PLOT_SHARE = 0.78  # of the width, left to the plots beside names and legend


def write_png(plan: Plan, timeline: Timeline, path: Path) -> None:
    """The Gantt chart above the path map."""
    picture = Gantt(plan, timeline)
    paths = path_map(picture)
    gantt_in = max(1.6, ROW_IN * (picture.rows[-1].y + 2))
    map_in = max(1.8, STATION_IN * (paths.height + 1))
    figure = blank(WIDTH_IN, gantt_in + map_in + 1.9)
    title = (
        f"{plan.cluster.name}, {plan.strategy}: an iteration of {timeline.iteration_s:.1f} s "
        f"for {plan.microbatches} microbatches ({timeline.timing} timing)"
    )
    figure.suptitle(literal(title), fontsize=13, color=INK)
    above, below = figure.subplots(2, 1, height_ratios=[gantt_in, map_in])
    _draw_gantt(above, picture)
    _draw_map(below, paths)
    write_image(figure, path)


def _draw_gantt(axes: Axes, picture: Gantt) -> None:
    rows, until_s = picture.rows, picture.shown_until_s
    axes.set_xlim(0, 1.005 * until_s)
    axes.set_ylim(rows[-1].y + 0.75, rows[0].y - 0.75)
    _draw_stages(axes, picture)
    for bar in picture.bars:
        y = rows[bar.row].y
        if bar.start_s >= until_s:
            continue
        if bar.kind is BarKind.WAITING:  # see-through: the more tasks wait, the darker the strip
            axes.barh(y + 0.44, bar.end_s - bar.start_s, 0.16, bar.start_s, color=bar.colour, alpha=0.55, linewidth=0)
        else:
            draw_task(axes, bar, (y - 0.06, 0.78), PLOT_SHARE * WIDTH_IN / until_s)
    last_s = seconds(picture.timeline.last_backward_ns)
    axes.axvline(last_s, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    note = f"last backward ends at {last_s:.1f} s" + (f"; {picture.beyond} →" if picture.beyond else "")
    axes.set_title(note, loc="right", fontsize=9, color=INK, pad=9)
    axes.set_title("What every node does", loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    axes.set_xlabel("seconds since the iteration began", fontsize=9, color=INK)
    axes.set_yticks([row.y for row in rows], [literal(row.name) for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(handles=_legend(picture), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _draw_stages(axes: Axes, picture: Gantt) -> None:
    """A band behind the rows of every stage, with its number to the left of the names."""
    names_pt = 5.2 * max(len(row.name) for row in picture.rows) + 16
    for stage in range(len(picture.plan.stages)):
        ys = [row.y for row in picture.rows if row.stage == stage]
        if not ys:
            continue
        axes.axhspan(ys[0] - 0.62, ys[-1] + 0.62, color="#F5F5F2" if stage % 2 else "#FCFCFA", zorder=0)
        middle, left = (0, sum(ys) / len(ys)), axes.get_yaxis_transform()
        look: dict[str, Any] = {"fontsize": 9, "color": INK, "ha": "right", "va": "center"}
        axes.annotate(f"stage {stage}", middle, (-names_pt, 0), left, "offset points", **look)


def draw_task(axes: Axes, bar: GanttBar, place: tuple[float, float], in_per_s: float, ink: str = "white") -> None:
    """Draw a task at this middle and height; with its lane in ink, dark on light bars, if there is room."""
    (middle, height), width_s = place, bar.end_s - bar.start_s
    hatch = {BarKind.HEAD: "////", BarKind.AVERAGING: "...."}.get(bar.kind)
    axes.barh(middle, width_s, height, bar.start_s, color=bar.colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    if bar.lane is None or bar.kind is BarKind.HEAD:
        return
    if width_s * in_per_s > DIGIT_IN * len(str(bar.lane)):
        ink = INK if bar.kind is BarKind.FORWARD else ink
        where = (bar.start_s + width_s / 2, middle + 0.02)
        axes.text(*where, str(bar.lane), fontsize=5.5, color=ink, ha="center", va="center_baseline")


def _legend(picture: Gantt) -> list[Patch]:
    named = picture.plan.cluster.nodes
    hues = [Patch(color=picture.hue_of(node), label=literal(f"from {named[node].name}")) for node in picture.data_nodes]
    grey = "#808080"
    words = {
        BarKind.FORWARD: "forward (with its lane)",
        BarKind.HEAD: "head and loss",
        BarKind.BACKWARD: "backward (with its lane)",
        BarKind.WEIGHTS: "its weight gradients",
    }
    if not picture.plan.split_backward:
        del words[BarKind.WEIGHTS]
    hatch = {BarKind.HEAD: "////"}
    kinds = [
        Patch(facecolor=shade(grey, kind), edgecolor="white", hatch=hatch.get(kind), label=label)
        for kind, label in words.items()
    ]
    kinds.append(Patch(facecolor=NEUTRAL[BarKind.WAITING], alpha=0.55, label="ready, but waits (collision)"))
    if picture.timeline.averaging_ns:
        dots = Patch(facecolor=NEUTRAL[BarKind.AVERAGING], edgecolor="white", hatch="....", label="gradient averaging")
        kinds += [dots, Patch(facecolor=NEUTRAL[BarKind.OPTIMIZER], label="optimizer step")]
    return [*hues, *kinds]


def _draw_map(axes: Axes, paths: PathMap) -> None:
    axes.set_xlim(-0.5, len(paths.columns) - 0.5)
    axes.set_ylim(paths.height + 0.15, -0.15)
    for line in paths.lines:
        _draw_line(axes, line, beside=sum(other.data_node == line.data_node for other in paths.lines))
    for station in paths.stations:
        _draw_station(axes, station, column_in=PLOT_SHARE * WIDTH_IN / len(paths.columns))
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(paths.columns)), paths.columns, fontsize=9)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Which way every lane goes", loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    note = "a line passes between the nodes of the stages it skips; lane numbers at the left"
    if any(hop.swapped for line in paths.lines for hop in line.hops):
        note += "; dashed arrow: a swap"
    axes.set_title(note, loc="right", fontsize=9, color=INK, pad=9)


def _draw_line(axes: Axes, line: PathLine, beside: int) -> None:
    """Draw a line; `beside` is how many leave the same data node, whose numbers must not run into each other."""
    width = min(3.5, 0.9 + 0.45 * len(line.lanes))
    for hop in line.hops:
        if hop.swapped:
            look = {"color": line.hue, "linewidth": width, "linestyle": (0, (2.5, 1.5))}
            arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11, **look}
            axes.annotate("", hop.points[-1], hop.points[0], arrowprops=arrow)
        else:
            axes.plot(*zip(*hop.points, strict=True), color=line.hue, linewidth=width, zorder=2)
    x, y = line.hops[0].points[0]
    left = x - 2 * HALF_WIDTH - 0.02
    size = min(8.0, 72 * STATION_IN * spacing(HEIGHT, beside))
    axes.text(left, y, ranges_text(line.lanes), fontsize=size, color=INK, ha="right", va="center")


def _draw_station(axes: Axes, station: Station, column_in: float) -> None:
    box = FancyBboxPatch(
        (station.x - HALF_WIDTH, station.y - HEIGHT / 2),
        2 * HALF_WIDTH,
        HEIGHT,
        boxstyle=f"round,pad=0,rounding_size={0.07 / column_in}",
        mutation_aspect=column_in / STATION_IN,  # round corners, though the axes have different scales
        facecolor="white",
        edgecolor=station.hue or FAINT,
        linewidth=1.8 if station.hue else 0.9,
        zorder=3,
    )
    axes.add_patch(box)
    rows = wrap(station.name, NAME_CHARACTERS)
    wide_pt = 72 * 2 * HALF_WIDTH * column_in / (0.65 * max(map(len, rows)))
    high_pt = 72 * HEIGHT * STATION_IN / (1.4 * len(rows))
    size = min(8.5, wide_pt, high_pt)
    name = literal("\n".join(rows))
    axes.text(station.x, station.y, name, fontsize=size, color=INK, ha="center", va="center", zorder=5)


def blank(width_in: float, height_in: float) -> Figure:
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_image(figure: Figure, path: Path, dpi: float = DPI) -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=dpi)
    write_bytes(path, image.getvalue())


def literal(text: str) -> str:
    """The text with dollar signs escaped: matplotlib would read what stands between two as a formula."""
    return text.replace("$", r"\$")


def dress(axes: Axes, title: str, x_title: str, y_title: str = "") -> None:
    """Titles of a panel with curves on a grid, without a frame."""
    axes.set_title(literal(title), loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_xlabel(literal(x_title), fontsize=10, color=INK)
    axes.set_ylabel(y_title, fontsize=10, color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
