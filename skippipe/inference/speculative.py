"""Self-speculative decoding: some stages draft tokens, then all of them verify these in one pass.

The output is the same as without drafts: at every position the whole subset samples, by its own logits and the
request's noise, and a draft is accepted only as far as it agrees. That holds for greedy and for random sampling alike,
as far as one pass over several tokens rounds like several passes over one.

Stages with which both the draft and the whole subset begin (stage 0 at least) compute a token once: their hidden states
are kept until verification, which goes on from there. A draft of nothing but such stages has no KV cache of its own.
Which stages draft, and how many tokens, follows from measured times and acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skippipe.errors import UserError
from skippipe.inference.cached_stage import BatchRows, CachedStage, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.engine import Decoder, last, rows_after, rows_of_prompts
from skippipe.inference.likelihood import SubsetModel
from skippipe.inference.request import Generation
from skippipe.inference.sampler import sample_with_probabilities
from skippipe.stage_subset import StageSubset, Visits, residual_scale_of, whole_numbers

MAX_DRAFT_TOKENS = 12
FIRST_DRAFT_TOKENS = 3  # before it is known how long a token takes
MIN_SPEEDUP = 1.05  # a draft with a lower estimate is not used: estimates are not that exact
SAMPLE_TOKENS = 256
TIMED, TIMED_TOKENS, TIMED_AFTER = 5, 4, 16  # how often, how many tokens to verify, after so many others
BINS = 10  # of the probability of a drafted token
PRIOR_WEIGHT = 4  # the prior counts as so many observations
DECAY = 0.98  # of acceptance with every token that is tested, and of what rounds gave with every round
TIME_DECAY = 0.6  # of measured times with every new one
EXPLORE_EVERY = 48  # rounds after which the other way is tried: it may have become better
EXPLORE_ROUNDS = 4  # with drafts, where there were none; they count for more than the rounds before


@dataclass
class DraftRecord:
    """Counts of drafted tokens, for the statistics."""

    tested: int = 0
    """Drafted tokens that were compared, up to the first wrong one of each draft."""
    accepted: int = 0
    passes: int = 0
    """Passes through the whole subset, of each sequence."""
    tokens: int = 0
    """Tokens that these passes gave."""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


class Round(NamedTuple):
    """A draft and the pass that verifies it, of all sequences together."""

    drafting: bool
    """False: a pass without a draft."""
    length: int
    """Tokens of the longest draft; 0 with `drafting`: not even the first token seemed worth it."""
    tokens: float
    """Tokens that it gave each sequence: one, and those that were accepted."""
    drafting_s: float
    passing_s: float


class AcceptanceEstimate:
    """How often drafted tokens are accepted, by their probability in the draft."""

    def __init__(self) -> None:
        # two models agree on the likeliest token more often than either is right: so not the likelihood, but its root
        middles = [(number + 0.5) / BINS for number in range(BINS)]
        self._accepted = [PRIOR_WEIGHT * math.sqrt(middle) for middle in middles]
        self._tested = [float(PRIOR_WEIGHT)] * BINS

    def rate(self, probability: float) -> float:
        number = self._bin(probability)
        return self._accepted[number] / self._tested[number]

    def update(self, probability: float, accepted: bool) -> None:
        number = self._bin(probability)
        self._accepted[number] = DECAY * self._accepted[number] + accepted
        self._tested[number] = DECAY * self._tested[number] + 1

    def _bin(self, probability: float) -> int:
        return min(int(probability * BINS), BINS - 1)


class DraftLength:
    """The length of drafts: as long as they give more tokens a second, by measured acceptance and times.

    A draft ends where one more token, which counts only if all before it are accepted, is likely to take longer than
    it saves. There are none where rounds with drafts give fewer tokens a second than passes without.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self.acceptance = AcceptanceEstimate()
        self._plain_s: float | None = None
        """Seconds of a pass without a draft."""
        self._token_s: float | None = None
        """Seconds of a drafted token."""
        self._rounds, self._round_tokens, self._round_s = 0, 0.0, 0.0
        """Tokens that rounds with drafts gave each sequence, and their seconds; both decay."""

    def max_tokens(self) -> int:
        """Tokens of the next draft, at most; 0: a pass without a draft."""
        if self._fixed is not None:
            return self._fixed
        if self._plain_s is None:
            return 0
        if not self._round_tokens:
            return FIRST_DRAFT_TOKENS
        turn = self._rounds % EXPLORE_EVERY
        if self._drafting_pays:
            return 0 if turn == EXPLORE_EVERY - 1 else MAX_DRAFT_TOKENS
        return MAX_DRAFT_TOKENS if turn < EXPLORE_ROUNDS else 0

    def pays(self, probability: float) -> bool:
        """Is one more token worth it, if it and all before it are accepted with this probability, the batch's mean?"""
        if self._fixed is not None or self._token_s is None or self._plain_s is None:
            return True
        return probability * min(self._plain_s, self._round_s / self._round_tokens) > self._token_s

    def update(self, done: Round) -> None:
        self._rounds += 1
        if not done.drafting:
            self._plain_s = _average(self._plain_s, done.drafting_s + done.passing_s)
            return
        if done.length:
            self._token_s = _average(self._token_s, done.drafting_s / (done.length + 1))
        decay = DECAY if self._plain_s is None or self._drafting_pays else TIME_DECAY
        self._round_tokens = decay * self._round_tokens + done.tokens
        self._round_s = decay * self._round_s + done.drafting_s + done.passing_s

    @property
    def _drafting_pays(self) -> bool:
        assert self._plain_s is not None
        return self._round_s < self._round_tokens * self._plain_s


