"""Training in one process, fast: all microbatches of an iteration in one batch, those at the same stage together.

The stages and weights are the ones that nodes train; so are the rules for gradients and steps. What differs is the
order of sums: a test holds this to `OneProcess`, microbatch by microbatch, and that to real nodes.

Nothing in the loop waits for the device: the loss comes back when somebody asks for it. On a GPU, how many visit which
stage decides which kernels run, and who they are is data: so passes of one shape are recorded once and then replayed
(a CUDA graph). Small models are otherwise held up by Python, not by the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skippipe.learning import Learning
from skippipe.model.blueprint import Blueprint
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.weights import FlatWeights
from skippipe.parts import Visits
from skippipe.recipe import Recipe
from skippipe.study.paths import together

WARM = 3  # passes of a shape before it is recorded: they compile, and claim what memory libraries want
MOST_SHAPES = 32  # recorded; what comes in ever new shapes is not worth it


@dataclass(frozen=True)
class Step:
    """Some microbatches pass a stage together."""

    stage: int
    visitors: int
    drive: float
    """By what the stage's contribution is multiplied."""


@dataclass(frozen=True)
class Shape:
    """All that kernels depend on, of the paths of an iteration."""

    microbatches: int
    steps: tuple[Step, ...]

    @property
    def counts(self) -> Counter[int]:
        """Stage → visitors."""
        counts: Counter[int] = Counter()
        for step in self.steps:
            counts[step.stage] += step.visitors
        return counts


