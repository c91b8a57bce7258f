"""What a part of a model makes of tokens: how likely a continuation is, and which token comes next.

Rows of about the same length are computed together, padded at the end, where a causal model does not look. Logits are
made only where somebody asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.stage_subset import StageSubset

BATCH_TOKENS = 8192
HEAD_ROWS = 2048  # positions of which the logits are in memory at once
PAD_TO = 8  # few different lengths: a stage keeps the masks of each

CountProgress = Callable[[int, int], None]
"""How many are done, of how many."""


class LikelihoodRequest(NamedTuple):
    """How likely is it that this is continued like that?"""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    log: float
    """Natural logarithm, summed over the tokens of the continuation."""
    greedy: bool
    """Is every token of it the most likely one?"""


class SubsetModel:
    def __init__(self, staged: StagedModel, part: StageSubset, batch_tokens: int = BATCH_TOKENS) -> None:
        assert part.total == len(staged.stages), "the part of another model"
        self.part = part
        self.context = staged.context
        self._staged = staged
        self._batch_tokens = batch_tokens

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """What the last of its stages makes of [rows, tokens]."""
        hidden = self._staged.stages[0].embed(tokens)
        for number in self.part.stages:
            made = self._staged.stages[number](hidden)
            driven = number != 0 and self.part.drive != 1.0
            hidden = torch.lerp(hidden, made, self.part.drive) if driven else made
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        ends = self._staged.stages[0]
        assert ends.norm is not None
        assert ends.head is not None
        found: Tensor = ends.head(ends.norm(hidden))
        return found.float()

    def likelihoods(
        self, questions: Sequence[LikelihoodRequest], progress: CountProgress = lambda done, of: None
    ) -> list[Likelihood]:
        """A context that does not fit loses its beginning."""
        asked = [self._fitting(question) for question in questions]
        found: dict[int, Likelihood] = {}
        for batch in _batches([len(row) for row, _ in asked], self._batch_tokens):
            rows, counts = zip(*(asked[index] for index in batch), strict=True)
            made = self._likelihoods(rows, list(counts))
            if not all(math.isfinite(each.log) for each in made):
                raise UserError(f"stages {self.part.name} of the model make values that are not finite")
            found |= zip(batch, made, strict=True)
            progress(len(found), len(asked))
        return [found[index] for index in range(len(asked))]

    def most_likely(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The token that follows each row."""
        found: dict[int, int] = {}
        for batch in _batches([len(row) for row in rows], self._batch_tokens):
            chosen = [rows[index][-self.context :] for index in batch]
            last = torch.tensor([len(row) - 1 for row in chosen])
            hidden = self.hidden(self._padded(chosen))[torch.arange(len(chosen)), last]
            found |= zip(batch, self.logits(hidden).argmax(-1).tolist(), strict=True)
        return [found[index] for index in range(len(rows))]

    def _fitting(self, question: LikelihoodRequest) -> tuple[list[int], int]:
        """The row, the last token included, and how many tokens of it are scored."""
        count = len(question.continuation)
        if not question.context or not 0 < count <= self.context:
            raise UserError(
                f"a continuation of {count} tokens after {len(question.context)} cannot be scored: "
                f"the model looks at {self.context} tokens"
            )
        return [*question.context, *question.continuation][-(self.context + 1) :], count

    @torch.no_grad()
    def _likelihoods(self, rows: Sequence[list[int]], counts: list[int]) -> list[Likelihood]:
        hidden = self.hidden(self._padded([row[:-1] for row in rows]))
        flat = [
            hidden[index, len(row) - 1 - count : len(row) - 1]
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        wanted = torch.tensor([token for row, count in zip(rows, counts, strict=True) for token in row[-count:]])
        logs, best = [], []
        for some, tokens in zip(torch.split(torch.cat(flat), HEAD_ROWS), torch.split(wanted, HEAD_ROWS), strict=True):
            tokens = tokens.to(some.device)
            chances = self.logits(some).log_softmax(-1)
            logs.append(chances.gather(-1, tokens[:, None])[:, 0].double().cpu())
            best.append((chances.argmax(-1) == tokens).cpu())
        each = zip(torch.split(torch.cat(logs), counts), torch.split(torch.cat(best), counts), strict=True)
        return [Likelihood(float(log.sum()), bool(greedy.all())) for log, greedy in each]

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        width = min(-(-longest // PAD_TO) * PAD_TO, max(self.context, longest))
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = torch.tensor(row)
        return padded.to(self._staged.device)


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows of about the same length, the longest first: what does not fit into memory fails at once."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
