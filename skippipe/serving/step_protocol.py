"""A step in words, for every node on its lane; and what a node makes of them.

What a node that serves asks its computer to do, one thing at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams
from skippipe.runtime.messages import RunStep
from skippipe.serving.scheduler import ServingStep
from skippipe.transport.message import LARGEST_COUNT


def step_messages(step: ServingStep) -> dict[int, RunStep]:
    """The first node alone is told tokens and chances: it embeds and samples."""
    path = list(step.lane.path)
    rows = [[row.slot, row.start, len(row.tokens)] for row in step.rows]
    freed = list(step.freed)
    asked = [row.stream.request.sampling for row in step.rows]
    first = RunStep(
        step.number,
        step.lane.number,
        path,
        rows,
        freed,
        [list(row.tokens) for row in step.rows],
        [[each.temperature, float(each.top_k), each.top_p] for each in asked],
        [each.seed for each in asked],
    )
    other = RunStep(step.number, step.lane.number, path, rows, freed, [], [], [])
    return dict.fromkeys(path[1:], other) | {path[0]: first}


@dataclass(frozen=True)
class NodeInfo:
    """What a node knows of itself and of the others."""

    number: int
    stage: int
    nodes: int
    """How many there are: their numbers are below it."""
    vocabulary: int
    lane_tokens: int
    """That the cache of a lane has room for."""


@dataclass(frozen=True)
class StepInput:
    """A step as a node takes it."""

    step: int
    lane: int
    path: tuple[int, ...]
    rows: tuple[InputRow, ...]
    freed: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    """Of each row, for the first node of the path; likewise …"""
    how: tuple[SamplingParams, ...]
    """… how to choose the next one."""

    @property
    def count(self) -> int:
        """Tokens of all rows."""
        return sum(row.count for row in self.rows)


def parse_step(feed: RunStep, seat: NodeInfo) -> StepInput:
    """UserError says why such a step cannot be: caches and sampling rely on what is checked here.

    Numbers are whole and not negative, which `control` has seen to.
    """
    first = feed.path[:1] == [seat.number]
    _check(feed.lane <= LARGEST_COUNT, "a lane of too large a number")
    _check(len(set(feed.path)) == len(feed.path), "a path that visits a node twice")
    _check(all(node < seat.nodes for node in feed.path), "a path over nodes that nobody knows")
    _check(seat.number in feed.path, "a step that does not come here")
    _check(first == (seat.stage == 0), "a path that begins elsewhere than at stage 0")
    rows = _rows(feed.rows, seat.lane_tokens)
    tokens: tuple[tuple[int, ...], ...] = ()
    how: tuple[SamplingParams, ...] = ()
    if first:
        tokens = tuple(map(tuple, feed.tokens))
        _check([len(row) for row in tokens] == [row.count for row in rows], "other tokens than its rows have")
        _check(all(token < seat.vocabulary for row in tokens for token in row), "a token that nobody knows")
        how = _sampling(feed, len(rows))
    return StepInput(feed.step, feed.lane, tuple(feed.path), rows, tuple(feed.freed), tokens, how)


def _rows(said: list[list[int]], room: int) -> tuple[InputRow, ...]:
    _check(bool(said) and all(len(row) == 3 for row in said), "rows without slot, start and count")
    rows = tuple(InputRow(*row) for row in said)
    _check(all(row.count for row in rows), "a row of nothing")
    _check(len({row.slot for row in rows}) == len(rows), "a slot named twice")
    most = (max(row.slot for row in rows) + 1) * max(row.start + row.count for row in rows)
    _check(most <= room, "more tokens than a lane has room for")
    return rows


def _sampling(feed: RunStep, rows: int) -> tuple[SamplingParams, ...]:
    _check(len(feed.chances) == len(feed.seeds) == rows, "other chances than rows")
    _check(all(len(chance) == 3 and chance[1].is_integer() for chance in feed.chances), "chances of another kind")
    chances = zip(feed.chances, feed.seeds, strict=True)
    return tuple(SamplingParams(heat, int(top_k), top_p, seed) for (heat, top_k, top_p), seed in chances)


def _check(can_be: bool, otherwise: str) -> None:
    if not can_be:
        raise UserError(otherwise)


@dataclass(frozen=True)
class InputRow:
    slot: int
    start: int
    """Tokens of the slot that this stage has seen before."""
    count: int
    """New ones."""


@dataclass(frozen=True)
class ForwardStep:
    """New tokens of several streams through this stage: their ids on stage 0, else what the stage before made of them,
    [tokens of all rows, hidden]."""

    lane: int
    rows: tuple[InputRow, ...]
    freed: tuple[int, ...]
    """Slots to empty first."""
    given: Any


@dataclass(frozen=True)
class SampleTokens:
    """The next token of every row, from what the last stage made of its new ones."""

    rows: tuple[InputRow, ...]
    how: tuple[SamplingParams, ...]
    given: Any


@dataclass(frozen=True)
class FreeSlots:
    """A lane is closed: its caches go."""

    lane: int


@dataclass(frozen=True)
class StepRefused:
    """What becomes of a work that cannot be done."""

    reason: str
    given: bool
    """Is it because of what was given, and so of whoever sent it?"""


ServingWork = ForwardStep | SampleTokens | FreeSlots
