"""How many stages paths visit, iteration by iteration, and the plans for that.

A plan that was made for a length is used again whenever its turn comes, as long as nobody comes or goes. Then all of
them are out of date; one whose turn comes is where the search for its successor begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skippipe.plan import Plan
from skippipe.recipe import Recipe


@dataclass
class Lengths:
    recipe: Recipe
    iterations: int
    """Of the whole run, from its very first."""
    now: int
    """That the plan in use was made for; while stages are missing, its paths may be shorter."""
    plans: dict[int, Plan]
    """Length → the last plan for it; the one in use is among them."""
    usual: int = field(init=False)
    """All along, where the recipe says nothing."""
    noted: set[int] = field(init=False, default_factory=set)
    """Lengths whose plans are in the journal as they are."""
    _sound: set[int] = field(init=False)
    """Lengths whose plans are for those who are there."""

    def __post_init__(self) -> None:
        self.usual = self.now
        used = self.plans[self.now]
        self._sound = {
            length for length, plan in self.plans.items() if plan.stages == used.stages and plan.cluster == used.cluster
        }

    def at(self, iteration: int) -> int:
        return self.recipe.visited(iteration, self.iterations, len(self.plans[self.now].stages), self.usual)

    def ready(self, length: int) -> bool:
        """Is there a plan for those who are there?"""
        return length in self._sound

    def add(self, length: int, plan: Plan) -> None:
        self.plans[length] = plan
        self._sound.add(length)

    def renew(self, length: int, plan: Plan) -> None:
        """Somebody came or went: this is in use from now on, and the others are out of date."""
        self.now = length
        self._sound.clear()
        self.noted.clear()
        self.add(length, plan)
