"""What is asked of the planner: by which strategy, with which budget and options."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from skippipe.plan import Plan
from skippipe.planner.problem import Placement


class Strategy(StrEnum):
    BEST = "best"
    SKIPPIPE = "skippipe"
    NO_TC2 = "no-tc2"
    DTFM_SKIP = "dtfm-skip"
    DTFM = "dtfm"


PlanProgress = Callable[[str, float, float | None], None]
"""Called with what is being done, which share of it is done, and the best iteration so far, in seconds."""


@dataclass(frozen=True)
class PlanRequest:
    """Budget and options of one planning run. Steps are counted, so the same seed gives the same plan; seconds only cut
    the search short."""

    seed: int = 0
    budget_s: float = 60.0
    placement: Placement | None = None
    """Keep these nodes on these stages, and search paths only; None: search both."""
    progress: PlanProgress = lambda what, share, best_s: None
    clock: Callable[[], float] = time.monotonic
    stopped: Callable[[], bool] = lambda: False
    """Called between steps; once it returns True, the best plan so far is the result."""
    changes: float = math.inf
    """Changes that `best` may try: a limit like seconds, but one that can be repeated exactly."""
    bound_s: float = 0.0
    """Seconds for a proven lower bound, once there is a plan; 0: no bound."""
    start: Plan | None = None
    """The plan that `best` begins with; None: one that it makes in a moment."""
    robust: float = 0.0
    """Jitter under which `best` chooses its plan, by the 95th percentile; 0: by the promised iteration."""


def iteration_ns(plan: Plan) -> int:
    assert plan.expected is not None
    return plan.expected.iteration_ns
