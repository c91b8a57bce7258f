"""All weights of a stage in one flat tensor, all its gradients in another, both fp32.

Averaging sends slices of the one, and the optimizer is a single fused kernel over the other. Matrices come first and
decay; norms and biases do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skippipe.learning import Learning


class FlatWeights:
    """The weights of a module, their gradients and the optimizer's state, each as one flat tensor."""

    def __init__(self, module: nn.Module, learning: Learning) -> None:
        weights = list(module.parameters())
        matrices = [each for each in weights if each.dim() >= 2]
        others = [each for each in weights if each.dim() < 2]
        device = weights[0].device
        self.learning = learning
        self.values = torch.empty(sum(each.numel() for each in weights), device=device)
        self.gradient = torch.zeros_like(self.values)
        start = 0
        for each in (*matrices, *others):
            size = each.numel()
            self.values[start : start + size] = each.data.flatten()
            each.data = self.values[start : start + size].view_as(each)
            each.grad = self.gradient[start : start + size].view_as(each)
            start += size
        decayed = sum(each.numel() for each in matrices)
        self._parts = [nn.Parameter(part) for part in (self.values[:decayed], self.values[decayed:])]
        for part, gradient in zip(self._parts, (self.gradient[:decayed], self.gradient[decayed:]), strict=True):
            part.grad = gradient
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

    def squared_norm(self) -> float:
        return float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64) ** 2)

    def step(self, rate: float, scale: float) -> None:
        """Follow the gradient, times `scale`, once; then it is zero again."""
        if scale != 1.0:
            self.gradient.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.gradient.zero_()

    def divide_gradient(self, visits: int) -> None:
        """From the sum over the microbatches that came here to their mean; nobody came: it stays 0."""
        if visits > 1:
            self.gradient.div_(visits)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Adam's running means of the gradient and of its square; empty before the first step."""
        states = [self._adam.state[part] for part in self._parts]
        if not all(states):
            return torch.empty(0), torch.empty(0)
        return torch.cat([each["exp_avg"] for each in states]), torch.cat([each["exp_avg_sq"] for each in states])
