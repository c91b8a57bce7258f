"""How well parts of a model predict texts, many parts at once.

Parts that begin alike share that work: they are walked as a tree, depth first, and what a stage makes is kept while
there are parts that go on from it. So all 2^(S−1) parts of S stages take as many visits of a stage, instead of
(S+1)·2^(S−2). Whatever is shared is computed as it would be for one part alone: the numbers are the same to the last
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.eval.windows import Windows
from skippipe.stage_subset import StageSubset, Visits, residual_scale_of

BATCH_TOKENS = 8192
HEAD_ROWS = 2048  # positions of which the logits are in memory at once
LARGEST_LOSS = 700.0  # its perplexity can still be written as a number
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Ways between plain and scaled: a stage is driven by (S−1)/(L−1) to this power."""

Dtype = Literal["fp32", "bf16"]
CountProgress = Callable[[int, int], None]
"""How much is done, of how much."""


class TextLoss(NamedTuple):
    """Of a part, on a text."""

    mean: float
    """Nats a token."""
    tokens: int
    """That were predicted."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)


@dataclass
class PrefixTree:
    """Parts that have visited the same stages so far."""

    ending: list[StageSubset] = field(default_factory=list)
    onward: dict[int, dict[float, PrefixTree]] = field(default_factory=dict)
    """By the stage that comes next, and by how it is driven."""


def prefix_tree(parts: Iterable[StageSubset]) -> PrefixTree:
    root = PrefixTree()
    for part in parts:
        at = root
        for stage in part.stages:
            drive = part.drive if stage else 1.0
            at = at.onward.setdefault(stage, {}).setdefault(drive, PrefixTree())
        at.ending.append(part)
    return root


class PerplexityMeter:
    """Measures parts of one model on the same windows."""

    def __init__(
        self,
        staged: StagedModel,
        texts: Sequence[Windows],
        dtype: Dtype = "fp32",
        progress: CountProgress = lambda done, of: None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.losses: dict[StageSubset, dict[str, TextLoss]] = {}
        """Of every part, on every text by its name."""
        self._staged = staged
        self._texts = texts
        self._low_precision = dtype == "bf16"
        self._batch_tokens = batch_tokens
        self._progress = progress

    @torch.no_grad()
    def measure(self, parts: Iterable[StageSubset]) -> None:
        """Those that have not been measured yet. An interruption leaves what was found on the batches before it."""
        missing = [part for part in dict.fromkeys(parts) if part not in self.losses]
        if not missing:
            return
        tree = prefix_tree(missing)
        batches = [(text, numbers) for text in self._texts for numbers in text.batches(self._batch_tokens)]
        with torch.autocast(torch.device(self._staged.device).type, torch.bfloat16, enabled=self._low_precision):
            for done, (text, numbers) in enumerate(batches):
                found: dict[StageSubset, Tensor] = {}
                for part, loss in self._walked(tree, text.rows(numbers)):
                    found[part] = loss
                    self._progress(done * len(missing) + len(found), len(batches) * len(missing))
                means = torch.stack([found[part] for part in missing]).cpu() / (len(numbers) * text.length)
                self._add(text, len(numbers), dict(zip(missing, means.tolist(), strict=True)))

    def _add(self, text: Windows, windows: int, means: Mapping[StageSubset, float]) -> None:
        """All parts at once: an interruption must not leave them measured on different windows."""
        more = dict(self.losses)
        for part, mean in means.items():
            if not mean < LARGEST_LOSS:  # which nan is not either
                raise UserError(f"stages {part.name} of the model make values beyond all bounds; drive them less")
            before = more.get(part, {}).get(text.text, TextLoss(0.0, 0))
            tokens = before.tokens + windows * text.length
            so_far = before.mean + (mean - before.mean) * windows * text.length / tokens
            more[part] = {**more.get(part, {}), text.text: TextLoss(so_far, tokens)}
        self.losses = more

    def _walked(self, tree: PrefixTree, rows: Tensor) -> Iterator[tuple[StageSubset, Tensor]]:
        rows = rows.to(self._staged.device)
        hidden = self._staged.stages[0].embed(rows[:, :-1])
        return self._walk(tree, hidden.bfloat16() if self._low_precision else hidden, rows[:, 1:])

    def _walk(self, fork: PrefixTree, hidden: Tensor, labels: Tensor) -> Iterator[tuple[StageSubset, Tensor]]:
        if fork.ending:
            loss = self._loss(hidden, labels)
            yield from ((part, loss) for part in fork.ending)
        for stage, driven in fork.onward.items():
            made = self._staged.stages[stage](hidden)
            for drive, following in driven.items():
                yield from self._walk(following, made if drive == 1.0 else torch.lerp(hidden, made, drive), labels)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed over all tokens."""
        ends = self._staged.stages[0]
        assert ends.norm is not None
        assert ends.head is not None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        pieces = torch.split(hidden.flatten(0, 1), HEAD_ROWS), torch.split(labels.flatten(), HEAD_ROWS)
        for some, wanted in zip(*pieces, strict=True):
            logits = ends.head(ends.norm(some)).float()
            total += functional.cross_entropy(logits, wanted, reduction="none").double().sum()
        return total


def best_exponents(meter: PerplexityMeter, by_size: Mapping[int, Sequence[Visits]], total: int) -> dict[int, float]:
    """By how many stages are left: with which exponent these parts predict best what the meter measures on."""
    tried = {
        (kept, exponent): [
            StageSubset(stages, total, residual_scale_of("scaled", total, kept) ** exponent) for stages in parts
        ]
        for kept, parts in by_size.items()
        for exponent in EXPONENTS
    }
    meter.measure(part for parts in tried.values() for part in parts)

    def loss(kept: int, exponent: float) -> float:
        return fmean(each.mean for part in tried[kept, exponent] for each in meter.losses[part].values())

    return {kept: min(EXPONENTS, key=lambda exponent: loss(kept, exponent)) for kept in by_size}
