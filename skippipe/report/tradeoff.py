"""What a sweep has found, as an image and as a page: seconds against the share skipped, or against nats of codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from plotly import graph_objects as go

from skippipe.json_fields import write_text
from skippipe.planner.sweep import CodecPoint, SweepPoint, Trade, best, efficient
from skippipe.report.html import figure_html, page, section, table_html
from skippipe.report.png import INK, blank, dress, write_image
from skippipe.report.summary import Table, codecs_text
from skippipe.timeline import HUES

SKIPPED_TITLE, SECONDS_TITLE = "share of the stages skipped, %", "seconds per microbatch"
NATS_TITLE, ITERATION_TITLE = "nats that codecs add to the loss", "seconds of an iteration"
EFFICIENT, SAME = "efficient: nothing skips less and is faster", "as soon at the same loss as the best"
GREY = "#9A9A9A"
SKIPPED_IN_WORDS = """Points: visited stages of all stages, a colour for each number of stages. The line joins the
efficient ones: nothing skips less and is faster. Below the dotted line, plans would be sooner at the same loss than the
best one, which wears a ring."""
CODECS_IN_WORDS = """Points: the shortest iteration found for each budget, at what its codecs cost. Every link and every
stage has a codec of its own. Where the line is flat, more nats buy nothing."""


@dataclass(frozen=True)
class Tradeoff:
    """The points of a sweep, and how time is weighed against loss."""

    points: Sequence[SweepPoint]
    trade: Trade

    @cached_property
    def best(self) -> SweepPoint:
        return best(self.points, self.trade)

    @cached_property
    def front(self) -> list[SweepPoint]:
        """The efficient points, from none skipped to most: the Pareto front."""
        marked = zip(self.points, efficient(self.points), strict=True)
        return sorted((point for point, good in marked if good), key=lambda point: point.skipped)

    @property
    def groups(self) -> dict[int, list[SweepPoint]]:
        """Number of stages → its points."""
        counts = dict.fromkeys(point.stages for point in self.points)
        return {count: [point for point in self.points if point.stages == count] for count in counts}

    @property
    def same_loss(self) -> tuple[list[float], list[float]]:
        """Share skipped, %, and the seconds per microbatch that would be as good as the best point."""
        highest = max(point.skipped for point in self.points)
        shares = [highest * Fraction(step, 40) for step in range(41)]
        least_s = self.best.same_loss_s(self.trade)
        return [100 * float(share) for share in shares], [least_s / self.trade.tokens(share) for share in shares]


def write_skipped_png(tradeoff: Tradeoff, title: str, path: Path) -> None:
    figure = blank(8.6, 5.4)
    axes = figure.subplots()
    axes.plot(*_places(tradeoff.front), "-", color=GREY, linewidth=1.5, label=EFFICIENT, zorder=1)
    axes.plot(*tradeoff.same_loss, ":", color=INK, linewidth=1.2, label=SAME, zorder=1)
    for hue, (count, points) in zip(_hues(tradeoff), tradeoff.groups.items(), strict=True):
        axes.plot(*_places(points), "o", color=hue, markersize=6.5, linewidth=0, label=f"{count} stages", zorder=2)
    x, y = _places([tradeoff.best])
    axes.plot(x, y, "o", markersize=14, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.6, zorder=3)
    for point in {*tradeoff.front, tradeoff.best}:
        where = (100 * float(point.skipped), point.microbatch_s)
        axes.annotate(point.name, where, (8, 6), textcoords="offset points", fontsize=9, color=INK)
    axes.set_ylim(bottom=0)
    dress(axes, title, SKIPPED_TITLE, SECONDS_TITLE)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2, fontsize=9, frameon=False, labelcolor=INK)
    write_image(figure, path)


def write_skipped_page(tradeoff: Tradeoff, title: str, notes: str, table: Table, path: Path) -> None:
    figure = go.Figure()
    x, y = _places(tradeoff.front)
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": GREY}, name=EFFICIENT, hoverinfo="skip")
    x, y = tradeoff.same_loss
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": INK, "dash": "dot"}, name=SAME, hoverinfo="skip")
    for hue, (count, points) in zip(_hues(tradeoff), tradeoff.groups.items(), strict=True):
        x, y = _places(points)
        hover = {"hovertext": [_hover_text(point, tradeoff.trade) for point in points], "hoverinfo": "text"}
        figure.add_scatter(x=x, y=y, mode="markers", marker={"color": hue, "size": 9}, name=f"{count} stages", **hover)
    x, y = _places([tradeoff.best])
    ring = {"color": INK, "size": 18, "symbol": "circle-open", "line": {"width": 2}}
    figure.add_scatter(x=x, y=y, mode="markers", marker=ring, name="the best", hoverinfo="skip")
    figure.update_xaxes(title=SKIPPED_TITLE)
    figure.update_yaxes(title=SECONDS_TITLE, rangemode="tozero")
    figure.update_layout(height=520)
    words = f"{SKIPPED_IN_WORDS} {notes}"
    write_text(path, page(title, [section("What skipping gives", words, figure_html(figure)), table_html(table)]))


def _places(points: Sequence[SweepPoint]) -> tuple[list[float], list[float]]:
    return [100 * float(point.skipped) for point in points], [point.microbatch_s for point in points]


def _hues(tradeoff: Tradeoff) -> list[str]:
    return [HUES[index % len(HUES)] for index in range(len(tradeoff.groups))]


def _hover_text(point: SweepPoint, trade: Trade) -> str:
    return (
        f"visiting {point.name} stages: {point.microbatch_s:.3f} s per microbatch, "
        f"{point.same_loss_s(trade):.3f} s at the same loss"
    )


def write_codecs_png(points: Sequence[CodecPoint], title: str, path: Path) -> None:
    figure = blank(8.6, 5.0)
    axes = figure.subplots()
    axes.plot(*_codec_places(points), "o-", color=HUES[0], markersize=6.5, linewidth=1.5)
    for point in points:
        text = f"{point.iteration_s:.1f} s"
        axes.annotate(text, (point.nats, point.iteration_s), (6, 7), textcoords="offset points", fontsize=9, color=INK)
    axes.set_ylim(0, 1.1 * max(point.iteration_s for point in points))  # room for the words beside points
    axes.set_xlim(0, 1.1 * max(point.nats for point in points) or None)
    dress(axes, title, NATS_TITLE, ITERATION_TITLE)
    write_image(figure, path)


def write_codecs_page(points: Sequence[CodecPoint], title: str, notes: str, table: Table, path: Path) -> None:
    figure = go.Figure()
    x, y = _codec_places(points)
    hover = [f"{point.iteration_s:.2f} s for {point.nats:.2g} nats: {codecs_text(point.plan)}" for point in points]
    line = {"color": HUES[0]}
    figure.add_scatter(
        x=x, y=y, mode="lines+markers", line=line, marker={"size": 9}, hovertext=hover, hoverinfo="text", name="plans"
    )
    figure.update_xaxes(title=NATS_TITLE, rangemode="tozero")
    figure.update_yaxes(title=ITERATION_TITLE, rangemode="tozero")
    figure.update_layout(height=520)
    words = f"{CODECS_IN_WORDS} {notes}"
    write_text(path, page(title, [section("What codecs give", words, figure_html(figure)), table_html(table)]))


def _codec_places(points: Sequence[CodecPoint]) -> tuple[list[float], list[float]]:
    return [point.nats for point in points], [point.iteration_s for point in points]
