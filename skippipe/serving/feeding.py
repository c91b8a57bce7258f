"""A step in words, for every node on its lane."""

from __future__ import annotations

from skippipe.runtime.control import Feed
from skippipe.serving.gateway import Step


def feeds(step: Step) -> dict[int, Feed]:
    """The first node alone is told tokens and chances: it embeds and samples."""
    path = list(step.lane.path)
    rows = [[row.slot, row.start, len(row.tokens)] for row in step.rows]
    freed = list(step.freed)
    asked = [row.stream.request.sampling for row in step.rows]
    first = Feed(
        step.number,
        step.lane.number,
        path,
        rows,
        freed,
        [list(row.tokens) for row in step.rows],
        [[each.temperature, float(each.top_k), each.top_p] for each in asked],
        [each.seed for each in asked],
    )
    other = Feed(step.number, step.lane.number, path, rows, freed, [], [], [])
    return dict.fromkeys(path[1:], other) | {path[0]: first}
