"""Which stages lanes visit, and how many microbatches each carries, so that every stage gets its share (CC3).

A small integer programme over sets of stages: nodes do not matter here beyond the memory that a stage has for lanes.
With uneven lanes the shares can be even where the memory left after a loss is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Visits = tuple[int, ...]
"""The stages of a path in the order of the model, without stage 0."""

MOST_SETS = 130  # of stages: if there are more, some of them do
FEW_SETS = 40
PROGRAMME_S = 0.1  # for one of them; most take a tenth of that, and where it cuts one short the next may do
KEPT = 0.5  # a lane that is there already is worth this much more than a new one


@dataclass(frozen=True)
class LaneGroup:
    """Lanes that visit the same stages, and the microbatches that they carry together."""

    visits: Visits
    lanes: int
    microbatches: int


def visit_sets(stages: Sequence[int], length: int) -> list[Visits]:
    """The sets of so many stages that lanes may visit."""
    if comb(len(stages), length) <= MOST_SETS:
        return list(combinations(stages, length))
    return _pieces(stages, length)


def _pieces(stages: Sequence[int], length: int) -> list[Visits]:
    """Of a circle over the stages: all of them together visit each stage equally often."""
    circle = [*stages, *stages]
    return [tuple(sorted(circle[start : start + length])) for start in range(len(stages))]


def even_exposure(
    sets: Sequence[Visits],
    stages: Sequence[int],
    microbatches: int,
    room: Mapping[int, int],
    there: Mapping[Visits, int],
    only_there: bool = False,
    or_uneven: bool = True,
) -> list[LaneGroup]:
    """As even as can be; then with short lanes, with many, and with those that are there. Empty: nothing fits.

    `room` is how many lanes a stage can take, stage 0 included; `there` how many lanes of a set exist, and
    `only_there` says that there can be no others. Without `or_uneven`, exposures differ by 1 at most.
    """
    length = max(map(len, sets))
    whole = _Programme(sets, stages, microbatches, room, there, only_there)
    programmes = [whole]
    if len(sets) > FEW_SETS:  # a smaller one is solved sooner
        few = {*_pieces(stages, length), *there}
        narrow = [each for each in sets if each in few]
        programmes.insert(0, _Programme(narrow, stages, microbatches, room, there, only_there))
    visits = microbatches * length
    fewest = -(-microbatches // max(1, min(room[0], sum(room[s] for s in stages) // length)))
    even = _shortest(programmes, microbatches, fewest, visits // len(stages), -(-visits // len(stages)))
    if even or not or_uneven:
        return even
    return _shortest(programmes, microbatches, fewest, *_evenest(programmes)) or whole.solved(
        microbatches, 0, microbatches
    )


def _evenest(programmes: Sequence[_Programme]) -> tuple[int, int]:
    return min((each.evenest() for each in programmes), key=lambda bounds: bounds[1] - bounds[0])


def _shortest(
    programmes: Sequence[_Programme], microbatches: int, fewest: int, lowest: int, highest: int
) -> list[LaneGroup]:
    """With exposures in these bounds and no lane longer than need be, or nearly so."""
    longest = fewest
    while True:
        longest = min(longest, microbatches)
        for programme in programmes:
            found = programme.solved(longest, lowest, highest)
            if found:
                return found
        if longest == microbatches:
            return []
        longest += 1 if longest < fewest + 2 else longest // 2


class _Programme:
    def __init__(
        self,
        sets: Sequence[Visits],
        stages: Sequence[int],
        microbatches: int,
        room: Mapping[int, int],
        there: Mapping[Visits, int],
        only_there: bool,
    ) -> None:
        self.sets = list(sets)
        self.microbatches = microbatches
        n = len(self.sets)
        self.visiting = np.array([[stage in each for each in self.sets] for stage in stages], dtype=np.float64)
        self.room = np.array([room[stage] for stage in stages], dtype=np.float64)
        self.lanes = float(min(room[0], microbatches))
        self.kept = np.array([there.get(each, 0) for each in self.sets], dtype=np.float64)
        # of every set: its microbatches, its lanes, and how many of these are there already
        self.most = np.concatenate(
            [np.full(n, float(microbatches)), self.kept if only_there else np.full(n, self.lanes), self.kept]
        )

    def evenest(self) -> tuple[int, int]:
        """The lowest and the highest exposure if only their difference counts."""
        n, stages = len(self.sets), len(self.room)
        rows, low, high = self._rows(self.microbatches, 0, self.microbatches)
        exposure = np.hstack([self.visiting, np.zeros((stages, 2 * n))])
        # two more unknowns, the lowest and the highest exposure
        rows = np.hstack([rows, np.zeros((len(rows), 2))])
        above = np.hstack([exposure, np.full((stages, 1), -1.0), np.zeros((stages, 1))])
        below = np.hstack([exposure, np.zeros((stages, 1)), np.full((stages, 1), -1.0)])
        wish = np.zeros(3 * n + 2)
        wish[-2:] = -1, 1
        found = _solution(
            wish,
            np.vstack([rows, above, below]),
            np.concatenate([low, np.zeros(stages), np.full(stages, -np.inf)]),
            np.concatenate([high, np.full(stages, np.inf), np.zeros(stages)]),
            np.concatenate([self.most, np.full(2, float(self.microbatches))]),
            4 * PROGRAMME_S,
        )
        return (0, self.microbatches) if found is None else (int(found[-2]), int(found[-1]))

    def solved(self, longest: int, lowest: int, highest: int) -> list[LaneGroup]:
        """Many lanes, none with more than `longest` microbatches, and exposures in these bounds."""
        n = len(self.sets)
        wish = np.concatenate([np.zeros(n), np.full(n, -1.0), np.full(n, -KEPT)])
        found = _solution(wish, *self._rows(longest, lowest, highest), self.most)
        if found is None:
            return []
        return [
            LaneGroup(each, lanes, count)
            for each, count, lanes in zip(self.sets, found[:n].tolist(), found[n : 2 * n].tolist(), strict=True)
            if count
        ]

    def _rows(
        self, longest: int, lowest: int, highest: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The demands: each row times the unknowns lies between two numbers."""
        n, stages = len(self.sets), len(self.room)
        one, none = np.eye(n), np.zeros((n, n))
        empty = np.zeros((stages, n))
        blocks = [
            (np.hstack([np.ones(n), np.zeros(2 * n)])[None], [self.microbatches], [self.microbatches]),
            (np.hstack([np.zeros(n), np.ones(n), np.zeros(n)])[None], [1], [self.lanes]),
            (np.hstack([empty, self.visiting, empty]), np.zeros(stages), self.room),
            (np.hstack([self.visiting, empty, empty]), np.full(stages, lowest), np.full(stages, highest)),
            (np.hstack([one, -longest * one, none]), np.full(n, -np.inf), np.zeros(n)),
            (np.hstack([one, -one, none]), np.zeros(n), np.full(n, np.inf)),  # no lane without a microbatch
            (np.hstack([none, one, -one]), np.zeros(n), np.full(n, np.inf)),
        ]
        rows, low, high = (np.concatenate([np.asarray(block[part], float) for block in blocks]) for part in range(3))
        return rows, low, high


def _solution(
    wish: NDArray[np.float64],
    rows: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    most: NDArray[np.float64],
    limit_s: float = PROGRAMME_S,
) -> NDArray[np.int64] | None:
    """Whole numbers that meet the demands at the least `wish`; None if there are none or not in time."""
    outcome = milp(
        wish,
        integrality=np.ones(len(wish), np.int64),
        bounds=Bounds(np.zeros(len(wish)), most),
        constraints=LinearConstraint(csr_array(rows), low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 0.01},
    )
    return None if outcome.x is None else np.rint(outcome.x).astype(np.int64)
