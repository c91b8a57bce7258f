"""Training with a plan, its paths and its data in one process: what every run over many nodes must equal.

There are no nodes here and no time: the microbatches of an iteration pass, one after another, through the stages that
their lanes visit, in the order in which they visit them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.checkpoint.grown_state import GrownState
from skippipe.codecs import CODECS, compile_on_device
from skippipe.constraints import circle
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep, TeacherHidden
from skippipe.model.stand_ins import StagePlace
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.optim.interface import ParamSlot
from skippipe.plan import Plan
from skippipe.skip_schedule import PathLength, SkipSchedule
from skippipe.stage_subset import hops_of
from skippipe.whole_paths import planned_teacher_paths


class ReferenceState(NamedTuple):
    """What one iteration has come to."""

    iteration: int
    loss: float
    norm: float
    rate: float


@dataclass
class ReferenceTrainer:
    """All stages of a model in one process, trained microbatch by microbatch."""

    plan: Plan
    spec: ModelSpec
    learning: OptimConfig
    sampler: BatchSampler
    _: KW_ONLY
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
    plans: Mapping[PathLength, Plan] = field(default_factory=dict)
    """Length of paths → the plan for it, on the same stages; for a recipe whose paths change their length."""
    iterations: int = 0
    """The length of the whole run; for such a recipe, too."""
    device: str = "cpu"
    compiled: bool = False

    def __post_init__(self) -> None:
        work = self.plan.workload
        if self.compiled:
            compile_on_device()
        self.stages = [
            StageStep(
                self.spec,
                layers,
                self.learning,
                ends=index == 0,
                device=self.device,
                compute_dtype=work.compute_dtype,
                recompute=work.activation_checkpointing,
                compiled=self.compiled,
                place=StagePlace(index, len(self.plan.layers)),
            )
            for index, layers in enumerate(layer_ranges(self.plan.layers))
        ]

    def iteration(self, number: int) -> ReferenceState:
        visited = self.recipe.visited(number, self.iterations, len(self.stages), self.plan.visited)
        plan = {self.plan.visited: self.plan, **self.plans}[visited]
        self._passes = planned_teacher_paths(plan)
        losses = [
            self._forward_backward(plan, number, lane, microbatch)
            for lane, each in enumerate(plan.lanes)
            for microbatch in range(each.microbatches)
        ]
        counts = [self.recipe.divisor(each, plan.microbatches) for each in plan.exposure]
        self.sum_gradients()
        divided = list(zip(self.stages, counts, strict=True))
        norm, scale = self.learning.clipping(stage.weights.squared_norm(count) for stage, count in divided)
        rate = self.learning.rate_at(number)
        for stage, count in divided:
            if count:
                stage.weights.step(rate, scale / count)
        return ReferenceState(number, float(torch.stack(losses).double().mean()), norm, rate)

    def grow_from(self, young: ReferenceTrainer) -> str:
        """Begin as the grown form of a smaller model, with its optimizer's state; says what are copies of what."""
        grown = GrownState(young.spec, young.plan.layers, self.spec, self.plan.layers)
        found = {slot.name: weights.read_state(slot.start, slot.size) for weights, slot in young.state_slots()}
        for weights, slot in self.state_slots():
            new = grown.new_tensor(slot)
            weights.write_state(slot.start, found[grown.name(slot.name)] if new is None else new)
        steps = [stage.weights.steps for stage in young.stages]
        for index, stage in enumerate(self.stages):
            stage.weights.steps = grown.steps(index, steps)
        return grown.summary

    def state_slots(self) -> Iterator[tuple[FlatParams, ParamSlot]]:
        """Every tensor of the weights and the optimizer's state, and the stage's weights whose state it lies in."""
        for stage in self.stages:
            for slot in OPTIMIZERS[self.learning.optimizer].state_slots(stage.weights.slots):
                yield stage.weights, slot

    def sum_gradients(self) -> None:
        """What averaging makes of the sums of all stages' gradients: nothing, but for what an oracle does here."""

    @torch.no_grad()
    def held_out_loss(self, held_out: BatchSampler) -> float:
        """The loss of the whole model on all microbatches of this sampler, mean over the tokens that count."""
        losses, counts = [], []
        for microbatch in range(held_out.microbatches):
            inputs, labels = held_out.batch(0, microbatch)
            hidden, packed = torch.from_numpy(inputs).to(self.device), held_out.starts(0, microbatch)
            starts = None if packed is None else torch.from_numpy(packed).to(self.device)
            for stage in self.stages:
                hidden = rounded(stage.evaluate(hidden, starts), self.plan.workload.wire_dtype)
            losses.append(float(self.stages[0].evaluate_head(hidden, torch.from_numpy(labels).to(self.device))))
            counts.append(int((labels >= 0).sum()))
        return math.fsum(loss * count for loss, count in zip(losses, counts, strict=True) if count) / sum(counts)

    def _forward_backward(self, plan: Plan, iteration: int, lane: int, microbatch: int) -> Tensor:
        inputs, labels = self.sampler.batch(iteration, plan.microbatch(lane, microbatch))
        key = lane, microbatch
        nodes = plan.lanes[lane].path
        path = plan.visits(plan.lanes[lane])
        following = (*nodes[1:], nodes[0])
        residual_scale = self.recipe.residual_scale(len(self.stages), len(path))
        data_stage = self.stages[path[0]]
        data = plan.microbatch(lane, microbatch)
        packed, share = self.sampler.starts(iteration, data), self.sampler.share(iteration, data)
        starts = None if packed is None else torch.from_numpy(packed).to(self.device)
        hops = hops_of(path, len(self.stages))
        codecs = [plan.hop_dtype(node, after, backward=False) for node, after in zip(nodes, following, strict=True)]
        hidden = data_stage.begin(key, torch.from_numpy(inputs).to(self.device), starts, hops.get(path[0]))
        for codec, stage in zip(codecs[:-1], path[1:], strict=True):
            hidden = self.stages[stage].forward(key, rounded(hidden, codec), residual_scale, starts, hops.get(stage))
        hidden = rounded(hidden, codecs[-1])
        targets = torch.from_numpy(labels).to(self.device)
        taught = self._teacher_hidden(plan, lane, torch.from_numpy(inputs).to(self.device), starts)
        loss, gradient = data_stage.head(
            key, hidden, targets, early=self.recipe.early_exit, share=share, teacher=taught.get(len(self.stages))
        )
        for node, before, stage in reversed(list(zip(nodes, following, path, strict=True))):
            given = rounded(gradient, plan.hop_dtype(before, node, backward=True))
            back = self.stages[stage].backward(key, given, teacher=taught.get(stage))
            gradient = gradient if back is None else back
        return loss

    def _teacher_hidden(self, plan: Plan, lane: int, tokens: Tensor, starts: Tensor | None) -> dict[int, TeacherHidden]:
        """What the whole model makes of a microbatch: stage → what comes to it, with the head as the last one; empty:
        its lane has no teacher."""
        found, hidden = {}, tokens
        for stage, (node, after) in enumerate(circle(self._passes.get(lane, ()))):
            hidden = rounded(self.stages[stage].evaluate(hidden, starts), plan.hop_dtype(node, after, backward=False))
            found[stage + 1] = TeacherHidden(hidden, self.recipe.distill, self.recipe.distill_hidden)
        return found

    def weights(self) -> dict[str, Tensor]:
        """All that are trained."""
        return {slot.name: slot.of(stage.weights.values) for stage in self.stages for slot in stage.weights.slots}


def rounded(tensor: Tensor, codec: str) -> Tensor:
    """A tensor after a hop."""
    return CODECS[codec].rounded(tensor).float()
