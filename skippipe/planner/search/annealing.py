"""The search: changes tried one after another, worse ones taken too while it is warm, in rounds that grow longer.

Several searches go on side by side, one on each core (kernels let go of Python's lock), each with draws of its own.
After a round they go on from where they are, and those that lag far behind from where the best was. Rounds are counted
in changes, so the same seed and number of changes give the same plan; seconds only cut the search short.


The strategy `best`: from a first plan that holds to the best one that can be found in the time there is.

What is open beside the state, whether the backward is split, is tried side by side: each has a search of its own, until
one of them is clearly ahead.

"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from skippipe.dispatch import Dispatch
from skippipe.jit import kernel
from skippipe.jitter import Jitter, spread_of
from skippipe.plan import Plan
from skippipe.planner.astar import NO_WAY
from skippipe.planner.problem import Problem
from skippipe.planner.search.moves import DRAWS, SHARES, Move, propose
from skippipe.planner.search.objective import objective
from skippipe.planner.search.reinsertion import recreate
from skippipe.planner.search.state import (
    Ints,
    State,
    Tables,
    assign,
    copy_of,
    costs_by_layers,
    empty,
    plans_of,
    same,
    state_of,
    tables_of,
)
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate

AT_ONCE = 512  # changes between two looks at the clock
FIRST_ROUND = 4_096  # changes of a search
LONGEST_ROUND = 262_144
TEMPERATURE = (
    2.5  # by how much worse a state may be, on average, at the start of a round: divided by the square of its lanes
)
MAX_TEMPERATURE = 0.05
FINAL_TEMPERATURE = 0.03  # of that, at the end of a round
LAG = 0.5  # a search that is this much behind, divided by the rounds so far, goes on from where the best is


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
        if propose(draw, trial, tables, shares) and recreate(draw, trial, tables) and not same(trial, state):
            limit = scores[0] + int(warm * chances[number] * scores[0])
            found, uneven, iteration_ns = objective(trial, limit, tables)
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
        first, uneven, iteration_ns = objective(self.state, NO_WAY, self.tables)
        self.scores = np.array([first, iteration_ns if uneven == 0 else NO_WAY], np.int64)

    @property
    def heat(self) -> float:
        """A change is felt less among many lanes, and fewer of them can be tried: less heat brings more then."""
        return min(MAX_TEMPERATURE, TEMPERATURE / len(self.state.counts) ** 2)

    @property
    def best_ns(self) -> int:
        return int(self.scores[1])

    def follow(self, leader: Chain) -> None:
        """Go on from where another is."""
        self.tables, self.choice = leader.tables, leader.choice
        for own in (self.state, self.trial, self.best):
            assign(own, leader.best)
        self.scores[:] = objective(self.state, NO_WAY, self.tables)[0], leader.best_ns

    def round(self, changes: int, over: Callable[[], bool]) -> int:
        """From warm to cold; how many changes were tried."""
        done = 0
        while done < changes and not over():
            share = done / changes
            warm = self.heat * FINAL_TEMPERATURE**share
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
                if chain.best_ns > (1 + LAG / rounds) * leader.best_ns:
                    chain.follow(leader)
            length = min(2 * length, LONGEST_ROUND)


FEWEST_CHAINS = 4  # searches side by side; more cores, more of them
LARGE = 500  # nodes times lanes: from here on there is time for fewer of them, …
FEWEST_OF_LARGE = 2  # … with the backward split, and whole
STALL = 20  # changes without any progress after which it gives up: times the square of nodes times lanes
AT_LEAST = 20_000
UNEVEN_LAYERS = 3  # a stage may come to have so many times its even share of the layers


@dataclass(frozen=True)
class SearchLimits:
    """How long to search; the first that is reached ends it."""

    seed: int
    changes: float
    over: Callable[[], bool]
    on_round: Callable[[float, float | None], None]
    """Changes tried so far, and the best iteration in nanoseconds."""
    keep_stages: bool = False
    """Nodes stay on the stages of the first plan."""
    jitter: Jitter | None = None
    """Of what the searches have found, take what is best in its 95th percentile under this."""


def improved(problem: Problem, starts: Sequence[Plan], limits: SearchLimits) -> Plan:
    """The best plan found; it holds, and is no longer than any of those to begin with, which must hold.

    Searches begin with them in turn.
    """
    problems = _open_choices(problem, starts[0])
    most_layers = max(problem.layers)
    if _may_move_layers(problem):
        most_layers = min(UNEVEN_LAYERS * most_layers, problem.workload.model.layers - problem.stages + 1)
    costs = costs_by_layers(problem, most_layers)
    tables = [tables_of(each, costs) for each in problems]
    room = max(_room(problem, tables[0]), *(len(plan.lanes) for plan in starts))
    states = [state_of(plan, room) for plan in starts]
    shares = np.cumsum(_shares(problem, limits.keep_stages))
    fewest = FEWEST_OF_LARGE if len(problem.cluster) * room > LARGE else FEWEST_CHAINS
    cores = (os.cpu_count() or 1) if limits.changes == math.inf else 1  # what is counted is the same on every machine
    chains = []
    for number in range(max(fewest, cores)):
        choice, state = number % len(problems), copy_of(states[number % len(states)])
        if problem.freedoms.dispatch:
            state.order[0] = number // len(problems) % len(Dispatch)
        chains.append(Chain(state, tables[choice], shares, [limits.seed, number], choice))
    patience = STALL * (len(problem.cluster) * room) ** 2 + AT_LEAST
    search(chains, limits.changes, patience, limits.over, limits.on_round)
    found = [plan for chain in chains for plan in plans_of(problems[chain.choice], chain.best, "best")]
    distinct = dict.fromkeys([*starts, *found])  # searches that went on from the same best may not have left it
    promised = [plan.promising(simulate(plan, problem.timing)) for plan in distinct if not validate(plan)]
    return replace(min(promised, key=lambda plan: _seconds_and_nodes(plan, limits.jitter)), strategy="best")


def compile_moves(problem: Problem) -> None:
    """Without any other kernel."""
    tables = tables_of(problem, costs_by_layers(problem, max(problem.layers)))
    state = empty(len(problem.cluster), problem.stages, 1, problem.visited)
    state.counts[0] = 1
    state.size[:] = 1
    drawn = np.zeros(DRAWS, np.int64)
    propose(drawn, state, tables, np.cumsum(_shares(problem, False)))
    recreate(drawn, state, tables)


def _seconds_and_nodes(plan: Plan, jitter: Jitter | None) -> tuple[int, int]:
    assert plan.expected is not None
    taken_ns = spread_of(plan, plan.expected.timing, jitter).tail_ns if jitter else plan.expected.iteration_ns
    return taken_ns, len(plan.stage_of)


def _open_choices(problem: Problem, first: Plan) -> list[Problem]:
    """The problem, with every choice of what is open beside the state."""
    splits = (True, False) if problem.freedoms.split_backward else (problem.split_backward,)
    layers = tuple(stage.layers for stage in first.stages)
    return [replace(problem, split_backward=split, layers=layers) for split in splits]


def _may_move_layers(problem: Problem) -> bool:
    """Where nodes are equally fast there is nothing to match, and even stages are what the study has."""
    speeds = {node.flops_per_s for node in problem.cluster.nodes}
    return problem.freedoms.layers and len(speeds) > 1 and problem.stages > 2


def _shares(problem: Problem, keep_stages: bool) -> Ints:
    shares = {kind: SHARES[kind] for kind in Move}
    if problem.timing is Timing.CONTENTION_ONLY:
        shares[Move.RING] = 0
    if keep_stages:
        shares[Move.ROLES_OF_TWO] = 0
    if keep_stages or not problem.freedoms.sizes:
        shares[Move.ROLE] = 0
    if not _may_move_layers(problem):
        shares[Move.LAYERS] = 0
    if not problem.freedoms.dispatch:
        shares[Move.DISPATCH] = 0
        if problem.dispatch is not Dispatch.LANES_IN_ORDER:
            shares[Move.RANKS] = 0
    return np.array(list(shares.values()), np.int64)


def _room(problem: Problem, tables: Tables) -> int:
    """Lanes that there can be at most, on any stages."""
    slots = tables.slots[:, 1:].max(axis=(0, 1)).clip(max=problem.workload.microbatches)
    return int(min(problem.workload.microbatches, slots.sum() // problem.visited))
