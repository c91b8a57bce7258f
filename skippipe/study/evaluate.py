"""Loss on held-out text, of the whole model and of parts of it; and use of the experts of a mixture.

A part keeps stage 0 and some of the others, in order. Stages that are kept can be driven (their residual contribution
is scaled) to make up for those that are left out. How strongly is best is measured too: the factor (S−1)/(L−1) to the
power of each of `DRIVES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.token_file import Ids
from skippipe.stage_subset import Visits, draw_subsets, residual_scale_of
from skippipe.study.engine import Engine

DRIVES = (0.0, 0.5, 1.0)
DIGITS = 5  # of a loss in results
EVALUATED_SAMPLES = 64  # at a time


class EvalText:
    """Token ids on a device, cut into samples."""

    def __init__(self, ids: Ids, sequence: int, device: str) -> None:
        self.sequence = sequence
        self._ids = torch.from_numpy(np.ascontiguousarray(ids).astype(np.int32)).to(device)
        self._within = torch.arange(sequence + 1, device=device)

    def __len__(self) -> int:
        """The number of windows, as the sampler has them."""
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
        """Batches of the same size, spread evenly over the whole text."""
        wanted = min(len(self), max(1, tokens // self.sequence))
        size = min(EVALUATED_SAMPLES, wanted)
        windows = [at * len(self) // wanted for at in range(wanted // size * size)]
        return (self.batch(windows[start : start + size]) for start in range(0, len(windows), size))


@dataclass(frozen=True)
class SubsetLoss:
    """The loss of a part of the model on a text."""

    text: str
    stages: Visits
    drive: float
    """Exponent of the factor (S−1)/(L−1) by which stages are driven; 0: they are not."""
    loss: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "loss": round(self.loss, DIGITS)}


def mean_loss(engine: Engine, text: EvalText, tokens: int, visits: Visits, drive: float = 1.0, wire: str = "") -> float:
    """Loss on so many tokens of a text, through these stages; `wire`: with this codec on hops."""
    losses = [engine.loss_of(inputs, labels, visits, drive, wire) for inputs, labels in text.evaluated(tokens)]
    return float(torch.stack(losses).double().mean())


def part_losses(
    engine: Engine, texts: dict[str, EvalText], kept: list[int], draws: int, tokens: int, seed: int, wire: str = ""
) -> list[SubsetLoss]:
    """Losses of the whole model and, for each number of stages that are kept, of so many parts, on the same windows;
    `wire`: with this codec on hops."""

    def loss(text: EvalText, part: Visits, drive: float) -> float:
        return mean_loss(engine, text, tokens, part, drive, wire)

    stages = len(engine.stages)
    whole = tuple(range(stages))
    found = [SubsetLoss(name, whole, 0.0, loss(text, whole, 1.0)) for name, text in texts.items()]
    for visited in kept:
        most = residual_scale_of("scaled", stages, visited)
        for part in draw_subsets(stages, visited, draws, seed):
            for drive in DRIVES if most > 1 else (0.0,):
                for name, text in texts.items():
                    found.append(SubsetLoss(name, part, drive, loss(text, part, most**drive)))
    return found


@torch.no_grad()
def router_use(engine: Engine, texts: dict[str, EvalText], tokens: int) -> dict[str, Any] | None:
    """For every layer and text, the share of tokens that each expert gets; None for a dense model."""
    found = engine.stages[0].spec.router
    if found is None:
        return None
    kind, index = found
    active = engine.stages[0].spec.experts_active
    counted: list[Tensor] = []

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        scores = output[index] if isinstance(output, tuple) else output
        chosen = scores.topk(active, -1).indices.flatten()
        counted.append(torch.bincount(chosen, minlength=scores.shape[-1]))

    routers = [part for stage in engine.stages for part in stage.layers.modules() if isinstance(part, kind)]
    hooks = [router.register_forward_hook(count) for router in routers]
    whole = tuple(range(len(engine.stages)))
    shares: dict[str, Any] = {}
    for name, text in texts.items():
        counted.clear()
        for inputs, labels in text.evaluated(tokens):
            engine.loss_of(inputs, labels, whole, 1.0)
        rounds = torch.stack(counted).view(-1, len(routers), counted[0].shape[0]).sum(0).double()
        shares[name] = [[round(float(each), 4) for each in row] for row in rounds / rounds.sum(-1, keepdim=True)]
    for hook in hooks:
        hook.remove()
    return shares
