"""Bridges: what a hop that leaves stages out does in their place.

A stage holds one for each later stage that a hop may lead to past others, and one for the head. It adds to what passes
a small map of its own: a gain for every channel, and a matrix of low rank,

    h + gain · n + up(down(n)),  n = h / rms(h)

Gain and `up` are zero at the start, so an untrained bridge changes nothing. Both are linear in n: what layers add on
average is close to that, and it costs a few thousandths of a stage's work.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-6  # added to the mean square; what torch adds by itself depends on the precision and is large in bfloat16


class Bridges(nn.Module):
    """All that begin at one stage."""

    def __init__(self, stage: int, stages: int, width: int, rank: int, seed: int) -> None:
        """Of `stages` in all, which is also the number that the head goes by; `width` channels."""
        super().__init__()
        targets = torch.arange(stage + 2, stages + 1)
        self.targets: Tensor
        self.register_buffer("targets", targets, persistent=False)
        count = len(targets)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + stage)
        self.down = nn.Parameter(torch.randn(count, width * rank, generator=generator) / sqrt(width))
        self.up = nn.Parameter(torch.zeros(count, rank * width))
        self.gain = nn.Parameter(torch.zeros(count * width))  # flat, as what is no matrix does not decay
        self.width = width

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """`hidden` is [samples, sequence, width]; `targets` says where each sample goes next, and those that go to the
        next stage pass unchanged.

        Which bridge is whose is data, not shape: all samples go through one product of matrices, with their own ones.
        """
        chosen = (targets[:, None] == self.targets).to(self.down.dtype)
        samples = len(hidden)
        down = (chosen @ self.down).view(samples, self.width, -1)
        up = (chosen @ self.up).view(samples, -1, self.width)
        gain = (chosen @ self.gain.view(-1, self.width)).unsqueeze(1)
        normed = functional.rms_norm(hidden, (self.width,), eps=EPSILON)
        return (hidden + (normed @ down @ up + normed * gain)).to(hidden.dtype)


def bridges_of(stages: int, width: int, rank: int, seed: int) -> list[Bridges]:
    """Of every stage but the last, which has nothing to leave out after it; none at all with rank 0."""
    return [Bridges(stage, stages, width, rank, seed) for stage in range(stages - 1)] if rank else []
