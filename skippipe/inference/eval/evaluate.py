"""Evaluation of a trained model by subsets of its stages: which ones to measure, and what follows from the losses.

Stage ablation tells which stages a model can do without: each one alone, one after another, and the best subset of each
size. Stage 0 has the embedding and the head, and always stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from skippipe.errors import UserError
from skippipe.inference.cached_stage import DtypeName
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.eval.perplexity import PerplexityMeter, TextLoss, Windows, best_exponents
from skippipe.inference.likelihood import BATCH_TOKENS
from skippipe.stage_subset import StageSubset, Visits, draw_subsets, parse_subsets, residual_scale_of

MAX_SUBSETS = 1024
MAX_EXACT_SUBSETS = 128  # up to so many are all measured, to find the best of every size
CALIBRATION_SHARE = 16  # the residual scale is chosen on as many windows as are a 16th of those to measure on,
MIN_CALIBRATION_WINDOWS = 8  # but on so many at least,
CALIBRATION_SUBSETS = 4  # and for every size by so many subsets at most
BEST = "best"

StepProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


Losses = Callable[[Sequence[Visits]], Sequence[float]]
"""The losses of these subsets."""


class StageAblation(NamedTuple):
    """A stage that is left out, and the stages that remain."""

    stage: int
    remaining: Visits


def all_subsets(total: int) -> list[Visits]:
    """Every subset with stage 0, in order, the largest first."""
    return [(0, *others) for kept in range(total - 1, -1, -1) for others in combinations(range(1, total), kept)]


def ablations(stages: Visits) -> list[StageAblation]:
    return [StageAblation(stage, tuple(other for other in stages if other != stage)) for stage in stages[1:]]


def ablation_order(total: int, losses: Losses) -> Iterator[StageAblation]:
    """The greedy order: always the stage without which the loss is lowest, until stage 0 is alone."""
    remaining = tuple(range(total))
    while len(remaining) > 1:
        candidates = ablations(remaining)
        found = losses([ablation.remaining for ablation in candidates])
        best = candidates[min(range(len(candidates)), key=found.__getitem__)]
        remaining = best.remaining
        yield best


@dataclass(frozen=True)
class Selection:
    """Which subsets are measured, beside the whole model."""

    named: Sequence[str] = ()
    """Subsets by their stages, as in "0,2,3"."""
    shares: Sequence[str] = ()
    """Shares of the stages, drawn at random, as in "1/2"."""
    draws: int = 10
    """Number of subsets for each share."""
    seed: int = 0
    everything: bool = False
    """Measure all subsets that keep the order?"""
    ablation: bool = False
    """Measure the subsets that tell which stages the model can do without?"""
    residual_scale: str = "plain"
    """As for `residual_scale_of`, or "best"."""

    def stages(self, total: int) -> list[Visits]:
        """The subsets that are selected by themselves, the whole model first."""
        if total == 1 and (self.everything or self.ablation):
            raise UserError("the model is in one piece: give its number of stages with --cut, as in --cut 6")
        if self.everything and 2 ** (total - 1) > MAX_SUBSETS:
            raise UserError(
                f"--all: {total} stages have {2 ** (total - 1):,} subsets, more than {MAX_SUBSETS:,}; draw some with "
                "--keep 1/2 --draws 100, or cut the model into fewer stages with --cut 8"
            )
        found = [
            subset.stages for subset in parse_subsets(total, self.named, self.shares, "plain", self.draws, self.seed)
        ]
        return list(dict.fromkeys([tuple(range(total)), *found, *(all_subsets(total) if self.everything else ())]))

    def for_ablation(self, total: int) -> list[Visits]:
        """Subsets to measure for the ablation at once; what else its order needs shows on the way."""
        if not self.ablation:
            return []
        if 2 ** (total - 1) <= MAX_EXACT_SUBSETS:
            return all_subsets(total)
        return [ablation.remaining for ablation in ablations(tuple(range(total)))]


@dataclass(frozen=True)
class ResidualScaling:
    """The residual scale of subsets, by their size."""

    total: int
    mode: str
    """As for `residual_scale_of`, or "best"."""
    exponents: Mapping[int, float] = field(default_factory=dict)
    """Size → exponent between plain (0) and scaled (1), if the mode is "best"."""
    tokens: int = 0
    """Tokens that the exponents were chosen on."""

    def subset(self, stages: Visits) -> StageSubset:
        kept = len(stages)
        if self.mode != BEST:
            return StageSubset(stages, self.total, residual_scale_of(self.mode, self.total, kept))
        return StageSubset(
            stages, self.total, residual_scale_of("scaled", self.total, kept) ** self.exponents.get(kept, 0.0)
        )


class SizeSummary(NamedTuple):
    """Perplexities on a text of subsets of one size."""

    kept: int
    subsets: int
    """Number of subsets."""
    mean: float
    best: StageSubset
    worst: StageSubset


@dataclass(frozen=True)
class Evaluation:
    texts: Sequence[Windows]
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    parameters: tuple[int, ...]
    """Number of parameters of each stage; those of the embedding and the head are stage 0's."""
    wanted: Sequence[StageSubset]
    """The subsets that were selected by themselves, the whole model first."""
    losses: Mapping[StageSubset, Mapping[str, TextLoss]]
    """Losses of all subsets that were measured, by the texts' names; all on the same windows."""
    scaling: ResidualScaling
    order: Sequence[StageAblation]
    """The greedy order in which stages are left out, if ablation was selected."""
    ablation: bool
    interrupted: bool
    wire: str = ""
    """Codec of hidden states between stages; empty: none."""

    @property
    def whole(self) -> StageSubset:
        return self.wanted[0]

    @property
    def total(self) -> int:
        return self.whole.total

    @cached_property
    def sampled(self) -> list[StageSubset]:
        """Subsets that stand for all of their size: all there are, or else the selected ones."""
        if 2 ** (self.total - 1) <= len(self.losses):
            every = [self.subset(stages) for stages in all_subsets(self.total)]
            if all(subset in self.losses for subset in every):
                return every
        return list(self.wanted)

    def subset(self, stages: Visits) -> StageSubset:
        return self.scaling.subset(stages)

    def loss(self, subset: StageSubset, text: str) -> TextLoss | None:
        return self.losses.get(subset, {}).get(text)

    def increase(self, subset: StageSubset, text: str) -> float | None:
        """Relative increase of the perplexity, against the whole model's."""
        found, whole = self.loss(subset, text), self.loss(self.whole, text)
        return math.expm1(found.mean - whole.mean) if found and whole else None

    def share_of_parameters(self, subset: StageSubset) -> float:
        return sum(self.parameters[stage] for stage in subset.stages) / sum(self.parameters)

    def sizes(self, text: str) -> list[SizeSummary]:
        """A summary of every size, the largest first."""
        known = {subset: loss for subset in self.sampled if (loss := self.loss(subset, text))}
        found = []
        for kept in sorted({len(subset.stages) for subset in known}, reverse=True):
            ranked = sorted(
                (subset for subset in known if len(subset.stages) == kept), key=lambda subset: known[subset].mean
            )
            mean = fmean(known[subset].perplexity for subset in ranked)
            found.append(SizeSummary(kept, len(ranked), mean, ranked[0], ranked[-1]))
        return found

    def single_ablations(self) -> list[tuple[int, StageSubset]]:
        """Each stage and the subset without it, the costliest first, by the first text."""
        if not self.ablation:
            return []
        found = [(ablation.stage, self.subset(ablation.remaining)) for ablation in ablations(self.whole.stages)]
        costs = {subset: loss.mean for _, subset in found if (loss := self.loss(subset, self.texts[0].text))}
        return sorted((each for each in found if each[1] in costs), key=lambda each: -costs[each[1]])

    def best_by_size(self, text: str) -> dict[int, StageSubset]:
        """The best subset of every size, if all subsets were measured."""
        sizes = self.sizes(text)
        every = self.ablation and sum(size.subsets for size in sizes) == 2 ** (self.total - 1)
        return {size.kept: size.best for size in sizes} if every else {}


