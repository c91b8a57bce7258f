"""Backward in two parts: input gradients at once, because other nodes wait for them; weight gradients later.

The layers' linear maps, which hold nearly all weights, defer their weight gradient: backward notes the input and the
output gradient, and the product of the two is made later. Everything else (norms, routers, experts that are not
linear modules) is small or cannot be deferred, and is done with the input gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DeferredGradients = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weight, input and output gradient of every linear map whose weight gradient is still to be computed."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, master: nn.Parameter, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.master = master
        ctx.deferred = deferred
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        ctx.deferred.append((ctx.master, inputs, gradient))
        return gradient @ weight, None, None, None


class SplitLinear(nn.Linear):
    """A linear map whose backward pass defers its weight gradient."""

    deferred: DeferredGradients

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(inputs)
        weight: Tensor = self.weight
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        output: Tensor = _Linear.apply(inputs, weight.detach(), self.weight, self.deferred)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


def split_linears(layers: nn.Module, deferred: DeferredGradients) -> None:
    """Make every linear map in these layers defer its weight gradient into this list."""
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
            module.deferred = deferred  # type: ignore[assignment]


def add_weight_gradients(deferred: DeferredGradients) -> None:
    """Compute weight gradients that were deferred, and add them to their sums."""
    with torch.no_grad():
        for weight, inputs, gradient in deferred:
            assert weight.grad is not None
            rows, columns = gradient.flatten(0, -2), inputs.flatten(0, -2)
            if rows.dtype == weight.grad.dtype:
                weight.grad.addmm_(rows.T, columns)
            else:
                weight.grad.add_(rows.T @ columns)
