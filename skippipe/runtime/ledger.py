"""The book of an iteration: which microbatch is back, with what loss, and whose gradient it is part of, stage by stage.

A microbatch counts for a stage at most once. What a lost node had added up is lost with it: the microbatch then counts
for fewer stages, as if it had skipped that one, and the mean is over those that are in the book.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skippipe.plan import Plan
from skippipe.runtime.routes import Route


@dataclass
class Ledger:
    returned: dict[int, int] = field(default_factory=dict)
    """Lane → microbatches that are back; they come back in order."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Lane and microbatch → its loss, NaN if nobody is left who knew it."""
    contributed: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """Node → lane and microbatch of what it has added up."""

    def back(self, lane: int, microbatch: int, loss: float) -> None:
        """One is back, and so are those before it on its lane, though word of them may be lost. That it is back again,
        because nobody knew, changes nothing but that its loss may be known."""
        self.returned[lane] = max(microbatch + 1, self.returned.get(lane, 0))
        if math.isnan(self.losses.get((lane, microbatch), math.nan)):
            self.losses[lane, microbatch] = loss

    def all_back(self, routes: Sequence[Route]) -> bool:
        return all(self.returned.get(lane, 0) == route.microbatches for lane, route in enumerate(routes))

    def flaw(self, plan: Plan, node: int, visits: Iterable[Sequence[int]]) -> str:
        """What cannot be true of a node's account; empty if nothing."""
        rows = [tuple(row) for row in visits]
        if not all(
            len(row) == 2 and row[0] < len(plan.lanes) and row[1] < plan.lanes[row[0]].microbatches for row in rows
        ):
            return "counts microbatches that are not in the plan"
        if len(set(rows)) < len(rows):
            return "counts a microbatch twice"
        stage = plan.stage_of[node]
        for other, theirs in self.contributed.items():
            if other != node and plan.stage_of.get(other) == stage and theirs & set(rows):
                return f"counts a microbatch that node '{plan.cluster.nodes[other].name}' counts too"
        return ""

    def account(self, node: int, visits: Iterable[Sequence[int]]) -> None:
        self.contributed[node] = frozenset((lane, microbatch) for lane, microbatch in visits)

    def visits(self, plan: Plan) -> list[int]:
        """How many microbatches are in the gradient of each stage."""
        return [sum(len(self.contributed.get(node, ())) for node in stage.nodes) for stage in plan.stages]

    def loss(self) -> float:
        """Mean over the microbatches whose loss is known."""
        known = [loss for _, loss in sorted(self.losses.items()) if not math.isnan(loss)]
        return sum(known) / len(known) if known else math.nan
