"""How long paths are over a run, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skippipe.plan import Plan


@dataclass(frozen=True)
class Leg:
    """The iterations whose paths visit the same number of stages."""

    length: int
    iterations: int
    each_s: float
    """Promised."""

    @property
    def whole_s(self) -> float:
        return self.iterations * self.each_s


def timetable(lengths: Mapping[int, int], plans: Mapping[int, Plan]) -> list[Leg]:
    """Shortest paths first. Both are by length: how many iterations have such paths, and the plan for them."""
    promised = {length: plan.expected.iteration_s if plan.expected else 0.0 for length, plan in plans.items()}
    return [Leg(length, count, promised[length]) for length, count in sorted(lengths.items())]


def in_words(legs: Sequence[Leg], stages: int) -> str:
    parts = [
        f"{leg.iterations:,} iterations through {leg.length} of {stages} stages at {leg.each_s:.2f} s" for leg in legs
    ]
    return f"{', '.join(parts)}: {sum(leg.whole_s for leg in legs):,.1f} s promised in all"
