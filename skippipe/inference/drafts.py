"""With which stages to draft, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skippipe.errors import UserError
from skippipe.inference.loading import StagedModel
from skippipe.parts import Part, Visits, drive_of, whole_numbers
from skippipe.scoring.model import PartModel

LONGEST = 12  # tokens of a draft
WORTHWHILE = 1.1  # a draft that promises less is none: verifying many tokens costs more than verifying one
SAMPLE_TOKENS = 256
EXPECTED, WEIGHT = 0.75, 8  # of drafted tokens, this share is right: what to begin with, as if seen so many times
FADING = 0.98  # of experience, with every round


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


class DraftLength:
    """How many tokens to draft, by how often the recent ones were right. 0: not now.

    Old experience fades, also while nothing is drafted, so that after a while it is tried again.
    """

    def __init__(self, cost: float, fixed: int | None = None) -> None:
        self._cost = cost
        """Of drafting a token, a pass through the whole part being 1."""
        self._fixed = fixed
        self._tested, self._accepted = 0.0, 0.0

    def tokens(self) -> int:
        if self._fixed is not None:
            return self._fixed
        right = (self._accepted + EXPECTED * WEIGHT) / (self._tested + WEIGHT)
        return best_length(right, self._cost)[0]

    def learn(self, tested: int, accepted: int) -> None:
        """After each round."""
        self._tested = FADING * self._tested + tested
        self._accepted = FADING * self._accepted + accepted


def best_length(acceptance: float, cost: float) -> tuple[int, float]:
    """Of a draft, and how much faster than without.

    A pass gives as many tokens as were right, and one (Leviathan, Kalman and Matias, 2023, equation 1).
    """

    def speedup(length: int) -> float:
        return sum(acceptance**index for index in range(length + 1)) / (1 + cost * length)

    length = max(range(LONGEST + 1), key=speedup)
    return length, speedup(length)


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
