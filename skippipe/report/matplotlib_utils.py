"""Images as PNG. Needs no display."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skippipe.json_fields import write_bytes

DPI = 130
INK = "#222222"
GRID = "#E4E4E4"
LINE_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
"""By what plotly calls them."""


def blank(width_in: float, height_in: float) -> Figure:
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_image(figure: Figure, path: Path, dpi: float = DPI) -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=dpi)
    write_bytes(path, image.getvalue())


def literal(text: str) -> str:
    """Matplotlib would read what stands between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def dress(axes: Axes, title: str, x_title: str, y_title: str = "") -> None:
    """Curves on a grid, without a frame."""
    axes.set_title(literal(title), loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_xlabel(literal(x_title), fontsize=10, color=INK)
    axes.set_ylabel(y_title, fontsize=10, color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
