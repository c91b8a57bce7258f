"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skippipe.optim.interface import StateTensor, TorchOptimizer

if TYPE_CHECKING:
    from skippipe.optim.config import OptimConfig


class AdamW(TorchOptimizer):
    """Divides a running mean of gradients by the root of a running mean of their squares."""

    torch_name = "AdamW"
    state_tensors = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    flops_per_parameter = 250

    @staticmethod
    def hyperparameters(learning: OptimConfig) -> dict[str, Any]:
        return {"betas": (learning.beta1, learning.beta2), "eps": learning.epsilon}
