"""AdamW whose state is held in 8 bits a number, in blocks with a scale each (after Dettmers et al., "8-bit optimizers
via block-wise quantization", 2022): a quarter of AdamW's state, and nearly the same steps.

A number is held as a share of the largest one of its block, and the share as the power of an evenly spaced code: the
square for running means, the fourth power for running means of squares, whose square roots a step divides by. So small
numbers beside large ones keep their size, and no square becomes zero beside a mean that does not. The largest number
itself, fp32, lies in the last bits of the first 31 codes of its block: state takes a byte a number, and no more.

A step moves a running mean by less than the distance of two codes. Rounded to the nearest, it would stay where it is.
So it goes up or down, in such proportion that it is right in the mean over the steps. Which of the two is decided by
the place in the block and the number of the step: replicas do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from skippipe.optim.interface import BLOCK, HOST_PIECE, Hyperparameters, Optimizer, ParamSlot, StateTensor
from skippipe.optim.torch_optimizer import adamw_step

if TYPE_CHECKING:
    from torch import Tensor, device

SCALE_BITS = 31  # of an fp32 number that is not negative: without its sign
LEAST_SCALE = 2.0**-66  # a block of smaller numbers is zero: then powers of its shares are no subnormal numbers
GOLDEN = 0.6180339887498949  # its multiples, without their whole part, are the most evenly spread


class Code(NamedTuple):
    """Shares from 0 to 1 in 8 bits, or in 7 at the places of a block that have a bit of its scale, too."""

    levels: int
    """The code of 1, in 8 bits."""
    roots: int
    """Square roots one after another that make codes evenly spaced."""
    least: int
    """The code of the smallest shares, in 8 bits."""
    signed: bool

    def encode(self, values: Tensor, threshold: Tensor | float) -> Tensor:
        """Blocks as bytes. Between two codes, a value takes the upper one if it has more than this share of the way to
        it."""
        import torch

        sizes = values.abs() if self.signed else values
        scales = sizes.amax(1, keepdim=True)
        scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
        shares = torch.where(scales > 0, sizes / scales, 0.0)
        levels, shifts = self._places(values.device)
        lower = shares
        for _ in range(self.roots):
            lower = lower.sqrt()
        lower = (lower * levels).floor_()
        below = self._power(lower / levels)
        codes = lower.add_((shares - below) > threshold * (self._power((lower + 1) / levels) - below))
        codes = codes.clamp_(torch.full_like(shifts, self.least) >> shifts, levels)
        if self.signed:
            codes = torch.copysign(codes, values).add_(levels + 1)
        held = codes.to(torch.uint8) << shifts
        places = torch.arange(SCALE_BITS, device=values.device, dtype=torch.int32)
        held[:, :SCALE_BITS] |= (scales.view(torch.int32) >> places & 1).to(torch.uint8)
        return held

    def decode(self, held: Tensor) -> Tensor:
        """Values of blocks."""
        import torch

        places = torch.arange(SCALE_BITS, device=held.device, dtype=torch.int32)
        bits = (held[:, :SCALE_BITS] & 1).to(torch.int32) << places
        scales = bits.sum(1, keepdim=True, dtype=torch.int32).view(torch.float32)
        levels, shifts = self._places(held.device)
        codes = (held >> shifts).float()
        if not self.signed:
            return self._power(codes.div_(levels)).mul_(scales)
        codes.sub_(levels + 1)
        return (self._power(codes / levels) * scales).copysign_(codes)

    @property
    def zero(self) -> int:
        """The byte of a number in a block that is zero."""
        return self.levels + 1 if self.signed else self.least

    def _places(self, device: device) -> tuple[Tensor, Tensor]:
        """For each place of a block: the code of 1, and by how many bits codes are shifted."""
        import torch

        shifts = (torch.arange(BLOCK, device=device) < SCALE_BITS).to(torch.uint8)
        return torch.where(shifts > 0, float(self.levels // 2), float(self.levels)), shifts

    def _power(self, shares: Tensor) -> Tensor:
        for _ in range(self.roots):
            shares = shares.square()
        return shares


CODES = {
    "exp_avg": Code(127, 1, 0, signed=True),
    "exp_avg_sq": Code(255, 2, 2, signed=False),  # the root of the smallest is that of the smallest mean
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

        self._decayed = sum(slot.size for slot in slots if len(slot.shape) >= 2)
        self._ranges = cut([range(len(values))])
        tensors = [HostTensor(self.state[name], BLOCK) for name in CODES]
        self._host = HostState(values.device, len(values), tensors) if offload else None
        self._compiled: Callable[..., None] | None = None
        self.clear_state()

    def compile(self) -> None:
        from skippipe.torch_compile import compiled_on_device

        self._compiled = compiled_on_device(self._update, "the optimizer's step", dynamic=False)

    def step(self, gradient: Tensor, rate: float) -> None:
        self.values[: self._decayed].mul_(1 - rate * self.settings.weight_decay)
        thresholds, update = self._thresholds(), None
        if self._compiled is not None:
            update = partial(self._compiled, thresholds=thresholds, numbers=self._numbers(rate))
        for here, now, held in self._pieces(gradient):
            if update is not None and len(here) == HOST_PIECE:  # all but the last
                update(self.values[here.start : here.stop], now, *held)
                continue
            means = [code.decode(blocks) for code, blocks in zip(CODES.values(), held, strict=True)]
            mean, square = (each.flatten()[: len(here)] for each in means)
            adamw_step(self.values[here.start : here.stop], now, mean, square, self.settings, self.steps + 1, rate)
            for code, blocks, values in zip(CODES.values(), held, means, strict=True):
                values.view(-1)[len(here) :].zero_()  # the last block may be shorter
                blocks.copy_(code.encode(values, thresholds))

    def _numbers(self, rate: float) -> Tensor:
        """What a step multiplies by, which differs from step to step: as data, or each would be compiled anew."""
        import torch

        mean, square = 1 - self.settings.beta1 ** (self.steps + 1), 1 - self.settings.beta2 ** (self.steps + 1)
        return torch.tensor([rate / mean, square**0.5], device=self.values.device)

    def _update(
        self,
        values: Tensor,
        gradient: Tensor,
        mean_blocks: Tensor,
        square_blocks: Tensor,
        thresholds: Tensor,
        numbers: Tensor,
    ) -> None:
        """As `step`, of whole blocks, in one kernel: nothing but the arguments is read or written."""
        settings, (of_mean, of_square) = self.settings, CODES.values()
        given = gradient.view(-1, BLOCK)
        mean = of_mean.decode(mean_blocks).lerp(given, 1 - settings.beta1)
        square = of_square.decode(square_blocks) * settings.beta2 + given * given * (1 - settings.beta2)
        values.sub_((numbers[0] * mean / (square.sqrt() / numbers[1] + settings.epsilon)).flatten())
        mean_blocks.copy_(of_mean.encode(mean, thresholds))
        square_blocks.copy_(of_square.encode(square, thresholds))

    def read_state(self, name: str, first: int, count: int) -> Tensor:
        start = first % BLOCK
        held = self._held(name, range(first - start, first + count))
        return CODES[name].decode(held).flatten()[start : start + count]

    def write_state(self, name: str, first: int, given: Tensor) -> None:
        from torch.nn.functional import pad

        whole = len(given) % BLOCK == 0 or first + len(given) == len(self.values)
        assert whole and first % BLOCK == 0, "blocks are written whole"
        held = self._held(name, range(first, first + len(given)))
        blocks = pad(given.to(held.device), (0, -len(given) % BLOCK)).view(-1, BLOCK)
        held.copy_(CODES[name].encode(blocks, 0.5))

    def clear_state(self) -> None:
        for name, state in self.state.items():
            state.fill_(CODES[name].zero)

    def _held(self, name: str, here: range) -> Tensor:
        """The blocks of a range that begins with one."""
        return self.state[name][here.start // BLOCK : -(-here.stop // BLOCK)]

    def _pieces(self, gradient: Tensor) -> Iterator[tuple[range, Tensor, list[Tensor]]]:
        """Ranges with their gradient, and the blocks of each state tensor."""
        if self._host is not None:
            yield from self._host.pieces(gradient, self._scale, self._ranges)
            return
        for here in self._ranges:
            yield here, self.on_device(gradient, here), [self._held(name, here) for name in CODES]

    def _thresholds(self) -> Tensor:
        """For each place in a block, evenly spread over the steps."""
        import torch

        places = torch.arange(BLOCK, device=self.values.device, dtype=torch.float64)
        return (places * 2**0.5 + self.steps * GOLDEN).frac_().float()
