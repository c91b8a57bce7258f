"""Self-speculative decoding: some stages draft tokens, then all of them verify these in one pass.

The output is the same as without drafts: at every position the whole subset samples, by its own logits and the
request's noise, and a draft is accepted only as far as it agrees. That holds for greedy and for random sampling alike,
as far as one pass over several tokens rounds like several passes over one.

Stages with which both the draft and the whole subset begin (stage 0 at least) compute a token once: their hidden states
are kept until verification, which goes on from there. A draft of nothing but such stages has no KV cache of its own.
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
from skippipe.inference.sampler import sample_with_probabilities
from skippipe.stage_subset import StageSubset


class Draft(NamedTuple):
    """Drafted tokens of a batch."""

    hidden: Tensor
    """Hidden states of the shared stages, for each sequence's last token and the drafted ones: [rows, tokens, d]."""
    lengths: list[int]
    """Number of drafted tokens to verify, of each row."""
    guesses: list[list[int]]
    """Drafted tokens of each row; those beyond its length seemed too unsure, or are padding."""
    probabilities: list[list[float]]
    """Probabilities of these tokens, by the draft's logits."""
    seen: list[int]
    """Number of tokens that the draft's own stages have computed."""


class Speculator(Decoder):
    def __init__(
        self,
        staged: StagedModel,
        subset: StageSubset,
        draft: StageSubset,
        max_tokens: int,
        draft_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`draft_tokens`: length of drafts; None: as long as it pays, by `clock`. The output does not depend on it."""
        super().__init__(staged, subset, max_tokens)
        self.draft = draft
        self.record = DraftRecord()
        self._length = DraftLength(draft_tokens)
        self._clock = clock
        shared = shared_stages(subset, draft)
        self._first = self._chain(subset.stages[:shared], subset.residual_scale)
        self._rest = self._chain(subset.stages[shared:], subset.residual_scale)
        self._own = self._chain(draft.stages[shared:], draft.residual_scale)
        self._missed: dict[int, list[Tensor]] = {}
        """Slot → hidden states [1, d] of tokens that the draft's own stages have not computed yet."""

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        rows = rows_of_prompts(generations)
        hidden = self._first.forward(self._embed([generation.tokens for generation in generations]), rows)
        self._own.forward(hidden, rows)
        return self._sample_last(self._rest.forward(hidden, rows), rows, generations)

    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        most = self._length.max_tokens()
        wanted = [min(most, generation.remaining - 1) for generation in generations]
        began = self._clock()
        draft = self._draft(generations, wanted)
        drafted = self._clock()
        rows = rows_after(generations, [length + 1 for length in draft.lengths])
        chosen = self._verify(self._rest.forward(draft.hidden, rows), generations, rows)
        accepted = [
            _accepted(guess[:length], right)
            for guess, length, right in zip(draft.guesses, draft.lengths, chosen, strict=True)
        ]
        passed = self._clock()
        tokens = 1 + sum(accepted) / len(accepted)
        self._length.update(Round(max(wanted) > 0, max(draft.lengths), tokens, drafted - began, passed - drafted))
        self._record(draft, chosen, accepted)
        if self._own.visits:
            self._keep_missed(generations, draft, accepted)
        return [right[: count + 1] for right, count in zip(chosen, accepted, strict=True)]

    def free(self, slot: int) -> None:
        super().free(slot)
        self._missed.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        if source in self._missed:
            self._missed[target] = self._missed.pop(source)

    def _draft(self, generations: Sequence[Generation], wanted: Sequence[int]) -> Draft:
        """Drafts of `wanted` tokens for each row, or fewer where more would not pay.

        A row that has drafted enough goes along as padding, so that the rows stay those of neighbouring slots.
        """
        hidden_states: list[Tensor] = []
        guesses: list[list[int]] = [[] for _ in generations]
        probabilities: list[list[float]] = [[] for _ in generations]
        chances = [1.0] * len(generations)
        newest = [generation.tokens[-1] for generation in generations]
        longest = max(wanted)
        for step in range(longest + 1):
            counts = [int(step <= most) for most in wanted]
            rows = rows_after(generations, counts, [min(step, most + 1) for most in wanted])
            hidden_states.append(self._first.forward(self._embed([[token] for token in newest]), rows))
            if step == longest:
                break
            hidden = self._draft_hidden(hidden_states[-1], rows, wanted, step)
            newest, sure = self._sample_with_probabilities(
                hidden, generations, [len(generation.tokens) + step for generation in generations]
            )
            for row, (token, probability) in enumerate(zip(newest, sure, strict=True)):
                guesses[row].append(token)
                probabilities[row].append(probability)
                chances[row] *= self._length.acceptance.rate(probability) if step < wanted[row] else 0.0
            if not self._length.pays(sum(chances) / len(chances)):
                longest = step
                break
        lengths = [min(longest, most) for most in wanted]
        seen = [min(len(guess), most) for guess, most in zip(guesses, wanted, strict=True)]
        return Draft(torch.cat(hidden_states, 1), lengths, guesses, probabilities, seen)

    def _draft_hidden(self, hidden: Tensor, rows: BatchRows, wanted: Sequence[int], step: int) -> Tensor:
        """Hidden states of the draft's last stage for the newest token of each row: [rows, d]."""
        if not self._own.visits:
            return hidden[:, 0]
        if step:
            counts = [int(step < most) for most in wanted]
            return self._own.forward(hidden, BatchRows(rows.slots, rows.starts, tuple(counts)))[:, 0]
        if self._missed:
            missed = [self._missed.pop(slot, []) for slot in rows.slots]
            starts = tuple(start - len(each) for start, each in zip(rows.starts, missed, strict=True))
            rows = BatchRows(rows.slots, starts, tuple(len(each) + 1 for each in missed))
            inputs = [torch.cat([*each, row]) for each, row in zip(missed, hidden, strict=True)]
            hidden = pad_sequence(inputs, batch_first=True)
        return last(self._own.forward(hidden, rows), rows)

    def _verify(self, hidden: Tensor, generations: Sequence[Generation], rows: BatchRows) -> list[list[int]]:
        """The tokens that the whole subset samples at each position."""
        flat = hidden.flatten(0, 1)
        if not rows.uniform:
            flat = torch.cat([row[:count] for row, count in zip(hidden, rows.counts, strict=True)])
        of = [generation for generation, count in zip(generations, rows.counts, strict=True) for _ in range(count)]
        positions = [
            start + 1 + index for start, count in zip(rows.starts, rows.counts, strict=True) for index in range(count)
        ]
        chosen = iter(self._sample(flat, of, positions))
        return [[next(chosen) for _ in range(count)] for count in rows.counts]

    def _sample_with_probabilities(
        self, hidden: Tensor, generations: Sequence[Generation], positions: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        sampling = [generation.request.sampling for generation in generations]
        return sample_with_probabilities(logits(self._staged.stages[0], hidden), sampling, positions)

    def _keep_missed(self, generations: Sequence[Generation], draft: Draft, accepted: Sequence[int]) -> None:
        """Keeps the hidden state of a token that was accepted or sampled, but went through the shared stages only."""
        for row, (generation, length, count) in enumerate(zip(generations, draft.lengths, accepted, strict=True)):
            if count == length and draft.seen[row] <= length:
                self._missed.setdefault(generation.slot, []).append(draft.hidden[row, length : length + 1])

    def _record(self, draft: Draft, chosen: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        for guess, probabilities, seen, right, count in zip(
            draft.guesses, draft.probabilities, draft.seen, chosen, accepted, strict=True
        ):
            for index in range(min(count + 1, seen)):  # also one that seemed too unsure to be kept
                self._length.acceptance.update(probabilities[index], guess[index] == right[index])
        self.record.tested += sum(min(count + 1, length) for count, length in zip(accepted, draft.lengths, strict=True))
        self.record.accepted += sum(accepted)
        self.record.passes += len(accepted)
        self.record.tokens += len(accepted) + sum(accepted)


def _accepted(guess: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens up to the first that differs."""
    for index, token in enumerate(guess):
        if token != right[index]:
            return index
    return len(guess)
