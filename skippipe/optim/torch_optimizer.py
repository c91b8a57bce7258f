"""Optimizers of `torch.optim` behind the interface: AdamW, and SGD with momentum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from skippipe.optim.interface import Hyperparameters, Optimizer, ParamSlot, StateTensor

if TYPE_CHECKING:
    from torch import Tensor


class TorchOptimizer(Optimizer):
    """An elementwise optimizer of `torch.optim`, as one fused kernel; its state tensors have torch's names."""

    torch_name: ClassVar[str]
    """The name of the class in `torch.optim`."""
    decays: ClassVar[bool] = True
    """Whether its weight decay leaves the state alone; else weights are made smaller before its step."""

    offloads = True

    def __init__(
        self, values: Tensor, slots: Sequence[ParamSlot], settings: Hyperparameters, *, offload: bool = False
    ) -> None:
        super().__init__(values, slots, settings, offload=offload)
        import torch

        from skippipe.optim.host_state import HostState, HostTensor

        self._decayed = sum(slot.size for slot in slots if len(slot.shape) >= 2)
        ranges = range(self._decayed), range(self._decayed, len(values))
        self._ranges = [each for each in ranges if each]
        self._host = (
            HostState(values.device, len(values), [HostTensor(each) for each in self.state.values()])
            if offload
            else None
        )
        self._parameter = torch.nn.Parameter(values)
        """Stands for one range after another."""
        self._torch: torch.optim.Optimizer = getattr(torch.optim, self.torch_name)(
            [self._parameter],
            lr=settings.rate,
            fused=values.device.type in ("cpu", "cuda"),
            **self.hyperparameters(settings),
        )
        self._step = torch.zeros((), device=values.device)

    @staticmethod
    @abstractmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        """Arguments of the torch class, beside the learning rate and weight decay."""

    def step(self, gradient: Tensor, rate: float) -> None:
        (group,) = self._torch.param_groups
        group["lr"] = rate
        for here, now, state in self._pieces(gradient):
            values, decay = (
                self.values[here.start : here.stop],
                self.settings.weight_decay * (here.stop <= self._decayed),
            )
            if self.decays:
                group["weight_decay"] = decay
            elif decay:
                values.mul_(1 - rate * decay)
            self._parameter.data, self._parameter.grad = values, now
            named = zip(self.state, state, strict=True)
            self._torch.state[self._parameter] = {"step": self._step.fill_(self.steps), **dict(named)}
            self._torch.step()
        self._parameter.grad = None

    def _pieces(self, gradient: Tensor) -> Iterator[tuple[range, Tensor, list[Tensor]]]:
        from skippipe.optim.host_state import cut

        if self._host is not None:
            yield from self._host.pieces(gradient, self._scale, cut(self._ranges))
            return
        away = gradient.device != self.values.device
        for here in cut(self._ranges) if away else self._ranges:
            yield here, self.on_device(gradient, here), [each[here.start : here.stop] for each in self.state.values()]


class AdamW(TorchOptimizer):
    """Divides a running mean of gradients by the root of a running mean of their squares (Loshchilov and Hutter,
    "Decoupled weight decay regularization", 2019)."""

    torch_name = "AdamW"
    state_tensors = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    flops_per_parameter = 250

    @staticmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        return {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}


class SGD(TorchOptimizer):
    """Follows a decaying sum of gradients; `beta1` is the momentum. Half the state of AdamW, for a rate that has to be
    found. Weights decay apart from it, as with AdamW: in torch the sum would depend on the weights, and a node that
    joins could get neither of them before the other."""

    torch_name = "SGD"
    decays = False
    state_tensors = (StateTensor("momentum_buffer"),)
    unused = ("beta2", "epsilon")
    flops_per_parameter = 180  # of AdamW's time, the share of the bytes that a step reads and writes: 20 of 28

    @staticmethod
    def hyperparameters(settings: Hyperparameters) -> dict[str, Any]:
        return {"momentum": settings.beta1}


def adamw_step(
    values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, settings: Hyperparameters, step: int, rate: float
) -> None:
    """AdamW's step of this number, from 1, without weight decay, of values whose state is in fp32, all in place."""
    mean.lerp_(gradient, 1 - settings.beta1)
    square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    correction = (1 - settings.beta2**step) ** 0.5
    pace = rate / (1 - settings.beta1**step)
    values.addcdiv_(mean, (square.sqrt() / correction).add_(settings.epsilon), value=-pace)
