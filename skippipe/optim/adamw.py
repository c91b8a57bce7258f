"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""

from __future__ import annotations

from typing import Any

from skippipe.optim.interface import Hyperparameters, StateTensor, TorchOptimizer


class AdamW(TorchOptimizer):
    """Divides a running mean of gradients by the root of a running mean of their squares."""

    torch_name = "AdamW"
    state_tensors = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    flops_per_parameter = 250

    @staticmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        return {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
