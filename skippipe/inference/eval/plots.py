"""Plots of perplexity against the share of stages that is kept, as an image and as a self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator
from plotly.subplots import make_subplots

from skippipe.inference.eval.evaluate import Evaluation
from skippipe.inference.eval.tables import notes, number, tables
from skippipe.json_fields import write_text
from skippipe.report.html import figure_html, page, section, table_html
from skippipe.report.png import INK, LINE_STYLES, blank, dress, literal, write_image
from skippipe.stage_subset import StageSubset
from skippipe.timeline import HUES

MARKER = {"color": "#9A9A9A", "size": 7, "opacity": 0.6}
KEPT_TITLE, PERPLEXITY_TITLE = "stages kept, % of the model's", "perplexity (logarithmic)"
MEAN, ORDER, EXACT = "mean", "dropped one after another", "best of its size"
COLOURS = {MEAN: HUES[0], ORDER: HUES[1], EXACT: HUES[3]}
DASHES = {MEAN: "solid", ORDER: "solid", EXACT: "dot"}
IN_WORDS = """Points: subsets of the stages. Lines: the mean of each size; what is left when stages are dropped in the
best order, one after another (−3: stage 3 goes); the best subset of each size."""


@dataclass(frozen=True)
class PlotPoint:
    kept: float
    """Percentage of the stages."""
    perplexity: float
    name: str
    mark: str = ""
    """Label beside the point."""


@dataclass(frozen=True)
class PlotPanel:
    """The points and lines of one text."""

    text: str
    points: list[PlotPoint]
    lines: dict[str, list[PlotPoint]]


def panels(evaluation: Evaluation) -> list[PlotPanel]:
    """A panel for every text that was begun."""
    found = (_panel(evaluation, text.text) for text in evaluation.texts)
    return [panel for panel in found if panel.points]


def _panel(evaluation: Evaluation, text: str) -> PlotPanel:
    def points(subsets: Sequence[StageSubset]) -> list[PlotPoint]:
        known = {subset: loss for subset in subsets if (loss := evaluation.loss(subset, text))}
        return [
            PlotPoint(100 * len(subset.stages) / subset.total, loss.perplexity, subset.name)
            for subset, loss in known.items()
        ]

    sizes = evaluation.sizes(text)
    dropped = points([evaluation.subset(ablation.remaining) for ablation in evaluation.order])
    marks = [f"−{ablation.stage}" for ablation in evaluation.order]
    lines = {
        MEAN: [PlotPoint(100 * size.kept / evaluation.total, size.mean, f"mean of {size.subsets}") for size in sizes],
        ORDER: points([evaluation.whole])
        + [replace(point, mark=mark) for point, mark in zip(dropped, marks, strict=False)],
        EXACT: points(list(evaluation.best_by_size(text).values())),
    }
    return PlotPanel(
        text, points(list(evaluation.losses)), {name: line for name, line in lines.items() if len(line) > 1}
    )


def ticks(panel: PlotPanel) -> dict[float, str]:
    """Round perplexities, as they are written: even where they lie close together, else 1, 2 and 5 times 10^n."""
    values = [point.perplexity for point in panel.points]
    low, high = 0.97 * min(values), 1.03 * max(values)
    steps: Sequence[float] = [digit * 10.0**power for power in range(304) for digit in (1, 2, 5)]
    if high < 4 * low:
        steps = MaxNLocator(7, steps=[1, 2, 5, 10]).tick_values(low, high)
    return {float(step): number(step).removesuffix(".00") for step in steps if low <= step <= high}


def write_png(evaluation: Evaluation, title: str, path: Path) -> None:
    found = panels(evaluation)
    figure = blank(2.4 + 5.2 * len(found), 5.2)
    figure.suptitle(literal(title), fontsize=13, color=INK)
    row: Sequence[Axes] = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, panel in zip(row, found, strict=True):
        _draw(axes, panel)
        axes.set_yscale("log")
        marked = ticks(panel)
        axes.set_yticks(list(marked), list(marked.values()))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.invert_xaxis()
    row[0].set_ylabel(PERPLEXITY_TITLE, fontsize=10, color=INK)
    row[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9, frameon=False, labelcolor=INK)
    write_image(figure, path)


def _draw(axes: Axes, panel: PlotPanel) -> None:
    kept, perplexities = [point.kept for point in panel.points], [point.perplexity for point in panel.points]
    axes.plot(kept, perplexities, "o", color="#9A9A9A", markersize=4.5, alpha=0.6, linewidth=0, label="a subset")
    for name, line in panel.lines.items():
        axes.plot(
            [point.kept for point in line],
            [point.perplexity for point in line],
            LINE_STYLES[DASHES[name]],
            color=COLOURS[name],
            linewidth=2,
            label=name,
        )
        for point in line:
            where = (point.kept, point.perplexity)
            axes.annotate(point.mark, where, (3, -11), textcoords="offset points", fontsize=9, color=COLOURS[name])
    dress(axes, f"On '{panel.text}'", KEPT_TITLE)


def write_page(evaluation: Evaluation, title: str, path: Path) -> None:
    first, *others = tables(evaluation)
    sections = [
        *(f"<p>{escape(note)}</p>" for note in notes(evaluation)),
        section("Perplexity by the share of stages that is kept", IN_WORDS, _figure(panels(evaluation))),
        *(table_html(table, names=0) for table in (*others, first)),  # that of all subsets may be long
    ]
    write_text(path, page(title, sections))


def _figure(found: Sequence[PlotPanel]) -> str:
    titles = [f"on '{escape(panel.text)}'" for panel in found]
    figure = make_subplots(1, len(found), subplot_titles=titles, horizontal_spacing=0.06)
    for column, panel in enumerate(found, start=1):
        drawn = {"a subset": panel.points, **panel.lines}
        for name, points in drawn.items():
            line = {"color": COLOURS.get(name), "dash": DASHES.get(name), "width": 2}
            marks = {"mode": "lines", "line": line} if name in COLOURS else {"mode": "markers", "marker": MARKER}
            figure.add_scatter(
                x=[point.kept for point in points],
                y=[point.perplexity for point in points],
                hovertext=[f"{escape(point.name)}: {number(point.perplexity)} {point.mark}" for point in points],
                hoverinfo="text",
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
                **marks,
            )
        marked = ticks(panel)
        figure.update_yaxes(type="log", tickvals=list(marked), ticktext=list(marked.values()), col=column)
    figure.update_xaxes(title=KEPT_TITLE, autorange="reversed")
    figure.update_yaxes(title=PERPLEXITY_TITLE, col=1)
    figure.update_layout(height=520)
    return figure_html(figure)
