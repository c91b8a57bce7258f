"""Advice on a plan: every edit that its critical path gives reason for, evaluated in the simulation.

Edits are evaluated with the paths of the plan. Some call for other paths: a node more or less, a memory slot, and those
that remove the largest bottlenecks. For these, `best` searches paths again for a moment, with nodes on the stages they
have. The plan without any edit gets the same search, so that nothing is put down to an edit that only searching longer
has brought.

Also: why a plan leaves nodes out, and what the search chose of what was open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from skippipe.constraints import MAX_SWAPS, circle
from skippipe.cost_model import NEVER_NS, seconds
from skippipe.dispatch import Dispatch
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.codec_choice import choose_codecs
from skippipe.planner.codec_prices import CodecBudget, plan_nats
from skippipe.planner.problem import PlanProgress, PlanRequest, Problem, Strategy, iteration_ns, problem_on_stages
from skippipe.planner.strategies import compile_search, make_plan
from skippipe.planner.whatif import edits
from skippipe.planner.whatif.candidates import Candidate, CandidateEdits, EditKind
from skippipe.simulator import simulate, simulated_times
from skippipe.timeline import Timeline, Timing
from skippipe.validate import validate

SEARCHED = 100_000  # changes of a plan that a search tries
SEARCH_S = 2.0  # at most
WORTH = 0.001  # of the iteration: what gains less does not help


@dataclass(frozen=True)
class EvaluatedEdit:
    kind: EditKind
    what: str
    because: str
    """The part of the critical path that gives reason to try it."""
    plan: Plan
    """The plan on the edited cluster, with its promised timeline."""
    replanned: bool
    """Paths were searched again; False: they are those of the plan."""
    before_ns: int
    """What the gain is counted from: the iteration; or what other paths alone make of it, if that is shorter."""

    @property
    def after_ns(self) -> int:
        return iteration_ns(self.plan)

    @property
    def gain(self) -> float:
        """The share of the iteration that the edit saves."""
        return 1 - self.after_ns / self.before_ns


@dataclass(frozen=True)
class Advice:
    changes: list[EvaluatedEdit]
    """Edits that help, the best first."""
    searched_ns: int | None
    """The iteration with other paths and no edit, where that is shorter."""
    tried: int
    not_replanned: str
    """Why paths were not searched again; empty if they were."""


def advise(
    plan: Plan,
    timeline: Timeline,
    replanning: bool = True,
    progress: PlanProgress = lambda what, share, best_s: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Advice:
    """Evaluate the candidate edits of a plan; `timeline` is what `simulate` gives for it."""
    if replanning:
        progress("compiling (once on a machine)", 0, None)
        compile_search()
    edits = CandidateEdits(plan, timeline)
    not_replanned = _why_not_replanned(plan, timeline.timing) if replanning else "not asked for"
    candidates = [(candidate, False) for candidate in _distinct(edits.keeping_paths())]
    if not not_replanned:
        candidates += [(candidate, True) for candidate in _distinct(edits.replanning_paths())]
    found: list[EvaluatedEdit] = []
    tried = 0
    for number, (candidate, replanned) in enumerate(candidates):
        if stopped():
            break
        best_ns = min((change.after_ns for change in found), default=timeline.iteration_ns)
        progress(candidate.what, number / len(candidates), seconds(best_ns))
        outcome = _best_of(candidate, replanned, timeline.timing, stopped)
        tried += 1
        if outcome:
            found.append(
                EvaluatedEdit(
                    candidate.kind, candidate.what, candidate.because, outcome, replanned, timeline.iteration_ns
                )
            )
    replanned_ns = [change.after_ns for change in found if change.kind is EditKind.SEARCH and change.gain >= WORTH]
    return Advice(_worth_it(found, replanned_ns), replanned_ns[0] if replanned_ns else None, tried, not_replanned)


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates without duplicates: a node can be on the path for computing and for collisions."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.what, candidate)
    return list(first.values())


def _best_of(candidate: Candidate, replanned: bool, timing: Timing, stopped: Callable[[], bool]) -> Plan | None:
    """The best variant of a candidate; None: every variant deadlocks or breaks a rule."""
    promised = []
    for variant in candidate.variants():
        try:
            changed = variant()
            changed = _replanned(changed, timing, stopped) if replanned else changed
            promised.append(changed.promising(simulate(changed, timing)))
        except UserError:
            continue
    return min(promised, key=iteration_ns, default=None)


def _worth_it(found: list[EvaluatedEdit], replanned_ns: list[int]) -> list[EvaluatedEdit]:
    """The edits worth reporting. With other paths an edit must gain more than these do alone; but leaving a node out is
    free."""
    order = list(EditKind)
    best: dict[str, EvaluatedEdit] = {}
    for change in found:
        if change.replanned and change.kind not in (EditKind.SEARCH, EditKind.LESS):
            change = replace(change, before_ns=min([change.before_ns, *replanned_ns]))
        if change.gain < WORTH or (
            change.kind is EditKind.LESS and change.after_ns > min([change.after_ns, *replanned_ns])
        ):
            continue
        much_alike = str(change.kind) if change.kind is EditKind.MICROBATCHES else change.what
        best[much_alike] = max(best.get(much_alike, change), change, key=lambda each: each.gain)
    left_out = [change.after_ns for change in best.values() if change.kind is EditKind.LESS]
    return sorted(
        (
            each
            for each in best.values()
            if each.kind is not EditKind.SEARCH or all(each.after_ns < ns for ns in left_out)
        ),
        key=lambda each: (-each.gain, each.replanned, order.index(each.kind)),
    )


def _problem(plan: Plan, timing: Timing) -> Problem:
    """The problem of finding other paths for the same stages; a full pipeline in the order of the model stays one."""
    in_order = all(plan.visits(lane) == tuple(range(len(plan.stages))) for lane in plan.lanes)
    return problem_on_stages(plan, plan.visited, timing, swaps=0 if in_order else MAX_SWAPS)


def _why_not_replanned(plan: Plan, timing: Timing) -> str:
    if len({len(lane.path) for lane in plan.lanes}) > 1:
        return "its lanes visit different numbers of stages"
    broken = validate(replace(plan, expected=None))
    if broken:
        return f"the plan breaks a rule ({broken[0]})"
    try:
        _problem(plan, timing)
    except UserError as error:
        return str(error)
    return ""


def _replanned(plan: Plan, timing: Timing, stopped: Callable[[], bool]) -> Plan:
    request = PlanRequest(budget_s=SEARCH_S, changes=SEARCHED, placement=plan.placement, start=plan, stopped=stopped)
    return make_plan(_problem(plan, timing), Strategy.BEST, request)


def left_out(plan: Plan) -> dict[str, list[int]]:
    """Nodes that the plan does not use, by the reason."""
    found: dict[str, list[int]] = {}
    for node in range(len(plan.cluster)):
        if node not in plan.stage_of:
            found.setdefault(_reason(plan, node), []).append(node)
    return found


def _reason(plan: Plan, node: int) -> str:
    """The reason: what the shortest lane would take with this node instead of another of some stage."""
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
    """Nanoseconds of a round trip without other traffic."""
    costs = plan.costs
    tasks = sum(int(costs.forward_ns[stage_of[node], node] + costs.backward_ns[stage_of[node], node]) for node in path)
    hops = sum(costs.round_trip_ns(a, b) for a, b in circle(path))
    return tasks + hops + int(costs.head_ns[path[0]])


@dataclass(frozen=True)
class Choice:
    """A decision variable of a plan, and the next best value that it could have had."""

    variable: str
    chosen: str
    instead: str
    iteration_ns: int
    """With that, and the paths of the plan."""

    def to_json(self) -> dict[str, Any]:
        named = {"variable": self.variable, "chosen": self.chosen, "instead": self.instead}
        return {**named, "iteration_s": seconds(self.iteration_ns)}


def choices(problem: Problem, plan: Plan) -> list[Choice]:
    """What the search chose of what the problem left open, beside where nodes are and where lanes go."""
    variables, timing = problem.decision_variables, plan.promise.timing
    rivals: list[tuple[str, str, dict[str, Plan]]] = []
    if variables.split_backward:
        names = ("split", "whole") if plan.split_backward else ("whole", "split")
        rivals.append(("backward", names[0], {names[1]: edits.other_backward(plan)}))
    if variables.dispatch:
        others = {str(each): edits.other_dispatch(plan, each) for each in Dispatch if each is not plan.dispatch}
        rivals.append(("dispatch", str(plan.dispatch), others))
    kinds = dict.fromkeys(stage.averaging.kind for stage in plan.stages if len(stage.nodes) > 1)
    if timing is Timing.FULL and any(stage.pieces for stage in plan.stages):
        rivals.append(("averaging", " and ".join(kinds), {"rings": edits.averaging_in_rings(plan)}))
    if variables.checkpointing:
        names = ("yes", "no") if plan.workload.activation_checkpointing else ("no", "yes")
        rivals.append(("checkpointing", names[0], {names[1]: edits.other_checkpointing(plan)}))
    if problem.codec_budget:
        rivals += _codec_choices(plan, problem.codec_budget, timing)
    found = []
    for variable, chosen, others in rivals:
        taken_ns = {}
        for name, other in others.items():
            with suppress(UserError):  # lanes that lock up
                if not validate(other):
                    taken_ns[name] = simulated_times(other, timing).iteration_ns
        if taken_ns:
            instead = min(taken_ns, key=lambda name: taken_ns[name])
            found.append(Choice(variable, chosen, instead, taken_ns[instead]))
    return found


def _codec_choices(plan: Plan, budget: CodecBudget, timing: Timing) -> list[tuple[str, str, dict[str, Plan]]]:
    """What codecs cost, and with half of that; and whether any is smaller than the cheapest, and with none."""
    spent = plan_nats(plan, budget.prices)
    plain = edits.other_codecs(plan, *budget.usual)
    least = plan_nats(plain, budget.prices)
    if spent <= least:
        return []
    half = replace(budget, nats=max(spent / 2, least))
    with_half = {f"for {half.nats:.2g}": choose_codecs(plan, half, timing)}
    return [
        ("codecs", f"for {spent:.2g} of {budget.nats:g} nats", with_half),
        ("compression", "yes", {f"{' hops and '.join(budget.usual)} gradients": plain}),
    ]
