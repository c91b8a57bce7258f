"""How weights follow gradients: AdamW, clipped by the norm of the whole model's gradient.

The rate rises in a warm-up, is held, and follows a cosine down to its floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from skippipe.errors import UserError
from skippipe.value_ranges import BELOW_ONE, ITERATIONS_OR_NONE, SHARE, Range, check_ranges


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer."""

    rate: Annotated[float, Range(0, 100, above=True)] = 3e-4
    """The highest learning rate, reached after the warm-up."""
    warmup: Annotated[int, Range(0, ITERATIONS_OR_NONE.most - 1)] = 20
    """Iterations over which the rate rises from 0."""
    iterations: Annotated[int, ITERATIONS_OR_NONE] = 0
    """Iterations until the cosine has brought the rate down to its floor; 0: as long as the run is."""
    hold: Annotated[float, BELOW_ONE] = 0.6
    """Share of what follows the warm-up for which the rate stays at its highest before the cosine brings it down."""
    floor: Annotated[float, SHARE] = 0.1
    """Share of the rate that is left in the end."""
    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Of the mean of gradients."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Of the mean of their squares."""
    epsilon: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """Added to the root of the latter."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.1
    """Of matrices; norms and biases do not decay."""
    clip: Annotated[float, Range(0, 10**9)] = 1.0
    """Largest norm of the whole model's gradient; 0: not clipped."""

    def __post_init__(self) -> None:
        check_ranges(self, "learning")
        if 0 < self.iterations <= self.warmup:
            raise UserError(
                f"learning.warmup: {self.warmup} iterations of warm-up leave none of {self.iterations} to decay; "
                "make it smaller"
            )

    def rate_at(self, iteration: int) -> float:
        """`iteration` counts from 0."""
        assert self.iterations > 0, "how long it is was left open"
        if iteration < self.warmup:
            return self.rate * (iteration + 1) / (self.warmup + 1)
        progress = min(1.0, (iteration - self.warmup) / (self.iterations - self.warmup))
        progress = max(0.0, progress - self.hold) / (1 - self.hold)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def clipping(self, squared_norms: Iterable[float]) -> tuple[float, float]:
        """From the squared norms of the stages' gradients: the norm of the whole, and what to multiply it by."""
        norm = math.sqrt(math.fsum(squared_norms))
        if self.clip == 0 or not math.isfinite(norm):
            return norm, 1.0
        return norm, min(1.0, self.clip / (norm + 1e-6))
