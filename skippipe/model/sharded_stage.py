"""A stage whose layers are divided over several devices, for one that does not fit a single one.

Every device holds consecutive layers with their gradients and optimizer state, the first also what stage 0 has beside
its layers, the last also the bridges that begin there; a microbatch goes through all of them, and its activations move
from device to device. To the rest of the node it is a `StageStep`: weights and state are read and written by their
places in the flat layout of the whole stage, and gradients are added up in host memory, from where they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skippipe.errors import UserError
from skippipe.model.flat_params import FlatParams, layout, mean_squared_norm
from skippipe.model.stage_step import EarlyExit, Key, StageStep, TeacherHidden, input_gradient
from skippipe.model.stand_ins import is_bridge
from skippipe.optim.interface import BLOCK, HOST_PIECE, Optimizer, ParamSlot
from skippipe.stage_subset import StageHop


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

    def __init__(self, parts: Sequence[FlatParams], slots: Sequence[ParamSlot], frozen: Sequence[ParamSlot]) -> None:
        """`slots` and `frozen` are the layouts of the whole stage: of weights that are trained, and of those that are
        not. UserError if blocks of the optimizer's state would lie across devices."""
        check_blocks(type(parts[0].optimizer), slots, [each.slots for each in parts])
        self.parts = parts
        self.slots = slots
        states = parts[0].optimizer.state_tensors
        sections = [slots, *(each.slots(slots) for each in states), *([frozen] if frozen else [])]
        ends = list(accumulate(sum(slot.size for slot in section) for section in sections))
        self.state_parts = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        self.state_values = ends[-1]
        self.trained_values = ends[len(states)]
        self._segments: list[Segment] = []
        held = {
            (number, slot.name): (part, start + slot.start)
            for part, each in enumerate(parts)
            for number, (start, section) in enumerate(_sections(each))
            for slot in section
        }
        for number, section in enumerate(sections):
            runs = _runs([Segment(slot.start, slot.size, *held[number, slot.name]) for slot in section])
            start = self.state_parts[number].start
            self._segments += [run._replace(start=start + run.start) for run in runs]
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
            part = self.parts[segment.part].gradient[segment.at : segment.at + segment.size]
            pieces = (torch.split(each, HOST_PIECE) for each in (self.gradient[here.start : here.stop], part))
            for total, found in zip(*pieces, strict=True):
                total.add_(found.cpu())
        for each in self.parts:
            each.clear_gradient()

    def squared_norm(self, divisor: int = 1, summed: Tensor | None = None) -> float:
        whole = self.gradient if summed is None else summed
        return mean_squared_norm(whole, divisor, whole.device)

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


def _sections(each: FlatParams) -> list[tuple[int, Sequence[ParamSlot]]]:
    """What the state of one device is made of, and where each begins: weights, optimizer state, frozen weights."""
    slots, states = each.slots, each.optimizer.state_tensors
    sections = [slots, *(state.slots(slots) for state in states), each.frozen_slots]
    starts = [*(part.start for part in each.state_parts[: 1 + len(states)]), each.trained_values]
    return list(zip(starts, sections, strict=True))


def check_blocks(optimizer: type[Optimizer], slots: Sequence[ParamSlot], parts: Sequence[Sequence[ParamSlot]]) -> None:
    """UserError if blocks of its state would lie across devices; `slots` are the layout of the whole stage, `parts` of
    what each device holds."""
    for state in optimizer.state_tensors:
        held = {slot.name: (part, slot.start) for part, each in enumerate(parts) for slot in state.slots(each)}
        runs = _runs([Segment(slot.start, slot.size, *held[slot.name]) for slot in state.slots(slots)])
        if state.dtype == "8bit" and any(run.start % BLOCK or run.at % BLOCK for run in runs):
            raise UserError(
                f"a stage cannot be divided over several devices if the optimizer's blocks of {BLOCK} numbers would "
                f"lie across them, as with a hidden size that is no multiple of {BLOCK}; take another optimizer than "
                "one in 8 bits, or more stages, so that each fits one device"
            )


def whole_layout(parts: Iterable[Iterable[tuple[str, nn.Parameter]]]) -> list[ParamSlot]:
    """The layout of a stage, as on one device, from what its devices hold."""
    return layout(sorted(chain.from_iterable(parts), key=lambda pair: _place(pair[0])))


