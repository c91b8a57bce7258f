"""Perplexity of many subsets of a model's stages at once, on windows of a text.

Evaluation windows are stretches of a text of equal length, spread evenly over it. The token after a window is the label
of its last one, as in training. Where the tokenizer begins every text with a token of its own, that one stands before
every window instead: such models need it there.

Subsets that begin alike share that work: they are walked as a prefix tree, depth first, and a stage's output is kept
while there are subsets that go on from it. So all 2^(S−1) subsets of S stages take as many visits of a stage, instead
of (S+1)·2^(S−2). What is shared is computed as for one subset alone: the numbers are the same to the last bit.

Where the model is on several devices, each takes the next batch of windows when it is done with one (`over_replicas`).
Losses are added in the order of the batches, so the numbers do not depend on how many devices there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from skippipe.codecs import after_hop
from skippipe.data.documents import BUILT_IN
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import HEADER, Ids, TokenFile
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.inference.cached_stage import DtypeName, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.likelihood import BATCH_TOKENS, HEAD_ROWS, CountProgress, over_replicas
from skippipe.json_fields import exists
from skippipe.plan import Plan
from skippipe.stage_subset import StageHop, StageSubset, Visits, residual_scale_of

DEFAULT_CONTEXT = 512  # tokens of a window, if it is unknown on how many the model was trained
MAX_LOSS = 700.0  # its perplexity can still be written as a number
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Steps between plain and scaled: the residual scale is (S−1)/(L−1) to this power."""


