"""How long the plan says that work takes: what virtual time uses, and what emulated nodes are held to."""

from __future__ import annotations

from skippipe import dispatch
from skippipe.compiled import plain
from skippipe.plan import Plan
from skippipe.runtime.work import Step, Task, Work

is_weights = plain(dispatch.is_weights)


def planned_ns(plan: Plan, stage: int, node: int, work: Work) -> int:
    """What the plan does not speak of takes no time. The node may have come to the stage later than the plan."""
    costs = plan.costs
    if isinstance(work, Step):
        return int(costs.optimizer_ns[stage, node])
    if not isinstance(work, Task):
        return 0
    length = work.length
    if work.step < length:
        return int(costs.forward_ns[stage, node])
    if work.step == length:
        return int(costs.head_ns[node])
    if is_weights(work.step, length):
        return int(costs.weight_ns[stage, node])
    return int((costs.input_ns if plan.split_backward else costs.backward_ns)[stage, node])
