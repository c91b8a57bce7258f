"""Validation of a plan: every rule, every cost and every second of its promise, each violation named."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from skippipe import constraints
from skippipe.cost_model import seconds
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.simulator import simulate
from skippipe.timeline import Timeline


@dataclass(frozen=True)
class Violation:
    rule: str
    """Name of the rule: stages, CC1, CC2, CC3, TC1, deadlock, link, microbatches, or promise."""
    where: str
    message: str

    def __str__(self) -> str:
        meaning = constraints.RULES.get(self.rule)
        return f"{self.rule}{f' ({meaning})' if meaning else ''}: {self.where}: {self.message}"


def validate(plan: Plan) -> list[Violation]:
    """All violations; empty: the plan is valid."""
    return [*_stages(plan), *_paths(plan), *_exposure(plan), *_memory(plan), *_links(plan), *_promise(plan)]


def _stages(plan: Plan) -> list[Violation]:
    return [
        Violation("stages", f"stage {index}", "no node holds it")
        for index, stage in enumerate(plan.stages)
        if not stage.nodes
    ]


def _paths(plan: Plan) -> list[Violation]:
    found = []
    for number, lane in enumerate(plan.lanes):
        visits = plan.visits(lane)
        shown = "→".join(map(str, visits))
        hop = constraints.cc1_broken_at(visits)
        if hop is not None:
            problem = f"is on stage {visits[0]}, not 0" if hop == 0 else "is on stage 0 again"
            found.append(Violation("CC1", f"lane {number}, hop {hop}", f"'{_name(plan, lane.path[hop])}' {problem}"))
        hop = constraints.cc2_broken_at(visits)
        if hop is not None:
            message = (
                f"stage {visits[hop]} may not come here in {shown}: only neighbours swap, "
                f"{constraints.MAX_SWAPS} times a path at most, and no stage comes twice"
            )
            found.append(Violation("CC2", f"lane {number}, hop {hop}", message))
        elif plan.workload.bridge_parameters and list(visits) != sorted(visits):
            found.append(Violation("CC2", f"lane {number}", f"bridges lead forward, and {shown} has swapped stages"))
    return found


def _exposure(plan: Plan) -> list[Violation]:
    counts = plan.exposure
    mean = sum(counts[1:]) / (len(counts) - 1)
    found = [
        Violation("CC3", f"stage {stage}", f"{count} microbatches visit it, but {mean:g} is every other stage's share")
        for stage, count in constraints.cc3_uneven(counts).items()
    ]
    if plan.microbatches != plan.workload.microbatches:
        message = f"the lanes carry {plan.microbatches} microbatches, the workload has {plan.workload.microbatches}"
        found.append(Violation("microbatches", "lanes", message))
    return found


def _memory(plan: Plan) -> list[Violation]:
    paths = [lane.path for lane in plan.lanes]
    found = [
        Violation(
            "TC1",
            f"node '{_name(plan, node)}'",
            f"lies on {len(lanes)} lanes ({', '.join(map(str, lanes))}) but has {plan.slots[node]} memory slots",
        )
        for node, lanes in constraints.tc1_overfull(paths, plan.slots).items()
    ]
    circle = constraints.deadlock_cycle(paths, plan.slots)
    if circle:
        shown = " → ".join(_name(plan, node) for node in circle)
        found.append(
            Violation("deadlock", shown, "lanes can hold slots of these nodes and wait for each other in a circle")
        )
    return found


def _links(plan: Plan) -> list[Violation]:
    found: list[Violation] = []
    unreachable = plan.cluster.bandwidth_bytes_per_s == 0
    np.fill_diagonal(unreachable, val=False)
    if not unreachable.any():  # large stages average over very many links
        return found
    for number, lane in enumerate(plan.lanes):
        for hop, (a, b) in enumerate(constraints.circle(lane.path)):
            for sender, receiver in ((a, b), (b, a)):
                if unreachable[sender, receiver]:
                    message = f"'{_name(plan, sender)}' cannot reach '{_name(plan, receiver)}'"
                    found.append(Violation("link", f"lane {number}, hop {hop}", message))
    for index, stage in enumerate(plan.stages):
        for sender, receiver in sorted(stage.averaging.links):
            if unreachable[sender, receiver]:
                message = f"'{_name(plan, sender)}' cannot reach '{_name(plan, receiver)}' to average gradients"
                found.append(Violation("link", f"stage {index}, averaging", message))
    return found


def _promise(plan: Plan) -> list[Violation]:
    """Violations of the promised timeline: simulate again and compare every figure."""
    if plan.expected is None:
        return []
    if plan.lower_bound_ns and plan.expected.iteration_ns < plan.lower_bound_ns:
        message = f"{plan.expected.iteration_s:.9f} s are promised, less than the {seconds(plan.lower_bound_ns):.9f} s"
        return [Violation("promise", "lower_bound_s", f"{message} that no plan is to go under")]
    try:
        true = simulate(plan, plan.expected.timing)
    except UserError as error:  # it locks up, or never ends
        return [Violation("promise", "expected", str(error))]
    return [
        Violation("promise", f"expected.{name}", f"{stated} is promised, {found} comes out")
        for name, stated, found in _differences(plan.expected, true)
    ]


def _differences(stated: Timeline, true: Timeline) -> list[tuple[str, object, object]]:
    """Totals that differ; of every list, the first entry that does."""
    found: list[tuple[str, object, object]] = []
    for field in fields(Timeline):
        promised, simulated = getattr(stated, field.name), getattr(true, field.name)
        if promised == simulated:
            continue
        name = field.name.replace("_ns", "_s")
        if isinstance(promised, tuple):
            if len(promised) != len(simulated):
                found.append((name, f"{len(promised)} entries", f"{len(simulated)} entries"))
                continue
            index = next(i for i, (a, b) in enumerate(zip(promised, simulated, strict=True)) if a != b)
            found.append((f"{name}[{index}]", promised[index], simulated[index]))
        else:
            found.append((name, f"{seconds(promised):.9f} s", f"{seconds(simulated):.9f} s"))
    return found


def _name(plan: Plan, node: int) -> str:
    return plan.cluster.nodes[node].name
