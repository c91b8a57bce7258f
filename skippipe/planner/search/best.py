"""The strategy `best`: from a first plan that holds to the best one that can be found in the time there is.

What is open beside the state, whether the backward is split, is tried side by side: each has a search of its own, until
one of them is clearly ahead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skippipe.check import check
from skippipe.dispatch import Dispatch
from skippipe.jitter import Jitter, spread_of
from skippipe.plan import Plan
from skippipe.planner.problem import Problem
from skippipe.planner.search.annealing import Chain, search
from skippipe.planner.search.laying import lay_lifted
from skippipe.planner.search.moves import DRAWS, SHARES, Kind, change
from skippipe.planner.search.state import Ints, Tables, copy_of, costs_by_layers, empty, plans_of, state_of, tables_of
from skippipe.simulate import simulate
from skippipe.timeline import Timing

FEWEST_CHAINS = 4  # searches side by side; more cores, more of them
LARGE = 500  # nodes times lanes: from here on there is time for fewer of them, …
FEWEST_OF_LARGE = 2  # … with the backward split, and whole
PATIENCE = 20  # changes without any progress after which it gives up: times the square of nodes times lanes
AT_LEAST = 20_000
UNEVEN_LAYERS = 3  # a stage may come to have so many times its even share of the layers


@dataclass(frozen=True)
class Limits:
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


def improved(problem: Problem, starts: Sequence[Plan], limits: Limits) -> Plan:
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
    patience = PATIENCE * (len(problem.cluster) * room) ** 2 + AT_LEAST
    search(chains, limits.changes, patience, limits.over, limits.on_round)
    found = [plan for chain in chains for plan in plans_of(problems[chain.choice], chain.best, "best")]
    distinct = dict.fromkeys([*starts, *found])  # searches that went on from the same best may not have left it
    promised = [plan.promising(simulate(plan, problem.timing)) for plan in distinct if not check(plan)]
    return replace(min(promised, key=lambda plan: _seconds_and_nodes(plan, limits.jitter)), strategy="best")


def compile_moves(problem: Problem) -> None:
    """Without any other kernel."""
    tables = tables_of(problem, costs_by_layers(problem, max(problem.layers)))
    state = empty(len(problem.cluster), problem.stages, 1, problem.visited)
    state.counts[0] = 1
    state.size[:] = 1
    drawn = np.zeros(DRAWS, np.int64)
    change(drawn, state, tables, np.cumsum(_shares(problem, False)))
    lay_lifted(drawn, state, tables)


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
    shares = {kind: SHARES[kind] for kind in Kind}
    if problem.timing is Timing.CONTENTION_ONLY:
        shares[Kind.RING] = 0
    if keep_stages:
        shares[Kind.ROLES_OF_TWO] = 0
    if keep_stages or not problem.freedoms.sizes:
        shares[Kind.ROLE] = 0
    if not _may_move_layers(problem):
        shares[Kind.LAYERS] = 0
    if not problem.freedoms.dispatch:
        shares[Kind.DISPATCH] = 0
        if problem.dispatch is not Dispatch.LANES_IN_ORDER:
            shares[Kind.RANKS] = 0
    return np.array(list(shares.values()), np.int64)


def _room(problem: Problem, tables: Tables) -> int:
    """Lanes that there can be at most, on any stages."""
    slots = tables.slots[:, 1:].max(axis=(0, 1)).clip(max=problem.workload.microbatches)
    return int(min(problem.workload.microbatches, slots.sum() // problem.visited))
