"""A step as messages to the nodes of its route, what a node checks in them, and the work it gives to its executor."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams, TokenLogprobs
from skippipe.runtime.messages import RunStep
from skippipe.serving.scheduler import ServingStep
from skippipe.stage_subset import StageHop, hops_of
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
class RowSampling:
    """How the next token of one sequence is chosen."""

    params: SamplingParams
    num_prompt_tokens: int = 0
    allowed: bytes = b""
    """Bits of the tokens that may come next; empty: all may."""


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
    sampling: tuple[RowSampling, ...]
    """How to choose the next token of each row; for the first node of the path alone."""
    hop: StageHop | None = None
    """How the path goes on from this node's stage, if it leaves stages out."""

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


class StepOutput(NamedTuple):
    """The result of sampling."""

    tokens: list[int]
    """The next token of every row."""
    logprobs: list[TokenLogprobs]
    """Log-probabilities of every row; empty where none were asked for."""


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
        [_chances(each) for each in sampling],
        [each.seed for each in sampling],
        [len(row.sequence.request.prompt) for row in step.rows],
        [[[float(token), bias] for token, bias in each.logit_bias] for each in sampling],
        [0 if each.logprobs is None else each.logprobs + 1 for each in sampling],
        [base64.b64encode(row.allowed).decode() for row in step.rows],
    )
    other = RunStep(step.number, step.route.number, path, rows, freed, [], [], [])
    return dict.fromkeys(path[1:], other) | {path[0]: first}


def _chances(params: SamplingParams) -> list[float]:
    return [
        params.temperature,
        float(params.top_k),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ]


@dataclass(frozen=True)
class NodeInfo:
    """What a node knows of itself and of the cluster."""

    number: int
    stages: int
    """Number of stages of the model."""
    stage_of: tuple[int, ...]
    """The stage of every node."""
    vocabulary: int
    cache_tokens: int
    """Tokens that the KV cache of a route has room for."""

    @property
    def stage(self) -> int:
        return self.stage_of[self.number]


def parse_step(message: RunStep, node: NodeInfo) -> StepInput:
    """UserError says why such a step cannot be: KV caches and sampling rely on what is checked here.

    Numbers are whole and not negative, which `runtime.messages` has checked.
    """
    first = message.path[:1] == [node.number]
    _check(message.lane <= LARGEST_COUNT, "a route of too large a number")
    _check(len(set(message.path)) == len(message.path), "a path that visits a node twice")
    _check(all(each < len(node.stage_of) for each in message.path), "a path over unknown nodes")
    _check(node.number in message.path, "a step that does not come here")
    _check(first == (node.stage == 0), "a path that begins elsewhere than at stage 0")
    rows = _rows(message.rows, node.cache_tokens)
    tokens: tuple[tuple[int, ...], ...] = ()
    sampling: tuple[RowSampling, ...] = ()
    if first:
        tokens = tuple(map(tuple, message.tokens))
        _check([len(row) for row in tokens] == [row.count for row in rows], "other tokens than its rows have")
        _check(all(token < node.vocabulary for row in tokens for token in row), "a token beyond the vocabulary")
        sampling = _sampling(message, len(rows), node.vocabulary)
    path = tuple(message.path)
    hop = hops_of(tuple(node.stage_of[each] for each in path), node.stages).get(node.stage)
    return StepInput(message.step, message.lane, path, rows, tuple(message.freed), tokens, sampling, hop)


def _rows(rows_json: list[list[int]], room: int) -> tuple[InputRow, ...]:
    _check(bool(rows_json) and all(len(row) == 3 for row in rows_json), "rows without slot, start and count")
    rows = tuple(InputRow(*row) for row in rows_json)
    _check(all(row.count for row in rows), "a row without tokens")
    _check(len({row.slot for row in rows}) == len(rows), "a slot named twice")
    most = (max(row.slot for row in rows) + 1) * max(row.start + row.count for row in rows)
    _check(most <= room, "more tokens than a KV cache has room for")
    return rows


def _sampling(message: RunStep, rows: int, vocabulary: int) -> tuple[RowSampling, ...]:
    each = message.chances, message.seeds, message.prompts, message.biases, message.logprobs, message.allowed
    _check(all(len(column) == rows for column in each), "other sampling parameters than rows")
    return tuple(_row_sampling(message, row, vocabulary) for row in range(rows))


def _row_sampling(message: RunStep, row: int, vocabulary: int) -> RowSampling:
    chances, biases, logprobs = message.chances[row], message.biases[row], message.logprobs[row]
    _check(len(chances) == 7 and chances[1].is_integer(), "sampling parameters of another shape")
    _check(all(len(pair) == 2 and pair[0] in range(vocabulary) for pair in biases), "a bias of no token")
    temperature, top_k, top_p, min_p, repetition, presence, frequency = chances
    params = SamplingParams(
        temperature,
        int(top_k),
        top_p,
        message.seeds[row],
        min_p,
        repetition,
        presence,
        frequency,
        tuple((int(token), value) for token, value in biases),
        logprobs - 1 if logprobs else None,
    )
    try:
        mask = base64.b64decode(message.allowed[row], validate=True)
    except ValueError:
        raise UserError("allowed tokens that are not in base64") from None
    _check(not mask or (8 * len(mask) >= vocabulary and any(mask)), "no token that is allowed, or too few bits")
    return RowSampling(params, message.prompts[row], mask)


def _check(holds: bool, error: str) -> None:
    if not holds:
        raise UserError(error)
