"""With which stages to draft, and how many tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from skippipe.errors import UserError
from skippipe.inference.cached_stage import CachedStage, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.kv_cache import BatchRows
from skippipe.inference.likelihood import SubsetModel
from skippipe.stage_subset import StageSubset, Visits, residual_scale_of, whole_numbers

LONGEST = 12  # tokens of a draft
FIRST = 3  # tokens of the first one, before it is known how long they take
WORTHWHILE = 1.05  # a draft that promises less is none: promises are not that exact
SAMPLE_TOKENS = 256
TIMED, TIMED_TOKENS, TIMED_AFTER = 5, 4, 16  # how often, how many tokens to verify, after so many others
GRADES = 10  # of how sure a draft is
WEIGHT = 4  # what to begin with counts as if it had been seen so many times
FADING = 0.98  # of what was right, with every token that is tested; and of what rounds gave, with every round
HABIT = 0.6  # of times that were measured, with every new one
DOUBT = 48  # rounds after which what is not being done is tried: it may have become better
TRIED = 4  # rounds with drafts, where there were none; they count for more than what was before


@dataclass
class DraftRecord:
    tested: int = 0
    """Drafted tokens that were compared: those up to the first wrong one."""
    accepted: int = 0
    passes: int = 0
    """Of each text through the whole part."""
    tokens: int = 0
    """That came of these passes."""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


class Round(NamedTuple):
    """A draft and the pass that verifies it, of all texts together."""

    drafting: bool
    """False: only a pass."""
    length: int
    """Of the longest draft; 0 with `drafting`: not even the first token seemed worth it."""
    tokens: float
    """That came of it, for each text: one, and those that were right."""
    drafting_s: float
    passing_s: float


class AcceptanceEstimate:
    """How often drafted tokens are right, by how likely the draft holds them to be."""

    def __init__(self) -> None:
        # two models agree on the likeliest token more often than either is right: so not the likelihood, but its root
        middles = [(grade + 0.5) / GRADES for grade in range(GRADES)]
        self._right = [WEIGHT * math.sqrt(middle) for middle in middles]
        self._tested = [float(WEIGHT)] * GRADES

    def chance(self, share: float) -> float:
        grade = self._grade(share)
        return self._right[grade] / self._tested[grade]

    def learn(self, share: float, right: bool) -> None:
        grade = self._grade(share)
        self._right[grade] = FADING * self._right[grade] + right
        self._tested[grade] = FADING * self._tested[grade] + 1

    def _grade(self, share: float) -> int:
        return min(int(share * GRADES), GRADES - 1)


class DraftLength:
    """How long drafts are: as long as they give more tokens a second, by what was right and how long things took.

    A draft ends where one more token, which counts only if all before it are right too, is likely to take longer than
    it saves. There are none where rounds with drafts give fewer tokens a second than passes without.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self.trust = AcceptanceEstimate()
        self._plain_s: float | None = None
        """A pass without a draft."""
        self._token_s: float | None = None
        """A drafted token."""
        self._rounds, self._round_tokens, self._round_s = 0, 0.0, 0.0
        """With drafts: what they gave each text, and how long that took; lately."""

    def most(self) -> int:
        """Tokens of the next draft, at most; 0: a pass without."""
        if self._fixed is not None:
            return self._fixed
        if self._plain_s is None:
            return 0
        if not self._round_tokens:
            return FIRST
        turn = self._rounds % DOUBT
        if self._drafting_pays:
            return 0 if turn == DOUBT - 1 else LONGEST
        return LONGEST if turn < TRIED else 0

    def pays(self, chance: float) -> bool:
        """One more token: that it and all before it are right has this chance, the mean of all texts."""
        if self._fixed is not None or self._token_s is None or self._plain_s is None:
            return True
        return chance * min(self._plain_s, self._round_s / self._round_tokens) > self._token_s

    def learn(self, done: Round) -> None:
        self._rounds += 1
        if not done.drafting:
            self._plain_s = _average(self._plain_s, done.drafting_s + done.passing_s)
            return
        if done.length:
            self._token_s = _average(self._token_s, done.drafting_s / (done.length + 1))
        fading = FADING if self._plain_s is None or self._drafting_pays else HABIT
        self._round_tokens = fading * self._round_tokens + done.tokens
        self._round_s = fading * self._round_s + done.drafting_s + done.passing_s

    @property
    def _drafting_pays(self) -> bool:
        assert self._plain_s is not None
        return self._round_s < self._round_tokens * self._plain_s


