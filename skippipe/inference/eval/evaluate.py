"""A trained model held against parts of itself: what was asked, what was found, and what follows from it.

Which stages a model can do without: each alone, one after another, and the best choice of so many.

Stage 0 has the embedding and the head, and always stays.

"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.eval.perplexity import BATCH_TOKENS, Dtype, PerplexityMeter, TextLoss, best_exponents
from skippipe.inference.eval.windows import Windows
from skippipe.stage_subset import StageSubset, Visits, draw_subsets, parse_subsets, residual_scale_of

MOST_PARTS = 1024
EXACT_PARTS = 128  # up to so many are all measured to find the best of every size
CALIBRATED = 16  # how strongly to drive is chosen by as many windows as are a 16th of those to measure on,
CALIBRATED_LEAST = 8  # but by so many at least,
CALIBRATED_PARTS = 4  # and for every size by so many parts at most
BEST = "best"

EvalProgress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""


@dataclass(frozen=True)
class Selection:
    """Which parts are to be measured, beside the whole."""

    named: Sequence[str] = ()
    """Stages, as in "0,2,3"."""
    shares: Sequence[str] = ()
    """Of the stages, drawn at random, as in "1/2"."""
    draws: int = 10
    """Parts for each share."""
    seed: int = 0
    everything: bool = False
    """All parts that keep the order."""
    losing: bool = False
    """Those that tell which stages the model can do without."""
    drive: str = "plain"
    """As for `drive_of`, or "best"."""

    def stages(self, total: int) -> list[Visits]:
        """Those that are asked for by themselves, the whole first."""
        if total == 1 and (self.everything or self.losing):
            raise UserError("the model is in one piece: say with --cut how many stages it has, as in --cut 6")
        if self.everything and 2 ** (total - 1) > MOST_PARTS:
            raise UserError(
                f"--all: {total} stages have {2 ** (total - 1):,} parts, more than {MOST_PARTS:,}; draw some with "
                "--keep 1/2 --draws 100, or cut the model into fewer stages with --cut 8"
            )
        found = [part.stages for part in parse_subsets(total, self.named, self.shares, "plain", self.draws, self.seed)]
        return list(dict.fromkeys([tuple(range(total)), *found, *(all_parts(total) if self.everything else ())]))

    def to_know_losing(self, total: int) -> list[Visits]:
        """What to measure at once; what else the order of dropping needs shows on the way."""
        if not self.losing:
            return []
        if 2 ** (total - 1) <= EXACT_PARTS:
            return all_parts(total)
        return [drop.left for drop in ablations(tuple(range(total)))]


@dataclass(frozen=True)
class ResidualScaling:
    """How strongly the stages of a part are driven, by how many there are."""

    total: int
    said: str
    exponents: Mapping[int, float] = field(default_factory=dict)
    """By how many stages there are: where the best was looked for, between plain and scaled."""
    tokens: int = 0
    """That it was looked for on."""

    def part(self, stages: Visits) -> StageSubset:
        kept = len(stages)
        if self.said != BEST:
            return StageSubset(stages, self.total, residual_scale_of(self.said, self.total, kept))
        return StageSubset(
            stages, self.total, residual_scale_of("scaled", self.total, kept) ** self.exponents.get(kept, 0.0)
        )


class Size(NamedTuple):
    """What parts of so many stages do on a text."""

    kept: int
    parts: int
    mean: float
    """Of the perplexities."""
    best: StageSubset
    worst: StageSubset


@dataclass(frozen=True)
class Evaluation:
    texts: Sequence[Windows]
    layers: tuple[int, ...]
    """Of each stage."""
    parameters: tuple[int, ...]
    """Of each stage; those of the embedding and the head are stage 0's."""
    wanted: Sequence[StageSubset]
    """What was asked for by itself, the whole first."""
    losses: Mapping[StageSubset, Mapping[str, TextLoss]]
    """Of all that was measured, by the texts' names; all on the same windows."""
    driving: ResidualScaling
    drops: Sequence[StageAblation]
    """The best order in which to drop stages, if that was asked for."""
    losing: bool
    interrupted: bool

    @property
    def whole(self) -> StageSubset:
        return self.wanted[0]

    @property
    def total(self) -> int:
        return self.whole.total

    @cached_property
    def sampled(self) -> list[StageSubset]:
        """Parts that stand for all of their size: all there are, or else those that were asked for."""
        if 2 ** (self.total - 1) <= len(self.losses):
            every = [self.part(stages) for stages in all_parts(self.total)]
            if all(part in self.losses for part in every):
                return every
        return list(self.wanted)

    def part(self, stages: Visits) -> StageSubset:
        return self.driving.part(stages)

    def loss(self, part: StageSubset, text: str) -> TextLoss | None:
        return self.losses.get(part, {}).get(text)

    def increase(self, part: StageSubset, text: str) -> float | None:
        """Of the perplexity, against the whole model's."""
        found, whole = self.loss(part, text), self.loss(self.whole, text)
        return math.expm1(found.mean - whole.mean) if found and whole else None

    def share_of_parameters(self, part: StageSubset) -> float:
        return sum(self.parameters[stage] for stage in part.stages) / sum(self.parameters)

    def sizes(self, text: str) -> list[Size]:
        """The largest first."""
        known = {part: loss for part in self.sampled if (loss := self.loss(part, text))}
        found = []
        for kept in sorted({len(part.stages) for part in known}, reverse=True):
            ranked = sorted((part for part in known if len(part.stages) == kept), key=lambda part: known[part].mean)
            mean = fmean(known[part].perplexity for part in ranked)
            found.append(Size(kept, len(ranked), mean, ranked[0], ranked[-1]))
        return found

    def alone(self) -> list[tuple[int, StageSubset]]:
        """Each stage, and what is there without it, the costliest to lose first, by the first text."""
        if not self.losing:
            return []
        drops = [(drop.stage, self.part(drop.left)) for drop in ablations(self.whole.stages)]
        costs = {part: loss.mean for _, part in drops if (loss := self.loss(part, self.texts[0].text))}
        return sorted((each for each in drops if each[1] in costs), key=lambda each: -costs[each[1]])

    def exact(self, text: str) -> dict[int, StageSubset]:
        """The best part of every size, if all parts are known."""
        losses = {part.stages: loss.mean for part in self.sampled if (loss := self.loss(part, text))}
        if not self.losing or len(losses) < 2 ** (self.total - 1):
            return {}
        return {kept: self.part(stages) for kept, stages in best_of_every_size(losses).items()}


