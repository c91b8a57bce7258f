"""Which stages lanes visit, and how many microbatches each carries, so that exposure is even (CC3).

A small integer programme over sets of stages: nodes do not matter here beyond the slots that a stage has for lanes.
With uneven lanes exposure can be even where the memory left after a loss is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from skippipe.jit import Floats, Ints

StageSet = tuple[int, ...]
"""The stages of a path in the order of the model, without stage 0."""

MOST_SETS = 130  # of stages: if there are more, some of them do
FEW_SETS = 40
MILP_LIMIT_S = 0.1  # for one of them; most take a tenth of that, and where it cuts one short the next may do
REMEMBERED = 256
EXISTING_BONUS = 0.5  # a lane that is there already is worth this much more than a new one


@dataclass(frozen=True)
class LaneGroup:
    """Lanes that visit the same stages, with the microbatches that they carry together."""

    visits: StageSet
    lanes: int
    microbatches: int


def visit_sets(stages: Sequence[int], length: int) -> list[StageSet]:
    """The sets of so many stages that lanes may visit."""
    if comb(len(stages), length) <= MOST_SETS:
        return list(combinations(stages, length))
    return _windows(stages, length)


def _windows(stages: Sequence[int], length: int) -> list[StageSet]:
    """Windows on a circle over the stages: all of them together visit each stage equally often."""
    circle = [*stages, *stages]
    return [tuple(sorted(circle[start : start + length])) for start in range(len(stages))]


def even_exposure(
    sets: Sequence[StageSet],
    stages: Sequence[int],
    microbatches: Mapping[int, int],
    capacity: Mapping[int, int],
    existing: Mapping[StageSet, int],
    only_existing: bool = False,
    allow_uneven: bool = True,
) -> list[LaneGroup]:
    """The groups of lanes with the most even exposure; then with short lanes, with many, and with existing ones. Empty:
    infeasible.

    `microbatches` has how many visit sets of which size, mostly all of one; `capacity` is how many lanes a stage can
    take, stage 0 included; `existing` how many lanes of a set exist, and `only_existing` says that there can be no
    others. Without `allow_uneven`, exposures differ by 1 at most.
    """
    most = min(capacity[0], sum(microbatches.values()))  # more slots than that are as good as these
    slots = tuple((stage, min(capacity[stage], most)) for stage in (0, *stages))
    return list(
        _even_exposure(
            tuple(sets),
            tuple(stages),
            tuple(microbatches.items()),
            slots,
            tuple(sorted(existing.items())),
            only_existing,
            allow_uneven,
        )
    )


@lru_cache(maxsize=REMEMBERED)
def _even_exposure(
    sets: tuple[StageSet, ...],
    stages: tuple[int, ...],
    by_size: tuple[tuple[int, int], ...],
    slots: tuple[tuple[int, int], ...],
    lanes: tuple[tuple[StageSet, int], ...],
    only_existing: bool,
    allow_uneven: bool,
) -> list[LaneGroup]:
    """Assignments that are compared with each other mostly leave stages with the same slots."""
    capacity, existing, wanted = dict(slots), dict(lanes), dict(by_size)
    whole = _Milp(sets, stages, wanted, capacity, existing, only_existing)
    candidates = [whole]
    if len(sets) > FEW_SETS:  # a smaller one is solved sooner
        window_sets = {*existing, *(each for size in wanted for each in _windows(stages, size))}
        narrow = [each for each in sets if each in window_sets]
        candidates.insert(0, _Milp(narrow, stages, wanted, capacity, existing, only_existing))
    microbatches, visits = sum(wanted.values()), sum(size * count for size, count in by_size)
    fewest = -(-microbatches // max(1, min(capacity[0], sum(capacity[s] for s in stages) // min(wanted))))
    even = _shortest(candidates, microbatches, fewest, visits // len(stages), -(-visits // len(stages)))
    if even or not allow_uneven:
        return even
    return _shortest(candidates, microbatches, fewest, *_most_even(candidates)) or whole.solve(
        microbatches, 0, microbatches
    )


def _most_even(candidates: Sequence[_Milp]) -> tuple[int, int]:
    return min((each.most_even() for each in candidates), key=lambda bounds: bounds[1] - bounds[0])


def _shortest(
    candidates: Sequence[_Milp], microbatches: int, fewest: int, lowest: int, highest: int
) -> list[LaneGroup]:
    """The solution with exposures in these bounds and no lane longer than needed, or nearly so."""
    longest = fewest
    while True:
        longest = min(longest, microbatches)
        for candidate in candidates:
            found = candidate.solve(longest, lowest, highest)
            if found:
                return found
        if longest == microbatches:
            return []
        longest += 1 if longest < fewest + 2 else longest // 2


class _Milp:
    def __init__(
        self,
        sets: Sequence[StageSet],
        stages: Sequence[int],
        wanted: Mapping[int, int],
        capacity: Mapping[int, int],
        existing: Mapping[StageSet, int],
        only_existing: bool,
    ) -> None:
        self.sets = list(sets)
        self.wanted = wanted
        self.microbatches = microbatches = sum(wanted.values())
        n = len(self.sets)
        self.visiting = np.array([[stage in each for each in self.sets] for stage in stages], dtype=np.float64)
        self.capacity = np.array([capacity[stage] for stage in stages], dtype=np.float64)
        self.lanes = float(min(capacity[0], microbatches))
        self.existing_lanes = np.array([existing.get(each, 0) for each in self.sets], dtype=np.float64)
        # of every set: its microbatches, its lanes, and how many of these are there already
        self.upper = np.concatenate(
            [
                np.full(n, float(microbatches)),
                self.existing_lanes if only_existing else np.full(n, self.lanes),
                self.existing_lanes,
            ]
        )

    def most_even(self) -> tuple[int, int]:
        """The lowest and the highest exposure if only their difference counts."""
        n, stages = len(self.sets), len(self.capacity)
        rows, low, high = self._rows(self.microbatches, 0, self.microbatches)
        exposure = np.hstack([self.visiting, np.zeros((stages, 2 * n))])
        # two more unknowns, the lowest and the highest exposure
        rows = np.hstack([rows, np.zeros((len(rows), 2))])
        above = np.hstack([exposure, np.full((stages, 1), -1.0), np.zeros((stages, 1))])
        below = np.hstack([exposure, np.zeros((stages, 1)), np.full((stages, 1), -1.0)])
        objective = np.zeros(3 * n + 2)
        objective[-2:] = -1, 1
        found = _solution(
            objective,
            np.vstack([rows, above, below]),
            np.concatenate([low, np.zeros(stages), np.full(stages, -np.inf)]),
            np.concatenate([high, np.full(stages, np.inf), np.zeros(stages)]),
            np.concatenate([self.upper, np.full(2, float(self.microbatches))]),
            4 * MILP_LIMIT_S,
        )
        return (0, self.microbatches) if found is None else (int(found[-2]), int(found[-1]))

    def solve(self, longest: int, lowest: int, highest: int) -> list[LaneGroup]:
        """As many lanes as possible, none with more than `longest` microbatches, and exposures in these bounds."""
        n = len(self.sets)
        objective = np.concatenate([np.zeros(n), np.full(n, -1.0), np.full(n, -EXISTING_BONUS)])
        found = _solution(objective, *self._rows(longest, lowest, highest), self.upper)
        if found is None:
            return []
        return [
            LaneGroup(each, lanes, count)
            for each, count, lanes in zip(self.sets, found[:n].tolist(), found[n : 2 * n].tolist(), strict=True)
            if count
        ]

    def _rows(self, longest: int, lowest: int, highest: int) -> tuple[Floats, Floats, Floats]:
        """Constraints: each row times the unknowns lies between two numbers."""
        n, stages = len(self.sets), len(self.capacity)
        one, none = np.eye(n), np.zeros((n, n))
        empty = np.zeros((stages, n))
        of_size = np.array([[len(each) == size for each in self.sets] for size in self.wanted], dtype=np.float64)
        totals = [float(count) for count in self.wanted.values()]
        blocks = [
            (np.hstack([of_size, np.zeros((len(totals), 2 * n))]), totals, totals),
            (np.hstack([np.zeros(n), np.ones(n), np.zeros(n)])[None], [1], [self.lanes]),
            (np.hstack([empty, self.visiting, empty]), np.zeros(stages), self.capacity),
            (np.hstack([self.visiting, empty, empty]), np.full(stages, lowest), np.full(stages, highest)),
            (np.hstack([one, -longest * one, none]), np.full(n, -np.inf), np.zeros(n)),
            (np.hstack([one, -one, none]), np.zeros(n), np.full(n, np.inf)),  # no lane without a microbatch
            (np.hstack([none, one, -one]), np.zeros(n), np.full(n, np.inf)),
        ]
        rows, low, high = (np.concatenate([np.asarray(block[part], float) for block in blocks]) for part in range(3))
        return rows, low, high


def _solution(
    objective: Floats, rows: Floats, low: Floats, high: Floats, upper: Floats, limit_s: float = MILP_LIMIT_S
) -> Ints | None:
    """Whole numbers that satisfy the constraints at the least objective; None if there are none or not in time."""
    outcome = milp(
        objective,
        integrality=np.ones(len(objective), np.int64),
        bounds=Bounds(np.zeros(len(objective)), upper),
        constraints=LinearConstraint(csr_array(rows), low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 0.01},
    )
    return None if outcome.x is None else np.rint(outcome.x).astype(np.int64)
