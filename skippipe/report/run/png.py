"""A run that is over as images for papers: one picture of four panels, or a folder of single ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import mul
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from skippipe.report.gantt import RecordedGantt, pale
from skippipe.report.png import GRID, INK, blank, draw_task, dress, literal, write_image, write_png
from skippipe.report.run.summary import amount, marks_of, seconds_title, short_count, steps_of, title, tokens_each
from skippipe.runs.history import RunHistory
from skippipe.runs.records import downsample
from skippipe.simulator import simulate
from skippipe.timeline import HUES

PRINT_DPI = 300
WIDTH_IN, CURVES_IN = 11.0, 3.6
SINGLE_IN = 6.4  # the width of a single panel
ROW_IN, HIGHEST_IN = 0.3, 14.0  # of a node, and of all of them
MOST_POINTS = 500  # of a curve; of longer runs the mean of neighbours stands before the whole
GANTT_IN = 10.0
MEASURED, PROMISED, IDLE, BUSY, COLLISIONS = HUES[0], HUES[1], "#D9D9D9", HUES[0], HUES[1]
NODES_IN_WORDS = "seconds of an iteration, planned above measured:\nblue computes, grey idles, a diamond is collisions"
NOT_RECORDED = "not on record"

DrawPanel = Callable[[Axes, RunHistory], None]


def write_run_png(history: RunHistory, path: Path) -> None:
    """Loss, seconds, nodes and links in one picture."""
    nodes_in = _nodes_in(history)
    figure = blank(WIDTH_IN, CURVES_IN + nodes_in + 0.4)
    figure.suptitle(literal(title(history)), fontsize=13, color=INK)
    panels = figure.subplots(2, 2, height_ratios=[CURVES_IN, nodes_in], width_ratios=[1.0, 1.05])
    for axes, draw in zip(panels.flat, (_draw_loss, _draw_seconds, _draw_nodes, _draw_links), strict=True):
        draw(axes, history)
    write_image(figure, path, PRINT_DPI)


def write_run_pngs(history: RunHistory, folder: Path) -> list[str]:
    """Every panel by itself, a recorded iteration and the plan; the names of the files."""
    nodes_in = _nodes_in(history)
    panels: dict[str, tuple[DrawPanel, float]] = {
        "loss.png": (_draw_loss, CURVES_IN),
        "seconds.png": (_draw_seconds, CURVES_IN),
        "nodes.png": (_draw_nodes, nodes_in),
        "links.png": (_draw_links, nodes_in + 0.6),
    }
    for name, (draw, height_in) in panels.items():
        figure = blank(SINGLE_IN, height_in)
        draw(figure.subplots(), history)
        write_image(figure, folder / name, PRINT_DPI)
    written = list(panels)
    recorded = [recorded for recorded in history.recorded if recorded.planned or recorded.measured]
    if recorded:
        write_image(_gantt(RecordedGantt(recorded[-1])), folder / "recorded.png", PRINT_DPI)
        written.append("recorded.png")
    if history.plan is not None:
        write_png(history.plan, history.plan.expected or simulate(history.plan), folder / "plan.png")
        written.append("plan.png")
    return written


def _nodes_in(history: RunHistory) -> float:
    return min(HIGHEST_IN, max(3.2, ROW_IN * len(history.utilization) + 1.4))


def _name_pt(rows: int) -> float:
    """The font size at which names of so many rows fit below each other."""
    return min(8.0, 0.85 * 72 * HIGHEST_IN / rows)


def _draw_loss(axes: Axes, history: RunHistory) -> None:
    dress(axes, "Loss", "iteration", "training loss")
    if not history.losses:
        _say_nothing(axes)
        return
    _draw_curve(axes, history, "loss")
    if history.validation:
        at, losses = zip(*history.validation, strict=True)
        axes.plot([each + 1 for each in at], losses, "o-", color=PROMISED, markersize=3, linewidth=1, label="held out")
        axes.legend(fontsize=8, frameon=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    each = tokens_each(history)
    if each:
        above = axes.secondary_xaxis("top", functions=(partial(mul, each), partial(mul, 1 / each)))
        above.set_xlabel("tokens", fontsize=9, color=INK)
        above.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_count(tokens)))
        above.xaxis.set_major_locator(MaxNLocator(6))
        above.tick_params(labelsize=8, colors=INK)
        above.spines["top"].set_visible(False)


def _draw_curve(axes: Axes, history: RunHistory, name: str) -> None:
    size, means = downsample(history.rows, MOST_POINTS)
    for rows, colour, width, label in (
        *(((history.rows, pale(MEASURED), 0.4, "every iteration"),) if size > 1 else ()),
        (means, MEASURED, 1.4, f"mean of {size}" if size > 1 else "measured"),
    ):
        values = [_or_gap(getattr(row, name)) for row in rows]
        axes.plot([row.iteration + 1 for row in rows], values, color=colour, linewidth=width, label=label)


def _draw_seconds(axes: Axes, history: RunHistory) -> None:
    dress(axes, seconds_title(history), "iteration", "seconds")
    rows = history.rows
    at = [row.iteration + 1 for row in rows]
    _draw_curve(axes, history, "seconds")
    if any(row.promised_s is not None for row in rows):
        promised = [_or_gap(row.promised_s) for row in rows]
        axes.step(at, promised, where="mid", color=PROMISED, linewidth=1.4, linestyle="--", label="promised")
    top_s = max(row.seconds or 0.0 for row in rows)
    highest = 0
    for sort, marks in marks_of(history):
        highest = max(highest, *(mark.height + 1 for mark in marks))
        axes.plot(
            [mark.iteration + 1 for mark in marks],
            [top_s * (1.08 + 0.08 * mark.height) for mark in marks],
            sort.matplotlib,
            color=sort.colour,
            markersize=5,
            linewidth=0,
            label=sort.name,
        )
    axes.set_ylim(0, top_s * (1.08 + 0.08 * highest) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, labelcolor=INK)


def _draw_nodes(axes: Axes, history: RunHistory) -> None:
    utilization = history.utilization
    dress(axes, "Who computes, who waits", NODES_IN_WORDS)
    size = min(4.0, _name_pt(len(utilization)) / 2)
    for which, below, tone in (("planned", -0.2, pale), ("measured", 0.2, str)):
        known = [(at + below, getattr(use, which)) for at, use in enumerate(utilization) if getattr(use, which)]
        ys, busy_s = [y for y, _ in known], [use.busy_s for _, use in known]
        axes.barh(ys, busy_s, 0.36, color=tone(BUSY), linewidth=0)
        axes.barh(ys, [use.idle_s for _, use in known], 0.36, busy_s, color=tone(IDLE), linewidth=0)
        collisions_s = [use.collision_s for _, use in known]
        axes.plot(collisions_s, ys, "D", color=tone(COLLISIONS), markersize=size, markeredgecolor=INK, linewidth=0)
    named = [literal(use.name if use.stage is None else f"{use.name} [{use.stage}]") for use in utilization]
    axes.set_yticks(range(len(utilization)), named, fontsize=_name_pt(len(utilization)))
    axes.set_ylim(len(utilization) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    if all(use.measured is None for use in utilization):
        axes.set_title(f"measured: {NOT_RECORDED}", loc="right", fontsize=9, color=INK)


def _draw_links(axes: Axes, history: RunHistory) -> None:
    axes.set_title("Bytes over every link, in all", loc="left", fontsize=12, color=INK, fontweight="bold")
    names = [use.name for use in history.utilization if use.sent_bytes or use.received_bytes]
    if not names:
        _say_nothing(axes)
        return
    sent = {pair: count for pair, count in history.links.items() if count}
    ticks = steps_of(sent.values())
    table = [[sent.get((a, b), float("nan")) for b in names] for a in names]
    heat = axes.imshow(table, cmap="cividis_r", norm=LogNorm(ticks[0], max(ticks[-1], 1.01 * ticks[0])), aspect="auto")
    shown, small = [literal(name) for name in names], _name_pt(len(names))
    axes.set_xticks(range(len(names)), shown, rotation=60, ha="right", rotation_mode="anchor", fontsize=small)
    axes.set_yticks(range(len(names)), shown, fontsize=small)
    axes.set_xlabel("receiver", fontsize=10, color=INK)
    axes.set_ylabel("sender", fontsize=10, color=INK)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xticks([at - 0.5 for at in range(1, len(names))], minor=True)
    axes.set_yticks([at - 0.5 for at in range(1, len(names))], minor=True)
    axes.grid(which="minor", color="white", linewidth=min(1.2, small / 7))
    axes.tick_params(which="minor", length=0)
    bar = axes.figure.colorbar(heat, ax=axes, shrink=0.85)
    bar.set_ticks(ticks, labels=[amount(count) for count in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)


def _gantt(gantt: RecordedGantt) -> Figure:
    labels, ys = zip(*gantt.rows, strict=True)
    figure = blank(GANTT_IN, 1.4 + 0.36 * (ys[-1] + 1))
    axes = figure.subplots()
    until_s = gantt.shown_until_s
    for half, ink in (("planned", INK), ("measured", "white")):
        for bar, where in gantt.halves[half]:
            if bar.start_s < until_s:
                draw_task(axes, bar, where, 0.8 * GANTT_IN / until_s, ink)
    title = f"Iteration {gantt.recorded.iteration + 1}: planned above, measured below"
    dress(axes, title, "seconds since the iteration began")
    axes.set_xlim(0, 1.005 * until_s)
    axes.set_ylim(ys[-1] + 0.7, -0.7)
    axes.set_yticks(ys, [literal(label) for label in labels], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    return figure


def _say_nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, NOT_RECORDED, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value
