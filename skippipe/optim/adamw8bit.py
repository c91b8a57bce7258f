"""AdamW whose state is held in 8 bits a number, in blocks with a scale each (after Dettmers et al., "8-bit optimizers
via block-wise quantization", 2022): a quarter of AdamW's state, and nearly the same steps.

A number is held as a share of the largest one of its block, and the share as the power of an evenly spaced code: the
fourth power for running means, the eighth for running means of squares, whose square roots a step divides by. So small
numbers beside large ones keep their size, and no square becomes zero beside a mean that does not.

A step moves a running mean by less than the distance of two codes. Rounded to the nearest, it would stay where it is.
So it goes up or down, in such proportion that it is right in the mean over the steps. Which of the two is decided by
the place in the block and the number of the step: replicas do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from skippipe.optim.adamw import follow
from skippipe.optim.interface import BLOCK, Hyperparameters, Optimizer, ParamSlot, StateTensor

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BLOCKS = 2**14  # blocks that are decoded at a time: 4M numbers
LEAST_SCALE = 2.0**-66  # a block of smaller numbers is zero: then powers of its shares are no subnormal numbers
GOLDEN = 0.6180339887498949  # its multiples, without their whole part, are the most evenly spread


class Code(NamedTuple):
    """Shares from 0 to 1 in 8 bits."""

    levels: int
    """The code of 1."""
    roots: int
    """Square roots one after another that make codes evenly spaced."""
    least: int
    """The code of the smallest shares."""
    signed: bool

    def encode(self, values: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
        """Codes and scales of blocks. Between two codes, a value takes the upper one if it has more than this share of
        the way to it."""
        import torch

        sizes = values.abs() if self.signed else values
        scales = sizes.amax(1, keepdim=True)
        scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
        shares = torch.where(scales > 0, sizes / scales, 0.0)
        lower = shares
        for _ in range(self.roots):
            lower = lower.sqrt()
        lower = (lower * self.levels).floor_()
        below = self._power(lower)
        codes = lower.add_((shares - below) > threshold * (self._power(lower + 1) - below))
        codes.clamp_(self.least, self.levels)
        if self.signed:
            codes = torch.copysign(codes, values) + 128
        return codes.to(torch.uint8), scales.squeeze(1)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Values of blocks."""
        if not self.signed:
            return self._power(codes.float()) * scales.unsqueeze(1)
        whole = codes.float() - 128
        return (self._power(whole) * scales.unsqueeze(1)).copysign_(whole)

    def _power(self, codes: Tensor) -> Tensor:
        shares = codes / self.levels
        for _ in range(self.roots):
            shares = shares.square()
        return shares


CODES = {
    "exp_avg": Code(127, 2, 0, signed=True),
    "exp_avg_sq": Code(255, 3, 2, signed=False),  # the root of the smallest is that of the smallest mean
}


class AdamW8bit(Optimizer):
    """AdamW with its state in 8 bits. A step decodes a part of the state at a time, in fp32, and encodes it again."""

    state_tensors = (StateTensor("exp_avg", "8bit"), StateTensor("exp_avg_sq", "8bit"))
    flops_per_parameter = 1000

    def __init__(self, values: Tensor, slots: Sequence[ParamSlot], settings: Hyperparameters) -> None:
        super().__init__(values, slots, settings)
        blocks = -(-len(values) // BLOCK)
        self._scales = {each.name: values.new_zeros(blocks) for each in self.state_tensors}
        self._decayed = sum(slot.size for slot in slots if len(slot.shape) >= 2)
        self.clear_state()

    def step(self, gradient: Tensor, rate: float) -> None:
        self.values[: self._decayed].mul_(1 - rate * self.settings.weight_decay)
        thresholds = self._thresholds()
        for first in range(0, len(gradient), BLOCK * CHUNK_BLOCKS):
            here = slice(first, first + BLOCK * CHUNK_BLOCKS)
            now = gradient[here]
            mean, square = (self.read_state(name, first, len(now)) for name in CODES)
            follow(self.values[here], now, mean, square, self.settings, self.steps + 1, rate)
            self._encode("exp_avg", first, mean, thresholds)
            self._encode("exp_avg_sq", first, square, thresholds)

    def read_state(self, name: str, first: int, count: int) -> Tensor:
        from torch.nn.functional import pad

        blocks = slice(first // BLOCK, -(-(first + count) // BLOCK))
        codes = self.state[name][BLOCK * blocks.start : BLOCK * blocks.stop]
        codes = pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
        start = first % BLOCK
        return CODES[name].decode(codes, self._scales[name][blocks]).flatten()[start : start + count]

    def write_state(self, name: str, first: int, given: Tensor) -> None:
        whole = len(given) % BLOCK == 0 or first + len(given) == len(self.values)
        assert whole and first % BLOCK == 0, "blocks are written whole"
        self._encode(name, first, given.to(self.values.device), 0.5)

    def clear_state(self) -> None:
        for name, state in self.state.items():
            state.fill_(128 if CODES[name].signed else CODES[name].least)
            self._scales[name].zero_()

    def _encode(self, name: str, first: int, values: Tensor, threshold: Tensor | float) -> None:
        from torch.nn.functional import pad

        codes, scales = CODES[name].encode(pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK), threshold)
        self.state[name][first : first + len(values)] = codes.flatten()[: len(values)]
        self._scales[name][first // BLOCK : first // BLOCK + len(scales)] = scales

    def _thresholds(self) -> Tensor:
        """For each place in a block, evenly spread over the steps."""
        import torch

        places = torch.arange(BLOCK, device=self.values.device, dtype=torch.float64)
        return (places * 2**0.5 + self.steps * GOLDEN).frac_().float()
