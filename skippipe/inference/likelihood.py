"""Likelihoods by a subset of the stages, without a KV cache: of continuations, and of the next token.

Rows of about the same length are computed together, padded at the end, where a causal model does not look. Logits are
computed only at the positions that are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.stage_subset import StageSubset

BATCH_TOKENS = 8192
HEAD_ROWS = 2048  # positions of which the logits are in memory at once
PAD_TO = 8  # few different lengths: a stage keeps the masks of each

CountProgress = Callable[[int, int], None]
"""Called with the number of requests that are done, and of all."""


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
        rows_of = [self._fit(request) for request in requests]
        found: dict[int, Likelihood] = {}
        for batch in _batches([len(row) for row, _ in rows_of], self.batch_tokens):
            rows, counts = zip(*(rows_of[index] for index in batch), strict=True)
            made = self._likelihoods(rows, list(counts))
            if not all(math.isfinite(each.log) for each in made):
                raise UserError(f"stages {self.subset.name} of the model compute values that are not finite")
            found |= zip(batch, made, strict=True)
            progress(len(found), len(rows_of))
        return [found[index] for index in range(len(rows_of))]

    def most_likely(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The likeliest next token of each row."""
        found: dict[int, int] = {}
        for batch in _batches([len(row) for row in rows], self.batch_tokens):
            chosen = [rows[index][-self.staged.context :] for index in batch]
            last = torch.tensor([len(row) - 1 for row in chosen])
            hidden = self.hidden(self._pad(chosen))[torch.arange(len(chosen)), last]
            found |= zip(batch, logits(self.staged.stages[0], hidden).argmax(-1).tolist(), strict=True)
        return [found[index] for index in range(len(rows))]

    def _fit(self, request: LikelihoodRequest) -> tuple[list[int], int]:
        """The tokens of a request, and how many of them are scored."""
        count = len(request.continuation)
        if not request.context or not 0 < count <= self.staged.context:
            raise UserError(
                f"a continuation of {count} tokens after {len(request.context)} cannot be scored: "
                f"the model looks at {self.staged.context} tokens"
            )
        return [*request.context, *request.continuation][-(self.staged.context + 1) :], count

    @torch.no_grad()
    def _likelihoods(self, rows: Sequence[list[int]], counts: list[int]) -> list[Likelihood]:
        hidden = self.hidden(self._pad([row[:-1] for row in rows]))
        flat = [
            hidden[index, len(row) - 1 - count : len(row) - 1]
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        wanted = torch.tensor([token for row, count in zip(rows, counts, strict=True) for token in row[-count:]])
        logs, best = [], []
        for some, tokens in zip(torch.split(torch.cat(flat), HEAD_ROWS), torch.split(wanted, HEAD_ROWS), strict=True):
            tokens = tokens.to(some.device)
            log_probabilities = logits(self.staged.stages[0], some).log_softmax(-1)
            logs.append(log_probabilities.gather(-1, tokens[:, None])[:, 0].double().cpu())
            best.append((log_probabilities.argmax(-1) == tokens).cpu())
        each = zip(torch.split(torch.cat(logs), counts), torch.split(torch.cat(best), counts), strict=True)
        return [Likelihood(float(log.sum()), bool(greedy.all())) for log, greedy in each]

    def _pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        width = min(-(-longest // PAD_TO) * PAD_TO, max(self.staged.context, longest))
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = torch.tensor(row)
        return padded.to(self.staged.device)


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