def _runs(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that follow each other on one device as one."""
    found: list[Segment] = []
    for each in segments:
        if found and (last := found[-1]).part == each.part and last.at + last.size == each.at:
            found[-1] = last._replace(size=last.size + each.size)
        else:
            found.append(each)
    return found


class Passage(NamedTuple):
    """What a microbatch leaves behind the devices of a stage, for its backward pass."""

    scale: float
    """Of what the stage adds."""
    outputs: Tensor
    """Of all layers; a leaf that has the gradient if the path goes over a bridge."""
    bridged: Tensor | None = None
    """These with what their bridge adds."""
    early: Tensor | None = None
    """The gradient of the outputs, by the loss of an early exit."""


class ShardedStep:
    """The tasks of a stage whose layers are on several devices, one after another."""

    def __init__(self, parts: Sequence[StageStep]) -> None:
        """The parts hold the stage's layers in their order; the first has the ends, if the stage has them, and the last
        has the bridges. There are no adapters for missing stages: repeats would go through all parts again."""
        assert all(each.model.adapters is None for each in parts)
        self.parts = parts
        self.device = parts[0].device
        trained = whole_layout(each.model.trained_weights() for each in parts)
        frozen = whole_layout(each.model.frozen_weights() for each in parts)
        self.weights = ShardedParams([each.weights for each in parts], trained, frozen)
        self._passages: dict[Key, Passage] = {}
        self._exits: dict[Key, EarlyExit] = {}

    def begin(self, key: Key, tokens: Tensor, starts: Tensor | None = None, hop: StageHop | None = None) -> Tensor:
        outputs = self._through(key, self.parts[0].begin(key, tokens, starts), starts, 1)
        bridged = self._pass(key, outputs, 1.0, hop)
        self._exit_early(key)
        return bridged

    def forward(
        self,
        key: Key,
        hidden: Tensor,
        residual_scale: float = 1.0,
        starts: Tensor | None = None,
        hop: StageHop | None = None,
    ) -> Tensor:
        outputs = self._through(key, hidden, starts, 0)
        if residual_scale != 1.0:
            outputs = torch.lerp(hidden.to(outputs.device, outputs.dtype), outputs, residual_scale)
        return self._pass(key, outputs, residual_scale, hop)

    def head(
        self,
        key: Key,
        hidden: Tensor,
        labels: Tensor,
        *,
        early: float = 0.0,
        share: float = 1.0,
        counts: bool = True,
        teacher: TeacherHidden | None = None,
    ) -> tuple[Tensor, Tensor]:
        loss, back = self.parts[0].head(key, hidden, labels, share=share, counts=counts, teacher=teacher)
        if early:
            self._exits[key] = EarlyExit(labels, early * share, counts)
            self._exit_early(key)
        return loss, back

    def backward(
        self, key: Key, gradient: Tensor, *, counts: bool = True, teacher: TeacherHidden | None = None
    ) -> Tensor | None:
        passage = self._passages.pop(key)
        if passage.bridged is not None:
            new = counts and key not in self.parts[-1].deferred  # as for the layers before it
            root = passage.bridged
            back = input_gradient(passage.outputs, [root], [gradient.to(root.device, root.dtype)], new)
            assert back is not None
            gradient = back
        if passage.early is not None:
            gradient = gradient + passage.early.to(gradient.device)
        back = gradient * passage.scale
        for part in reversed(self.parts):
            assert back is not None
            first = teacher if part is self.parts[0] else None
            back = part.backward(key, back.to(part.device), counts=counts, teacher=first)
        if back is not None and passage.scale != 1.0:  # the rest goes past the layers
            back = back + (1 - passage.scale) * gradient.to(back.device)
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
        self._passages.pop(key, None)
        self._exits.pop(key, None)
        for part in self.parts:
            part.drop(key)

    def drop_all(self) -> None:
        self._passages.clear()
        self._exits.clear()
        for part in self.parts:
            part.drop_all()

    def _through(self, key: Key, hidden: Tensor, starts: Tensor | None, first: int) -> Tensor:
        for part in self.parts[first:]:
            hidden = part.forward(key, hidden.to(part.device), starts=_moved(starts, part.device))
        return hidden

    def _pass(self, key: Key, outputs: Tensor, scale: float, hop: StageHop | None) -> Tensor:
        """What goes on from the stage: over a bridge, if the path leads past other stages."""
        last, leaf = self.parts[-1], outputs.detach().requires_grad_()
        with last.autocast():
            bridged = last.model.cross(leaf, hop)
        self._passages[key] = Passage(scale, outputs) if bridged is leaf else Passage(scale, leaf, bridged)
        return bridged.detach()

    def _exit_early(self, key: Key) -> None:
        """As `StageStep` does; the head is on the first device."""
        if key not in self._passages or key not in self._exits:
            return
        passage, (labels, weight, counts) = self._passages[key], self._exits.pop(key)
        outputs = passage.outputs.detach().float().to(self.device)
        _, back = self.parts[0].head(key, outputs, labels, share=weight, counts=counts)
        self._passages[key] = passage._replace(early=back)


def _place(name: str) -> int:
    """The order in which a stage on one device has its weights: layers, what stage 0 has after them, bridges."""
    return 2 if is_bridge(name) else int(name.startswith(("model.norm.", "lm_head.")))


def _moved(starts: Tensor | None, device: str) -> Tensor | None:
    return None if starts is None else starts.to(device)
