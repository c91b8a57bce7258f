"""Decoders: the next tokens of a batch of sequences, by a subset of the stages in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from skippipe.inference.cached_stage import StageChain, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.kv_cache import BatchRows
from skippipe.inference.request import Generation
from skippipe.inference.sampler import sample
from skippipe.stage_subset import StageSubset, Visits


class Decoder(ABC):
    """A batch of sequences, whose KV caches hold all tokens but the last."""

    def __init__(self, staged: StagedModel, subset: StageSubset, max_tokens: int) -> None:
        assert subset.total == len(staged.stages), "a subset of another model"
        self.subset = subset
        self.max_tokens = max_tokens
        """Tokens of all sequences together that each stage's KV cache has room for."""
        self._staged = staged
        self._chains: list[StageChain] = []

    @abstractmethod
    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        """The first tokens of each sequence, one or more, from its prompt."""

    @abstractmethod
    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        """The next tokens of each sequence, one or more."""

    def free(self, slot: int) -> None:
        for chain in self._chains:
            chain.free(slot)

    def move(self, source: int, target: int) -> None:
        for chain in self._chains:
            chain.move(source, target)

    def _chain(self, visits: Visits, residual_scale: float) -> StageChain:
        self._chains.append(StageChain(self._staged.stages, visits, residual_scale, self.max_tokens))
        return self._chains[-1]

    def _embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return embed(self._staged.stages[0], tokens)

    def _sample(self, hidden: Tensor, generations: Sequence[Generation], positions: Sequence[int]) -> list[int]:
        """A token for each of [rows, d], at these positions of these sequences."""
        sampling = [generation.request.sampling for generation in generations]
        return sample(logits(self._staged.stages[0], hidden), sampling, positions)

    def _sample_last(self, hidden: Tensor, rows: BatchRows, generations: Sequence[Generation]) -> list[list[int]]:
        """The token that follows each row."""
        chosen = self._sample(last(hidden, rows), generations, [len(generation.tokens) for generation in generations])
        return [[token] for token in chosen]


class TokenByToken(Decoder):
    """All stages of the subset for every token."""

    def __init__(self, staged: StagedModel, subset: StageSubset, max_tokens: int) -> None:
        super().__init__(staged, subset, max_tokens)
        self._whole = self._chain(subset.stages, subset.residual_scale)

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        rows = rows_of_prompts(generations)
        hidden = self._embed([generation.tokens for generation in generations])
        return self._sample_last(self._whole.forward(hidden, rows), rows, generations)

    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        rows = rows_after(generations, [1] * len(generations))
        hidden = self._embed([generation.tokens[-1:] for generation in generations])
        return self._sample_last(self._whole.forward(hidden, rows), rows, generations)


def rows_of_prompts(generations: Sequence[Generation]) -> BatchRows:
    return BatchRows(
        _slots(generations), (0,) * len(generations), tuple(len(generation.tokens) for generation in generations)
    )


def rows_after(generations: Sequence[Generation], counts: Sequence[int], ahead: Sequence[int] = ()) -> BatchRows:
    """Rows of `counts` tokens from the last token of each sequence on, or from `ahead` tokens after it."""
    ends = [len(generation.tokens) - 1 for generation in generations]
    starts = [end + more for end, more in zip(ends, ahead, strict=True)] if ahead else ends
    return BatchRows(_slots(generations), tuple(starts), tuple(counts))


def last(hidden: Tensor, rows: BatchRows) -> Tensor:
    """The last token of each row, padding aside: [rows, d]."""
    if rows.uniform:
        return hidden[:, -1]
    return hidden[torch.arange(len(rows.counts)), torch.tensor(rows.counts) - 1]


def _slots(generations: Sequence[Generation]) -> tuple[int, ...]:
    return tuple(generation.slot for generation in generations)
