"""Some stages draft tokens, then all of them verify these in one pass (self-speculative decoding).

What comes out is what would come without drafts: at every position the whole part chooses, by its own logits and the
request's own noise, and a draft is kept only as far as it says the same. That holds for the likeliest tokens and for
tokens at random alike, as far as one pass over several tokens rounds like several passes over one.

Stages with which both the draft and the whole part begin (stage 0 at least) compute a token once: their hidden states
are kept until verification, which goes on from there. A draft that is nothing but such stages has no cache of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skippipe.inference.cache import Rows
from skippipe.inference.decoding import Decoder, last, rows_after, rows_of_prompts
from skippipe.inference.drafts import DraftLength, DraftRecord, Round
from skippipe.inference.loading import StagedModel
from skippipe.inference.replies import Reply
from skippipe.parts import Part


class Speculator(Decoder):
    def __init__(
        self,
        staged: StagedModel,
        part: Part,
        draft: Part,
        max_tokens: int,
        draft_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`draft_tokens`: of each draft; None: as many as pay, by `clock`. They decide how fast, not what is said."""
        super().__init__(staged, part, max_tokens)
        self.draft = draft
        self.record = DraftRecord()
        self._length = DraftLength(draft_tokens)
        self._clock = clock
        shared = shared_stages(part, draft)
        self._first = self._stretch(part.stages[:shared], part.drive)
        self._rest = self._stretch(part.stages[shared:], part.drive)
        self._own = self._stretch(draft.stages[shared:], draft.drive)
        self._missed: dict[int, list[Tensor]] = {}
        """By slot, a token [1, d] each: what the draft's own stages have yet to see."""

    def begin(self, replies: Sequence[Reply]) -> list[list[int]]:
        rows = rows_of_prompts(replies)
        hidden = self._first.forward(self._embedded([reply.tokens for reply in replies]), rows)
        self._own.forward(hidden, rows)
        return self._following(self._rest.forward(hidden, rows), rows, replies)

    def advance(self, replies: Sequence[Reply]) -> list[list[int]]:
        length = min(self._length.tokens(), max(reply.left for reply in replies) - 1)
        lengths = [min(length, reply.left - 1) for reply in replies]
        began = self._clock()
        hidden, guesses = self._drafted(replies, lengths)
        drafted = self._clock()
        rows = rows_after(replies, [length + 1 for length in lengths])
        chosen = self._verdicts(self._rest.forward(hidden, rows), replies, rows)
        said, accepted = [], []
        for guess, right in zip(guesses, chosen, strict=True):
            count = 0
            while count < len(right) - 1 and guess[count] == right[count]:
                count += 1
            said.append(right[: count + 1])
            accepted.append(count)
        self._note(lengths, accepted, drafted - began, self._clock() - drafted)
        if self._own.visits:
            self._miss(replies, hidden, lengths, accepted)
        return said

    def free(self, slot: int) -> None:
        super().free(slot)
        self._missed.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        if source in self._missed:
            self._missed[target] = self._missed.pop(source)

    def _drafted(self, replies: Sequence[Reply], lengths: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """What the shared stages make of the last token and of the drafted ones; and these, for each reply.

        A row that has drafted enough goes along as padding, so that the rows stay those of neighbouring slots.
        """
        made: list[Tensor] = []
        guesses: list[list[int]] = [[] for _ in replies]
        newest = [reply.tokens[-1] for reply in replies]
        for step in range(max(lengths) + 1):
            counts = [int(step <= length) for length in lengths]
            rows = rows_after(replies, counts, [min(step, length + 1) for length in lengths])
            made.append(self._first.forward(self._embedded([[token] for token in newest]), rows))
            if step < max(lengths):
                hidden = self._leaving(made[-1], rows, lengths, step)
                newest = self._chosen(hidden, replies, [len(reply.tokens) + step for reply in replies])
                for guess, token in zip(guesses, newest, strict=True):
                    guess.append(token)
        return torch.cat(made, 1), guesses

    def _leaving(self, hidden: Tensor, rows: Rows, lengths: Sequence[int], step: int) -> Tensor:
        """[rows, d], out of the draft's last stage."""
        if not self._own.visits:
            return hidden[:, 0]
        if step:
            counts = [int(step < length) for length in lengths]
            return self._own.forward(hidden, Rows(rows.slots, rows.starts, tuple(counts)))[:, 0]
        if self._missed:
            missed = [self._missed.pop(slot, []) for slot in rows.slots]
            starts = tuple(start - len(each) for start, each in zip(rows.starts, missed, strict=True))
            rows = Rows(rows.slots, starts, tuple(len(each) + 1 for each in missed))
            all_of_it = [torch.cat([*each, row]) for each, row in zip(missed, hidden, strict=True)]
            hidden = pad_sequence(all_of_it, batch_first=True)
        return last(self._own.forward(hidden, rows), rows)

    def _verdicts(self, hidden: Tensor, replies: Sequence[Reply], rows: Rows) -> list[list[int]]:
        """What the whole part says at each position."""
        flat = torch.cat([row[:count] for row, count in zip(hidden, rows.counts, strict=True)])
        of = [reply for reply, count in zip(replies, rows.counts, strict=True) for _ in range(count)]
        positions = [
            start + 1 + index for start, count in zip(rows.starts, rows.counts, strict=True) for index in range(count)
        ]
        chosen = iter(self._chosen(flat, of, positions))
        return [[next(chosen) for _ in range(count)] for count in rows.counts]

    def _miss(self, replies: Sequence[Reply], hidden: Tensor, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """The last drafted token went through the shared stages only; without a draft, so did the last one said."""
        for reply, row, length, count in zip(replies, hidden, lengths, accepted, strict=True):
            if count == length:
                self._missed.setdefault(reply.slot, []).append(row[length : length + 1])

    def _note(self, lengths: Sequence[int], accepted: Sequence[int], drafting_s: float, passing_s: float) -> None:
        tested = sum(min(count + 1, length) for count, length in zip(accepted, lengths, strict=True))
        self._length.learn(Round(max(lengths), tested, sum(accepted), drafting_s, passing_s))
        self.record.tested += tested
        self.record.accepted += sum(accepted)
        self.record.passes += len(accepted)
        self.record.tokens += len(accepted) + sum(accepted)


def shared_stages(part: Part, draft: Part) -> int:
    """With how many of the same stages, driven alike, both begin; stage 0 is never driven."""
    count = 0
    for one, other in zip(part.stages, draft.stages, strict=False):
        if one != other or (one and part.drive != draft.drive):
            break
        count += 1
    return count
