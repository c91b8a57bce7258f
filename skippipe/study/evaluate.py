"""Loss on held-out text: of the whole model, and of parts of it.

A part keeps stage 0 and some of the others, in order. What is left out can be made up for by driving those that are
there; how strongly is measured too, since nobody knows it beforehand: by `DRIVES` of the way, in the exponent, from
not at all to (S−1)/(L−1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.token_file import Ids
from skippipe.stage_subset import Visits, draw_subsets, residual_scale_of
from skippipe.study.engine import Engine

DRIVES = (0.0, 0.5, 1.0)
EVALUATED_SAMPLES = 64  # at a time


class EvalText:
    """Ids on a device, cut into samples."""

    def __init__(self, ids: Ids, sequence: int, device: str) -> None:
        self.sequence = sequence
        self._ids = torch.from_numpy(np.ascontiguousarray(ids).astype(np.int32)).to(device)
        self._within = torch.arange(sequence + 1, device=device)

    def __len__(self) -> int:
        """Windows, as the sampler has them."""
        return (len(self._ids) - 1) // self.sequence

    def batch(self, windows: list[int] | range) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(windows).to(self._ids.device, non_blocking=True) * self.sequence
        rows = self._ids[starts[:, None] + self._within].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def iteration(self, sampler: BatchSampler, number: int) -> tuple[Tensor, Tensor]:
        """The samples of all microbatches of an iteration, as nodes would get them."""
        return self.batch(
            [
                sampler.window(number, microbatch, sample)
                for microbatch in range(sampler.microbatches)
                for sample in range(sampler.samples)
            ]
        )

    def evaluated(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Spread evenly over the whole text; every batch is of the same size."""
        wanted = min(len(self), max(1, tokens // self.sequence))
        size = min(EVALUATED_SAMPLES, wanted)
        windows = [at * len(self) // wanted for at in range(wanted // size * size)]
        return (self.batch(windows[start : start + size]) for start in range(0, len(windows), size))


@dataclass(frozen=True)
class SubsetLoss:
    """What a part of the model makes of a text."""

    text: str
    stages: Visits
    drive: float
    """0: what is missing is not made up for; 1: driven by (S−1)/(L−1); between: by that to this power."""
    loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mean_loss(engine: Engine, text: EvalText, tokens: int, visits: Visits, drive: float = 1.0) -> float:
    """Of a text, or some of it, through these stages."""
    losses = [engine.loss_of(inputs, labels, visits, drive) for inputs, labels in text.evaluated(tokens)]
    return float(torch.stack(losses).double().mean())


def part_losses(
    engine: Engine, texts: dict[str, EvalText], kept: list[int], draws: int, tokens: int, seed: int
) -> list[SubsetLoss]:
    """Of the whole and, for each number of stages that are kept, of so many parts, all on the same windows."""
    stages = len(engine.stages)
    whole = tuple(range(stages))
    found = [SubsetLoss(name, whole, 0.0, mean_loss(engine, text, tokens, whole)) for name, text in texts.items()]
    for visited in kept:
        most = residual_scale_of("scaled", stages, visited)
        for part in draw_subsets(stages, visited, draws, seed):
            for drive in DRIVES if most > 1 else (0.0,):
                for name, text in texts.items():
                    found.append(SubsetLoss(name, part, drive, mean_loss(engine, text, tokens, part, most**drive)))
    return found
