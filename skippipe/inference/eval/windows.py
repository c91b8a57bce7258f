"""Evaluation windows: stretches of a text of equal length, spread evenly over it.

The token after a window is the label of its last one, as in training. Where the tokenizer begins every text with a
token of its own, that one stands before every window instead: such models need it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skippipe.data.documents import BUILT_IN
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import Ids, TokenFile
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.plan import Plan

DEFAULT_CONTEXT = 512  # tokens of a window, if it is unknown on how many the model was trained


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
    """Token ids of a prepared folder, or of a text file, which is kept prepared in the cache."""
    if name not in BUILT_IN and Path(name).is_dir():
        return TokenFile.open(Path(name), tokenizer).ids
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
