"""Which stages every microbatch visits, drawn by the rules; and which microbatches go through a stage together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from skippipe.skip_schedule import SkipSchedule, donors, young_stages
from skippipe.stage_subset import Visits
from skippipe.study.config import HopCodecs, Rule, StudyRun

ORDERS = 8  # in which stages come with CC2 broken, one for all microbatches of an iteration
UNEVEN = 4.0  # with CC3 broken, the most visited stage is visited so many times as often as the least

ALL_OF_IT = HopCodecs()  # hops that round nothing


@dataclass(frozen=True)
class StudyStep:
    """Microbatches that pass a stage together."""

    stage: int
    visitors: int
    drives: tuple[tuple[float, int], ...]
    """Factors of the stage's residual contribution, each with the number of visitors that it is for, in their order."""


@dataclass(frozen=True)
class StudyShape:
    """The paths of microbatches as far as kernels depend on them."""

    microbatches: int
    steps: tuple[StudyStep, ...]
    skipping: int = 0
    """Microbatches that skip stages: they go over bridges, with adapters, and have the whole model as a teacher."""
    healing: bool = False
    """Only bridges and adapters are trained."""
    hops: HopCodecs = ALL_OF_IT
    """What is rounded on hops."""

    @property
    def counts(self) -> Counter[int]:
        """Stage → visitors."""
        counts: Counter[int] = Counter()
        for step in self.steps:
            counts[step.stage] += step.visitors
        return counts

    @classmethod
    def merged(cls, shapes: Sequence[StudyShape]) -> StudyShape:
        """That of all their microbatches."""
        return cls(
            sum(each.microbatches for each in shapes),
            tuple(step for each in shapes for step in each.steps),
            sum(each.skipping for each in shapes),
            shapes[0].healing,
            shapes[0].hops,
        )


@dataclass(frozen=True)
class IterationPaths:
    """The paths of an iteration, and the stages that the model has in it."""

    there: Visits
    """The stages that the model has."""
    born: dict[int, int]
    """Stages that are new since the iteration before → the stages that they are copies of."""
    visits: list[Visits]
    """Stages on the path of each microbatch; of all again for every further pass."""


def iteration_paths(run: StudyRun) -> Iterator[IterationPaths]:
    """The paths of all iterations of a run."""
    recipe, stages, microbatches = run.variant.recipe, run.variant.stages, run.study.batch.microbatches
    generator = default_rng([run.seed, 1])
    whole: Visits = tuple(range(stages))
    there = whole
    for number in range(run.iterations):
        parts, passes = run.steps(number)
        parts *= run.variant.traffic.replicas
        lengths = run.path_lengths(number, parts)
        young = recipe.is_young(number, run.iterations)
        before, there = there, young_stages(stages, lengths[0]) if young else whole
        grows = number > 0 and len(there) > len(before)
        born = {new: before[old] for new, old in donors(len(there), len(before)).items()} if grows else {}
        if young:
            yield IterationPaths(there, born, [there] * microbatches)
        else:
            steps = [
                sample_paths_of_lengths(generator, lengths, stages, recipe, run.variant.breaks)
                for _ in range(parts * passes)
            ]
            yield IterationPaths(whole, born, [visits for step in steps for visits in step])


def sample_paths_of_lengths(
    generator: Generator, lengths: Sequence[int], stages: int, recipe: SkipSchedule, breaks: Rule = ""
) -> list[Visits]:
    """Paths of these lengths, in this order; those of each length keep CC3 among themselves."""
    return [
        visits
        for length, group in groupby(lengths)
        for visits in sample_paths(generator, len(list(group)), stages, length, recipe, breaks)
    ]


