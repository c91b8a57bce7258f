"""Chunked prefill: how many tokens of prompts a step takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from skippipe.cost_model import ns

FIRST = 64  # tokens of a step, before it is known how fast nodes are
LEAST = 16  # tokens of a step, however slow nodes are
QUICK = 0.25  # share of the deadline within which a step may have been larger

log = logging.getLogger(__name__)


def prompt_tokens(rows: Iterable[Sequence[int]]) -> int:
    """Tokens of prompts in a step, or of what is computed anew; a row with one token goes on with an answer."""
    return sum(len(tokens) for tokens in rows if len(tokens) > 1)


@dataclass
class PrefillLimit:
    """As many tokens as nodes compute and send within a step's deadline: few at first, twice as many after every step
    that was quick. A step that is late is lost, with the KV caches of all answers on its route, and halves it: its
    prompts are computed again in smaller pieces, or they would be late for ever."""

    most: int
    """Tokens of a step at most."""
    deadline: timedelta
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = min(FIRST, self.most)

    def late(self, tokens: int) -> None:
        """A step with so many tokens of prompts has taken longer than its deadline."""
        smaller = max(LEAST, min(self.tokens, tokens) // 2)
        if tokens and smaller < self.tokens:
            self.tokens = smaller
            log.warning(
                "a step with %d tokens of prompts took over %g s: steps take %d at most from now on",
                *(tokens, self.deadline.total_seconds(), smaller),
            )

    def done(self, tokens: int, took_ns: int) -> None:
        """A step with so many tokens of prompts is done."""
        if tokens >= self.tokens and took_ns < QUICK * ns(self.deadline.total_seconds()):
            self.tokens = min(self.most, 2 * self.tokens)
