"""Settings of the optimizer: which one, its learning rate over the run, and clipping by the whole model's norm.

The rate rises in a warm-up, is held, and follows a cosine down to its floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from skippipe.errors import UserError
from skippipe.optim import DEFAULT, OPTIMIZERS
from skippipe.value_ranges import BELOW_ONE, ITERATIONS_OR_NONE, SHARE, Choices, Range, check_ranges


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer, `[learning]` in a job. A field that it has no use for must be left out."""

    optimizer: Annotated[str, Choices(OPTIMIZERS)] = DEFAULT
    """What takes the step: AdamW; the same with its state in 8 bits; Muon for matrices, AdamW for the rest; or gradient
    descent with momentum. The last three hold less state."""
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
    """Decay of the running mean of gradients; the momentum of sgd."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Decay of the running mean of their squares."""
    epsilon: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """Added to the root of that mean."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.1
    """Weight decay of matrices; norms and biases do not decay."""
    clip: Annotated[float, Range(0, 10**9)] = 1.0
    """Largest norm of the whole model's gradient; 0: not clipped."""

    def __post_init__(self) -> None:
        check_ranges(self, "learning")
        for name in OPTIMIZERS[self.optimizer].unused:
            if getattr(self, name) != getattr(OptimConfig, name):
                raise UserError(
                    f"learning.{name}: learning.optimizer '{self.optimizer}' has no use for it; leave it out"
                )
        if 0 < self.iterations <= self.warmup:
            raise UserError(
                f"learning.warmup: {self.warmup} iterations of warm-up leave none of {self.iterations} to decay; "
                "make it smaller"
            )

    def to_json(self) -> dict[str, Any]:
        """The fields; the default optimizer is left out, so that a study's results keep their keys."""
        return {name: value for name, value in vars(self).items() if (name, value) != ("optimizer", DEFAULT)}

    def rate_at(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        assert self.iterations > 0, "the length of the schedule was left open"
        if iteration < self.warmup:
            return self.rate * (iteration + 1) / (self.warmup + 1)
        progress = min(1.0, (iteration - self.warmup) / (self.iterations - self.warmup))
        progress = max(0.0, progress - self.hold) / (1 - self.hold)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def clipping(self, squared_norms: Iterable[float]) -> tuple[float, float]:
        """From the squared norms of the stages' gradients: the norm of the model's, and the factor that clips it."""
        norm = math.sqrt(math.fsum(squared_norms))
        if self.clip == 0 or not math.isfinite(norm):
            return norm, 1.0
        return norm, min(1.0, self.clip / (norm + 1e-6))