def sample_paths(
    generator: Generator, microbatches: int, stages: int, visited: int, recipe: SkipSchedule, breaks: Rule = ""
) -> list[Visits]:
    """The stages of each microbatch in the order in which it visits them."""
    first = 0 if breaks == "CC1" else 1
    others = np.arange(first, stages)
    weights = np.ones(len(others))
    if breaks == "CC3":
        weights = np.geomspace(1, UNEVEN, len(others))
    elif recipe.exposure is not None and first == 1:
        weights = np.array(recipe.exposure)
    wanted = visited - first
    shares = visit_counts(generator, weights, microbatches, wanted)
    rows = [sorted(int(others[at]) for at in row) for row in _deal_stages(generator, shares, microbatches, wanted)]
    if breaks == "CC2":
        place = default_rng(generator.integers(ORDERS)).permutation(stages)
        rows = [sorted(row, key=lambda stage: place[stage]) for row in rows]
    elif recipe.swaps:
        _swap(generator, rows, recipe.swaps, first)
    return [tuple(row) if first == 0 else (0, *row) for row in rows]


def visit_counts(generator: Generator, weights: NDArray[np.float64], microbatches: int, visited: int) -> list[int]:
    """How many microbatches visit each stage, in proportion to the weights; none visits a stage twice.

    Where that does not come out even, chance decides which stages get one more, so that it does over many iterations.
    """
    total = microbatches * visited
    exact = np.zeros(len(weights))
    free = np.ones(len(weights), dtype=bool)
    while True:  # a stage that all microbatches visit leaves its surplus to the others
        left = total - microbatches * int((~free).sum())
        exact = np.where(free, left * weights / max(weights[free].sum(), 1e-12), microbatches)
        over = free & (exact > microbatches)
        if not over.any():
            break
        free &= ~over
    counts = [floor(each) for each in exact]
    by_rest = sorted(generator.permutation(len(counts)), key=lambda at: round(float(counts[at] - exact[at]), 9))
    for at in by_rest[: total - sum(counts)]:
        counts[at] += 1
    return counts


def _deal_stages(generator: Generator, shares: Sequence[int], microbatches: int, visited: int) -> list[list[int]]:
    """`visited` different stages for each microbatch, so that every stage is dealt out as often as its share."""
    left = np.array(shares, dtype=np.float64)
    rows = []
    for rest in range(microbatches, 0, -1):
        must = left >= rest  # or the microbatches that are left could not use it up
        free = visited - int(must.sum())
        row = list(np.flatnonzero(must))
        if free:
            rank = generator.random(len(left)) ** (1 / np.where(left > 0, left, 1e-9))  # the heavier, the likelier
            rank[must | (left <= 0)] = -1
            row += list(np.argsort(-rank)[:free])
        left[row] -= 1
        rows.append([int(at) for at in row])
    order = generator.permutation(microbatches)
    return [rows[at] for at in order]


def _swap(generator: Generator, rows: list[list[int]], share: float, first: int) -> None:
    """Swap two neighbours, in that share of the microbatches, or in all that have any if these are fewer."""
    left = round(share * len(rows))
    for at in generator.permutation(len(rows)):
        row = rows[at]
        pairs = [place for place in range(len(row) - 1) if row[place] + 1 == row[place + 1] and row[place] >= first]
        if pairs and left:
            place = int(generator.choice(pairs))
            row[place], row[place + 1] = row[place + 1], row[place]
            left -= 1


def group_by_stage(visits: Sequence[Visits]) -> list[tuple[int, list[int]]]:
    """(stage, microbatches) one after another, so that every microbatch visits its stages in its own order.

    Next comes the lowest stage that no microbatch has yet to reach by way of another, if any. So, without swaps or
    with one order for all, every stage comes once.
    """
    left = {row: list(each) for row, each in enumerate(visits) if each}
    steps: list[tuple[int, list[int]]] = []
    while left:
        waiting = Counter(each[0] for each in left.values())
        to_come = Counter(stage for each in left.values() for stage in each)
        stage = min(waiting, key=lambda stage: (to_come[stage] > waiting[stage], stage))
        rows = [row for row, each in left.items() if each[0] == stage]
        steps.append((stage, rows))
        for row in rows:
            left[row].pop(0)
            if not left[row]:
                del left[row]
    return steps
