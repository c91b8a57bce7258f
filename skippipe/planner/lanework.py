"""What searches do to lanes, whatever else they change: kernels over paths and microbatches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skippipe.compiled import kernel

Ints = NDArray[np.int64]


@kernel
def visits(path: Ints, stage: int, stage_of: Ints) -> bool:
    for node in path:  # noqa: SIM110, numba has no `any` over a generator
        if stage_of[node] == stage:
            return True
    return False


@kernel
def put_in_order(path: Ints, stage_of: Ints) -> None:
    """By stage."""
    for end in range(1, len(path)):
        hop = end
        while hop > 0 and stage_of[path[hop]] < stage_of[path[hop - 1]]:
            path[hop], path[hop - 1] = path[hop - 1], path[hop]
            hop -= 1


@kernel
def move_microbatches(
    a: int, b: int, moved: int, from_: int, to: int, paths: Ints, counts: Ints, stage_of: Ints
) -> None:
    """From lane a to b. If these visit other stages, as many go where they make up for it, if there is such a pair:
    looked for from lanes `from_` and `to` on."""
    counts[a] -= moved
    counts[b] += moved
    lanes = len(counts)
    sets = np.zeros(lanes, np.int64)
    for lane in range(lanes):
        if counts[lane] > 0 or lane == a:
            for node in paths[lane]:
                sets[lane] |= 1 << stage_of[node]
    lost, won = sets[a] & ~sets[b], sets[b] & ~sets[a]
    if lost == 0 and won == 0:
        return
    for nth in range(lanes):
        c = (from_ + nth) % lanes
        if counts[c] < moved or won & ~sets[c] or lost & sets[c]:
            continue
        for other in range(lanes):
            d = (to + other) % lanes
            back = c == b and d == a
            if counts[d] > 0 and not back and sets[c] & ~sets[d] == won and sets[d] & ~sets[c] == lost:
                counts[c] -= moved
                counts[d] += moved
                return
