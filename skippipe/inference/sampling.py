"""How the next token is to be chosen; `choosing` does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe.errors import UserError


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Only from so many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Then only from the fewest likely ones that together have this share."""
    seed: int = 0
    """With the place of a token it says what chance says, so that any node gives the same answer."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: 0 (always the likeliest token) or a number above it")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: a number of tokens, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: a share above 0, 1 at most")