def evaluate(
    staged: StagedModel,
    texts: Sequence[Windows],
    selection: Selection,
    dtype: Dtype = "fp32",
    progress: EvalProgress = lambda what, done, of: None,
    batch_tokens: int = BATCH_TOKENS,
) -> Evaluation:
    """Stages are dropped, and the best drive is chosen, by the first text. An interruption ends it with what is known,
    unless that is nothing."""
    total, first = len(staged.stages), texts[0]
    wanted = selection.stages(total)
    needed = [*wanted, *selection.to_know_losing(total)]
    driving = ResidualScaling(total, selection.drive)
    if selection.drive == BEST:
        some = first.others(max(CALIBRATED_LEAST, len(first.numbers) // CALIBRATED))
        meter = PerplexityMeter(staged, [some], dtype, _on(progress, "choosing the drive"), batch_tokens)
        sizes = _calibrated(total, needed, selection)
        driving = ResidualScaling(total, BEST, best_exponents(meter, sizes, total), some.tokens)
    asked = [driving.part(stages) for stages in wanted]
    meter = PerplexityMeter(staged, texts, dtype, _on(progress, "measuring"), batch_tokens)

    def losses(parts: Sequence[Visits]) -> list[float]:
        driven = [driving.part(stages) for stages in parts]
        meter.measure(driven)
        return [meter.losses[part][first.text].mean for part in driven]

    drops: list[StageAblation] = []
    interrupted = False
    try:
        meter.measure(driving.part(stages) for stages in needed)
        if selection.losing:
            for drop in ablation_order(total, losses):
                drops.append(drop)  # one by one: an interruption leaves those that are known
    except KeyboardInterrupt:
        if not meter.losses:
            raise
        interrupted = True
    return Evaluation(
        texts=texts,
        layers=staged.layers,
        parameters=tuple(sum(each.numel() for _, each in stage.named_weights()) for stage in staged.stages),
        wanted=asked,
        losses=_comparable(meter.losses, asked[0]),
        driving=driving,
        drops=drops,
        losing=selection.losing,
        interrupted=interrupted,
    )


def _on(progress: EvalProgress, what: str) -> Callable[[int, int], None]:
    return lambda done, of: progress(what, done, of)


def _calibrated(total: int, needed: Sequence[Visits], selection: Selection) -> dict[int, list[Visits]]:
    """By how many stages they have: parts to choose the drive by. Where nothing can be driven, there are none."""
    sizes = range(2, total) if selection.losing else sorted({len(stages) for stages in needed} - {1, total})
    found = {}
    for kept in sizes:
        parts = [stages for stages in needed if len(stages) == kept]
        every = max(1, -(-len(parts) // CALIBRATED_PARTS))
        found[kept] = parts[::every] or draw_subsets(total, kept, CALIBRATED_PARTS, selection.seed)
    return found


def _comparable(
    losses: Mapping[StageSubset, Mapping[str, TextLoss]], whole: StageSubset
) -> dict[StageSubset, dict[str, TextLoss]]:
    """Without what an interruption left measured on fewer windows than the whole model."""
    tokens = {text: loss.tokens for text, loss in losses[whole].items()}
    found = {
        part: {text: loss for text, loss in texts.items() if loss.tokens == tokens[text]}
        for part, texts in losses.items()
    }
    return {part: texts for part, texts in found.items() if texts}


Losses = Callable[[Sequence[Visits]], Sequence[float]]
"""What these parts lose."""


class StageAblation(NamedTuple):
    stage: int
    left: Visits
    """What is there without it."""


def all_parts(total: int) -> list[Visits]:
    """Everything that keeps stage 0 and the order, the largest first."""
    return [(0, *others) for kept in range(total - 1, -1, -1) for others in combinations(range(1, total), kept)]


def ablations(stages: Visits) -> list[StageAblation]:
    return [StageAblation(stage, tuple(other for other in stages if other != stage)) for stage in stages[1:]]


def ablation_order(total: int, losses: Losses) -> Iterator[StageAblation]:
    """Greedily: always the one without which the rest loses least, until stage 0 is alone."""
    left = tuple(range(total))
    while len(left) > 1:
        drops = ablations(left)
        found = losses([drop.left for drop in drops])
        best = min(range(len(drops)), key=found.__getitem__)
        left = drops[best].left
        yield drops[best]


def best_of_every_size(losses: Mapping[Visits, float]) -> dict[int, Visits]:
    """Of these parts."""
    sizes = sorted({len(stages) for stages in losses}, reverse=True)
    return {size: min((each for each in losses if len(each) == size), key=losses.__getitem__) for size in sizes}
