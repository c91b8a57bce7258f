"""A step as messages to the nodes of its route, what a node checks in them, and the work it gives to its executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams
from skippipe.runtime.messages import RunStep
from skippipe.serving.scheduler import ServingStep
from skippipe.transport.message import LARGEST_COUNT


@dataclass(frozen=True)
class InputRow:
    """New tokens of one sequence in a step."""

    slot: int
    start: int
    """Tokens of the sequence that are in the slot of the KV cache already."""
    count: int
    """Number of new tokens."""


@dataclass(frozen=True)
class StepInput:
    """A step as a node has checked it."""

    step: int
    route: int
    path: tuple[int, ...]
    rows: tuple[InputRow, ...]
    freed: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each row; for the first node of the path alone."""
    sampling: tuple[SamplingParams, ...]
    """How to choose the next token of each row; for the first node of the path alone."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.count for row in self.rows)


@dataclass(frozen=True)
class ForwardStep:
    """New tokens of several sequences through this stage."""

    step: StepInput
    position: int
    """The node's position on the path of the step."""
    inputs: Any
    """On stage 0 the ids of each row's tokens, else the hidden states of the stage before: [tokens of all rows, d]."""


@dataclass(frozen=True)
class SampleTokens:
    """The next token of every row, from the last stage's hidden states."""

    step: StepInput
    inputs: Any

    @property
    def position(self) -> int:
        return len(self.step.path)


@dataclass(frozen=True)
class FreeSlots:
    """The KV caches of a route that is closed."""

    route: int


@dataclass(frozen=True)
class StepRefused:
    """The result of work that cannot be done."""

    reason: str
    bad_input: bool
    """Is the input the reason, and so its sender at fault?"""


ServingWork = ForwardStep | SampleTokens | FreeSlots


def step_messages(step: ServingStep) -> dict[int, RunStep]:
    """The message for each node; tokens and sampling parameters go to the first one alone, which embeds and samples."""
    path = list(step.route.path)
    rows = [[row.slot, row.start, len(row.tokens)] for row in step.rows]
    freed = list(step.freed)
    sampling = [row.sequence.request.sampling for row in step.rows]
    first = RunStep(
        step.number,
        step.route.number,
        path,
        rows,
        freed,
        [list(row.tokens) for row in step.rows],
        [[each.temperature, float(each.top_k), each.top_p] for each in sampling],
        [each.seed for each in sampling],
    )
    other = RunStep(step.number, step.route.number, path, rows, freed, [], [], [])
    return dict.fromkeys(path[1:], other) | {path[0]: first}


@dataclass(frozen=True)
class NodeInfo:
    """What a node knows of itself and of the cluster."""

    number: int
    stage: int
    nodes: int
    """Number of nodes: their numbers are below it."""
    vocabulary: int
    cache_tokens: int
    """Tokens that the KV cache of a route has room for."""


def parse_step(message: RunStep, node: NodeInfo) -> StepInput:
    """UserError says why such a step cannot be: KV caches and sampling rely on what is checked here.

    Numbers are whole and not negative, which `runtime.messages` has checked.
    """
    first = message.path[:1] == [node.number]
    _check(message.lane <= LARGEST_COUNT, "a route of too large a number")
    _check(len(set(message.path)) == len(message.path), "a path that visits a node twice")
    _check(all(each < node.nodes for each in message.path), "a path over unknown nodes")
    _check(node.number in message.path, "a step that does not come here")
    _check(first == (node.stage == 0), "a path that begins elsewhere than at stage 0")
    rows = _rows(message.rows, node.cache_tokens)
    tokens: tuple[tuple[int, ...], ...] = ()
    sampling: tuple[SamplingParams, ...] = ()
    if first:
        tokens = tuple(map(tuple, message.tokens))
        _check([len(row) for row in tokens] == [row.count for row in rows], "other tokens than its rows have")
        _check(all(token < node.vocabulary for row in tokens for token in row), "a token beyond the vocabulary")
        sampling = _sampling(message, len(rows))
    return StepInput(message.step, message.lane, tuple(message.path), rows, tuple(message.freed), tokens, sampling)


def _rows(rows_json: list[list[int]], room: int) -> tuple[InputRow, ...]:
    _check(bool(rows_json) and all(len(row) == 3 for row in rows_json), "rows without slot, start and count")
    rows = tuple(InputRow(*row) for row in rows_json)
    _check(all(row.count for row in rows), "a row without tokens")
    _check(len({row.slot for row in rows}) == len(rows), "a slot named twice")
    most = (max(row.slot for row in rows) + 1) * max(row.start + row.count for row in rows)
    _check(most <= room, "more tokens than a KV cache has room for")
    return rows


def _sampling(message: RunStep, rows: int) -> tuple[SamplingParams, ...]:
    _check(len(message.chances) == len(message.seeds) == rows, "other sampling parameters than rows")
    _check(
        all(len(chance) == 3 and chance[1].is_integer() for chance in message.chances),
        "sampling parameters of another shape",
    )
    pairs = zip(message.chances, message.seeds, strict=True)
    return tuple(SamplingParams(temperature, int(top_k), top_p, seed) for (temperature, top_k, top_p), seed in pairs)


def _check(holds: bool, error: str) -> None:
    if not holds:
        raise UserError(error)