def best_length(acceptance: float, cost: float, verifying: float = 1.0) -> tuple[int, float]:
    """The length of a draft, and its speedup.

    A pass gives as many tokens as were accepted, and one (Leviathan, Kalman and Matias, 2023, equation 1). `cost` of
    drafting a token and of `verifying` some, a pass over one token being 1.
    """

    def speedup(length: int) -> float:
        tokens = sum(acceptance**index for index in range(length + 1))
        return tokens / (verifying + cost * length) if length else 1.0

    length = max(range(MAX_DRAFT_TOKENS + 1), key=speedup)
    return length, speedup(length)


def _average(before: float | None, new: float) -> float:
    return new if before is None else TIME_DECAY * before + (1 - TIME_DECAY) * new


class StageTimings:
    """Seconds of each stage of a subset, and of the head, for a token; and the factor for a few tokens together."""

    def __init__(self, staged: StagedModel, subset: StageSubset, clock: Callable[[], float]) -> None:
        self._clock = clock
        stages = staged.stages
        self._stand_ins = staged.stand_ins
        hidden = {count: embed(stages[0], [[0] * count]) for count in (1, TIMED_TOKENS, TIMED_AFTER)}
        times: dict[int, list[float]] = {1: [], TIMED_TOKENS: []}
        for number in subset.stages:
            stage = CachedStage(stages[number], TIMED_AFTER + TIMED_TOKENS)
            stage.forward(hidden[TIMED_AFTER], BatchRows((0,), (0,), (TIMED_AFTER,)))
            for count, found in times.items():
                rows = BatchRows((0,), (TIMED_AFTER,), (count,))
                found.append(self._seconds(partial(stage.forward, hidden[count], rows)))
        heads = {count: self._seconds(partial(logits, stages[0], hidden[count])) for count in times}
        self.head_s = heads[1]
        self.stage_s = dict(zip(subset.stages, times[1], strict=True))
        self.several = (sum(times[TIMED_TOKENS]) + heads[TIMED_TOKENS]) / (sum(times[1]) + heads[1])

    def speedup(self, subset: StageSubset, draft: StageSubset, agreement: float) -> float:
        """The speedup by this draft, if this share of its tokens is accepted."""
        count = shared_stages(subset, draft, stand_ins=self._stand_ins)
        shared = sum(self.stage_s[number] for number in subset.stages[:count])
        whole = sum(self.stage_s.values()) + self.head_s
        drafting = sum(self.stage_s[number] for number in draft.stages) + self.head_s
        verifying = shared + self.several * (whole - shared)
        return best_length(agreement, drafting / whole, verifying / whole)[1]

    def _seconds(self, work: Callable[[], torch.Tensor]) -> float:
        taken = []
        for _ in range(TIMED):
            began = self._clock()
            work().flatten()[0].item()  # waits for the device
            taken.append(self._clock() - began)
        return min(taken)


def shared_stages(subset: StageSubset, draft: StageSubset, *, stand_ins: bool = False) -> int:
    """Number of stages with which both begin, at the same residual scale; stage 0 is never scaled. None with stand-ins
    for missing stages: what a stage makes then depends on how many are."""
    if stand_ins:
        return 0
    alike = subset.residual_scale == draft.residual_scale
    pairs = zip(subset.stages, draft.stages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and (alike or not pair[0]), pairs))


