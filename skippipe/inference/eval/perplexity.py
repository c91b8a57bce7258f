"""Perplexity of many subsets of a model's stages at once.

Subsets that begin alike share that work: they are walked as a prefix tree, depth first, and a stage's output is kept
while there are subsets that go on from it. So all 2^(S−1) subsets of S stages take as many visits of a stage, instead
of (S+1)·2^(S−2). What is shared is computed as for one subset alone: the numbers are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skippipe.errors import UserError
from skippipe.inference.cached_stage import DtypeName, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.eval.windows import Windows
from skippipe.inference.likelihood import BATCH_TOKENS, HEAD_ROWS, CountProgress
from skippipe.stage_subset import StageSubset, Visits, residual_scale_of

MAX_LOSS = 700.0  # its perplexity can still be written as a number
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Steps between plain and scaled: the residual scale is (S−1)/(L−1) to this power."""


class TextLoss(NamedTuple):
    """Loss of a subset on a text."""

    mean: float
    """Nats a token."""
    tokens: int
    """Tokens that were predicted."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


@dataclass
class PrefixTree:
    """Subsets that begin with the same stages."""

    complete: list[StageSubset] = field(default_factory=list)
    onward: dict[int, dict[float, PrefixTree]] = field(default_factory=dict)
    """Next stage → its residual scale → the subsets that go on so."""


def prefix_tree(subsets: Iterable[StageSubset]) -> PrefixTree:
    root = PrefixTree()
    for subset in subsets:
        at = root
        for stage in subset.stages:
            residual_scale = subset.residual_scale if stage else 1.0
            at = at.onward.setdefault(stage, {}).setdefault(residual_scale, PrefixTree())
        at.complete.append(subset)
    return root


class PerplexityMeter:
    """Measures subsets of one model on the same windows."""

    def __init__(
        self,
        staged: StagedModel,
        texts: Sequence[Windows],
        dtype: DtypeName = "fp32",
        progress: CountProgress = lambda done, of: None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.losses: dict[StageSubset, dict[str, TextLoss]] = {}
        """Losses of every subset, on every text by its name."""
        self._staged = staged
        self._texts = texts
        self._low_precision = dtype == "bf16"
        self._batch_tokens = batch_tokens
        self._progress = progress

    @torch.no_grad()
    def measure(self, subsets: Iterable[StageSubset]) -> None:
        """Measures subsets that have not been measured yet. An interruption leaves the losses of earlier batches."""
        missing = [subset for subset in dict.fromkeys(subsets) if subset not in self.losses]
        if not missing:
            return
        tree = prefix_tree(missing)
        batches = [(text, numbers) for text in self._texts for numbers in text.batches(self._batch_tokens)]
        with torch.autocast(torch.device(self._staged.device).type, torch.bfloat16, enabled=self._low_precision):
            for done, (text, numbers) in enumerate(batches):
                found: dict[StageSubset, Tensor] = {}
                for subset, loss in self._losses(tree, text.rows(numbers)):
                    found[subset] = loss
                    self._progress(done * len(missing) + len(found), len(batches) * len(missing))
                means = torch.stack([found[subset] for subset in missing]).cpu() / (len(numbers) * text.length)
                self._add(text, len(numbers), dict(zip(missing, means.tolist(), strict=True)))

    def _add(self, text: Windows, windows: int, means: Mapping[StageSubset, float]) -> None:
        """Adds all losses at once: an interruption must not leave subsets measured on different windows."""
        more = dict(self.losses)
        for subset, mean in means.items():
            if not mean < MAX_LOSS:  # which nan is not either
                raise UserError(
                    f"stages {subset.name} of the model compute values beyond all bounds; use a lower residual scale"
                )
            before = more.get(subset, {}).get(text.text, TextLoss(0.0, 0))
            tokens = before.tokens + windows * text.length
            so_far = before.mean + (mean - before.mean) * windows * text.length / tokens
            more[subset] = {**more.get(subset, {}), text.text: TextLoss(so_far, tokens)}
        self.losses = more

    def _losses(self, tree: PrefixTree, rows: Tensor) -> Iterator[tuple[StageSubset, Tensor]]:
        rows = rows.to(self._staged.device)
        hidden = self._staged.stages[0].embed(rows[:, :-1])
        return self._walk(tree, hidden.bfloat16() if self._low_precision else hidden, rows[:, 1:])

    def _walk(self, tree: PrefixTree, hidden: Tensor, labels: Tensor) -> Iterator[tuple[StageSubset, Tensor]]:
        if tree.complete:
            loss = self._loss(hidden, labels)
            yield from ((subset, loss) for subset in tree.complete)
        for stage, scales in tree.onward.items():
            output = self._staged.stages[stage](hidden)
            for scale, following in scales.items():
                scaled = output if scale == 1.0 else torch.lerp(hidden, output, scale)
                yield from self._walk(following, scaled, labels)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, summed over all tokens."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        pieces = torch.split(hidden.flatten(0, 1), HEAD_ROWS), torch.split(labels.flatten(), HEAD_ROWS)
        for some, wanted in zip(*pieces, strict=True):
            total += (
                functional.cross_entropy(logits(self._staged.stages[0], some), wanted, reduction="none").double().sum()
            )
        return total


def best_exponents(meter: PerplexityMeter, by_size: Mapping[int, Sequence[Visits]], total: int) -> dict[int, float]:
    """Size → the exponent with which its subsets have the lowest loss on the meter's windows."""
    tried = {
        (kept, exponent): [
            StageSubset(stages, total, residual_scale_of("scaled", total, kept) ** exponent) for stages in subsets
        ]
        for kept, subsets in by_size.items()
        for exponent in EXPONENTS
    }
    meter.measure(subset for subsets in tried.values() for subset in subsets)

    def loss(kept: int, exponent: float) -> float:
        return fmean(each.mean for subset in tried[kept, exponent] for each in meter.losses[subset].values())

    return {kept: min(EXPONENTS, key=lambda exponent: loss(kept, exponent)) for kept in by_size}