def best_length(acceptance: float, cost: float, verifying: float = 1.0) -> tuple[int, float]:
    """Of a draft, and how much faster than without.

    A pass gives as many tokens as were right, and one (Leviathan, Kalman and Matias, 2023, equation 1). `cost` of
    drafting a token and of `verifying` some, a pass over one token being 1.
    """

    def speedup(length: int) -> float:
        tokens = sum(acceptance**index for index in range(length + 1))
        return tokens / (verifying + cost * length) if length else 1.0

    length = max(range(LONGEST + 1), key=speedup)
    return length, speedup(length)


def _average(before: float | None, new: float) -> float:
    return new if before is None else HABIT * before + (1 - HABIT) * new


class StageTimings:
    """Seconds of each stage of a part, and of the head, for a token; and how many times that for a few together."""

    def __init__(self, staged: StagedModel, part: StageSubset, clock: Callable[[], float]) -> None:
        self._clock = clock
        stages = staged.stages
        hidden = {count: embed(stages[0], [[0] * count]) for count in (1, TIMED_TOKENS, TIMED_AFTER)}
        times: dict[int, list[float]] = {1: [], TIMED_TOKENS: []}
        for number in part.stages:
            stage = CachedStage(stages[number], TIMED_AFTER + TIMED_TOKENS)
            stage.forward(hidden[TIMED_AFTER], BatchRows((0,), (0,), (TIMED_AFTER,)))
            for count, found in times.items():
                rows = BatchRows((0,), (TIMED_AFTER,), (count,))
                found.append(self._seconds(partial(stage.forward, hidden[count], rows)))
        heads = {count: self._seconds(partial(logits, stages[0], hidden[count])) for count in times}
        self.head_s = heads[1]
        self.stage_s = dict(zip(part.stages, times[1], strict=True))
        self.several = (sum(times[TIMED_TOKENS]) + heads[TIMED_TOKENS]) / (sum(times[1]) + heads[1])

    def promise(self, part: StageSubset, draft: StageSubset, agreement: float) -> float:
        """How much faster with this draft, if so many of its tokens are right."""
        shared = sum(self.stage_s[number] for number in part.stages[: shared_stages(part, draft)])
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


def shared_stages(part: StageSubset, draft: StageSubset) -> int:
    """With how many of the same stages, driven alike, both begin; stage 0 is never driven."""
    count = 0
    for one, other in zip(part.stages, draft.stages, strict=False):
        if one != other or (one and part.drive != draft.drive):
            break
        count += 1
    return count


def parse_draft(text: str, part: StageSubset, drive: str = "plain") -> StageSubset:
    stages = whole_numbers(text, "--draft")
    _check_pieces(part)
    if stages[0] != 0 or len(set(stages)) < len(stages):
        raise UserError(f"--draft {text}: begin with stage 0, which has the head, and name every stage once")
    if not set(stages) < set(part.stages):
        raise UserError(f"--draft {text}: some of the stages {','.join(map(str, part.stages))}, and not all of them")
    return _driven(stages, part, drive)


def pick_draft(
    staged: StagedModel,
    part: StageSubset,
    tokens: Sequence[int],
    drive: str = "plain",
    clock: Callable[[], float] = time.perf_counter,
) -> StageSubset | None:
    """The one that promises most, by how often it agrees with the whole part on a text and by what stages take.

    Tried are those that leave early, and those that leave out what lies before the last stage. None: none is faster.
    """
    _check_pieces(part)
    count = len(part.stages)
    early = [part.stages[:kept] for kept in range(1, count)]
    tried = dict.fromkeys([*early, *((*some, part.stages[-1]) for some in early[:-1])])
    text = torch.tensor([tokens[-min(SAMPLE_TOKENS, staged.context) :]], device=staged.device)

    def likeliest(which: StageSubset) -> torch.Tensor:
        model = SubsetModel(staged, which)
        return model.logits(model.hidden(text)).argmax(-1)

    wanted, timing = likeliest(part), StageTimings(staged, part, clock)
    promises: dict[StageSubset, float] = {}
    for stages in tried:
        draft = _driven(stages, part, drive)
        agreement = float((likeliest(draft) == wanted).double().mean())
        promises[draft] = timing.promise(part, draft, agreement)
    best = max(promises, key=lambda draft: promises[draft])
    return best if promises[best] >= WORTHWHILE else None


def _driven(stages: Visits, part: StageSubset, drive: str) -> StageSubset:
    return StageSubset(stages, part.total, residual_scale_of(drive, part.total, len(stages)))


def _check_pieces(part: StageSubset) -> None:
    if len(part.stages) == 1:
        raise UserError("--draft: there is one stage, and nothing to leave out: say with --cut how many, as in --cut 6")
