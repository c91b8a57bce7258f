"""The same plan, paths and data in one process: what every run over many nodes must equal, and, used alone, the fast
way to study convergence.

There are no nodes here and no time: the microbatches of an iteration pass, one after another, through the stages that
their lanes visit, in the order in which they visit them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skippipe.learning import Learning
from skippipe.model.blueprint import Blueprint
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.plan import Plan
from skippipe.runtime.tensors import rounded
from skippipe.text.sampler import Sampler


@dataclass(frozen=True)
class Progress:
    iteration: int
    loss: float
    norm: float
    rate: float


class OneProcess:
    def __init__(
        self,
        plan: Plan,
        blueprint: Blueprint,
        learning: Learning,
        sampler: Sampler,
        *,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        self.plan = plan
        self.learning = learning
        self.sampler = sampler
        work = plan.workload
        ranges = layer_ranges(plan.layers)
        self.stages = [
            StageTasks(
                blueprint,
                layers,
                learning,
                ends=index == 0,
                device=device,
                compute_dtype=work.compute_dtype,
                recompute=work.activation_checkpointing,
                compiled=compiled,
            )
            for index, layers in enumerate(ranges)
        ]
        self._device = device
        self._visits = plan.exposure

    def iteration(self, number: int) -> Progress:
        losses = [
            self._there_and_back(number, lane, microbatch)
            for lane, each in enumerate(self.plan.lanes)
            for microbatch in range(each.microbatches)
        ]
        visited = list(zip(self.stages, self._visits, strict=True))
        norm, scale = self.learning.clipping(stage.weights.squared_norm(visits) for stage, visits in visited)
        rate = self.learning.rate_at(number)
        for stage, visits in visited:
            if visits:
                stage.weights.step(rate, scale / visits)
        return Progress(number, float(torch.stack(losses).double().mean()), norm, rate)

    def _there_and_back(self, iteration: int, lane: int, microbatch: int) -> Tensor:
        inputs, labels = self.sampler.batch(iteration, self.plan.microbatch(lane, microbatch))
        key = lane, microbatch
        path = self.plan.visits(self.plan.lanes[lane])
        data_stage = self.stages[path[0]]
        hidden = self._hop(data_stage.begin(key, torch.from_numpy(inputs).to(self._device)))
        for stage in path[1:]:
            hidden = self._hop(self.stages[stage].forward(key, hidden))
        loss, gradient = data_stage.head(hidden, torch.from_numpy(labels).to(self._device))
        for stage in reversed(path):
            back = self.stages[stage].backward(key, self._hop(gradient))
            gradient = gradient if back is None else back
        return loss

    def _hop(self, tensor: Tensor) -> Tensor:
        return rounded(tensor, self.plan.workload.wire_dtype).float()

    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach() for stage in self.stages for name, each in stage.model.named_weights()}
