"""How each stage of a plan averages: chosen for when its nodes are done, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skippipe.collectives.schedule import Averaging
from skippipe.collectives.topology import RINGS_UP_TO, exchange, may_relay
from skippipe.collectives.transfers import FreeLinks, averaged_ns, transfer_loads
from skippipe.cost_model import CostModel
from skippipe.errors import UserError
from skippipe.jit import Ints
from skippipe.plan import Plan, Stage
from skippipe.simulator import simulated_times

ROUNDS = 3  # in which every stage is divided anew, beside what the others send


def averaging_fastest(plan: Plan, orders: Sequence[tuple[int, ...]] | None = None, *, thorough: bool = False) -> Plan:
    """The plan whose stages average in the way that is fastest for when their nodes are done: a ring, a direct
    exchange, or one by way of relays. `orders` of rings are tried, too. A thorough choice takes most of a second."""
    costs = plan.costs
    try:
        first = simulated_times(plan)
    except UserError:  # lanes that lock up
        return plan
    done_ns = first.done_ns
    orders = orders or [stage.ring for stage in plan.stages]
    best_ns, best = first.iteration_ns, [stage.averaging for stage in plan.stages]

    def with_averaging(averagings: Sequence[Averaging]) -> Plan:
        return replace(plan, stages=tuple(map(Stage.of, plan.layers, averagings)))

    def is_better(averagings: list[Averaging]) -> bool:
        nonlocal best_ns, best
        taken_ns = simulated_times(with_averaging(averagings)).iteration_ns
        better = taken_ns < best_ns
        if better:
            best_ns, best = taken_ns, averagings
        return better

    ways = [[each] for each in best]
    for index, order in enumerate(orders):
        if len(order) <= RINGS_UP_TO:
            ways[index].append(Averaging(order))
    everybody = tuple(plan.stage_of)
    thorough = thorough and any(may_relay(order, costs) for order in orders)  # else there is little to choose
    if not costs.collective.only_rings:
        for relays in ((), everybody) if thorough else (everybody,):
            averagings = _exchanges(costs, orders, done_ns, relays)
            is_better(averagings)
            for index, each in enumerate(averagings):
                ways[index].append(each)
    is_better([min(each, key=lambda way: averaged_ns(costs, stage, way, done_ns)) for stage, each in enumerate(ways)])
    for _ in range(ROUNDS if thorough and not costs.collective.only_rings else 0):
        improved = False
        for index in _by_bytes(costs):
            if len(orders[index]) > 1:
                free_ns = _free_after(costs, [(at, each) for at, each in enumerate(best) if at != index], done_ns)
                again = _exchange(costs, index, orders[index], done_ns, free_ns, everybody)
                improved |= is_better([again if at == index else each for at, each in enumerate(best)])
        if not improved:
            break
    return with_averaging(best)


def _by_bytes(costs: CostModel) -> list[int]:
    return sorted(range(len(costs.gradient_bytes)), key=lambda stage: -costs.gradient_bytes[stage])


def _exchanges(
    costs: CostModel, orders: Sequence[tuple[int, ...]], done_ns: Ints, relays: Sequence[int]
) -> list[Averaging]:
    """An exchange for every stage, one after another: each goes round what the larger ones send."""
    free_ns = _free_after(costs, [], done_ns)
    found = [Averaging(order) for order in orders]
    for index in _by_bytes(costs):
        if len(orders[index]) > 1:
            found[index] = _exchange(costs, index, orders[index], done_ns, free_ns, relays)
    return found


def _exchange(
    costs: CostModel, stage: int, order: tuple[int, ...], done_ns: Ints, free_ns: FreeLinks, relays: Sequence[int]
) -> Averaging:
    return exchange(costs, stage, order, free_ns, relays, all_done_ns=int(done_ns[list(order)].max()))


def _free_after(costs: CostModel, averagings: Sequence[tuple[int, Averaging]], done_ns: Ints) -> FreeLinks:
    """When links are free, were each sender done and all that these stages send on its way at once."""
    free_ns = FreeLinks(np.repeat(done_ns[:, None], len(done_ns), axis=1), done_ns.copy(), done_ns.copy())
    for taken, more in zip(free_ns, transfer_loads(costs, averagings), strict=True):
        taken += more
    return free_ns
