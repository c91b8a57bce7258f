"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skippipe.optim.interface import Hyperparameters, StateTensor
from skippipe.optim.torch_optimizer import TorchOptimizer

if TYPE_CHECKING:
    from torch import Tensor


class AdamW(TorchOptimizer):
    """Divides a running mean of gradients by the root of a running mean of their squares."""

    torch_name = "AdamW"
    state_tensors = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    flops_per_parameter = 250

    @staticmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        return {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}


def follow(
    values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, settings: Hyperparameters, step: int, rate: float
) -> None:
    """Step `step`, counted from 1, without weight decay, of numbers whose state is in fp32; all is changed in place."""
    mean.lerp_(gradient, 1 - settings.beta1)
    square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    correction = (1 - settings.beta2**step) ** 0.5
    pace = rate / (1 - settings.beta1**step)
    values.addcdiv_(mean, (square.sqrt() / correction).add_(settings.epsilon), value=-pace)
