"""Likelihoods by a subset of the stages, without a KV cache: of continuations, and of the next token.

Rows of about the same length are computed together, padded at the end, where a causal model does not look. Logits are
computed only at the positions that are scored.

Where the model is on several devices, each takes the next batch when it is done with one, here and where perplexity is
measured. Batches are the same ones as on one device, and their results are taken in order, so the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.model.stage import StageModel
from skippipe.stage_subset import StageSubset

BATCH_TOKENS = 8192
HEAD_ROWS = 2048  # positions of which the logits are in memory at once
PAD_TO = 8  # few different lengths: a stage keeps the masks of each

CountProgress = Callable[[int, int], None]
"""Called with the number of requests that are done, and of all."""


Model = TypeVar("Model")
Batch = TypeVar("Batch")
Output = TypeVar("Output")


def over_replicas(
    compute: Callable[[Model, Batch], Output], replicas: Sequence[Model], batches: Iterable[Batch]
) -> Iterator[Output]:
    """What is computed of each batch, in their order, by replicas side by side: each takes one batch at a time."""
    if len(replicas) == 1:
        yield from (compute(replicas[0], batch) for batch in batches)
        return
    idle: SimpleQueue[Model] = SimpleQueue()
    for each in replicas:
        idle.put(each)

    def computed(batch: Batch) -> Output:
        replica = idle.get()
        try:
            return compute(replica, batch)
        finally:
            idle.put(replica)

    pool = ThreadPoolExecutor(len(replicas), "eval")
    try:
        yield from pool.map(computed, batches)
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption waits for the batches that have begun


class LikelihoodRequest(NamedTuple):
    """A continuation whose likelihood after a context is wanted."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    log: float
    """Natural logarithm, summed over the continuation's tokens."""
    greedy: bool
    """Is every token of it the most likely one?"""


@dataclass(frozen=True)
class SubsetModel:
    """A model of some of its stages."""

    staged: StagedModel
    subset: StageSubset
    batch_tokens: int = BATCH_TOKENS
    replicas: Sequence[StagedModel] = ()
    """The same model on other devices, which take batches of requests too."""

    def __post_init__(self) -> None:
        assert self.subset.total == len(self.staged.stages), "a subset of another model"

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states of the last stage for [rows, tokens]."""
        hidden = self.staged.stages[0].embed(tokens)
        for number in self.subset.stages:
            stage, hop = self.staged.stages[number], self.subset.hops.get(number)
            stage.set_hop(hop)
            output = stage(hidden)
            scaled = number != 0 and self.subset.residual_scale != 1.0
            hidden = stage.cross(torch.lerp(hidden, output, self.subset.residual_scale) if scaled else output, hop)
        return hidden

    def likelihoods(
        self, requests: Sequence[LikelihoodRequest], progress: CountProgress = lambda done, of: None
    ) -> list[Likelihood]:
        """The likelihood of each request; a context that does not fit loses its beginning."""
        found: dict[int, Likelihood] = {}
        models = [self, *(replace(self, staged=each, replicas=()) for each in self.replicas)]
        batches = list(likelihood_batches(requests, self.staged.context, "cpu", self.batch_tokens))
        for batch, made in zip(batches, over_replicas(SubsetModel._batch_likelihoods, models, batches), strict=True):
            if not all(math.isfinite(each.log) for each in made):
                raise UserError(f"stages {self.subset.name} of the model compute values that are not finite")
            found |= zip(batch.requests, made, strict=True)
            progress(len(found), len(requests))
        return [found[index] for index in range(len(requests))]

    def _batch_likelihoods(self, batch: LikelihoodBatch) -> list[Likelihood]:
        here = batch.to(self.staged.device)
        return here.likelihoods(*token_likelihoods(self.staged.stages[0], self.hidden(here.inputs), here))

    def most_likely(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The likeliest next token of each row."""
        found: dict[int, int] = {}
        for batch in _batches([len(row) for row in rows], self.batch_tokens):
            chosen = [rows[index][-self.staged.context :] for index in batch]
            last = torch.tensor([len(row) - 1 for row in chosen])
            inputs = _padded(chosen, self.staged.context).to(self.staged.device)
            hidden = self.hidden(inputs)[torch.arange(len(chosen)), last]
            found |= zip(batch, logits(self.staged.stages[0], hidden).argmax(-1).tolist(), strict=True)
        return [found[index] for index in range(len(rows))]