class Engine:
    def __init__(
        self,
        blueprint: Blueprint,
        layers: tuple[int, ...],
        learning: Learning,
        recipe: Recipe,
        *,
        device: str = "cpu",
        low_precision: bool = False,
        compiled: bool = False,
    ) -> None:
        self.recipe = recipe
        self.learning = learning
        self.device = device
        self._ranges = list(enumerate(layer_ranges(layers)))
        self.stages = [StageModel(blueprint, each, ends=index == 0).to(device) for index, each in self._ranges]
        self.weights = [FlatWeights(stage.named_weights(), learning) for stage in self.stages]
        self._low_precision = low_precision
        self._loss: Callable[[Tensor, Tensor], Tensor] = self.stages[0].loss
        if compiled:
            for stage in self.stages:
                for layer in stage.layers:
                    layer.compile()
            self._loss = torch.compile(self.stages[0].loss)
        can_record = device.startswith("cuda") and blueprint.router is None  # who goes to which expert is not data
        self._recordings = _Recordings(device) if can_record else None

    def begin_again(self, blueprint: Blueprint, learning: Learning, recipe: Recipe) -> None:
        """As new, with another seed or recipe; what was compiled stays."""
        before = self._recorded_with
        self.recipe, self.learning = recipe, learning
        if self._recordings and self._recorded_with != before:
            self._recordings = _Recordings(self.device)
        for (index, layers), weights in zip(self._ranges, self.weights, strict=True):
            new = FlatWeights(StageModel(blueprint, layers, ends=index == 0).named_weights(), learning)
            weights.values.copy_(new.values)
            weights.begin_again(learning)

    def grow(self, donors: Mapping[int, int]) -> None:
        """New stages as copies of others, with what the optimizer knows of them."""
        for new, old in donors.items():
            for to, from_ in zip(self.weights[new].state, self.weights[old].state, strict=True):
                to.copy_(from_)
            self.weights[new].steps = self.weights[old].steps

    @property
    def _recorded_with(self) -> tuple[float, float, str]:
        """What recordings depend on beside their shape."""
        return self.learning.clip, self.recipe.early_exit, self.recipe.gradients

    @property
    def parameters(self) -> int:
        return sum(len(each.values) for each in self.weights)

    def iteration(
        self, number: int, inputs: Tensor, labels: Tensor, visits: Sequence[Visits], *, young: bool = False
    ) -> Tensor:
        """Inputs and labels are [microbatches × samples, sequence]; the loss before the step, still on its device.

        `young`: the stages that are visited are the whole model yet, and stand for no others.
        """
        steps = together(visits)
        drives = [1.0 if young else self._drive(stage, rows, visits) for stage, rows in steps]
        shape = Shape(
            len(visits),
            tuple(Step(stage, len(rows), drive) for (stage, rows), drive in zip(steps, drives, strict=True)),
        )
        samples = len(inputs) // len(visits)
        rows = [row * samples + sample for _, each in steps for row in each for sample in range(samples)]
        given = inputs, labels, torch.tensor(rows).to(self.device, non_blocking=True)
        if self._recordings is None:
            loss = self._gradients(shape, *given)
        else:
            loss = self._recordings.run(shape, self._gradients, given)
        rate = self.learning.rate_at(number)
        visited = shape.counts
        for stage, weights in enumerate(self.weights):
            if visited[stage]:
                weights.step(rate, 1.0)
        return loss

    @torch.no_grad()
    def loss_of(self, inputs: Tensor, labels: Tensor, visits: Visits, drive: float) -> Tensor:
        """The mean loss of these samples through these stages, each but stage 0 driven so much."""
        with self._autocast():
            hidden = self._embed(inputs)
            for stage in visits:
                made = self.stages[stage](hidden)
                hidden = made if stage == 0 or drive == 1.0 else torch.lerp(hidden, made, drive)
            return self._loss(hidden, labels)

    def _gradients(self, shape: Shape, inputs: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """Forward and backward; then the gradients are what a step follows: means, clipped."""
        with self._autocast():
            hidden, balance, early = self._through(shape, inputs, rows)
            loss = self._loss(hidden, labels)
            total = loss + balance
            if self.recipe.early_exit:
                total = total + self.recipe.early_exit * self._loss(early, labels)
        total.backward()  # type: ignore[no-untyped-call]
        self._clip(shape)
        return loss.detach()

    def _through(self, shape: Shape, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes out in the end, the balancing loss of routers on the way, and what stage 0 alone made of it."""
        hidden = early = self._embed(inputs)
        balance = torch.zeros((), device=self.device)
        samples = len(inputs) // shape.microbatches
        visitors = torch.split(rows, [step.visitors * samples for step in shape.steps])
        for step, here in zip(shape.steps, visitors, strict=True):
            model = self.stages[step.stage]
            everybody = step.visitors == shape.microbatches
            given = hidden if everybody else _chosen(hidden, here)
            made = model(given)
            if step.drive != 1.0:
                made = torch.lerp(given, made, step.drive)
            added = model.balance()
            if added is not None:  # the mean over its microbatches, of which each counts as one of all
                balance = balance + added * (step.visitors / shape.microbatches)
            hidden = made if everybody else hidden.index_copy(0, here, made)
            early = hidden if step.stage == 0 else early
        return hidden, balance, early

    def _clip(self, shape: Shape) -> None:
        """As `OneProcess` and nodes do; here gradients are sums over visitors, divided by all microbatches."""
        visited = shape.counts
        by_visitors = self.recipe.gradients == "visitors"
        means = [
            shape.microbatches / visited[stage] if by_visitors and visited[stage] else 1.0
            for stage in range(len(self.stages))
        ]
        norms = [torch.linalg.vector_norm(each.gradient) * mean for each, mean in zip(self.weights, means, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        clip = self.learning.clip / (norm + 1e-6) if self.learning.clip else torch.ones_like(norm)
        clip = torch.where(torch.isfinite(norm), clip.clamp(max=1.0), 0.0)
        for each, mean in zip(self.weights, means, strict=True):
            each.gradient.mul_(clip * mean)

    def _embed(self, inputs: Tensor) -> Tensor:
        hidden = self.stages[0].embed(inputs)
        return hidden.to(torch.bfloat16) if self._low_precision else hidden

    def _drive(self, stage: int, rows: Sequence[int], visits: Sequence[Visits]) -> float:
        if stage == 0:
            return 1.0
        (drive,) = {self.recipe.drive(len(self.stages), len(visits[row])) for row in rows}
        return drive

    def _autocast(self) -> Any:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._low_precision)


class _Chosen(torch.autograd.Function):
    """Rows of a tensor, each chosen once: so its gradient is put back in its place, where `index_select` would add."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(whole)
        return whole.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), (gradient,) = ctx.saved_tensors, gradients
        whole = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return whole.index_copy_(0, rows, gradient), None


def _chosen(whole: Tensor, rows: Tensor) -> Tensor:
    chosen: Tensor = _Chosen.apply(whole, rows)  # type: ignore[no-untyped-call]
    return chosen


Given = tuple[Tensor, ...]
Passes = Callable[..., Tensor]


class _Recordings:
    """CUDA graphs of passes, one for every shape; what they are given is copied to where they were recorded with."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # one for all: autograd remembers it
        self._seen: Counter[Shape] = Counter()
        self._recorded: dict[Shape, tuple[Any, Given, Tensor]] = {}

    def run(self, shape: Shape, passes: Passes, given: Given) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run(shape, passes, given)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _run(self, shape: Shape, passes: Passes, given: Given) -> Tensor:
        self._seen[shape] += 1
        if shape not in self._recorded:
            if self._seen[shape] <= WARM or len(self._recorded) >= MOST_SHAPES:
                for each in given:
                    each.record_stream(self._stream)
                return passes(shape, *given)
            self._record(shape, passes, given)
        graph, places, loss = self._recorded[shape]
        for place, each in zip(places, given, strict=True):
            place.copy_(each)
        graph.replay()
        return loss.clone()

    def _record(self, shape: Shape, passes: Passes, given: Given) -> None:
        places = tuple(each.clone() for each in given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            loss = passes(shape, *places)
        self._recorded[shape] = graph, places, loss
