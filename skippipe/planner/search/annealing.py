"""The search: changes tried one after another, worse ones taken too while it is warm, in rounds that grow longer.

Several searches go on side by side, one on each core (kernels let go of Python's lock), each with draws of its own.
After a round they go on from where they are, and those that lag far behind from where the best was. Rounds are counted
in changes, so the same seed and number of changes give the same plan; seconds only cut the search short.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from skippipe.compiled import kernel
from skippipe.planner.search.laying import lay_lifted
from skippipe.planner.search.moves import DRAWS, change
from skippipe.planner.search.score import score
from skippipe.planner.search.state import Ints, State, Tables, assign, copy_of, same
from skippipe.planner.tours import NO_WAY

AT_ONCE = 512  # changes between two looks at the clock
FIRST_ROUND = 4_096  # changes of a search
LONGEST_ROUND = 262_144
HEAT = 2.5  # by how much worse a state may be, on average, at the start of a round: divided by the square of its lanes
MOST_HEAT = 0.05
COLD = 0.03  # of that, at the end of a round
LAGGING = 0.5  # a search that is this much behind, divided by the rounds so far, goes on from where the best is


@kernel
def anneal(
    state: State,
    best: State,
    trial: State,
    scores: Ints,  # of the state, and the iteration of the best
    draws: Ints,  # [change, …]
    chances: np.ndarray,  # [change]: exponentially distributed
    warm: float,
    tables: Tables,
    shares: Ints,  # of each kind of change
) -> None:
    """Try changes one after another; all three states are changed in place."""
    for number in range(len(draws)):
        draw = draws[number]
        if change(draw, trial, tables, shares) and lay_lifted(draw, trial, tables) and not same(trial, state):
            limit = scores[0] + int(warm * chances[number] * scores[0])
            found, uneven, iteration_ns = score(trial, limit, tables)
            if found <= limit:
                assign(state, trial)
                scores[0] = found
                if uneven == 0 and iteration_ns < scores[1]:
                    scores[1] = iteration_ns
                    assign(best, trial)
                continue
        assign(trial, state)


@dataclass
class Chain:
    """One search."""

    first: State
    tables: Tables
    shares: Ints
    seed: list[int]
    choice: int = 0
    """Of what is open beside the state: which one the tables are for."""

    def __post_init__(self) -> None:
        self.state, self.best, self.trial = copy_of(self.first), copy_of(self.first), copy_of(self.first)
        self.draw = np.random.default_rng(self.seed)
        first, uneven, iteration_ns = score(self.state, NO_WAY, self.tables)
        self.scores = np.array([first, iteration_ns if uneven == 0 else NO_WAY], np.int64)

    @property
    def heat(self) -> float:
        """A change is felt less among many lanes, and fewer of them can be tried: less heat brings more then."""
        return min(MOST_HEAT, HEAT / len(self.state.counts) ** 2)

    @property
    def best_ns(self) -> int:
        return int(self.scores[1])

    def follow(self, leader: Chain) -> None:
        """Go on from where another is."""
        self.tables, self.choice = leader.tables, leader.choice
        for own in (self.state, self.trial, self.best):
            assign(own, leader.best)
        self.scores[:] = score(self.state, NO_WAY, self.tables)[0], leader.best_ns

    def round(self, changes: int, over: Callable[[], bool]) -> int:
        """From warm to cold; how many changes were tried."""
        done = 0
        while done < changes and not over():
            share = done / changes
            warm = self.heat * COLD**share
            draws = self.draw.integers(0, 2**31, (AT_ONCE, DRAWS))
            chances = self.draw.exponential(size=AT_ONCE)
            anneal(self.state, self.best, self.trial, self.scores, draws, chances, warm, self.tables, self.shares)
            done += AT_ONCE
        return done


def search(
    chains: list[Chain],
    changes: float,
    patience: float,
    over: Callable[[], bool],
    on_round: Callable[[float, float | None], None] = lambda done, best_ns: None,
) -> None:
    """Ends after so many changes in all, or when so many have brought nothing."""
    best_ns, better_at = min(chain.best_ns for chain in chains), 0
    done, rounds, length = 0, 0, FIRST_ROUND
    with ThreadPoolExecutor(min(len(chains), os.cpu_count() or 1)) as threads:
        while done < changes and done - better_at <= patience and not over():
            each = min(length, math.ceil((changes - done) / len(chains))) if changes < math.inf else length
            done += sum(threads.map(Chain.round, chains, repeat(each), repeat(over)))
            rounds += 1
            leader = min(chains, key=lambda chain: chain.best_ns)
            if leader.best_ns < best_ns:
                best_ns, better_at = leader.best_ns, done
            on_round(done, best_ns)
            for chain in chains:
                if chain.best_ns > (1 + LAGGING / rounds) * leader.best_ns:
                    chain.follow(leader)
            length = min(2 * length, LONGEST_ROUND)
