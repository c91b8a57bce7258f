"""Nodes that a plan does without, by the reason."""

from __future__ import annotations

from skippipe.costs import NEVER_NS, seconds
from skippipe.plan import Plan
from skippipe.rules import circle


def left_out(plan: Plan) -> dict[str, list[int]]:
    """Reason → nodes."""
    found: dict[str, list[int]] = {}
    for node in range(len(plan.cluster)):
        if node not in plan.stage_of:
            found.setdefault(_reason(plan, node), []).append(node)
    return found


def _reason(plan: Plan, node: int) -> str:
    """What the shortest lane would take that had it instead of another node of some stage."""
    stages = [stage for stage in range(len(plan.stages)) if plan.costs.slots[stage, node] > 0]
    if not stages:
        return "too little memory for any stage"
    round_ns = {lane.path: _alone_ns(plan, lane.path, plan.stage_of) for lane in plan.lanes}
    with_it_ns = min(
        (
            _alone_ns(plan, (*lane.path[:hop], node, *lane.path[hop + 1 :]), {**plan.stage_of, node: stage})
            for lane in plan.lanes
            for hop, stage in enumerate(plan.visits(lane))
            if stage in stages
        ),
        default=NEVER_NS,
    )
    slowest_ns = max(round_ns.values())
    if with_it_ns >= NEVER_NS:
        return "no lane can reach it and come back"
    if with_it_ns > slowest_ns:
        return (
            f"too far or too slow: a microbatch over it takes {seconds(with_it_ns):.2f} s alone, "
            f"on the slowest lane in use {seconds(slowest_ns):.2f} s"
        )
    return "not needed: the lanes there are carry all microbatches, and no slower"


def _alone_ns(plan: Plan, path: tuple[int, ...], stage_of: dict[int, int]) -> int:
    """A round trip with nobody else there."""
    costs = plan.costs
    tasks = sum(int(costs.forward_ns[stage_of[node], node] + costs.backward_ns[stage_of[node], node]) for node in path)
    hops = sum(int(costs.hop_ns[a, b] + costs.hop_ns[b, a]) for a, b in circle(path))
    return tasks + hops + int(costs.head_ns[path[0]])
