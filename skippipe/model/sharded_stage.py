"""A stage whose layers are divided over several devices, for one that does not fit a single one.

Every device holds consecutive layers with their gradients and optimizer state, the first also what stage 0 has beside
its layers; a microbatch goes through all of them, and its activations move from device to device. To the rest of the
node it is a `StageStep`: weights and state are read and written by their places in the flat layout of the whole stage,
and gradients are added up in host memory, from where they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.model.flat_params import FlatParams, layout
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage_step import Key, StageStep
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.optim.interface import ParamSlot


def check_sharded(spec: ModelSpec, learning: OptimConfig, early_exit: float = 0.0) -> None:
    """UserError if a stage of such a job cannot be divided over devices."""
    in_blocks = any(each.dtype == "8bit" for each in OPTIMIZERS[learning.optimizer].state_tensors)
    hindrances = {
        f"optimizer '{learning.optimizer}', whose blocks would lie across devices": in_blocks,
        "LoRA": spec.lora.rank > 0,
        "bridges": spec.bridges > 0,
        "an early exit": early_exit > 0,
    }
    if found := [name for name, hinders in hindrances.items() if hinders]:
        raise UserError(
            f"a stage cannot be divided over several devices with {found[0]}; use more stages, so that each fits one"
        )


class Segment(NamedTuple):
    """Consecutive numbers of the stage's state that lie on one device."""

    start: int
    size: int
    part: int
    at: int
    """Where they begin in the state of that device."""


class ShardedParams:
    """Weights, gradients and optimizer state of a stage that lie on several devices, in the layout of the stage.

    It does what `FlatParams` does for a stage on one device."""

    frozen: tuple[Tensor, ...] = ()

    def __init__(self, parts: Sequence[FlatParams], slots: Sequence[ParamSlot]) -> None:
        """`slots` is the layout of the whole stage."""
        self.parts = parts
        self.slots = slots
        sections = [list(self.slots), *(each.slots(self.slots) for each in parts[0].optimizer.state_tensors)]
        ends = list(accumulate(sum(slot.size for slot in section) for section in sections))
        self.state_parts = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        self.state_values = self.trained_values = ends[-1]
        held = {
            (number, slot.name): (part, whole.start + slot.start)
            for part, each in enumerate(parts)
            for number, whole in enumerate(each.state_parts)
            for slot in ([each.slots, *(state.slots(each.slots) for state in each.optimizer.state_tensors)][number])
        }
        self._segments = [
            Segment(self.state_parts[number].start + slot.start, slot.size, *held[number, slot.name])
            for number, section in enumerate(sections)
            for slot in section
        ]
        on_card = parts[0].values.is_cuda
        self.gradient = torch.zeros(len(self.state_parts[0]), pin_memory=on_card)
        """In host memory: what `collect` has added up, over all devices."""

    @property
    def values(self) -> Tensor:
        """A copy of all weights, in host memory."""
        return self.read_state(0, len(self.state_parts[0]))

    @property
    def steps(self) -> int:
        return self.parts[0].steps

    @steps.setter
    def steps(self, count: int) -> None:
        for each in self.parts:
            each.steps = count

    def clear_state(self) -> None:
        for each in self.parts:
            each.clear_state()

    def clear_gradient(self) -> None:
        self.gradient.zero_()
        for each in self.parts:
            each.clear_gradient()

    def collect(self) -> None:
        """Add the devices' sums of gradients to that in host memory; theirs are zero then."""
        for segment, here in self._of(0, len(self.gradient)):
            part = self.parts[segment.part]
            at = segment.at + here.start - segment.start
            self.gradient[here.start : here.stop].add_(part.gradient[at : at + len(here)].cpu())
        for each in self.parts:
            each.clear_gradient()

    def squared_norm(self, visits: int = 1, summed: Tensor | None = None) -> float:
        whole = self.gradient if summed is None else summed
        return float(torch.linalg.vector_norm(whole, dtype=torch.float64) ** 2) / max(1, visits) ** 2

    def step(self, rate: float, scale: float, summed: Tensor | None = None) -> None:
        whole = self.gradient if summed is None else summed
        for segment, here in self._of(0, len(whole)):
            part = self.parts[segment.part]
            part.gradient[segment.at : segment.at + segment.size].copy_(whole[here.start : here.stop])
        for each in self.parts:
            each.step(rate, scale)
        self.gradient.zero_()

    def read_state(self, first: int, count: int) -> Tensor:
        found = [
            self.parts[segment.part].read_state(segment.at + here.start - segment.start, len(here)).cpu()
            for segment, here in self._of(first, count)
        ]
        return torch.cat(found)

    def write_state(self, first: int, given: Tensor, *, added: bool = False) -> None:
        for segment, here in self._of(first, len(given)):
            part = self.parts[segment.part]
            values = given[here.start - first : here.stop - first].to(part.values.device)
            part.write_state(segment.at + here.start - segment.start, values, added=added)

    def _of(self, first: int, count: int) -> Iterator[tuple[Segment, range]]:
        """The segments of a range of the state, each with the numbers of it that lie there."""
        if not 0 <= first < first + count <= self.state_values:
            raise ValueError(f"numbers {first} to {first + count} of a state of {self.state_values}")
        for segment in self._segments:
            here = range(max(first, segment.start), min(first + count, segment.start + segment.size))
            if here:
                yield segment, here


