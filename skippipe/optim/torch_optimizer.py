"""Optimizers of `torch.optim` behind the interface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from skippipe.optim.interface import Hyperparameters, Optimizer, ParamSlot

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
