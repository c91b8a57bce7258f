"""The next tokens of many texts together, by a part of the model in one process."""

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
    """The caches hold all tokens of a reply but the last, which nobody has looked at yet."""

    def __init__(self, staged: StagedModel, part: StageSubset, max_tokens: int) -> None:
        assert part.total == len(staged.stages), "the part of another model"
        self.part = part
        self.max_tokens = max_tokens
        """Of all replies together, that each stage has room for."""
        self._staged = staged
        self._stretches: list[StageChain] = []

    @abstractmethod
    def begin(self, replies: Sequence[Generation]) -> list[list[int]]:
        """The first tokens of each, one or more, by its prompt."""

    @abstractmethod
    def advance(self, replies: Sequence[Generation]) -> list[list[int]]:
        """The next tokens of each, one or more."""

    def free(self, slot: int) -> None:
        for stretch in self._stretches:
            stretch.free(slot)

    def move(self, source: int, target: int) -> None:
        for stretch in self._stretches:
            stretch.move(source, target)

    def _stretch(self, visits: Visits, drive: float) -> StageChain:
        self._stretches.append(StageChain(self._staged.stages, visits, drive, self.max_tokens))
        return self._stretches[-1]

    def _embedded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return embed(self._staged.stages[0], tokens)

    def _chosen(self, hidden: Tensor, replies: Sequence[Generation], positions: Sequence[int]) -> list[int]:
        """A token for each of [rows, d]; the replies they are for, and where in them."""
        how = [reply.request.sampling for reply in replies]
        return sample(logits(self._staged.stages[0], hidden), how, positions)

    def _following(self, hidden: Tensor, rows: BatchRows, replies: Sequence[Generation]) -> list[list[int]]:
        """The token after the last one of each row."""
        chosen = self._chosen(last(hidden, rows), replies, [len(reply.tokens) for reply in replies])
        return [[token] for token in chosen]


class TokenByToken(Decoder):
    """The whole part, for every token."""

    def __init__(self, staged: StagedModel, part: StageSubset, max_tokens: int) -> None:
        super().__init__(staged, part, max_tokens)
        self._whole = self._stretch(part.stages, part.drive)

    def begin(self, replies: Sequence[Generation]) -> list[list[int]]:
        rows = rows_of_prompts(replies)
        hidden = self._embedded([reply.tokens for reply in replies])
        return self._following(self._whole.forward(hidden, rows), rows, replies)

    def advance(self, replies: Sequence[Generation]) -> list[list[int]]:
        rows = rows_after(replies, [1] * len(replies))
        hidden = self._embedded([reply.tokens[-1:] for reply in replies])
        return self._following(self._whole.forward(hidden, rows), rows, replies)


def rows_of_prompts(replies: Sequence[Generation]) -> BatchRows:
    return BatchRows(_slots(replies), (0,) * len(replies), tuple(len(reply.tokens) for reply in replies))


def rows_after(replies: Sequence[Generation], counts: Sequence[int], ahead: Sequence[int] = ()) -> BatchRows:
    """From the last token that was said on, or so many after it, so many tokens."""
    ends = [len(reply.tokens) - 1 for reply in replies]
    starts = [end + more for end, more in zip(ends, ahead, strict=True)] if ahead else ends
    return BatchRows(_slots(replies), tuple(starts), tuple(counts))


def last(hidden: Tensor, rows: BatchRows) -> Tensor:
    """The last token of each row, padding aside: [rows, d]."""
    if rows.uniform:
        return hidden[:, -1]
    return hidden[torch.arange(len(rows.counts)), torch.tensor(rows.counts) - 1]


def _slots(replies: Sequence[Generation]) -> tuple[int, ...]:
    return tuple(reply.slot for reply in replies)
