"""The results of a study as pictures, each as PNG and all of them, with the tables, as one page without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from skippipe.json_fields import write_text
from skippipe.report.html import figure_html, page, section, table_html
from skippipe.report.png import INK, LINE_STYLES, blank, dress, literal, write_image
from skippipe.report.summary import Table
from skippipe.study.part_tables import increases
from skippipe.study.planned_time import PlannedTimes, elapsed_s
from skippipe.study.results import FULL, Result, Runs, held_out
from skippipe.study.tables import total_s
from skippipe.timeline import HUES

SETTLED = 0.12  # share of the longest run before which losses are so high that they need not be in the picture
FINE = 0.02  # below this, increases are drawn as they are; far above it, by their logarithm
TICKS = (-0.2, -0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 10_000)
LOSS_TITLE = "held-out loss, nats a token"
KEPT_TITLE = "stages kept, % of the model's"
INCREASE_TITLE = "increase of the perplexity"
BANDS_IN_WORDS = """Increase of the perplexity against the same model whole, when stages are left out after training.
Lines: mean over the parts that were drawn, and over seeds; bands: from the best part to the worst. Stages that are kept
are driven as was best on the first text."""
HEAD_PX, ROW_PX = 40, 480  # of a picture on the page
ABREAST = 3  # texts side by side, at most
DASHES = tuple(LINE_STYLES)


@dataclass(frozen=True)
class LineStyle:
    """How a variant is drawn, wherever it is."""

    colour: str
    dash: str

    @property
    def width(self) -> float:
        return 2.4 if self.colour == INK else 1.8


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """The full one is black; a ninth of the others takes the first hue again, dashed."""
    others = [name for name in names if name != FULL]
    found = {
        name: LineStyle(HUES[at % len(HUES)], DASHES[at // len(HUES) % len(DASHES)]) for at, name in enumerate(others)
    }
    return {name: found.get(name, LineStyle(INK, "solid")) for name in names}


@dataclass(frozen=True)
class LossCurve:
    """Loss against something, for one seed or (None) the mean of several."""

    variant: str
    seed: int | None
    xs: list[float]
    losses: list[float]


@dataclass(frozen=True)
class LossChart:
    """Loss against one thing, for all variants."""

    file: str
    title: str
    note: str
    x_title: str
    curves: list[LossCurve]

    @property
    def mean_curves(self) -> list[LossCurve]:
        """The mean over seeds, where they were evaluated at the same points."""
        found = []
        for name in dict.fromkeys(curve.variant for curve in self.curves):
            own = [curve for curve in self.curves if curve.variant == name]
            common = [curve for curve in own if curve.xs == own[0].xs]
            losses = [fmean(each) for each in zip(*(curve.losses for curve in common), strict=True)]
            found.append(LossCurve(name, None if len(common) > 1 else own[0].seed, own[0].xs, losses))
        return found

    @property
    def loss_range(self) -> tuple[float, float]:
        begins = SETTLED * max(curve.xs[-1] for curve in self.curves)
        points = [point for curve in self.curves for point in zip(curve.xs, curve.losses, strict=True)]
        shown = [loss for x, loss in points if x >= begins and math.isfinite(loss)] or [0.0]
        low, high = min(shown), max(shown)
        margin = 0.04 * (high - low) or 0.1
        return low - margin, high + margin


def charts(runs: Runs, times: PlannedTimes | None) -> list[LossChart]:
    found = [
        LossChart(
            "loss-tokens.png",
            "Loss against tokens",
            "Held-out loss of the whole model while it is trained. Thick: mean over seeds; thin: each seed.",
            "tokens, millions",
            list(_curves(runs, lambda result: [point[1] / 1e6 for point in result["curve"]])),
        )
    ]
    if times:

        def hours(result: Result) -> list[float] | None:
            at = elapsed_s(result, times)
            return [each / 3600 for each in at] if at else None

        timed = list(_curves(runs, hours))
        full_s = total_s(runs.get(FULL, {}), times)
        beside = f" '{FULL}' takes {full_s / 3600:.1f} h." if full_s else ""
        found.append(
            LossChart(
                "loss-time.png",
                "Loss against planned time",
                f"The same in the seconds that iterations are planned to take.{beside}",
                f"planned hours on {times.planned.cluster} ({times.planned})",
                timed,
            )
        )
    return [chart for chart in found if chart.curves]


def _curves(runs: Runs, xs_of: Callable[[Result], list[float] | None]) -> Iterator[LossCurve]:
    for name, seeds in runs.items():
        for seed, result in seeds.items():
            xs = xs_of(result)
            if xs:
                yield LossCurve(name, seed, xs, held_out(result))


@dataclass(frozen=True)
class SubsetBand:
    """What a variant loses on a text when stages are left out, from the whole model downwards, over all seeds."""

    variant: str
    text: str
    kept: list[float]
    """Shares of the stages, %."""
    means: list[float]
    bests: list[float]
    worsts: list[float]


def subset_bands(runs: Runs) -> list[SubsetBand]:
    found = []
    for name, seeds in runs.items():
        measured = increases(seeds)
        for text in dict.fromkeys(each.text for each in measured):
            own = [each for each in measured if each.text == text]
            kept = [100.0, *(100 * each.kept / each.stages for each in own)]
            rows = [(0.0, 0.0, 0.0), *((fmean(each.means), fmean(each.bests), fmean(each.worsts)) for each in own)]
            means, bests, worsts = (list(column) for column in zip(*rows, strict=True))
            found.append(SubsetBand(name, text, kept, means, bests, worsts))
    return found


def squeezed(increases: Sequence[float]) -> list[float]:
    """Small ones as they are, large ones by their logarithm; below 0: a part is better than the whole."""
    return [math.asinh(increase / FINE) for increase in increases]


def _ticks(found: Sequence[SubsetBand]) -> list[float]:
    low, high = min(min(band.bests) for band in found), max(max(band.worsts) for band in found)
    return [tick for tick in TICKS if 1.3 * low <= tick <= 1.3 * high]


def _grid(found: Sequence[SubsetBand]) -> tuple[list[str], int, int]:
    """Texts, and the rows and columns in which they are shown."""
    texts = list(dict.fromkeys(band.text for band in found))
    rows = -(-len(texts) // ABREAST)
    return texts, rows, -(-len(texts) // rows)


def write_pictures(runs: Runs, times: PlannedTimes | None, folder: Path) -> list[Path]:
    """The PNGs for which there is something to show."""
    styles = line_styles(list(runs))
    figures = {chart.file: _chart_png(chart, styles) for chart in charts(runs, times)}
    found = subset_bands(runs)
    if found:
        figures["parts.png"] = _bands_png(found, styles)
    for file, figure in figures.items():
        write_image(figure, folder / file)
    return [folder / file for file in figures]


def _chart_png(chart: LossChart, styles: dict[str, LineStyle]) -> Figure:
    figure = blank(9.5, 5.4)
    axes = figure.subplots()
    for curve in chart.curves:
        axes.plot(curve.xs, curve.losses, color=styles[curve.variant].colour, linewidth=0.7, alpha=0.35)
    for curve in chart.mean_curves:
        style = styles[curve.variant]
        axes.plot(curve.xs, curve.losses, LINE_STYLES[style.dash], color=style.colour, linewidth=style.width)
        axes.plot(curve.xs[-1:], curve.losses[-1:], "o", color=style.colour, markersize=4.5)
    axes.set_ylim(*chart.loss_range)
    axes.set_xlim(left=0)
    dress(axes, chart.title, chart.x_title, LOSS_TITLE)
    _legend(axes, {_ending(curve): styles[curve.variant] for curve in chart.mean_curves})
    return figure


def _bands_png(found: list[SubsetBand], styles: dict[str, LineStyle]) -> Figure:
    texts, rows, columns = _grid(found)
    figure = blank(2.2 + 4.6 * columns, 0.6 + 4.4 * rows)
    ticks = _ticks(found)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for unused in grid.flat[len(texts) :]:
        unused.set_visible(False)
    for at, text in enumerate(texts):
        axes = grid.flat[at]
        for band in (band for band in found if band.text == text):
            style = styles[band.variant]
            low, mean, high = (squeezed(each) for each in (band.bests, band.means, band.worsts))
            axes.fill_between(band.kept, low, high, color=style.colour, alpha=0.12, linewidth=0)
            line_and_dots = LINE_STYLES[style.dash] + "o"
            axes.plot(band.kept, mean, line_and_dots, color=style.colour, linewidth=style.width, markersize=4.5)
        axes.set_xlim(max(band.kept[0] for band in found) + 2, min(band.kept[-1] for band in found) - 2)
        axes.set_yticks(squeezed(ticks), [_percent(tick) for tick in ticks])
        dress(axes, f"On '{text}'", KEPT_TITLE, "" if at % columns else INCREASE_TITLE)
    _legend(grid[0, -1], {band.variant: styles[band.variant] for band in found})
    return figure


def _legend(axes: Axes, labels: dict[str, LineStyle]) -> None:
    handles = [
        Line2D([], [], color=style.colour, ls=LINE_STYLES[style.dash], lw=style.width, label=literal(label))
        for label, style in labels.items()
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9, frameon=False, labelcolor=INK)


def _ending(curve: LossCurve) -> str:
    return f"{curve.variant}: {curve.losses[-1]:.3f}"


def _percent(increase: float) -> str:
    return f"{100 * increase:+,.0f}%".replace("-", "−") if increase else "0"


def write_page(title: str, tables: Sequence[Table], runs: Runs, times: PlannedTimes | None, path: Path) -> None:
    styles = line_styles(list(runs))
    sections = [table_html(table) for table in tables[:1]]
    for chart in charts(runs, times):
        sections.append(section(chart.title, chart.note, _chart_html(chart, styles)))
    found = subset_bands(runs)
    if found:
        sections.append(section("Parts of the model", BANDS_IN_WORDS, _bands_html(found, styles)))
    sections += [table_html(table) for table in tables[1:]]
    write_text(path, page(title, sections))


def _chart_html(chart: LossChart, styles: dict[str, LineStyle]) -> str:
    figure = go.Figure()
    for curve in chart.curves:
        line = {"color": styles[curve.variant].colour, "width": 0.7}
        figure.add_scatter(
            x=curve.xs,
            y=curve.losses,
            mode="lines",
            line=line,
            opacity=0.4,
            legendgroup=curve.variant,
            showlegend=False,
            hoverinfo="skip",
        )
    for curve in chart.mean_curves:
        style = styles[curve.variant]
        figure.add_scatter(
            x=curve.xs,
            y=curve.losses,
            mode="lines",
            line={"color": style.colour, "width": style.width, "dash": style.dash},
            legendgroup=curve.variant,
            name=escape(_ending(curve)),
            hovertemplate=f"{escape(curve.variant)}<br>%{{x:,.4~g}}: %{{y:.4f}}<extra></extra>",
        )
    figure.update_xaxes(title=escape(chart.x_title), rangemode="tozero")
    figure.update_yaxes(title=LOSS_TITLE, range=chart.loss_range)
    figure.update_layout(height=HEAD_PX + ROW_PX)
    return figure_html(figure)


def _bands_html(found: list[SubsetBand], styles: dict[str, LineStyle]) -> str:
    texts, rows, columns = _grid(found)
    titles = [f"on '{escape(text)}'" for text in texts]
    figure = make_subplots(rows, columns, shared_yaxes="all", subplot_titles=titles, horizontal_spacing=0.03)
    for band in found:
        style = styles[band.variant]
        row, column = divmod(texts.index(band.text), columns)
        edges = squeezed(band.bests) + squeezed(band.worsts)[::-1]
        common = {"legendgroup": band.variant, "name": escape(band.variant), "row": row + 1, "col": column + 1}
        figure.add_scatter(
            x=band.kept + band.kept[::-1],
            y=edges,
            fill="toself",
            fillcolor=style.colour,
            opacity=0.12,
            line={"width": 0},
            mode="lines",
            showlegend=False,
            hoverinfo="skip",
            **common,
        )
        hover = [
            f"{escape(band.variant)}, {kept:.0f}% kept<br>mean {mean:+.1%}, best {best:+.1%}, worst {worst:+.1%}"
            for kept, mean, best, worst in zip(band.kept, band.means, band.bests, band.worsts, strict=True)
        ]
        figure.add_scatter(
            x=band.kept,
            y=squeezed(band.means),
            mode="lines+markers",
            line={"color": style.colour, "width": style.width, "dash": style.dash},
            showlegend=band.text == texts[0],
            hovertext=hover,
            hoverinfo="text",
            **common,
        )
    ticks = _ticks(found)
    figure.update_xaxes(title=KEPT_TITLE, autorange="reversed")
    figure.update_yaxes(tickvals=squeezed(ticks), ticktext=[_percent(tick) for tick in ticks])
    figure.update_yaxes(title=INCREASE_TITLE, col=1)
    figure.update_layout(height=HEAD_PX + ROW_PX * rows)
    return figure_html(figure)
