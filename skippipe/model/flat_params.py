"""All weights of a stage in one flat tensor, all its gradients in another, both fp32.

Averaging sends slices of the gradient, and the optimizer steps along the whole of it at once. Matrices come first and
decay; norms and biases do not.

Gradients are sums over the microbatches that came. They are never divided: the norm of the mean and a step along it
take the number of visits into account, so that the norm of a sum can be taken any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from skippipe.model.model_spec import ROUTER_BIAS, ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stand_ins import StagePlace
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.optim.interface import HOST_PIECE, ParamSlot


def layout(named: Iterable[tuple[str, nn.Parameter]]) -> list[ParamSlot]:
    """Where the weights lie in a flat tensor: matrices first, which decay."""
    slots = []
    start = 0
    for name, each in sorted(named, key=lambda pair: pair[1].dim() < 2):
        slots.append(ParamSlot(name, tuple(each.shape), start))
        start += each.numel()
    return slots


def layout_of_stage(spec: ModelSpec, counts: tuple[int, ...], stage: int, *, frozen: bool = False) -> list[ParamSlot]:
    """The layout of the weights of any stage that are trained, or of those that are not, without making it; `counts`
    are the layers of each stage."""
    place = StagePlace(stage, len(counts))
    with torch.device("meta"):
        like = StageModel(spec, layer_ranges(counts)[stage], ends=stage == 0, place=place)
    return layout(like.frozen_weights() if frozen else like.trained_weights())


class FlatParams:
    """Weights, their gradients and the optimizer's state, each as one flat tensor; and weights that are not trained."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        learning: OptimConfig,
        frozen: Iterable[tuple[str, nn.Parameter]] = (),
        *,
        offload: bool = False,
        compiled: bool = False,
    ) -> None:
        """`offload`: the optimizer's state is held in host memory. `compiled`: its steps are compiled."""
        weights, unchanged = dict(named), dict(frozen)
        like = next(iter((weights or unchanged).values()))
        self.slots = layout(weights.items())
        self.values = torch.empty(0, device=like.device) if not weights else _flattened(weights, self.slots)
        self.gradient = torch.zeros_like(self.values)
        for slot in self.slots:
            weights[slot.name].grad = self.gradient[slot.start : slot.start + slot.size].view(slot.shape)
        self._unmoved = [
            slice(slot.start, slot.start + slot.size) for slot in self.slots if slot.name.endswith(f".{ROUTER_BIAS}")
        ]
        """What has no gradient, but may have got a little of others' when gradients were rounded together."""
        self.frozen_slots = layout(unchanged.items())
        self.frozen = tuple(
            _flattened(unchanged, [slot._replace(start=slot.start - part[0].start) for slot in part])
            for _, group in groupby(self.frozen_slots, lambda slot: unchanged[slot.name].dtype)
            for part in [list(group)]
        )
        """Weights that are not trained, in the order of their layout: one flat tensor for each run of one type."""
        self._offload, self._compiled = offload, compiled
        self._changes = 0
        self.reset(learning)

    @property
    def changes(self) -> int:
        """Grows with every change of weights: by a step, by what is written here, or in place by whoever has `values`,
        which torch counts."""
        return self._changes + self.values._version

    def reset(self, learning: OptimConfig) -> None:
        """Start over with the weights as they are: no gradient, no optimizer state, no step taken."""
        self.optimizer = OPTIMIZERS[learning.optimizer](self.values, self.slots, learning, offload=self._offload)
        if self._compiled:
            self.optimizer.compile()
        self.gradient.zero_()

    def clear_state(self) -> None:
        self.optimizer.clear_state()

    def clear_gradient(self) -> None:
        self.gradient.zero_()

    def collect(self) -> None:
        """Make `gradient` the sum over all devices that hold parts of the stage: this is the only one."""

    def grow_from(self, donor: FlatParams) -> None:
        """Become a copy of another stage, with its optimizer's state."""
        self.values.copy_(donor.values)
        self._changes += 1
        for name, size in self.optimizer.state_sizes.items():
            self.optimizer.write_state(name, 0, donor.optimizer.read_state(name, 0, size))
        self.steps = donor.steps

    def squared_norm(self, divisor: int = 1, summed: Tensor | None = None) -> float:
        """Squared norm of this node's gradient, or of the one `summed` over the stage, divided by `divisor`."""
        return mean_squared_norm(self.gradient if summed is None else summed, divisor, self.values.device)

    def step(self, rate: float, scale: float, summed: Tensor | None = None) -> None:
        """One optimizer step along `scale` times this node's gradient, or times the one `summed` over the stage.

        Afterwards this node's gradient is zero, and what was summed has been overwritten.
        """
        whole = self.gradient if summed is None else summed
        for place in self._unmoved:
            whole[place] = 0.0
        self.optimizer.step_along(whole, rate, scale)
        self._changes += 1
        self.steps += 1
        self.gradient.zero_()

    @property
    def steps(self) -> int:
        """Steps that the optimizer has taken."""
        return self.optimizer.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.optimizer.steps = count

    @property
    def state_parts(self) -> list[range]:
        """Where the parts of the state lie, as one sequence of numbers: weights, the optimizer's tensors, and weights
        that are not trained. That is what a replica of the stage has to have; a checkpoint stores the first two."""
        sizes = [len(self.values), *self.optimizer.state_sizes.values(), *(len(part) for part in self.frozen)]
        ends = list(accumulate(sizes))
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @property
    def trained_values(self) -> int:
        """How many numbers training changes: weights and the optimizer's tensors."""
        return self.state_values - sum(len(part) for part in self.frozen)

    @property
    def state_values(self) -> int:
        """How many numbers the state has."""
        return self.state_parts[-1].stop

    def read_state(self, first: int, count: int) -> Tensor:
        """A range of the state, as fp32."""
        found = []
        for part, here in self._parts_of(first, count):
            if 0 < part <= len(self.optimizer.state):
                name = self.optimizer.state_tensors[part - 1].name
                found.append(self.optimizer.read_state(name, here.start, len(here)).to(self.values.device))
            else:
                found.append(self._weights(part)[here.start : here.stop].float())
        return torch.cat(found)

    def write_state(self, first: int, given: Tensor, *, added: bool = False) -> None:
        """Write a range of the state, or add to weights."""
        self._changes += 1
        for part, here in self._parts_of(first, len(given)):
            values, given = given[: len(here)], given[len(here) :]
            if 0 < part <= len(self.optimizer.state):
                assert not added, "only weights are summed"
                self.optimizer.write_state(self.optimizer.state_tensors[part - 1].name, here.start, values)
            else:
                place = self._weights(part)[here.start : here.stop]
                place.add_(values) if added else place.copy_(values)

    def _weights(self, part: int) -> Tensor:
        return self.values if part == 0 else self.frozen[part - 1 - len(self.optimizer.state)]

    def _parts_of(self, first: int, count: int) -> list[tuple[int, range]]:
        """The parts that a range of the state lies in, each with the range within it."""
        if not 0 <= first < first + count <= self.state_values:
            raise ValueError(f"numbers {first} to {first + count} of a state of {self.state_values}")
        found = []
        for number, part in enumerate(self.state_parts):
            here = range(max(first, part.start) - part.start, min(first + count, part.stop) - part.start)
            if here:
                found.append((number, here))
        return found