class LikelihoodBatch(NamedTuple):
    """Requests that are computed together; tensors are on one device."""

    requests: list[int]
    """Numbers of the requests."""
    inputs: Tensor
    """Token ids, [rows, tokens], padded at the end."""
    scored: Tensor
    """Positions of the flattened inputs that say something of a continuation, request by request."""
    wanted: Tensor
    """The token that follows in the continuation, at each of these."""
    counts: list[int]
    """Tokens of each continuation."""

    def to(self, device: str | torch.device) -> LikelihoodBatch:
        tensors = {name: getattr(self, name).to(device) for name in ("inputs", "scored", "wanted")}
        return self._replace(**tensors)

    def likelihoods(self, logs: Tensor, greedy: Tensor) -> list[Likelihood]:
        """The likelihoods of the requests, from what `token_likelihoods` finds."""
        starts = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        sums = np.add.reduceat(logs.double().cpu().numpy(), starts)
        every = np.logical_and.reduceat(greedy.cpu().numpy(), starts)
        return [Likelihood(*each) for each in zip(sums.tolist(), every.tolist(), strict=True)]


def likelihood_batches(
    requests: Sequence[LikelihoodRequest], context: int, device: str | torch.device, tokens: int = BATCH_TOKENS
) -> Iterator[LikelihoodBatch]:
    """Batches of about so many tokens each, for a model that looks at `context` of them."""
    fitted = [_fit(request, context) for request in requests]
    for batch in _batches([len(row) for row, _ in fitted], tokens):
        rows, counts = [fitted[index][0] for index in batch], [fitted[index][1] for index in batch]
        inputs = _padded([row[:-1] for row in rows], context)
        scored = [
            number * inputs.shape[1] + place
            for number, (row, count) in enumerate(zip(rows, counts, strict=True))
            for place in range(len(row) - 1 - count, len(row) - 1)
        ]
        wanted = [token for row, count in zip(rows, counts, strict=True) for token in row[-count:]]
        yield LikelihoodBatch(batch, inputs, torch.tensor(scored), torch.tensor(wanted), counts).to(device)


@torch.no_grad()
def token_likelihoods(ends: StageModel, hidden: Tensor, batch: LikelihoodBatch) -> tuple[Tensor, Tensor]:
    """Of every token that is scored, by the hidden states of the last stage: the logarithm of its likelihood, and
    whether it is the likeliest. `ends` is the stage that has the head."""
    logs, best = [], []
    chosen = hidden.flatten(0, 1).index_select(0, batch.scored)
    for some, tokens in zip(torch.split(chosen, HEAD_ROWS), torch.split(batch.wanted, HEAD_ROWS), strict=True):
        log_probabilities = logits(ends, some).log_softmax(-1)
        logs.append(log_probabilities.gather(-1, tokens[:, None])[:, 0])
        best.append(log_probabilities.argmax(-1) == tokens)
    return torch.cat(logs), torch.cat(best)


def _fit(request: LikelihoodRequest, context: int) -> tuple[list[int], int]:
    """The tokens of a request, and how many of them are scored."""
    count = len(request.continuation)
    if not request.context or not 0 < count <= context:
        raise UserError(
            f"a continuation of {count} tokens after {len(request.context)} cannot be scored: "
            f"the model looks at {context} tokens"
        )
    return [*request.context, *request.continuation][-(context + 1) :], count


def _padded(rows: Sequence[Sequence[int]], context: int) -> Tensor:
    longest = max(map(len, rows))
    width = min(-(-longest // PAD_TO) * PAD_TO, max(context, longest))
    padded = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row)
    return padded


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows of about the same length, the longest first: one too large for memory fails at once."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
