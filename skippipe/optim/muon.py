"""Muon (Jordan et al., 2024) for the matrices of layers, AdamW for everything else.

The running mean of a matrix's gradients is made orthogonal: all its singular values become about 1. Then it is scaled
so that its numbers are on average as large as those of AdamW's steps (Liu et al., "Muon is scalable for LLM training",
2025), and AdamW's learning rate and weight decay suit both.

The state of a matrix is that running mean alone, and it changes number by number. So a node that joins gets it piece by
piece, like AdamW's; the weights come after it. Replicas have the same bits if they multiply matrices alike: their
devices must be of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from skippipe.optim.interface import Optimizer, ParamSlot, Shape, StateTensor
from skippipe.optim.torch_optimizer import adamw_step

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a polynomial of odd powers that brings singular values near 1 soon
ROUNDS = 5
SIZE = 0.2  # root mean square of the numbers of a step of AdamW, times its rate
CHUNK = 2**24  # numbers that AdamW steps along at a time, and of matrices that are made orthogonal together


class Muon(Optimizer):
    """`beta1` is the momentum, with a look ahead (Nesterov's); 0.95 is usual."""

    state_tensors = (StateTensor("exp_avg"), StateTensor("exp_avg_sq", kept_for="others"))
    flops_per_parameter = 250

    def step(self, gradient: Tensor, rate: float) -> None:
        ours, means, first = self.settings, self.state["exp_avg"], 0
        for slots in _alike(self.slots):
            self._orthogonal_step(slots, gradient, rate)
        for slot in self.slots:
            if slot.is_layer_matrix:
                continue
            here = slice(slot.start, slot.start + slot.size)
            values, mean, now = self.values[here], means[here], self.on_device(gradient, range(here.start, here.stop))
            if len(slot.shape) >= 2:
                values.mul_(1 - rate * ours.weight_decay)
            square = self.state["exp_avg_sq"][first : first + slot.size]
            for at in range(0, slot.size, CHUNK):
                part = slice(at, at + CHUNK)
                adamw_step(values[part], now[part], mean[part], square[part], ours, self.steps + 1, rate)
            first += slot.size

    def _orthogonal_step(self, slots: Sequence[ParamSlot], gradient: Tensor, rate: float) -> None:
        """Of matrices of one shape."""
        import torch

        ours, shape = self.settings, slots[0].shape
        values, means = ([slot.of(flat) for slot in slots] for flat in (self.values, self.state["exp_avg"]))
        now = [self.on_device(gradient, range(slot.start, slot.start + slot.size)).view(shape) for slot in slots]
        torch._foreach_lerp_(means, now, 1 - ours.beta1)
        torch._foreach_lerp_(now, means, ours.beta1)
        steps = orthogonal(torch.stack(now) if len(now) > 1 else now[0]).float().view(len(now), *shape)
        torch._foreach_mul_(values, 1 - rate * ours.weight_decay)
        torch._foreach_add_(values, list(steps), alpha=-rate * SIZE * max(shape[-2:]) ** 0.5)

    @classmethod
    def step_flops(cls, parameters: int, ends: int, width: int) -> int:
        """Each round multiplies a matrix twice by a square one of its narrower side, and that by itself."""
        products = ROUNDS * (2 + 2 + 1) * width  # of the width at most; most matrices have another, wider side
        return cls.flops_per_parameter * parameters + products * (parameters - ends)


def _alike(slots: Sequence[ParamSlot]) -> Iterator[list[ParamSlot]]:
    """Matrices of layers in groups of one shape, as many together as make no more than a few large products: a small
    model is otherwise held up by hundreds of small ones."""
    shapes: dict[Shape, list[ParamSlot]] = defaultdict(list)
    for slot in slots:
        if slot.is_layer_matrix:
            shapes[slot.shape].append(slot)
    for group in shapes.values():
        count = max(1, CHUNK // group[0].size)
        yield from (group[at : at + count] for at in range(0, len(group), count))


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices of the same singular vectors, by Newton and Schulz's iteration; on a GPU in bf16."""
    import torch

    wide = matrices.shape[-2] <= matrices.shape[-1]
    found = matrices.reshape(-1, *matrices.shape[-2:])
    found = found.to(torch.bfloat16 if found.is_cuda else torch.float32)
    found = found if wide else found.mT
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp_(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        square = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return (found if wide else found.mT).reshape(matrices.shape)