def evaluate(
    staged: StagedModel,
    texts: Sequence[Windows],
    selection: Selection,
    dtype: DtypeName = "fp32",
    progress: StepProgress = lambda what, done, of: None,
    batch_tokens: int = BATCH_TOKENS,
    wire: str = "",
    replicas: Sequence[StagedModel] = (),
) -> Evaluation:
    """Measures the selected subsets, with the codec `wire` on hops if there is one; `replicas` are the same model on
    other devices, which take a part of the work.

    Ablation and the best residual scale go by the first text. An interruption ends it with what was measured until
    then, unless that is nothing."""
    total, first = len(staged.stages), texts[0]
    wanted = selection.stages(total)
    needed = [*wanted, *selection.for_ablation(total)]
    scaling = ResidualScaling(total, selection.residual_scale)
    if selection.residual_scale == BEST:
        some = first.others(max(MIN_CALIBRATION_WINDOWS, len(first.numbers) // CALIBRATION_SHARE))
        choosing = partial(progress, "choosing the residual scale")
        meter = PerplexityMeter(staged, [some], dtype, choosing, batch_tokens, wire, replicas)
        sizes = _calibration_subsets(total, needed, selection)
        scaling = ResidualScaling(total, BEST, best_exponents(meter, sizes, total), some.tokens)
    subsets_wanted = [scaling.subset(stages) for stages in wanted]
    meter = PerplexityMeter(staged, texts, dtype, partial(progress, "measuring"), batch_tokens, wire, replicas)

    def losses(subsets: Sequence[Visits]) -> list[float]:
        scaled = [scaling.subset(stages) for stages in subsets]
        meter.measure(scaled)
        return [meter.losses[subset][first.text].mean for subset in scaled]

    order: list[StageAblation] = []
    interrupted = False
    try:
        meter.measure(scaling.subset(stages) for stages in needed)
        if selection.ablation:
            for ablation in ablation_order(total, losses):
                order.append(ablation)  # one by one: an interruption leaves those that are known
    except KeyboardInterrupt:
        if not meter.losses:
            raise
        interrupted = True
    return Evaluation(
        texts=texts,
        layers=staged.layers,
        parameters=tuple(sum(each.numel() for _, each in stage.named_weights()) for stage in staged.stages),
        wanted=subsets_wanted,
        losses=_comparable(meter.losses, subsets_wanted[0]),
        scaling=scaling,
        order=order,
        ablation=selection.ablation,
        interrupted=interrupted,
        wire=wire,
    )


def _calibration_subsets(total: int, needed: Sequence[Visits], selection: Selection) -> dict[int, list[Visits]]:
    """Size → subsets to choose the residual scale by; none for sizes that are never scaled."""
    sizes = range(2, total) if selection.ablation else sorted({len(stages) for stages in needed} - {1, total})
    found = {}
    for kept in sizes:
        subsets = [stages for stages in needed if len(stages) == kept]
        every = max(1, -(-len(subsets) // CALIBRATION_SUBSETS))
        found[kept] = subsets[::every] or draw_subsets(total, kept, CALIBRATION_SUBSETS, selection.seed)
    return found


def _comparable(
    losses: Mapping[StageSubset, Mapping[str, TextLoss]], whole: StageSubset
) -> dict[StageSubset, dict[str, TextLoss]]:
    """The losses without those that an interruption left measured on fewer windows than the whole model."""
    tokens = {text: loss.tokens for text, loss in losses[whole].items()}
    found = {
        subset: {text: loss for text, loss in texts.items() if loss.tokens == tokens[text]}
        for subset, texts in losses.items()
    }
    return {subset: texts for subset, texts in found.items() if texts}
