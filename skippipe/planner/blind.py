"""Paths that keep every rule and know nothing of the network: the study's DT-FM-skip, and everybody's first answer.

Lane after lane takes the next L−1 stages of a circle over stages 1 … S−1. Lanes come in multiples of the unit, so the
circle closes and every stage is visited equally often; inside a stage, lanes are dealt out over the free slots.
"""

from __future__ import annotations

import numpy as np

from skippipe.planner.problem import Placement, Problem

Path = tuple[int, ...]


def blind_paths(
    problem: Problem, placement: Placement, lanes: list[tuple[int, int]], seed: list[int]
) -> tuple[Path, ...]:
    """One path for each (data node, microbatches)."""
    draw = np.random.default_rng(seed)
    others, visits = problem.stages - 1, problem.visited - 1
    slots = np.minimum(problem.costs.slots, len(lanes))
    free = [
        draw.permutation(np.repeat(nodes, slots[stage, list(nodes)])).tolist() for stage, nodes in enumerate(placement)
    ]
    paths: dict[int, Path] = {}
    # lanes that carry one microbatch more are a multiple of the unit too: each kind goes around the circle by itself
    order = sorted(range(len(lanes)), key=lambda lane: lanes[lane][1])
    start = 0
    for lane in order:
        stages = sorted((start + offset) % others + 1 for offset in range(visits))
        start = (start + visits) % others
        paths[lane] = (lanes[lane][0], *(free[stage].pop() for stage in stages))
    return tuple(paths[lane] for lane in range(len(lanes)))
