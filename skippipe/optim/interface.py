"""What an optimizer is to the rest of the package: the step along flat tensors, and the state that it keeps for it.

Planner, checkpoints, state transfer and growth ask the class for names, shapes and sizes, which takes no torch. A stage
makes an object of it, which holds the state. A new optimizer is one file beside this one and one line in `__init__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, dtype


Shape = tuple[int, ...]
STORED_BYTES = 4  # of a number on the wire and in checkpoints, weights and state alike: fp32
HELD_BYTES = {"fp32": 4, "bf16": 2}
HOST_PIECE = 2**22  # parameters whose state comes from host memory at a time
HOST_BUFFERS = 2  # such pieces that are on the device at one time
END_MATRICES = ("model.embed_tokens.weight", "lm_head.weight")
BLOCK = 256
"""Numbers of a state tensor in 8 bits that have a scale in common. They are sent and received together."""


class ParamSlot(NamedTuple):
    """Where a tensor lies in a flat one."""

    name: str
    shape: Shape
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix of a layer, or several; vectors, embedding and head are not."""
        return len(self.shape) >= 2 and self.name not in END_MATRICES

    def of(self, flat: Tensor) -> Tensor:
        """The tensor, of the flat one that it lies in."""
        return flat[self.start : self.start + self.size].view(self.shape)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for every parameter; it is zero before the first step."""

    name: str
    """In checkpoints its values are called `NAME.PARAMETER`, as in `exp_avg.model.norm.weight`."""
    dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """What a node holds it in. On the wire and in checkpoints it is fp32. "8bit": in blocks with a scale each, by codes
    that the optimizer knows."""
    shape: Callable[[Shape], Shape] | None = None
    """From a parameter's shape to this tensor's, of at least one dimension; None: the same."""
    kept_for: Literal["all", "others"] = "all"
    """Which parameters have one; "others": those that are not matrices of layers."""

    def slots(self, parameters: Sequence[ParamSlot], start: int = 0) -> list[ParamSlot]:
        """The tensor's parts, which belong to parameters, one after another from there on."""
        found = []
        for slot in parameters:
            if self.kept_for == "all" or not slot.is_layer_matrix:
                shape = slot.shape if self.shape is None else self.shape(slot.shape)
                found.append(ParamSlot(f"{self.name}.{slot.name}", shape, start))
                start += found[-1].size
        return found

    def size(self, parameters: int, ends: int) -> int:
        """Numbers for so many parameters, of which so many belong to no layer. A tensor of another shape is small
        beside them, and so are the vectors of layers: not counted."""
        if self.shape is not None:
            return 0
        return parameters if self.kept_for == "all" else ends

    def held_bytes(self, parameters: int, ends: int) -> int:
        """Bytes of memory for these."""
        size = self.size(parameters, ends)
        return -(-size // BLOCK) * BLOCK if self.dtype == "8bit" else HELD_BYTES[self.dtype] * size


class Hyperparameters(Protocol):
    """What optimizers may read of the settings (`optim.config.OptimConfig`)."""

    @property
    def rate(self) -> float: ...

    @property
    def beta1(self) -> float: ...

    @property
    def beta2(self) -> float: ...

    @property
    def epsilon(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...


class Optimizer(ABC):
    """Steps along the gradient of a stage, whose parameters lie in one flat fp32 tensor, and holds its state."""

    state_tensors: ClassVar[tuple[StateTensor, ...]]
    """The state beside the parameters, in the order in which it is sent and stored."""
    elementwise: ClassVar[bool] = True
    """A step changes every number of the state by that number and its gradient alone, or every block by those of the
    block. Then a node may step while it still receives the state of its stage, piece by piece: a piece that has come
    stays as its sender has it, and so do weights that come after all of the state."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Settings that it has no use for; a job that sets one is refused."""
    flops_per_parameter: ClassVar[int]
    """Operations of a step for each parameter. Most steps wait for memory: then those that fit into their time."""

    offloads: ClassVar[bool] = False
    """Whether its state can be held in host memory, away from the device of the parameters."""

    def __init__(
        self, values: Tensor, slots: Sequence[ParamSlot], settings: Hyperparameters, *, offload: bool = False
    ) -> None:
        """`slots` say where in `values` each parameter lies: those of two or more dimensions, which decay, first.
        `offload`: the state is held in host memory."""
        import torch

        assert self.offloads or not offload, "its state stays on the device"
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
        self.values = values
        self.slots = slots
        self.settings = settings
        self.offload = offload
        self.steps = 0
        """Steps taken so far."""
        self.state: dict[str, Tensor] = {}
        """By name: one flat tensor for all parameters, as it is held; in 8 bits [blocks, BLOCK]."""
        self.state_sizes: dict[str, int] = {}
        """By name: how many numbers it has."""
        for each in self.state_tensors:
            size = self.state_sizes[each.name] = sum(slot.size for slot in each.slots(slots))
            shape = (-(-size // BLOCK), BLOCK) if each.dtype == "8bit" else (size,)
            self.state[each.name] = self.zeros(shape, dtypes[each.dtype])
        self._scale = 1.0

    def zeros(self, shape: Shape, dtype: dtype) -> Tensor:
        """Room for state: where the parameters are, or in host memory that the device reads and writes by itself."""
        import torch

        device = self.values.device
        if self.offload:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        return torch.zeros(shape, dtype=dtype, device=device)

    def compile(self) -> None:  # noqa: B027
        """Have torch.compile make kernels of a step, where that pays: nothing to do but for an optimizer of many small
        operations."""

    def step_along(self, gradient: Tensor, rate: float, scale: float) -> None:
        """A step along `scale` times the gradient, which may lie in host memory; the caller counts `steps`."""
        self._scale = scale
        if scale != 1.0 and gradient.device == self.values.device:
            gradient.mul_(scale)
        self.step(gradient, rate)

    def on_device(self, gradient: Tensor, here: range) -> Tensor:
        """A part of the gradient that is stepped along: it is brought here and scaled now if it lies in host memory."""
        part = gradient[here.start : here.stop]
        if part.device == self.values.device:
            return part
        return part.to(self.values.device, non_blocking=True).mul_(self._scale)

    @abstractmethod
    def step(self, gradient: Tensor, rate: float) -> None:
        """Change the parameters and the state in place; the caller counts `steps`.

        The gradient is the mean over the stage's microbatches, clipped by the norm of the whole model's; what
        `on_device` gives of it. It may be overwritten.
        """

    def read_state(self, name: str, first: int, count: int) -> Tensor:
        """A range of a state tensor, as fp32."""
        return self.state[name][first : first + count].float()

    def write_state(self, name: str, first: int, given: Tensor) -> None:
        """Write a range of a state tensor, given as fp32; of one in 8 bits, whole blocks. What was read elsewhere is
        then held here with the same bits."""
        self.state[name][first : first + len(given)].copy_(given)

    def clear_state(self) -> None:
        """Make all state zero."""
        for each in self.state.values():
            each.zero_()

    @classmethod
    def state_slots(cls, slots: Sequence[ParamSlot]) -> list[ParamSlot]:
        """Parameters and state of a stage as one sequence of numbers, under the names that they have in checkpoints."""
        found = list(slots)
        start = sum(slot.size for slot in slots)
        for each in cls.state_tensors:
            found += each.slots(slots, start)
            start = found[-1].start + found[-1].size
        return found

    @classmethod
    def held_bytes(cls, parameters: int, ends: int = 0) -> int:
        """Bytes of a node's memory that its state fills, of so many parameters, of which so many belong to no layer."""
        return sum(each.held_bytes(parameters, ends) for each in cls.state_tensors)

    @classmethod
    def stored_bytes(cls, parameters: int, ends: int = 0) -> int:
        """Bytes that a checkpoint takes, or the transfer of a stage's state to another node, for these parameters."""
        return STORED_BYTES * (parameters + sum(each.size(parameters, ends) for each in cls.state_tensors))

    @classmethod
    def step_flops(cls, parameters: int, ends: int, width: int) -> int:  # noqa: ARG003
        """Operations of a step, for the planner; `width` is the hidden size of the model."""
        return cls.flops_per_parameter * parameters
