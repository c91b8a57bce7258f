"""Simulated annealing over whole plans: the strategy `best`, and the repair of lanes with stages kept.

A chain proposes one neighbourhood move after another, worse states are accepted too while the temperature is high, and
it cools down in rounds that grow longer. Several chains run side by side, one on each core (kernels release the GIL),
each with random draws of its own. After a round they go on from where they are; those that lag far behind restart from
the best. Rounds are counted in changes, so the same seed and number of changes give the same plan; seconds only cut the
search short.

What a state does not hold, whether the backward is split, is searched side by side: each variant has chains of its own
until one of them is clearly ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from operator import gt, itemgetter

import numpy as np

from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible, UserError
from skippipe.jit import Floats, Ints, cores, kernel
from skippipe.jitter import Jitter, spread_of
from skippipe.plan import Plan
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.problem import Placement, Problem
from skippipe.planner.search.moves import DRAWS, PLACEMENT_MOVES, Move, cumulative_move_weights, propose
from skippipe.planner.search.objective import objective
from skippipe.planner.search.reinsertion import recreate
from skippipe.planner.search.state import (
    State,
    Tables,
    assign,
    copy_state,
    costs_by_layers,
    empty_state,
    plans_of,
    same,
    state_of,
    tables_of,
)
from skippipe.simulator import simulate, simulated_times
from skippipe.timeline import Timing
from skippipe.validate import validate

BATCH = 512  # changes between two looks at the clock
FIRST_ROUND = 4_096  # changes of a chain
LONGEST_ROUND = 262_144
TEMPERATURE = 2.5  # at the start of a round, times the lanes squared: by what share worse states may be on average
MAX_TEMPERATURE = 0.05
FINAL_TEMPERATURE = 0.03  # of that, at the end of a round
MAX_LAG = 0.5  # a chain that is this much behind, divided by the rounds so far, restarts from the best
FEWEST_CHAINS = 4  # more cores, more of them
LARGE = 1_000  # nodes times lanes: from here on there is no time for placements alone, and for fewer chains, …
FEWEST_OF_LARGE = 2  # … with the backward split, and whole
STALL = 20  # changes without progress after which the search ends: times the square of nodes times lanes
FEWEST_STALLED = 20_000
PLACEMENT_SHARE = 0.4  # of the changes, for placements alone
PLACEMENT_ROUND = 16_384  # changes of a chain in the first round of that
UNEVEN_LAYERS = 3  # a stage may come to have so many times its even share of the layers

OnProgress = Callable[[float, int], None]
"""Called after a round with the changes tried so far and the nanoseconds that the best plan so far would promise."""


@kernel
def anneal(
    state: State,
    best: State,
    trial: State,
    scores: Ints,  # objective of the state, and the iteration of the best
    draws: Ints,  # [change, …]
    exponentials: Floats,  # [change]: exponentially distributed
    temperature: float,
    tables: Tables,
    cumulative_weights: Ints,  # [move]
) -> None:
    """Try changes one after another; all three states are changed in place."""
    for number in range(len(draws)):
        draw = draws[number]
        if (
            propose(draw, trial, tables, cumulative_weights)
            and recreate(draw, trial, tables)
            and not same(trial, state)
        ):
            limit = scores[0] + int(temperature * exponentials[number] * scores[0])
            found, spread, iteration_ns = objective(trial, limit, tables)
            if found <= limit:
                assign(state, trial)
                scores[0] = found
                if spread <= tables.spread and iteration_ns < scores[1]:
                    scores[1] = iteration_ns
                    assign(best, trial)
                continue
        assign(trial, state)


@dataclass
class Chain:
    """One annealing chain: its current state, and the best it has visited."""

    first: State
    tables: Tables
    cumulative_weights: Ints
    seed: list[int]
    variant: int = 0
    """Number of the variant of the problem that the tables are for."""
    temperature_factor: float = 1.0
    """Factor on the temperature: below 1 for a start that is nearly good enough, or for little time."""

    def __post_init__(self) -> None:
        self.state, self.best, self.trial = (copy_state(self.first) for _ in range(3))
        self.rng = np.random.default_rng(self.seed)
        first, spread, iteration_ns = objective(self.state, INFINITE_NS, self.tables)
        self.scores = np.array([first, iteration_ns if spread <= self.tables.spread else INFINITE_NS], np.int64)

    @property
    def initial_temperature(self) -> float:
        """Lower with many lanes: one change matters less among them, and fewer changes can be tried."""
        return self.temperature_factor * min(MAX_TEMPERATURE, TEMPERATURE / len(self.state.counts) ** 2)

    @property
    def best_ns(self) -> int:
        return int(self.scores[1])

    def restart_from(self, leader: Chain) -> None:
        """Take over the best state of another chain."""
        self.tables, self.variant = leader.tables, leader.variant
        for own in (self.state, self.trial, self.best):
            assign(own, leader.best)
        self.scores[:] = objective(self.state, INFINITE_NS, self.tables)[0], leader.best_ns

    def round(self, changes: int, stopped: Callable[[], bool]) -> int:
        """Cool down once over so many changes; returns how many were tried."""
        done = 0
        while done < changes and not stopped():
            temperature = self.initial_temperature * FINAL_TEMPERATURE ** (done / changes)
            draws = self.rng.integers(0, 2**31, (BATCH, DRAWS))
            random = draws, self.rng.exponential(size=BATCH)
            states = self.state, self.best, self.trial
            anneal(*states, self.scores, *random, temperature, self.tables, self.cumulative_weights)
            done += BATCH
        return done


OnRound = Callable[[float, Chain], None]
"""Called after a round with the changes tried so far and the chain that is ahead."""


def no_report(done: float, leader: Chain) -> None:
    pass


class Incumbent:
    """The plan with the best promise so far: chains only estimate how long averaging takes, and a state that a chain
    takes for better may not be."""

    def __init__(self, problems: Sequence[Problem], starts: Sequence[Plan]) -> None:
        self._problems = problems
        self._estimate_ns = INFINITE_NS
        self.plan = min(_promised(starts, problems[0].timing), key=_time_and_nodes)

    def update(self, leader: Chain) -> None:
        """Take the best state of the chain that is ahead into account."""
        if leader.best_ns < self._estimate_ns:
            self._estimate_ns = leader.best_ns
            self.take_better(plans_of(self._problems[leader.variant], leader.best, "best"))

    def take_better(self, plans: Iterable[Plan]) -> None:
        """The best of these, if it is valid and better. Only that one gets a whole timeline, which takes longest."""
        timing, ranked = self._problems[0].timing, []
        for plan in plans:
            with suppress(UserError):  # lanes that lock up
                ranked.append((simulated_times(plan, timing).iteration_ns, len(plan.stage_of), plan))
        for *rank, plan in sorted(ranked, key=itemgetter(0, 1)):
            if tuple(rank) >= _time_and_nodes(self.plan):
                return
            if not validate(plan):
                self.plan = plan.promising(simulate(plan, timing))
                return


def search(
    chains: list[Chain],
    changes: float,
    stopped: Callable[[], bool],
    *,
    stall_limit: float = math.inf,
    first_round: int = FIRST_ROUND,
    on_round: OnRound = no_report,
) -> None:
    """Run chains until they have tried so many changes in all, or `stall_limit` without an improvement."""
    best_ns, better_at = min(chain.best_ns for chain in chains), 0
    done, rounds, length = 0, 0, first_round
    with ThreadPoolExecutor(min(len(chains), cores())) as threads:
        while done < changes and done - better_at <= stall_limit and not stopped():
            each = min(length, math.ceil((changes - done) / len(chains))) if changes < math.inf else length
            done += sum(threads.map(Chain.round, chains, repeat(each), repeat(stopped)))
            rounds += 1
            leader = min(chains, key=lambda chain: chain.best_ns)
            if leader.best_ns < best_ns:
                best_ns, better_at = leader.best_ns, done
            on_round(done, leader)
            for chain in chains:
                if chain.best_ns > (1 + MAX_LAG / rounds) * leader.best_ns:
                    chain.restart_from(leader)
            length = min(2 * length, LONGEST_ROUND)


def improve(
    problem: Problem,
    starts: Sequence[Plan],
    seed: int,
    changes: float,
    stopped: Callable[[], bool],
    on_progress: OnProgress | None = None,
    keep_stages: bool = False,
    jitter: Jitter | None = None,
    placed: Callable[[], bool] = lambda: False,
) -> Plan:
    """The best plan found; it is valid, and no longer than any of `starts`, which must be valid.

    Chains begin with these in turn; where averaging counts and stages are not kept, placements are searched first,
    until `placed` or after a share of the changes. With `jitter` the plan is chosen by its 95th percentile under that,
    without by the promised iteration. Paths of several lengths stay as many of each; then placements are not searched
    first, as the lanes that are laid for these have one length.
    """
    problems = variants(problem, starts[0].layers)
    most_layers = max(problem.layers)
    if may_move_layers(problem):
        most_layers = min(UNEVEN_LAYERS * most_layers, problem.workload.model.layers - problem.stages + 1)
    tables = _tables(problems, most_layers)
    visits = sum(len(lane.path) * lane.microbatches for lane in starts[0].lanes) / starts[0].microbatches
    most_lanes = max(*(_most_lanes(problem, each, visits) for each in tables), *(len(plan.lanes) for plan in starts))
    states = [state_of(plan, most_lanes) for plan in starts]
    sandwich = any(len({len(lane.path) for lane in plan.lanes}) > 1 for plan in starts)
    placing = set() if sandwich else _placement_moves(problem, keep_stages)
    weights = _move_weights(problem, keep_stages, placing)
    size = len(problem.cluster) * most_lanes
    most = cores() if changes == math.inf else 1  # what is counted is the same on every machine
    chains = []
    for number in range(max(FEWEST_OF_LARGE if size > LARGE else FEWEST_CHAINS, most)):
        variant, state = number % len(problems), copy_state(states[number % len(states)])
        if problem.decision_variables.dispatch:
            state.dispatch[0] = number // len(problems) % len(Dispatch)
        chains.append(Chain(state, tables[variant], weights, [seed, number], variant))
    if placing and size <= LARGE:
        _search_placements(chains, placing, PLACEMENT_SHARE * changes, lambda: stopped() or placed())
    stall_limit = STALL * size**2 + FEWEST_STALLED
    incumbent = Incumbent(problems, starts)

    def on_round(done: float, leader: Chain) -> None:
        incumbent.update(leader)
        if on_progress:
            on_progress(done, incumbent.plan.promise.iteration_ns)

    search(chains, changes, stopped, stall_limit=stall_limit, on_round=on_round)
    found = [plan for chain in chains for plan in plans_of(problems[chain.variant], chain.best, "best")]
    distinct = dict.fromkeys(found)  # chains that restarted from the same best may not have left it
    if jitter is None:
        incumbent.take_better(distinct)
        return replace(incumbent.plan, strategy="best")
    promised = [*_promised([*starts, *distinct], problem.timing), incumbent.plan]
    tails = [(spread_of(plan, problem.timing, jitter).tail_ns, len(plan.stage_of)) for plan in promised]
    return replace(promised[tails.index(min(tails))], strategy="best")


def checked_start(problem: Problem, plan: Plan, placement: Placement | None) -> Plan:
    """The plan to begin with, on the problem's cluster and with the dispatch and the backward that are fixed; UserError
    if it does not fit the problem, or has nodes elsewhere than a placement that is kept."""
    names = [[node.name for node in each.nodes] for each in (problem.cluster, plan.cluster)]
    if names[0] != names[1]:
        raise UserError("the plan to begin with is for other nodes; plan without it")
    if placement and any(set(nodes) - set(kept) for nodes, kept in zip(plan.placement, placement, strict=False)):
        raise UserError("the plan to begin with has other nodes on its stages than those to keep; plan without it")
    variables, sizes = problem.decision_variables, [len(nodes) for nodes in plan.placement]
    compared: list[tuple[str, object, object]] = [
        ("stages", len(plan.stages), problem.stages),
        ("stages on a path", plan.visited, problem.visited),
        ("microbatches", plan.microbatches, problem.workload.microbatches),
    ]
    if not variables.layers:
        compared.append(("as layers of stages", list(plan.layers), list(problem.layers)))
    if not variables.sizes and any(map(gt, sizes, problem.sizes)):  # less: no lane visited a node
        compared.append(("as sizes of stages", sizes, list(problem.sizes)))
    for what, found, required in compared:
        if found != required:
            raise UserError(f"the plan to begin with has {found} {what}, and {required} are asked for; plan without it")
    plan = replace(
        plan,
        dispatch=plan.dispatch if variables.dispatch else problem.dispatch,
        split_backward=plan.split_backward if variables.split_backward else problem.split_backward,
    )
    fitted = [plan.edited(cluster=problem.cluster, workload=work) for work in problem.workloads]
    broken = [validate(each) for each in fitted]
    if all(broken):
        raise UserError(f"the plan to begin with does not hold here: {broken[0][0]}")
    return fitted[broken.index([])]


def _placement_moves(problem: Problem, keep_stages: bool) -> set[Move]:
    """Those that are open; none where averaging does not count, as lanes then find their way from any placement."""
    if problem.timing is not Timing.FULL or keep_stages:
        return set()
    return set(PLACEMENT_MOVES) if problem.decision_variables.sizes else {Move.EXCHANGE_NODES}


def _search_placements(chains: list[Chain], moves: set[Move], changes: float, stopped: Callable[[], bool]) -> None:
    """Search placements alone, each judged by lanes that are laid for it in one go; chains then begin with the best.

    Moves of a single node see a valley around every placement: lanes that fit it well fit no other. On a network of
    regions the way from one good placement to another leads through many bad ones.
    """
    weights = cumulative_move_weights(moves), cumulative_move_weights({Move.EXCHANGE_NODES})
    placing = []
    for number, chain in enumerate(chains):
        same_sizes = number >= len(chains) // 2  # half of them: sizes that match the demand are mostly good
        own = Chain(chain.first, chain.tables, weights[same_sizes], [*chain.seed, 1], chain.variant)
        own.temperature_factor = MAX_TEMPERATURE / own.initial_temperature
        placing.append(own)
    search(placing, changes, stopped, first_round=PLACEMENT_ROUND)
    for chain, found in zip(chains, placing, strict=True):
        chain.restart_from(found)


def compile_moves(problem: Problem) -> None:
    """Compile the moves, and no other kernel."""
    (tables,) = _tables([problem], max(problem.layers))
    state = empty_state(len(problem.cluster), problem.stages, 1, problem.visited)
    state.counts[0] = 1
    state.size[:] = 1
    drawn = np.zeros(DRAWS, np.int64)
    propose(drawn, state, tables, _move_weights(problem, False, _placement_moves(problem, False)))
    recreate(drawn, state, tables)


def _tables(problems: Sequence[Problem], most_layers: int) -> list[Tables]:
    visitable = np.ones(problems[0].stages, np.bool_)
    costs = {
        work: costs_by_layers(problems[0].cluster, work, most_layers)
        for work in dict.fromkeys(each.workload for each in problems)
    }
    return [
        tables_of(costs[each.workload], visitable, each.timing, each.split_backward, each.swaps) for each in problems
    ]


def _promised(plans: Iterable[Plan], timing: Timing) -> list[Plan]:
    """Those that are valid, each with its promise; plans that have one are."""
    found = []
    for plan in plans:
        if plan.expected is not None and plan.expected.timing is timing:
            found.append(plan)
        elif not validate(plan):
            found.append(plan.promising(simulate(plan, timing)))
    return found


def _time_and_nodes(plan: Plan) -> tuple[int, int]:
    return plan.promise.iteration_ns, len(plan.stage_of)


def variants(problem: Problem, layers: tuple[int, ...]) -> list[Problem]:
    """The problem with these layers and stages of any size, once for every choice that is open and that a state does
    not hold."""
    splits = (True, False) if problem.decision_variables.split_backward else (problem.split_backward,)
    works: list[Problem] = []
    for workload in problem.workloads:
        with suppress(Infeasible):  # some layers fit only with it, a stage of one layer perhaps only without
            each = replace(problem, workload=workload, layers=layers, sizes=(1,) * problem.stages)
            if not works or each.has_more_slots_than(works[0]):
                works.append(each)
    return [replace(work, split_backward=split) for work in works for split in splits]


def may_move_layers(problem: Problem) -> bool:
    """Where nodes are equally fast there is nothing to match, and even stages are what the paper has."""
    speeds = {(node.flops_per_s, node.devices) for node in problem.cluster.nodes}
    return problem.decision_variables.layers and len(speeds) > 1 and problem.stages > 2


def _move_weights(problem: Problem, keep_stages: bool, placing: set[Move]) -> Ints:
    variables = problem.decision_variables
    is_open = {
        Move.REORDER_RING: problem.timing is Timing.FULL,
        Move.SWAP_ROLES: not keep_stages,
        Move.CHANGE_ROLE: not keep_stages and variables.sizes,
        Move.MOVE_LAYER: may_move_layers(problem),
        Move.CHANGE_DISPATCH: variables.dispatch,
        Move.SWAP_LANE_ORDER: variables.dispatch or problem.dispatch is Dispatch.LANES_IN_ORDER,
        **{move: move in placing for move in PLACEMENT_MOVES},
    }
    return cumulative_move_weights(move for move in Move if is_open.get(move, True))


def _most_lanes(problem: Problem, tables: Tables, visits: float) -> int:
    """Lanes that there can be at most, whichever node is on which stage, with so many visits of a microbatch on
    average."""
    slots = tables.slots[:, 1:].max(axis=(0, 1)).clip(max=problem.workload.microbatches)
    return int(min(problem.workload.microbatches, slots.sum() // visits))
