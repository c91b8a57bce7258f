"""Which stages a model can do without: each alone, one after another, and the best choice of so many.

Stage 0 has the embedding and the head, and always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from skippipe.parts import Visits

Losses = Callable[[Sequence[Visits]], Sequence[float]]
"""What these parts lose."""


class Drop(NamedTuple):
    stage: int
    left: Visits
    """What is there without it."""


def all_parts(total: int) -> list[Visits]:
    """Everything that keeps stage 0 and the order, the largest first."""
    return [(0, *others) for kept in range(total - 1, -1, -1) for others in combinations(range(1, total), kept)]


def without_one(stages: Visits) -> list[Drop]:
    return [Drop(stage, tuple(other for other in stages if other != stage)) for stage in stages[1:]]


def dropping_order(total: int, losses: Losses) -> Iterator[Drop]:
    """Greedily: always the one without which the rest loses least, until stage 0 is alone."""
    left = tuple(range(total))
    while len(left) > 1:
        drops = without_one(left)
        found = losses([drop.left for drop in drops])
        best = min(range(len(drops)), key=found.__getitem__)
        left = drops[best].left
        yield drops[best]


def best_of_every_size(losses: Mapping[Visits, float]) -> dict[int, Visits]:
    """Of these parts."""
    sizes = sorted({len(stages) for stages in losses}, reverse=True)
    return {size: min((each for each in losses if len(each) == size), key=losses.__getitem__) for size in sizes}
