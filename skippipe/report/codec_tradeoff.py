"""Seconds against nats: what a sweep over budgets for codecs has found, as an image and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plotly import graph_objects as go

from skippipe.json_fields import write_text
from skippipe.planner.sweep import CodecPoint
from skippipe.report.html import figure_html, page, section, table_html
from skippipe.report.png import INK, blank, dress, write_image
from skippipe.report.summary import Table, codecs_text
from skippipe.timeline import HUES

NATS_TITLE, SECONDS_TITLE = "nats that codecs add to the loss", "seconds of an iteration"
IN_WORDS = """Points: the shortest iteration found for each budget, at what its codecs cost. Every link and every
stage has a codec of its own. Where the line is flat, more nats buy nothing."""


def write_png(points: Sequence[CodecPoint], title: str, path: Path) -> None:
    figure = blank(8.6, 5.0)
    axes = figure.subplots()
    axes.plot(*_places(points), "o-", color=HUES[0], markersize=6.5, linewidth=1.5)
    for point in points:
        text = f"{point.iteration_s:.1f} s"
        axes.annotate(text, (point.nats, point.iteration_s), (6, 7), textcoords="offset points", fontsize=9, color=INK)
    axes.set_ylim(0, 1.1 * max(point.iteration_s for point in points))  # room for the words beside points
    axes.set_xlim(0, 1.1 * max(point.nats for point in points) or None)
    dress(axes, title, NATS_TITLE, SECONDS_TITLE)
    write_image(figure, path)


def write_page(points: Sequence[CodecPoint], title: str, notes: str, table: Table, path: Path) -> None:
    figure = go.Figure()
    x, y = _places(points)
    hover = [f"{point.iteration_s:.2f} s for {point.nats:.2g} nats: {codecs_text(point.plan)}" for point in points]
    line = {"color": HUES[0]}
    figure.add_scatter(
        x=x, y=y, mode="lines+markers", line=line, marker={"size": 9}, hovertext=hover, hoverinfo="text", name="plans"
    )
    figure.update_xaxes(title=NATS_TITLE, rangemode="tozero")
    figure.update_yaxes(title=SECONDS_TITLE, rangemode="tozero")
    figure.update_layout(height=520)
    words = f"{IN_WORDS} {notes}"
    write_text(path, page(title, [section("What codecs give", words, figure_html(figure)), table_html(table)]))


def _places(points: Sequence[CodecPoint]) -> tuple[list[float], list[float]]:
    return [point.nats for point in points], [point.iteration_s for point in points]
