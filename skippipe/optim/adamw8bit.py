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

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from skippipe.optim.adamw import follow
from skippipe.optim.interface import BLOCK, Hyperparameters, Optimizer, ParamSlot, StateTensor

if TYPE_CHECKING:
    from torch import Tensor

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
    flops_per_parameter = 2000

    offloads = True

    def __init__(
        self, values: Tensor, slots: Sequence[ParamSlot], settings: Hyperparameters, *, offload: bool = False
    ) -> None:
        super().__init__(values, slots, settings, offload=offload)
        from skippipe.optim.host_state import HostState, HostTensor, cut

        blocks = -(-len(values) // BLOCK)
        self._scales = {name: self.zeros(blocks, values.dtype) for name in self.state}
        self._decayed = sum(slot.size for slot in slots if len(slot.shape) >= 2)
        self._ranges = cut([range(len(values))])
        tensors = [HostTensor(*each) for name in CODES for each in ((self.state[name], 1), (self._scales[name], BLOCK))]
        self._host = HostState(values.device, len(values), tensors) if offload else None
        self.clear_state()

    def step(self, gradient: Tensor, rate: float) -> None:
        self.values[: self._decayed].mul_(1 - rate * self.settings.weight_decay)
        thresholds = self._thresholds()
        for here, now, held in self._pieces(gradient):
            kept = list(zip(CODES.values(), held[::2], held[1::2], strict=True))
            mean, square = (_decoded(code, codes, scales) for code, codes, scales in kept)
            follow(self.values[here.start : here.stop], now, mean, square, self.settings, self.steps + 1, rate)
            for (code, codes, scales), values in zip(kept, (mean, square), strict=True):
                _encode(code, values, thresholds, codes, scales)

    def read_state(self, name: str, first: int, count: int) -> Tensor:
        start = first % BLOCK
        here = range(first - start, min(len(self.values), -(-(first + count) // BLOCK) * BLOCK))
        return _decoded(CODES[name], *self._held(name, here))[start : start + count]

    def write_state(self, name: str, first: int, given: Tensor) -> None:
        whole = len(given) % BLOCK == 0 or first + len(given) == len(self.values)
        assert whole and first % BLOCK == 0, "blocks are written whole"
        codes, scales = self._held(name, range(first, first + len(given)))
        _encode(CODES[name], given.to(codes.device), 0.5, codes, scales)

    def clear_state(self) -> None:
        for name, state in self.state.items():
            state.fill_(128 if CODES[name].signed else CODES[name].least)
            self._scales[name].zero_()

    def _held(self, name: str, here: range) -> tuple[Tensor, Tensor]:
        """Codes and scales of a range that begins with a block."""
        blocks = slice(here.start // BLOCK, -(-here.stop // BLOCK))
        return self.state[name][here.start : here.stop], self._scales[name][blocks]

    def _pieces(self, gradient: Tensor) -> Iterator[tuple[range, Tensor, list[Tensor]]]:
        """Ranges with their gradient, and codes and scales of each state tensor."""
        if self._host is not None:
            yield from self._host.pieces(gradient, self._scale, self._ranges)
            return
        for here in self._ranges:
            yield here, self.on_device(gradient, here), [part for name in CODES for part in self._held(name, here)]

    def _thresholds(self) -> Tensor:
        """For each place in a block, evenly spread over the steps."""
        import torch

        places = torch.arange(BLOCK, device=self.values.device, dtype=torch.float64)
        return (places * 2**0.5 + self.steps * GOLDEN).frac_().float()


def _decoded(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    """Values of blocks, the last of which may be shorter."""
    from torch.nn.functional import pad

    blocks = pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    return code.decode(blocks, scales).flatten()[: len(codes)]


def _encode(code: Code, values: Tensor, threshold: Tensor | float, codes: Tensor, scales: Tensor) -> None:
    """Write values of blocks as codes and scales."""
    from torch.nn.functional import pad

    found, sizes = code.encode(pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK), threshold)
    codes.copy_(found.flatten()[: len(values)])
    scales.copy_(sizes)
