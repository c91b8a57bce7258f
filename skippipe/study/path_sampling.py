"""Which stages every microbatch visits, drawn by the rules; and who goes through a stage together."""

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
from skippipe.study.config import Rule, StudyRun

ORDERS = 8  # in which stages come with CC2 broken, one for all microbatches of an iteration
UNEVEN = 4.0  # with CC3 broken, the most visited stage is visited so many times as often as the least


@dataclass(frozen=True)
class Turn:
    """An iteration, as far as paths go."""

    there: Visits
    """The stages that the model has."""
    born: dict[int, int]
    """Stages that are new since the iteration before, and whose copies they are."""
    visits: list[Visits]
    """Of each microbatch."""


def turns(run: StudyRun) -> Iterator[Turn]:
    """All iterations of a run."""
    recipe, stages, microbatches = run.variant.recipe, run.variant.stages, run.study.batch.microbatches
    generator = default_rng([run.seed, 1])
    whole = there = tuple(range(stages))
    for number in range(run.iterations):
        lengths = run.path_lengths(number)
        if recipe.is_young(number, run.iterations):
            there = young_stages(stages, lengths[0])
            yield Turn(there, {}, [there] * microbatches)
        else:
            born = donors(stages, len(there)) if there != whole else {}
            there = whole
            yield Turn(whole, born, drawn_for(generator, lengths, stages, recipe, run.variant.breaks))


def drawn_for(
    generator: Generator, lengths: Sequence[int], stages: int, recipe: SkipSchedule, breaks: Rule = ""
) -> list[Visits]:
    """Paths of these lengths, in this order; those of each length keep CC3 among themselves."""
    return [
        visits
        for length, group in groupby(lengths)
        for visits in drawn(generator, len(list(group)), stages, length, recipe, breaks)
    ]


def drawn(
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
    shares = shares_of(generator, weights, microbatches, wanted)
    rows = [sorted(int(others[at]) for at in row) for row in _dealt(generator, shares, microbatches, wanted)]
    if breaks == "CC2":
        place = default_rng(generator.integers(ORDERS)).permutation(stages)
        rows = [sorted(row, key=lambda stage: place[stage]) for row in rows]
    elif recipe.swaps:
        _swap(generator, rows, recipe.swaps, first)
    return [tuple(row) if first == 0 else (0, *row) for row in rows]


def shares_of(generator: Generator, weights: NDArray[np.float64], microbatches: int, visited: int) -> list[int]:
    """How many microbatches visit each stage, in proportion to the weights; nobody visits a stage twice.

    Where that does not come out even, chance says who gets one more, so that it does over many iterations.
    """
    total = microbatches * visited
    exact = np.zeros(len(weights))
    free = np.ones(len(weights), dtype=bool)
    while True:  # a stage that everybody visits leaves its surplus to the others
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


def _dealt(generator: Generator, shares: Sequence[int], microbatches: int, visited: int) -> list[list[int]]:
    """`visited` different ones for each microbatch, so that every one is dealt out as often as its share says."""
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
    """Two neighbours, in that share of the microbatches, or in all that have any if these are fewer."""
    left = round(share * len(rows))
    for at in generator.permutation(len(rows)):
        row = rows[at]
        pairs = [place for place in range(len(row) - 1) if row[place] + 1 == row[place + 1] and row[place] >= first]
        if pairs and left:
            place = int(generator.choice(pairs))
            row[place], row[place + 1] = row[place + 1], row[place]
            left -= 1


def together(visits: Sequence[Visits]) -> list[tuple[int, list[int]]]:
    """(stage, microbatches) one after another, so that everybody visits its stages in its own order.

    Next comes a stage that nobody has yet to reach by way of another, if there is one: the lowest. So, without swaps or
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
