"""How each stage of a plan averages: chosen for when its nodes are done, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skippipe.collectives.schedule import Averaging, FreeLinks
from skippipe.collectives.topology import RELAYED_UP_TO, averaged_ns, exchange
from skippipe.errors import UserError
from skippipe.plan import Plan, Stage
from skippipe.simulator import simulate
from skippipe.timeline import Timing


def averaging_fastest(plan: Plan, orders: Sequence[tuple[int, ...]] | None = None) -> Plan:
    """The plan whose stages average in the way that is fastest for when their nodes are done: a ring, a direct
    exchange, or one by way of relays. `orders` of rings are tried, too."""
    costs = plan.costs
    try:
        first = simulate(plan, Timing.FULL)
    except UserError:  # lanes that lock up
        return plan
    done_ns = np.array(first.done_ns(len(plan.cluster)), np.int64)
    by_time = [(first.iteration_ns, plan)]
    orders = orders or [stage.ring for stage in plan.stages]
    by_bytes = sorted(range(len(plan.stages)), key=lambda index: -costs.gradient_bytes[index])

    def consider(averagings: Sequence[Averaging]) -> None:
        found = replace(plan, stages=tuple(map(Stage.of, plan.layers, averagings)))
        by_time.append((simulate(found, Timing.FULL).iteration_ns, found))

    ways = [[stage.averaging] for stage in plan.stages]
    for index, order in enumerate(orders):
        if len(order) <= RELAYED_UP_TO:
            ways[index].append(Averaging(order))
    if not costs.collective.only_rings:
        for relays in ((), tuple(plan.stage_of)):
            free_ns = FreeLinks(np.repeat(done_ns[:, None], len(done_ns), axis=1), done_ns.copy(), done_ns.copy())
            averagings = [stage.averaging for stage in plan.stages]
            for index in by_bytes:
                if len(orders[index]) > 1:
                    averagings[index] = exchange(costs, index, orders[index], free_ns, relays)
                    ways[index].append(averagings[index])
            consider(averagings)
    consider([min(each, key=lambda way: averaged_ns(costs, index, way, done_ns)) for index, each in enumerate(ways)])
    return min(by_time, key=lambda each: each[0])[1]
