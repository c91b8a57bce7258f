"""The next tokens of many texts together, by a part of the model in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from skippipe.inference.cache import Rows
from skippipe.inference.choosing import choose
from skippipe.inference.loading import StagedModel
from skippipe.inference.replies import Reply
from skippipe.inference.stage import Stretch, embed, logits
from skippipe.parts import Part, Visits


class Decoder(ABC):
    """The caches hold all tokens of a reply but the last, which nobody has looked at yet."""

    def __init__(self, staged: StagedModel, part: Part, max_tokens: int) -> None:
        assert part.total == len(staged.stages), "the part of another model"
        self.part = part
        self.max_tokens = max_tokens
        """Of all replies together, that each stage has room for."""
        self._staged = staged
        self._stretches: list[Stretch] = []

    @abstractmethod
    def begin(self, replies: Sequence[Reply]) -> list[list[int]]:
        """The first tokens of each, one or more, by its prompt."""

    @abstractmethod
    def advance(self, replies: Sequence[Reply]) -> list[list[int]]:
        """The next tokens of each, one or more."""

    def free(self, slot: int) -> None:
        for stretch in self._stretches:
            stretch.free(slot)

    def move(self, source: int, target: int) -> None:
        for stretch in self._stretches:
            stretch.move(source, target)

    def _stretch(self, visits: Visits, drive: float) -> Stretch:
        self._stretches.append(Stretch(self._staged.stages, visits, drive, self.max_tokens))
        return self._stretches[-1]

    def _embedded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return embed(self._staged.stages[0], tokens)

    def _chosen(self, hidden: Tensor, replies: Sequence[Reply], positions: Sequence[int]) -> list[int]:
        """A token for each of [rows, d]; the replies they are for, and where in them."""
        how = [reply.request.sampling for reply in replies]
        return choose(logits(self._staged.stages[0], hidden), how, positions)

    def _following(self, hidden: Tensor, rows: Rows, replies: Sequence[Reply]) -> list[list[int]]:
        """The token after the last one of each row."""
        chosen = self._chosen(last(hidden, rows), replies, [len(reply.tokens) for reply in replies])
        return [[token] for token in chosen]


class TokenByToken(Decoder):
    """The whole part, for every token."""

    def __init__(self, staged: StagedModel, part: Part, max_tokens: int) -> None:
        super().__init__(staged, part, max_tokens)
        self._whole = self._stretch(part.stages, part.drive)

    def begin(self, replies: Sequence[Reply]) -> list[list[int]]:
        rows = rows_of_prompts(replies)
        hidden = self._embedded([reply.tokens for reply in replies])
        return self._following(self._whole.forward(hidden, rows), rows, replies)

    def advance(self, replies: Sequence[Reply]) -> list[list[int]]:
        rows = rows_after(replies, [1] * len(replies))
        hidden = self._embedded([reply.tokens[-1:] for reply in replies])
        return self._following(self._whole.forward(hidden, rows), rows, replies)


def rows_of_prompts(replies: Sequence[Reply]) -> Rows:
    return Rows(_slots(replies), (0,) * len(replies), tuple(len(reply.tokens) for reply in replies))


def rows_after(replies: Sequence[Reply], counts: Sequence[int], ahead: Sequence[int] = ()) -> Rows:
    """From the last token that was said on, or so many after it, so many tokens."""
    ends = [len(reply.tokens) - 1 for reply in replies]
    starts = [end + more for end, more in zip(ends, ahead, strict=True)] if ahead else ends
    return Rows(_slots(replies), tuple(starts), tuple(counts))


def last(hidden: Tensor, rows: Rows) -> Tensor:
    """The last token of each row, padding aside: [rows, d]."""
    if rows.uniform:
        return hidden[:, -1]
    return hidden[torch.arange(len(rows.counts)), torch.tensor(rows.counts) - 1]


def _slots(replies: Sequence[Reply]) -> tuple[int, ...]:
    return tuple(reply.slot for reply in replies)
