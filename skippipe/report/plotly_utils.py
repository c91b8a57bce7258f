"""Pages that open anywhere, also without a network: everything they need is inside the file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from skippipe.report.table import Table

SHORT = 24  # characters of a name that stay on one line
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto; padding: 0 1em; }
body { max-width: 1400px; } p { max-width: 60em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: .15em .9em .15em 0; text-align: left; border-bottom: 1px solid #e6e6e6; }
.short { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole file; the sections are HTML, the title is text."""
    named = escape(title)
    head = f'<meta charset="utf-8"><title>{named}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script>'
    body = "\n".join([f"<h1>{named}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def section(title: str, note: str, content: str) -> str:
    """The content is HTML, the others are text."""
    told = f"<p>{escape(note)}</p>\n" if note else ""
    return f"<h2>{escape(title)}</h2>\n{told}{content}"


def table_html(table: Table, names: int = 1) -> str:
    """A section. The first columns, so many, are names and stand at the left; figures stand at the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        named = (f"<{tag}{' class=short' * (len(cell) <= SHORT)}>{escape(cell)}</{tag}>" for cell in cells[:names])
        figures = (f"<{tag} class=number>{escape(cell)}</{tag}>" for cell in cells[names:])
        return f"<tr>{''.join([*named, *figures])}</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    return section(table.title, table.note, f"<table>{row(table.headings, 'th')}{rows}</table>" if rows else "")


def figure_html(figure: go.Figure) -> str:
    figure.update_layout(template="plotly_white", margin={"l": 10, "r": 10, "t": 40, "b": 40})
    buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]]  # none that would send anything anywhere
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": buttons}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=config))
