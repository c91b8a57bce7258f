"""Held-out loss: which samples go along which paths between two iterations, and what has come back.

An evaluation is the coordinator's own wish: training does not need it. So if a node or a link that it uses is lost, it
is given up, training goes on as if it had not begun, and the next commit tries again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, ValidationReport
from skippipe.runtime.coordinator.settings import ValidationSettings
from skippipe.runtime.messages import Validate, Validated
from skippipe.whole_paths import Start, whole_paths


@dataclass
class Validation:
    settings: ValidationSettings
    env: CoordinatorEnv | None = None
    """None in one process, where no order is given."""
    first_iteration: int = 0
    order: Validate | None = None
    """The evaluation that is under way."""
    best: float = field(init=False)
    """The lowest loss so far."""
    _without_gain: int = field(init=False, default=0)
    """Evaluations since then."""
    _losses: dict[int, tuple[float, int]] = field(init=False, default_factory=dict)
    """Microbatch → its loss, and the tokens that this is the mean of."""
    _owed: bool = field(init=False, default=False)
    """The last evaluation was given up."""
    _iteration: int = field(init=False, default=-1)
    """The last iteration whose weights were to be evaluated, and the last that were."""
    _done: int = field(init=False, default=-1)
    _began_ns: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        at, self.best = self.settings.best or (self.first_iteration, math.inf)
        if self.settings.every:
            self._without_gain = max(0, self.first_iteration - at) // self.settings.every

    def is_due(self, iterations: int, *, last: bool) -> bool:
        """Are the weights after so many iterations to be evaluated?"""
        every = self.settings.every
        return every > 0 and self._done != iterations - 1 and (self._owed or last or iterations % every == 0)

    def begin(self, iteration: int, epoch: int, plan: Plan, active: Collection[int]) -> bool:
        """Send the order to all nodes of the paths; whether there are paths."""
        assert self.env is not None
        self._owed, self._iteration = True, iteration
        paths = evaluation_paths(plan, active)
        if not paths:
            return False
        self.order = Validate(iteration, epoch, self.settings.microbatches, [list(path) for path in paths])
        self._losses, self._began_ns = {}, self.env.now_ns()
        for node in sorted({node for path in paths for node in path}):
            self.env.send(node, self.order)
        return True

    def on_message(self, node: int, control: Validated) -> bool:
        """Whether this was the last loss that was missing."""
        order = self.order
        if order is None or (control.iteration, control.epoch) != (order.iteration, order.epoch):
            return False
        known = control.microbatch < order.microbatches
        if known and order.paths[control.microbatch % len(order.paths)][0] == node:
            self._losses[control.microbatch] = control.loss, control.tokens
        return len(self._losses) == order.microbatches

    @property
    def awaited(self) -> list[int]:
        """Data nodes whose losses are missing."""
        if self.order is None:
            return []
        paths, count = self.order.paths, self.order.microbatches
        return sorted({paths[each % len(paths)][0] for each in range(count) if each not in self._losses})

    def uses(self, a: int, b: int) -> bool:
        """Does it need the link between two nodes?"""
        paths = self.order.paths if self.order else []
        return any({a, b} == set(link) for path in paths for link in circle(path))

    def finish(self) -> ValidationReport:
        """All losses are there: their mean."""
        assert self.env is not None
        tokens = sum(count for _, count in self._losses.values())
        summed = sum(loss * count for _, (loss, count) in sorted(self._losses.items()) if count)  # fsum may raise
        self.order = None
        seconds = (self.env.now_ns() - self._began_ns) / 1e9
        return self.add(self._iteration, summed / tokens if tokens else math.nan, seconds)

    def add(self, iteration: int, loss: float, seconds: float) -> ValidationReport:
        """The held-out loss after an iteration."""
        is_best = loss < self.best
        self.best = loss if is_best else self.best
        self._without_gain = 0 if is_best else self._without_gain + 1
        self._done, self._owed = iteration, False
        return ValidationReport(iteration, loss, is_best, seconds)

    def give_up(self) -> int:
        """The iteration whose weights were to be evaluated, and are not."""
        self.order = None
        return self._iteration

    @property
    def is_hopeless(self) -> bool:
        """Has the loss not become lower for so long that the run is to end?"""
        return 0 < self.settings.patience <= self._without_gain


def evaluation_paths(plan: Plan, active: Collection[int]) -> list[tuple[int, ...]]:
    """Paths through every stage in its order, as many as the largest stage has nodes, so that all nodes can compute.
    Empty: there is none."""
    stages = [[node for node in stage.nodes if node in active] for stage in plan.stages]
    if not all(stages):
        return []
    starts = [Start(stages[0][number % len(stages[0])]) for number in range(max(map(len, stages)))]
    return [path for path in whole_paths(plan, starts, stages) if path is not None]
