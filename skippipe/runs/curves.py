"""Long runs as short curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skippipe.runs.records import Row

MEANS = tuple(Row._fields.index(name) for name in ("loss", "seconds", "promised_s", "tokens_per_s", "sent_bytes"))


def thinned(rows: Sequence[Row], most: int) -> tuple[int, list[Row]]:
    """How many neighbours stand together, and their means; the rest is the last one's."""
    size = max(1, -(-len(rows) // most))
    if size == 1:
        return size, list(rows)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return size, [_together(group) for group in groups]


def _together(rows: Sequence[Row]) -> Row:
    last = rows[-1]
    return Row(*(_mean([row[at] for row in rows]) if at in MEANS else last[at] for at in range(len(last))))  # type: ignore[arg-type]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    mean = math.fsum(found) / len(found) if found else math.nan
    return mean if math.isfinite(mean) else None
