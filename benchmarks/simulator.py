"""How many iterations of published20 the simulator runs in a second, on one core.

python -m benchmarks.simulator
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

import numpy as np

from skippipe import event_loop
from skippipe.dispatch import all_steps
from skippipe.planner.published import published20, published_plan
from skippipe.simulator import NO_RECORD, NO_SLACK, PlacementCosts, path_arrays
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


def main() -> None:
    plan = published_plan(published20(), "skippipe")
    paths, lengths = path_arrays([lane.path for lane in plan.lanes])
    microbatches = np.array([lane.microbatches for lane in plan.lanes])

    def speeds(timing: Timing, split: bool) -> tuple[float, float]:
        """Iterations a second of the compiled event loop, and of the same code as plain Python."""
        rings = [stage.ring for stage in plan.stages]
        costs = PlacementCosts.of(plan.costs, rings, plan.dispatch, timing, split)
        costs.run_iteration(paths, lengths, microbatches)  # compile
        compiled = per_second(lambda: costs.run_iteration(paths, lengths, microbatches))
        tasks = (
            costs.forward_ns,
            costs.backward_ns,
            costs.weight_ns,
            costs.head_ns,
        )
        out = (NO_SLACK, np.empty(len(plan.cluster), np.int64), NO_RECORD)
        hops = (costs.slots, costs.flight_ns, costs.transmit_ns, timing is Timing.FULL)
        rest = (costs.order, split, *out)
        plain = event_loop.run_iteration.py_func  # type: ignore[attr-defined]
        return compiled, per_second(lambda: plain(paths, lengths, microbatches, *tasks, *hops, *rest))

    for timing, split in product(Timing, (False, True)):
        compiled, plain = speeds(timing, split)
        tasks = plan.microbatches * all_steps(4, split)
        print(
            f"published20, {timing} timing{', split backward' * split}: {compiled:,.0f} iterations/s "
            f"({compiled * tasks / 1e6:.1f} M tasks/s), {compiled / plain:.0f} times the same code without the compiler"
        )


if __name__ == "__main__":
    main()
