"""Stochastic gradient descent with momentum: half the optimizer state of AdamW, for a rate that has to be found."""

from __future__ import annotations

from typing import Any

from skippipe.optim.interface import Hyperparameters, StateTensor
from skippipe.optim.torch_optimizer import TorchOptimizer


class SGD(TorchOptimizer):
    """Follows a decaying sum of gradients; `beta1` is the momentum. Weights decay apart from it, as with AdamW: in
    torch the sum would depend on the weights, and a node that joins could get neither of them before the other."""

    torch_name = "SGD"
    decays = False
    state_tensors = (StateTensor("momentum_buffer"),)
    unused = ("beta2", "epsilon")
    flops_per_parameter = 180  # of AdamW's time, the share of the bytes that a step reads and writes: 20 of 28

    @staticmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        return {"momentum": settings.beta1}