@dataclass(frozen=True)
class Windows:
    text: str
    """The text's name."""
    ids: Ids
    length: int
    """Tokens of a window; all of them are predicted."""
    beginning: int | None
    """The token that stands before every window; None: the one that does so in the text."""
    numbers: tuple[int, ...]
    """The windows to measure on, of all that the text has."""

    @classmethod
    def of(cls, text: str, ids: Ids, context: int, tokens: int, beginning: int | None = None) -> Windows:
        """Windows of at most `tokens` together, but one at least. A text shorter than a window is one by itself."""
        predicted = len(ids) - (beginning is None)
        if predicted < 1:
            raise UserError(f"--text {text}: has {len(ids)} tokens, too few to predict one; name a longer text")
        every = cls(text, ids, min(context, predicted), beginning, ())
        return replace(every, numbers=_spread(range(every.total), tokens // every.length))

    @property
    def total(self) -> int:
        """Number of windows of the whole text."""
        return (len(self.ids) - (self.beginning is None)) // self.length

    @property
    def tokens(self) -> int:
        return len(self.numbers) * self.length

    def others(self, wanted: int) -> Windows:
        """So many windows that are not among these, to calibrate on; some of these, where too few are left."""
        left = sorted(set(range(self.total)) - set(self.numbers))
        return replace(self, numbers=_spread(left if len(left) >= wanted else self.numbers, wanted))

    def batches(self, tokens: int) -> list[Sequence[int]]:
        """Batches of about so many tokens, each spread over the whole text: the first ones are a fair sample."""
        count = -(-len(self.numbers) // max(1, tokens // self.length))
        return [self.numbers[start::count] for start in range(count)]

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """The tokens of each window, and the one before it."""
        starts = np.array(numbers)[:, None] * self.length
        if self.beginning is None:
            return torch.from_numpy(self.ids[starts + np.arange(self.length + 1)].astype(np.int64))
        rows = torch.from_numpy(self.ids[starts + np.arange(self.length)].astype(np.int64))
        return torch.cat([torch.full((len(rows), 1), self.beginning), rows], 1)


def _spread(numbers: Sequence[int], wanted: int) -> tuple[int, ...]:
    wanted = min(len(numbers), max(1, wanted))
    return tuple(numbers[at * len(numbers) // wanted] for at in range(wanted))


def open_text(name: str, tokenizer: TextTokenizer, progress: PrepareProgress = lambda what, share: None) -> Ids:
    """Token ids of a prepared folder, or of texts, which are kept prepared in the cache."""
    if name not in BUILT_IN and exists(Path(name) / HEADER):
        return TokenFile.open(Path(name), tokenizer).check_plain().ids
    return prepare(name, tokenizer, progress=progress).ids


def labels(names: Sequence[str]) -> list[str]:
    """Names of the texts: short, if that tells them apart."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--text {twice}: named twice; once is enough")
    short = [Path(name).name.removesuffix(".xz").removesuffix(".txt") for name in names]
    return short if len(set(short)) == len(short) else list(names)


def beginning_of(tokenizer: Any) -> int | None:
    """The token that a tokenizer of transformers puts before any text by itself."""
    added: list[int] = tokenizer("").input_ids
    return added[0] if added and added[0] == tokenizer.bos_token_id else None


def default_context(place: Path, most: int) -> int:
    """The length of the samples that the model was trained on, if its run's plan is found; else a default."""
    run = place.parent if place.name == "model" else place.parent.parent
    of_run = place.name == "model" or place.parent.name == "checkpoints"
    if of_run and (run / "plan.json").is_file():
        return min(most, Plan.load(run / "plan.json").workload.sequence_tokens)
    return min(most, DEFAULT_CONTEXT)


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
    """Subsets that begin with the same stages, and where others stand in for missing ones, by the same hops."""

    complete: list[StageSubset] = field(default_factory=list)
    onward: dict[tuple[int, StageHop | None], dict[float, PrefixTree]] = field(default_factory=dict)
    """Next stage and the hop from it → its residual scale → the subsets that go on so."""


def prefix_tree(subsets: Iterable[StageSubset], *, stand_ins: bool) -> PrefixTree:
    root = PrefixTree()
    for subset in subsets:
        at = root
        for stage in subset.stages:
            residual_scale = subset.residual_scale if stage else 1.0
            hop = subset.hops.get(stage) if stand_ins else None
            at = at.onward.setdefault((stage, hop), {}).setdefault(residual_scale, PrefixTree())
        at.complete.append(subset)
    return root


Means = Mapping[StageSubset, float]
"""The mean losses of subsets on a batch."""


@dataclass(frozen=True)
class BatchLosses:
    """Computes the losses of subsets on a batch, on one device."""

    staged: StagedModel
    dtype: DtypeName
    wire: str = ""
    """Codec of hidden states between stages, as if each was served by a node of its own; empty: none."""

    def means(
        self,
        tree: PrefixTree,
        subsets: Sequence[StageSubset],
        text: Windows,
        numbers: Sequence[int],
        progress: Callable[[int], None] = lambda count: None,
    ) -> Means:
        """The mean loss of every subset, all of which are in the tree; `progress` gets how many are done."""
        found: dict[StageSubset, Tensor] = {}
        device = torch.device(self.staged.device).type
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=(self.dtype == "bf16")):
            for subset, loss in self._losses(tree, text.rows(numbers)):
                found[subset] = loss
                progress(len(found))
        means = torch.stack([found[subset] for subset in subsets]).cpu() / (len(numbers) * text.length)
        return dict(zip(subsets, means.tolist(), strict=True))

    def _losses(self, tree: PrefixTree, rows: Tensor) -> Iterator[tuple[StageSubset, Tensor]]:
        rows = rows.to(self.staged.device)
        hidden = self.staged.stages[0].embed(rows[:, :-1])
        return self._walk(tree, hidden.bfloat16() if (self.dtype == "bf16") else hidden, rows[:, 1:])

    def _walk(
        self, tree: PrefixTree, hidden: Tensor, labels: Tensor, at_head: Tensor | None = None
    ) -> Iterator[tuple[StageSubset, Tensor]]:
        """`hidden` is what arrives from the stage before; `at_head` what its head gets, if that is something else."""
        if tree.complete:
            loss = self._loss(hidden if at_head is None else at_head, labels)
            yield from ((subset, loss) for subset in tree.complete)
        for (number, hop), scales in tree.onward.items():
            stage = self.staged.stages[number]
            stage.set_hop(hop)
            output = stage(hidden)
            for scale, following in scales.items():
                scaled = output if scale == 1.0 else torch.lerp(hidden, output, scale)
                made = stage.cross(scaled, hop)
                yield from self._walk(following, self._sent(made), labels, made if number == 0 else None)

    def _sent(self, hidden: Tensor) -> Tensor:
        """What arrives after a hop."""
        return after_hop(hidden, self.wire) if self.wire else hidden

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, summed over all tokens."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        pieces = torch.split(hidden.flatten(0, 1), HEAD_ROWS), torch.split(labels.flatten(), HEAD_ROWS)
        for some, wanted in zip(*pieces, strict=True):
            total += (
                functional.cross_entropy(logits(self.staged.stages[0], some), wanted, reduction="none").double().sum()
            )
        return total


@dataclass
class PerplexityMeter:
    """Measures subsets of one model on the same windows."""

    staged: StagedModel
    texts: Sequence[Windows]
    dtype: DtypeName = "fp32"
    progress: CountProgress = lambda done, of: None
    batch_tokens: int = BATCH_TOKENS
    wire: str = ""
    """As `BatchLosses` has it."""
    replicas: Sequence[StagedModel] = ()
    """The same model on other devices, which take batches too."""
    losses: dict[StageSubset, dict[str, TextLoss]] = field(init=False, default_factory=dict)
    """Losses of every subset, on every text by its name."""

    def measure(self, subsets: Iterable[StageSubset]) -> None:
        """Measures subsets that have not been measured yet. An interruption leaves the losses of earlier batches."""
        missing = [subset for subset in dict.fromkeys(subsets) if subset not in self.losses]
        if not missing:
            return
        tree = prefix_tree(missing, stand_ins=self.staged.stand_ins)
        batches = [(text, numbers) for text in self.texts for numbers in text.batches(self.batch_tokens)]
        of = len(batches) * len(missing)
        if not self.replicas:
            losses = BatchLosses(self.staged, self.dtype, self.wire)
            for done, (text, numbers) in enumerate(batches):
                report = partial(self._report, done * len(missing), of)
                self._add(text, len(numbers), losses.means(tree, missing, text, numbers, report))
            return
        replicas = [BatchLosses(each, self.dtype, self.wire) for each in (self.staged, *self.replicas)]
        measured = over_replicas(lambda losses, batch: losses.means(tree, missing, *batch), replicas, batches)
        for done, ((text, numbers), means) in enumerate(zip(batches, measured, strict=True), 1):
            self._add(text, len(numbers), means)
            self.progress(done * len(missing), of)

    def _report(self, before: int, of: int, count: int) -> None:
        self.progress(before + count, of)

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
