"""What a node that serves asks its computer to do, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skippipe.inference.sampling import Sampling


@dataclass(frozen=True)
class FedRow:
    slot: int
    start: int
    """Tokens of the slot that this stage has seen before."""
    count: int
    """New ones."""


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
    how: tuple[Sampling, ...]
    given: Any


@dataclass(frozen=True)
class Forget:
    """A lane is closed: its caches go."""

    lane: int


@dataclass(frozen=True)
class Unable:
    """What becomes of a work that cannot be done."""

    reason: str
    given: bool
    """Is it because of what was given, and so of whoever sent it?"""


ServingWork = Pass | Choose | Forget