class WeightCopies:
    """Copies of weights in the type of computing, which take the weights' place in their modules. Their gradients are
    of that type, and are added to the sums of the stage as they come."""

    def __init__(self, weights: FlatParams, named: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._weights = weights
        self._made_of = weights.changes
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for slot in weights.slots:
            if slot.name in named:
                each, master = named[slot.name], slot.of(weights.values)
                each.grad = None
                each.data = master.to(dtype)
                total = slot.of(weights.gradient)
                each.register_post_accumulate_grad_hook(partial(_add_gradient, total))  # type: ignore[no-untyped-call]
                self._pairs.append((each.data, master))

    def refresh(self) -> None:
        """Make them anew if weights have been changed."""
        if self._made_of != self._weights.changes:
            self._made_of = self._weights.changes
            for copy, master in self._pairs:
                copy.copy_(master)


def _add_gradient(total: Tensor, weight: Tensor) -> None:
    if weight.grad is not None:  # it is None where a split backward has put it off
        total.add_(weight.grad)
        weight.grad = None


def mean_squared_norm(summed: Tensor, divisor: int, device: torch.device) -> float:
    """Squared norm of a sum of gradients divided by `divisor`; computed on this device."""
    total = torch.zeros((), dtype=torch.float64, device=device)  # and so it is if nothing is trained
    for part in torch.split(summed, HOST_PIECE):  # of each a copy is made, in fp64
        total += torch.linalg.vector_norm(part.to(device), dtype=torch.float64) ** 2
    return float(total) / max(1, divisor) ** 2


def _flattened(weights: Mapping[str, nn.Parameter], slots: Sequence[ParamSlot]) -> Tensor:
    """One flat tensor that these weights become parts of."""
    like = weights[slots[0].name]
    flat = torch.empty(sum(slot.size for slot in slots), dtype=like.dtype, device=like.device)
    for slot in slots:
        each, cut = weights[slot.name], slice(slot.start, slot.start + slot.size)
        flat[cut] = each.data.flatten()
        each.data = flat[cut].view(slot.shape)
    return flat