def parse_draft(text: str, subset: StageSubset, residual_scale: str = "plain") -> StageSubset:
    stages = whole_numbers(text, "--draft")
    _check_several(subset)
    if stages[0] != 0 or len(set(stages)) < len(stages):
        raise UserError(f"--draft {text}: begin with stage 0, which has the head, and name every stage once")
    if not set(stages) < set(subset.stages):
        raise UserError(f"--draft {text}: some of the stages {','.join(map(str, subset.stages))}, and not all of them")
    return _scaled(stages, subset, residual_scale)


def pick_draft(
    staged: StagedModel,
    subset: StageSubset,
    tokens: Sequence[int],
    residual_scale: str = "plain",
    clock: Callable[[], float] = time.perf_counter,
) -> StageSubset | None:
    """The draft of the highest estimated speedup, by its agreement with the whole subset on a text and by stage times.

    Tried are early exits, and subsets that leave out stages before the last one. None: no draft is faster.
    """
    _check_several(subset)
    count = len(subset.stages)
    early = [subset.stages[:kept] for kept in range(1, count)]
    tried = dict.fromkeys([*early, *((*some, subset.stages[-1]) for some in early[:-1])])
    text = torch.tensor([tokens[-min(SAMPLE_TOKENS, staged.context) :]], device=staged.device)

    def greedy(which: StageSubset) -> torch.Tensor:
        return logits(staged.stages[0], SubsetModel(staged, which).hidden(text)).argmax(-1)

    wanted, timing = greedy(subset), StageTimings(staged, subset, clock)
    speedups: dict[StageSubset, float] = {}
    for stages in tried:
        draft = _scaled(stages, subset, residual_scale)
        agreement = float((greedy(draft) == wanted).double().mean())
        speedups[draft] = timing.speedup(subset, draft, agreement)
    best = max(speedups, key=lambda draft: speedups[draft])
    return best if speedups[best] >= MIN_SPEEDUP else None


def _scaled(stages: Visits, subset: StageSubset, residual_scale: str) -> StageSubset:
    return StageSubset(stages, subset.total, residual_scale_of(residual_scale, subset.total, len(stages)))


def _check_several(subset: StageSubset) -> None:
    if len(subset.stages) == 1:
        more = "give the number of stages with --cut, as in --cut 6" if subset.total == 1 else "write with more of them"
        raise UserError(f"--draft: there is one stage, and nothing to leave out: {more}")


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
        shared = shared_stages(subset, draft, stand_ins=staged.stand_ins)
        self._first = self._chain(subset, subset.stages[:shared])
        self._rest = self._chain(subset, subset.stages[shared:])
        self._own = self._chain(draft, draft.stages[shared:])
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
        chosen = self._verify(self._rest.forward(draft.hidden, rows), generations, rows, draft.guesses)
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
        sampling = [generation.request.sampling for generation in generations]
        longest = max(wanted)
        for step in range(longest + 1):
            counts = [int(step <= most) for most in wanted]
            rows = rows_after(generations, counts, [min(step, most + 1) for most in wanted])
            hidden_states.append(self._first.forward(self._embed([[token] for token in newest]), rows))
            if step == longest:
                break
            hidden = self._draft_hidden(hidden_states[-1], rows, wanted, step)
            positions = [len(generation.tokens) + step for generation in generations]
            values = self._logits(hidden, generations, guesses)
            newest, sure = sample_with_probabilities(values, sampling, positions)
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

    def _verify(
        self, hidden: Tensor, generations: Sequence[Generation], rows: BatchRows, guesses: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The tokens that the whole subset samples at each position."""
        flat = hidden.flatten(0, 1)
        if not rows.uniform:
            flat = torch.cat([row[:count] for row, count in zip(hidden, rows.counts, strict=True)])
        of = [generation for generation, count in zip(generations, rows.counts, strict=True) for _ in range(count)]
        before = [guess[:index] for guess, count in zip(guesses, rows.counts, strict=True) for index in range(count)]
        chosen = iter(self._sample(flat, of, before))
        return [[next(chosen) for _ in range(count)] for count in rows.counts]

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
    return next((index for index, token in enumerate(guess) if token != right[index]), len(guess))
