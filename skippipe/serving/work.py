"""What a node that serves asks its computer to do, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FedRow:
    slot: int
    start: int
    """Tokens of the slot that this stage has seen before."""
    count: int
    """New ones."""


@dataclass(frozen=True)
class Chance:
    """How to choose the next token of a row (see `streams.Sampling`)."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class Pass:
    """New tokens of several streams through this stage: their ids on stage 0, else what the stage before made of them,
    [tokens of all rows, hidden]."""

    lane: int
    rows: tuple[FedRow, ...]
    freed: tuple[int, ...]
    """Slots to empty first."""
    given: Any


@dataclass(frozen=True)
class Choose:
    """The next token of every row, from what the last stage made of its new ones."""

    rows: tuple[FedRow, ...]
    chances: tuple[Chance, ...]
    given: Any


@dataclass(frozen=True)
class Forget:
    """A lane is closed: its caches go."""

    lane: int


ServingWork = Pass | Choose | Forget
