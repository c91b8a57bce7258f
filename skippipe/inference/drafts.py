"""With which stages to draft, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skippipe.errors import UserError
from skippipe.inference.loading import StagedModel
from skippipe.parts import Part, Visits, drive_of, whole_numbers
from skippipe.scoring.model import PartModel

LONGEST = 12  # tokens of a draft
FIRST = 3  # tokens of the first one
WORTHWHILE = 1.1  # a draft that promises less is none: verifying several tokens costs more than making one
SAMPLE_TOKENS = 256
EXPECTED, WEIGHT = 0.75, 6  # of drafted tokens, this share is right: what to begin with, as if seen so many times
FADING = 0.96  # of what was right, with every token that is tested
HABIT = 0.6  # of times that were measured, with every new one
DOUBT = 32  # rounds after which what is not being done is done once: it may have become better


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

    length: int
    """Of the longest draft; 0: only a pass."""
    tested: int
    accepted: int
    drafting_s: float
    passing_s: float


class DraftLength:
    """How many tokens to draft: what gives most tokens a second, by what was right lately and how long it took.

    0: none, where drafts are wrong too often, or the machine takes much longer for a few tokens than for one.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._tested, self._accepted = 0.0, 0.0
        self._plain_s: float | None = None
        """A pass without a draft."""
        self._verifying_s: float | None = None
        self._token_s: float | None = None
        """A drafted token."""
        self._rounds = 0

    def tokens(self) -> int:
        if self._fixed is not None:
            return self._fixed
        if self._plain_s is None:
            return 0
        if self._verifying_s is None or self._token_s is None:
            return FIRST
        right = (self._accepted + EXPECTED * WEIGHT) / (self._tested + WEIGHT)
        best = best_length(right, self._token_s / self._plain_s, self._verifying_s / self._plain_s)[0]
        if self._rounds % DOUBT == 0:
            return 0 if best else FIRST
        return best

    def learn(self, done: Round) -> None:
        self._rounds += 1
        fading = FADING**done.tested
        self._tested = fading * self._tested + done.tested
        self._accepted = fading * self._accepted + done.accepted
        if not done.length:
            self._plain_s = _average(self._plain_s, done.drafting_s + done.passing_s)
        else:
            self._verifying_s = _average(self._verifying_s, done.passing_s)
            self._token_s = _average(self._token_s, done.drafting_s / done.length)


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


def cost_of(staged: StagedModel, part: Part, draft: Part) -> float:
    """Of drafting a token: by how many weights it takes, the whole part being 1."""
    head = staged.stages[0].head
    assert head is not None, "stage 0 has the head"
    weights = [sum(each.numel() for each in stage.layers.parameters()) for stage in staged.stages]
    of_head = sum(each.numel() for each in head.parameters())
    drafting, all_of_it = (of_head + sum(weights[number] for number in each.stages) for each in (draft, part))
    return drafting / all_of_it


def parse_draft(text: str, part: Part, drive: str = "plain") -> Part:
    stages = whole_numbers(text, "--draft")
    _check_pieces(part)
    if stages[0] != 0 or len(set(stages)) < len(stages):
        raise UserError(f"--draft {text}: begin with stage 0, which has the head, and name every stage once")
    if not set(stages) < set(part.stages):
        raise UserError(f"--draft {text}: some of the stages {','.join(map(str, part.stages))}, and not all of them")
    return _driven(stages, part, drive)


def pick_draft(staged: StagedModel, part: Part, tokens: Sequence[int], drive: str = "plain") -> Part | None:
    """The one that promises most, by how often it agrees with the whole part on a text; None: none does.

    Tried are those that leave early, and those that leave out what lies before the last stage.
    """
    _check_pieces(part)
    count = len(part.stages)
    early = [part.stages[:kept] for kept in range(1, count)]
    tried = dict.fromkeys([*early, *((*some, part.stages[-1]) for some in early[:-1])])
    text = torch.tensor([tokens[-min(SAMPLE_TOKENS, staged.context) :]], device=staged.device)

    def likeliest(which: Part) -> torch.Tensor:
        model = PartModel(staged, which)
        return model.logits(model.hidden(text)).argmax(-1)

    wanted = likeliest(part)
    promises: dict[Part, float] = {}
    for stages in tried:
        draft = _driven(stages, part, drive)
        agreement = float((likeliest(draft) == wanted).double().mean())
        promises[draft] = best_length(agreement, cost_of(staged, part, draft))[1]
    best = max(promises, key=lambda draft: promises[draft])
    return best if promises[best] >= WORTHWHILE else None


def _driven(stages: Visits, part: Part, drive: str) -> Part:
    return Part(stages, part.total, drive_of(drive, part.total, len(stages)))


def _check_pieces(part: Part) -> None:
    if len(part.stages) == 1:
        raise UserError("--draft: there is one stage, and nothing to leave out: say with --cut how many, as in --cut 6")
