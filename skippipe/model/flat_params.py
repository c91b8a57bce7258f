"""All weights of a stage in one flat tensor, all its gradients in another, both fp32.

Averaging sends slices of the one, and the optimizer is a single fused kernel over the other. Matrices come first and
decay; norms and biases do not.

Gradients are sums over the microbatches that came. They are never divided: the norm of the mean and a step along it
take the number of visits into account, so that a sum can be measured any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.optim_config import OptimConfig


class ParamSlot(NamedTuple):
    """Where a weight lies in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)


def layout(named: Iterable[tuple[str, nn.Parameter]]) -> list[ParamSlot]:
    """Matrices first."""
    weights = list(named)
    places = []
    start = 0
    for name, each in sorted(weights, key=lambda pair: pair[1].dim() < 2):
        places.append(ParamSlot(name, tuple(each.shape), start))
        start += each.numel()
    return places


def layout_of_stage(spec: ModelSpec, counts: tuple[int, ...], stage: int) -> list[ParamSlot]:
    """The same for a stage that is not there: `counts` are the layers of each. Takes no memory."""
    with torch.device("meta"):
        like = StageModel(spec, layer_ranges(counts)[stage], ends=stage == 0)
    return layout(like.named_weights())


class FlatParams:
    """Weights, their gradients and the optimizer's state, each as one flat tensor."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], learning: OptimConfig) -> None:
        weights = dict(named)
        places = layout(weights.items())
        device = next(iter(weights.values())).device
        self.learning = learning
        self.values = torch.empty(sum(place.size for place in places), device=device)
        self.gradient = torch.zeros_like(self.values)
        for name, shape, start in places:
            each, end = weights[name], start + prod(shape)
            self.values[start:end] = each.data.flatten()
            each.data = self.values[start:end].view(shape)
            each.grad = self.gradient[start:end].view(shape)
        decayed = sum(place.size for place in places if len(place.shape) >= 2)
        self._cuts = slice(0, decayed), slice(decayed, None)
        self._parts = [nn.Parameter(self.values[cut]) for cut in self._cuts]
        self._adam = torch.optim.AdamW(
            [
                {"params": [self._parts[0]], "weight_decay": learning.weight_decay},
                {"params": [self._parts[1]], "weight_decay": 0.0},
            ],
            lr=learning.rate,
            betas=(learning.beta1, learning.beta2),
            eps=learning.epsilon,
            fused=device.type in ("cpu", "cuda"),
        )
        self.mean, self.square = torch.zeros_like(self.values), torch.zeros_like(self.values)
        for part, cut in zip(self._parts, self._cuts, strict=True):
            # as Adam would make them itself, but in one piece
            self._adam.state[part] = {
                "step": torch.zeros((), device=device),
                "exp_avg": self.mean[cut],
                "exp_avg_sq": self.square[cut],
            }

    def begin_again(self, learning: OptimConfig) -> None:
        """As if no step had been taken."""
        self.learning = learning
        for each in (self.gradient, self.mean, self.square):
            each.zero_()
        self.steps = 0
        for group, decay in zip(self._adam.param_groups, (learning.weight_decay, 0.0), strict=True):
            group.update(betas=(learning.beta1, learning.beta2), eps=learning.epsilon, weight_decay=decay)

    def squared_norm(self, visits: int = 1, summed: Tensor | None = None) -> float:
        """Of the mean over the visits: of what was added up here, or of what was `summed` over the stage."""
        whole = self.gradient if summed is None else summed
        return float(torch.linalg.vector_norm(whole, dtype=torch.float64) ** 2) / max(1, visits) ** 2

    def step(self, rate: float, scale: float, summed: Tensor | None = None) -> None:
        """Follow the gradient, or what was `summed` over the stage, times `scale`, once; then the gradient is zero
        again, and the sum is used up."""
        whole = self.gradient if summed is None else summed
        if scale != 1.0:
            whole.mul_(scale)
        for part, cut in zip(self._parts, self._cuts, strict=True):
            part.grad = whole[cut]
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.gradient.zero_()

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, and Adam's running means of the gradient and of its square."""
        return self.values, self.mean, self.square

    def stretch(self, first: int, count: int) -> list[Tensor]:
        """Views of these numbers of the state, as if its three tensors were one."""
        if not 0 <= first < first + count <= 3 * len(self.values):
            raise ValueError(f"numbers {first} to {first + count} of a state of {3 * len(self.values)}")
        found = []
        for part in self.state:
            here = part[max(0, first) : max(0, first + count)]
            if len(here):
                found.append(here)
            first -= len(part)
        return found

    @property
    def steps(self) -> int:
        """How many the optimizer has taken."""
        return int(self._adam.state[self._parts[0]]["step"])

    @steps.setter
    def steps(self, count: int) -> None:
        for part in self._parts:
            self._adam.state[part]["step"].fill_(count)
