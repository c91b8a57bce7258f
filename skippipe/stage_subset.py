"""Subsets of a model's stages, stage 0 first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple, cast, get_args

import numpy as np
from numpy.random import default_rng

from skippipe.errors import UserError
from skippipe.skip_schedule import Residual, SkipSchedule, parse_share, visited_of
from skippipe.value_ranges import RESIDUAL_SCALE

Visits = tuple[int, ...]
"""Numbers of stages, in the order in which they are visited."""

DIGITS = 9  # of a stage's number, or of how many layers it has
WHOLE = {"1", "100%"}
"""Spellings of the share that leaves nothing out."""


class StageHop(NamedTuple):
    """How a path that leaves stages out goes on from a stage."""

    stage: int
    target: int
    """The stage that comes next; their number, if it is the head."""
    missing: int
    """Stages that the whole path leaves out."""

    @property
    def left_out(self) -> int:
        """Of these, those that this hop leaves out."""
        return self.target - self.stage - 1


def hops_of(stages: Visits, total: int) -> dict[int, StageHop]:
    """The hop from every stage; none where no stage is missing, or where they are visited in another order than their
    own: then nothing stands in for anything."""
    if len(stages) == total or list(stages) != sorted(set(stages)):
        return {}
    return {stage: StageHop(stage, target, total - len(stages)) for stage, target in pairwise((*stages, total))}


@dataclass(frozen=True)
class StageSubset:
    stages: Visits
    """The stages that are visited, in order."""
    total: int
    """Number of stages of the whole model."""
    residual_scale: float = 1.0
    """Factor of what a visited stage, other than stage 0, adds to the residual stream."""

    @cached_property
    def hops(self) -> dict[int, StageHop]:
        """As `hops_of`."""
        return hops_of(self.stages, self.total)

    @property
    def name(self) -> str:
        if self.stages == tuple(range(self.total)):
            return f"all {self.total}" if self.total > 1 else "whole"
        scale = "" if self.residual_scale == 1.0 else f" ×{self.residual_scale:.3g}"
        return ",".join(map(str, self.stages)) + scale


def parse_subsets(
    total: int,
    named: Iterable[str],
    shares: Iterable[str],
    residual_scale: str = "plain",
    draws: int = 1,
    seed: int = 0,
) -> list[StageSubset]:
    """Subsets by their share (1, 1/2) and by their stages (0,2,3), each once; without either, the whole model."""
    named, shares = list(named), [share.strip() for share in shares]
    if total == 1 and (named or set(shares) - WHOLE):
        raise UserError("the model is in one piece: give its number of stages with --cut, as in --cut 6")
    found = [stages for share in shares for stages in draw_stages(share, total, draws, seed)]
    found += [parse_stages(text, total) for text in named]
    found = found or [tuple(range(total))]
    return [
        StageSubset(stages, total, residual_scale_of(residual_scale, total, len(stages)))
        for stages in dict.fromkeys(found)
    ]


def parse_stages(text: str, total: int) -> Visits:
    stages = whole_numbers(text, "--stages")
    if stages[0] != 0:
        raise UserError(f"--stages {text}: stage 0 has the embedding and the head and is always visited: begin with 0")
    if max(stages) >= total:
        raise UserError(f"--stages {text}: the model has {total} stages, 0 to {total - 1}")
    if len(set(stages)) < len(stages):
        raise UserError(f"--stages {text}: name every stage once")
    return stages


def draw_stages(share: str, total: int, draws: int, seed: int) -> list[Visits]:
    """Different subsets of that share, so many at random or all there are; the same as in a study with this seed."""
    kept = Fraction(1) if share in WHOLE else parse_share(share, "--keep")
    return draw_subsets(total, visited_of(1 - kept, total), draws, seed)


def residual_scale_of(text: str, total: int, visited: int) -> float:
    """The factor for 'plain', 'scaled' or a number; 1 where no stage is missing."""
    if text in get_args(Residual):
        return SkipSchedule(residual=cast(Residual, text)).residual_scale(total, visited)
    try:
        residual_scale = float(text)
    except ValueError:
        raise UserError(
            f"--residual-scale: '{text}' is neither a number nor one of {', '.join(get_args(Residual))}"
        ) from None
    RESIDUAL_SCALE.check(residual_scale, "--residual-scale")
    return residual_scale if visited < total else 1.0


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UserError(f"{option}: '{text}' is not a list of whole numbers; write it as 0,2,3")
    if max(map(len, words)) > DIGITS:
        raise UserError(
            f"{option}: '{max(words, key=len)[:DIGITS]}…' is out of range; a number here has up to {DIGITS} digits"
        )
    return tuple(map(int, words))


def draw_subsets(stages: int, visited: int, draws: int, seed: int) -> list[Visits]:
    """Different subsets of that many stages, stage 0 among them: all of them, or `draws` at random."""
    if math.comb(stages - 1, visited - 1) <= draws:
        return [(0, *others) for others in combinations(range(1, stages), visited - 1)]
    generator = default_rng([seed, stages, visited])
    found: set[Visits] = set()
    while len(found) < draws:
        others = generator.choice(np.arange(1, stages), visited - 1, replace=False)
        found.add((0, *sorted(int(each) for each in others)))
    return sorted(found)
