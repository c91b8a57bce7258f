"""How many iterations of published20 the simulator runs in a second, on one core.

python -m benchmarks.simulator
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from skippipe import event_loop
from skippipe.collectives.transfers import free_links
from skippipe.dispatch import all_steps
from skippipe.plan import Plan
from skippipe.planner.astar import INFINITE_NS
from skippipe.planner.averaging import averaging_fastest
from skippipe.planner.published import published20, published_plan
from skippipe.planner.search.objective import objective
from skippipe.planner.search.state import costs_by_layers, state_of, tables_of
from skippipe.simulator import NO_RECORD, NO_SLACK, PlacementCosts, lane_arrays
from skippipe.timeline import Timing


def per_second(call: Callable[[], object], at_least_s: float = 2.0) -> float:
    """Best of five runs: the machine may be shared."""
    best = 0.0
    for _ in range(5):
        count, began = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began) < at_least_s / 5:
            call()
            count += 1
        best = max(best, count / took_s)
    return best


def speeds(plan: Plan, timing: Timing, split: bool) -> tuple[float, float]:
    """Iterations a second of the compiled event loop, and of the same code as plain Python."""
    lanes, costs = lane_arrays(plan), PlacementCosts.of_plan(replace(plan, split_backward=split), timing)
    costs.run_iteration(*lanes)  # compile
    compiled = per_second(lambda: costs.run_iteration(*lanes))
    tasks = costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.head_ns
    links = costs.worker_slots, costs.workers, costs.flight_ns, costs.transmit_ns, costs.upload_ns, costs.download_ns
    out = NO_SLACK, np.empty(len(plan.cluster), np.int64), *free_links(len(plan.cluster)), NO_RECORD
    plain = event_loop.run_iteration.py_func  # type: ignore[attr-defined]
    rest = timing is Timing.FULL, costs.order, split, *out, None
    return compiled, per_second(lambda: plain(*lanes, *tasks, *links, *rest))


def searched(plan: Plan) -> float:
    """Plans a second whose iteration the search works out, averaging included."""
    costs = costs_by_layers(plan.cluster, plan.workload, max(plan.layers))
    tables = tables_of(costs, np.ones(len(plan.stages), np.bool_), Timing.FULL, plan.split_backward, 1)
    state = state_of(plan, len(plan.lanes))
    return per_second(lambda: objective(state, INFINITE_NS, tables))


def with_rates(plan: Plan) -> Plan:
    """Every other node has an upload of 30 MB/s and a download of 100 MB/s."""
    nodes = [
        replace(node, upload_bytes_per_s=3e7, download_bytes_per_s=1e8) if number % 2 else node
        for number, node in enumerate(plan.cluster.nodes)
    ]
    return replace(plan, cluster=replace(plan.cluster, nodes=tuple(nodes)), expected=None)


def main() -> None:
    ring = published_plan(published20(), "skippipe")
    ring = replace(ring, stages=tuple(replace(stage, pieces=()) for stage in ring.stages), expected=None)
    for timing, split in product(Timing, (False, True)):
        compiled, plain = speeds(ring, timing, split)
        tasks = ring.microbatches * all_steps(4, split)
        print(
            f"published20, {timing} timing{', split backward' * split}: {compiled:,.0f} iterations/s "
            f"({compiled * tasks / 1e6:.1f} M tasks/s), {compiled / plain:.0f} times the same code without the compiler"
        )
    for name, plan in (("links of their own", ring), ("half of the nodes with rates", with_rates(ring))):
        relayed = averaging_fastest(plan)
        transfers = sum(len(stage.averaging.schedule.transfers) for stage in relayed.stages)
        compiled, _ = speeds(relayed, Timing.FULL, split=False)
        print(f"{name}, {transfers} transfers of averaging: {compiled:,.0f} iterations/s", end="; ")
        print(f"plans a second in the search: {searched(relayed):,.0f}", flush=True)


if __name__ == "__main__":
    main()