class ShardedStep:
    """The tasks of a stage whose layers are on several devices, one after another."""

    def __init__(self, parts: Sequence[StageStep]) -> None:
        """The parts hold the stage's layers in their order; the first has the ends, if the stage has them."""
        self.parts = parts
        self.device = parts[0].device
        named = [pair for each in parts for pair in each.model.trained_weights()]
        named.sort(key=lambda pair: pair[0].startswith(("model.norm.", "lm_head.")))  # as in a stage on one device
        self.weights = ShardedParams([each.weights for each in parts], layout(named))
        self._scales: dict[Key, float] = {}
        """Microbatch → the scale of what the stage adds to it, unless it is 1."""

    def begin(self, key: Key, tokens: Tensor, starts: Tensor | None = None, target: int = 0) -> Tensor:
        return self._through(key, self.parts[0].begin(key, tokens, starts, target), starts, 1)

    def forward(
        self, key: Key, hidden: Tensor, residual_scale: float = 1.0, starts: Tensor | None = None, target: int = 0
    ) -> Tensor:
        del target  # there are no bridges
        outputs = self._through(key, hidden, starts, 0)
        self._scales.pop(key, None)
        if residual_scale == 1.0:
            return outputs
        self._scales[key] = residual_scale
        return torch.lerp(hidden.to(outputs.device, outputs.dtype), outputs, residual_scale)

    def head(
        self, key: Key, hidden: Tensor, labels: Tensor, *, early: float = 0.0, share: float = 1.0, counts: bool = True
    ) -> tuple[Tensor, Tensor]:
        return self.parts[0].head(key, hidden, labels, early=early, share=share, counts=counts)

    def backward(self, key: Key, gradient: Tensor, *, counts: bool = True) -> Tensor | None:
        scale = self._scales.pop(key, 1.0)
        back: Tensor | None = gradient * scale
        for part in reversed(self.parts):
            assert back is not None
            back = part.backward(key, back.to(part.device), counts=counts)
        if back is not None and scale != 1.0:  # the rest goes past the layers
            back = back + (1 - scale) * gradient.to(back.device)
        return back

    def weight_gradients(self, key: Key, *, counts: bool = True) -> None:
        for part in self.parts:
            part.weight_gradients(key, counts=counts)

    def evaluate(self, given: Tensor, starts: Tensor | None = None) -> Tensor:
        for part in self.parts:
            given = part.evaluate(given.to(part.device), _moved(starts, part.device))
        return given

    def evaluate_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.parts[0].evaluate_head(hidden.to(self.device), labels)

    def drop(self, key: Key) -> None:
        self._scales.pop(key, None)
        for part in self.parts:
            part.drop(key)

    def drop_all(self) -> None:
        self._scales.clear()
        for part in self.parts:
            part.drop_all()

    def _through(self, key: Key, hidden: Tensor, starts: Tensor | None, first: int) -> Tensor:
        for part in self.parts[first:]:
            hidden = part.forward(key, hidden.to(part.device), starts=_moved(starts, part.device))
        return hidden


def _moved(starts: Tensor | None, device: str) -> Tensor | None:
    return None if starts is None else starts.to(device)
