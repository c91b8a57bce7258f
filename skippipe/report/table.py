"""A table of words and figures. Whoever finds something makes one; pages, terminals and documents show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "–"  # in a cell for which there is no figure


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n" + "\n".join(cells) + (f"\n\n{self.note}" if self.note else "") + "\n"
