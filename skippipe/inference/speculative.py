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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.decoder import Decoder, last, rows_after, rows_of_prompts
from skippipe.inference.draft_policy import DraftLength, DraftRecord, Round, shared_stages
from skippipe.inference.kv_cache import BatchRows
from skippipe.inference.request import Generation
from skippipe.inference.sampler import sample_with_logprobs
from skippipe.stage_subset import StageSubset


class Draft(NamedTuple):
    hidden: Tensor
    """What the shared stages made of the last token of each text and of those drafted: [rows, tokens, d]."""
    lengths: list[int]
    guesses: list[list[int]]
    """As many; or more, which seemed too unsure, or are padding."""
    shares: list[list[float]]
    """How likely the draft holds them to be."""
    seen: list[int]
    """Tokens that the draft's own stages have seen."""


class Speculator(Decoder):
    def __init__(
        self,
        staged: StagedModel,
        part: StageSubset,
        draft: StageSubset,
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

    def begin(self, replies: Sequence[Generation]) -> list[list[int]]:
        rows = rows_of_prompts(replies)
        hidden = self._first.forward(self._embedded([reply.tokens for reply in replies]), rows)
        self._own.forward(hidden, rows)
        return self._following(self._rest.forward(hidden, rows), rows, replies)

    def advance(self, replies: Sequence[Generation]) -> list[list[int]]:
        most = self._length.most()
        wanted = [min(most, reply.left - 1) for reply in replies]
        began = self._clock()
        draft = self._drafted(replies, wanted)
        drafted = self._clock()
        rows = rows_after(replies, [length + 1 for length in draft.lengths])
        chosen = self._verdicts(self._rest.forward(draft.hidden, rows), replies, rows)
        accepted = [
            _agreed(guess[:length], right)
            for guess, length, right in zip(draft.guesses, draft.lengths, chosen, strict=True)
        ]
        passed = self._clock()
        tokens = 1 + sum(accepted) / len(accepted)
        self._length.learn(Round(max(wanted) > 0, max(draft.lengths), tokens, drafted - began, passed - drafted))
        self._note(draft, chosen, accepted)
        if self._own.visits:
            self._miss(replies, draft, accepted)
        return [right[: count + 1] for right, count in zip(chosen, accepted, strict=True)]

    def free(self, slot: int) -> None:
        super().free(slot)
        self._missed.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        if source in self._missed:
            self._missed[target] = self._missed.pop(source)

    def _drafted(self, replies: Sequence[Generation], wanted: Sequence[int]) -> Draft:
        """So many tokens for each, or fewer, where more would not pay.

        A row that has drafted enough goes along as padding, so that the rows stay those of neighbouring slots.
        """
        made: list[Tensor] = []
        guesses: list[list[int]] = [[] for _ in replies]
        shares: list[list[float]] = [[] for _ in replies]
        chances = [1.0] * len(replies)
        newest = [reply.tokens[-1] for reply in replies]
        longest = max(wanted)
        for step in range(longest + 1):
            counts = [int(step <= most) for most in wanted]
            rows = rows_after(replies, counts, [min(step, most + 1) for most in wanted])
            made.append(self._first.forward(self._embedded([[token] for token in newest]), rows))
            if step == longest:
                break
            hidden = self._leaving(made[-1], rows, wanted, step)
            newest, sure = self._weighed(hidden, replies, [len(reply.tokens) + step for reply in replies])
            for row, (token, share) in enumerate(zip(newest, sure, strict=True)):
                guesses[row].append(token)
                shares[row].append(share)
                chances[row] *= self._length.trust.chance(share) if step < wanted[row] else 0.0
            if not self._length.pays(sum(chances) / len(chances)):
                longest = step
                break
        lengths = [min(longest, most) for most in wanted]
        seen = [min(len(guess), most) for guess, most in zip(guesses, wanted, strict=True)]
        return Draft(torch.cat(made, 1), lengths, guesses, shares, seen)

    def _leaving(self, hidden: Tensor, rows: BatchRows, wanted: Sequence[int], step: int) -> Tensor:
        """[rows, d], out of the draft's last stage."""
        if not self._own.visits:
            return hidden[:, 0]
        if step:
            counts = [int(step < most) for most in wanted]
            return self._own.forward(hidden, BatchRows(rows.slots, rows.starts, tuple(counts)))[:, 0]
        if self._missed:
            missed = [self._missed.pop(slot, []) for slot in rows.slots]
            starts = tuple(start - len(each) for start, each in zip(rows.starts, missed, strict=True))
            rows = BatchRows(rows.slots, starts, tuple(len(each) + 1 for each in missed))
            all_of_it = [torch.cat([*each, row]) for each, row in zip(missed, hidden, strict=True)]
            hidden = pad_sequence(all_of_it, batch_first=True)
        return last(self._own.forward(hidden, rows), rows)

    def _verdicts(self, hidden: Tensor, replies: Sequence[Generation], rows: BatchRows) -> list[list[int]]:
        """What the whole part says at each position."""
        flat = hidden.flatten(0, 1)
        if not rows.uniform:
            flat = torch.cat([row[:count] for row, count in zip(hidden, rows.counts, strict=True)])
        of = [reply for reply, count in zip(replies, rows.counts, strict=True) for _ in range(count)]
        positions = [
            start + 1 + index for start, count in zip(rows.starts, rows.counts, strict=True) for index in range(count)
        ]
        chosen = iter(self._chosen(flat, of, positions))
        return [[next(chosen) for _ in range(count)] for count in rows.counts]

    def _weighed(
        self, hidden: Tensor, replies: Sequence[Generation], positions: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        how = [reply.request.sampling for reply in replies]
        return sample_with_logprobs(logits(self._staged.stages[0], hidden), how, positions)

    def _miss(self, replies: Sequence[Generation], draft: Draft, accepted: Sequence[int]) -> None:
        """A token that was right, or the last one said, but went through the shared stages only."""
        for row, (reply, length, count) in enumerate(zip(replies, draft.lengths, accepted, strict=True)):
            if count == length and draft.seen[row] <= length:
                self._missed.setdefault(reply.slot, []).append(draft.hidden[row, length : length + 1])

    def _note(self, draft: Draft, chosen: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        for guess, shares, seen, right, count in zip(
            draft.guesses, draft.shares, draft.seen, chosen, accepted, strict=True
        ):
            for index in range(min(count + 1, seen)):  # also one that seemed too unsure to be kept
                self._length.trust.learn(shares[index], guess[index] == right[index])
        self.record.tested += sum(min(count + 1, length) for count, length in zip(accepted, draft.lengths, strict=True))
        self.record.accepted += sum(accepted)
        self.record.passes += len(accepted)
        self.record.tokens += len(accepted) + sum(accepted)


def _agreed(guess: Sequence[int], right: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    for index, token in enumerate(guess):
        if token != right[index]:
            return index
    return len(guess)
