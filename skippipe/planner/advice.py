"""What one change would help a plan most: each that its critical path gives reason for, tried in the simulation.

Changes are tried with the plan as it is. Some call for other paths: a node more or less, a memory slot, and those that
mend what limits the plan most. For these, paths are searched anew for a moment, by the strategy `best`, with nodes on
the stages they have. The same search is given to the plan without any change, so that nothing is put down to a change
that only searching longer has brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from skippipe import rules
from skippipe.check import check
from skippipe.costs import seconds
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.ideas import Ideas, Proposal, Sort
from skippipe.planner.problem import NO_FREEDOMS, Problem
from skippipe.planner.strategies import Request, Strategy, compile_search, iteration_ns, make_plan
from skippipe.simulate import simulate
from skippipe.timeline import Timeline, Timing

SEARCHED = 100_000  # changes of a plan that a search tries
SEARCH_S = 2.0  # at most
WORTH = 0.001  # of the iteration: what gains less does not help


@dataclass(frozen=True)
class Change:
    sort: Sort
    what: str
    because: str
    """What of the critical path gives reason to try it."""
    plan: Plan
    """On the changed cluster, with its promise."""
    replanned: bool
    """Paths were searched anew; otherwise they are those of the plan."""
    before_ns: int
    """What its gain is counted from: the iteration; or if other paths alone make that shorter, what they make of it."""

    @property
    def after_ns(self) -> int:
        return iteration_ns(self.plan)

    @property
    def gain(self) -> float:
        """The share that it saves."""
        return 1 - self.after_ns / self.before_ns


@dataclass(frozen=True)
class Advice:
    changes: list[Change]
    """That help, the best first."""
    searched_ns: int | None
    """The iteration with other paths and no change, where that is shorter."""
    tried: int
    not_replanned: str
    """Why no paths were searched anew; empty if they were."""


Progress = Callable[[str, float, float | None], None]


def advice(
    plan: Plan,
    timeline: Timeline,
    replanning: bool = True,
    progress: Progress = lambda what, share, best_s: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Advice:
    """`timeline` is what `simulate` gives for the plan."""
    if replanning:
        progress("compiling (once on a machine)", 0, None)
        compile_search()
    ideas = Ideas(plan, timeline)
    not_replanned = _why_not_replanned(plan, timeline.timing) if replanning else "not asked for"
    proposals = [(proposal, False) for proposal in _distinct(ideas.for_these_paths())]
    if not not_replanned:
        proposals += [(proposal, True) for proposal in _distinct(ideas.for_other_paths())]
    found: list[Change] = []
    tried = 0
    for number, (proposal, replanned) in enumerate(proposals):
        if stopped():
            break
        best_ns = min((change.after_ns for change in found), default=timeline.iteration_ns)
        progress(proposal.what, number / len(proposals), seconds(best_ns))
        outcome = _best_of(proposal, replanned, timeline.timing, stopped)
        tried += 1
        if outcome:
            found.append(
                Change(proposal.sort, proposal.what, proposal.because, outcome, replanned, timeline.iteration_ns)
            )
    searched = [change.after_ns for change in found if change.sort is Sort.SEARCH and change.gain >= WORTH]
    return Advice(_worth_it(found, searched), searched[0] if searched else None, tried, not_replanned)


def _distinct(proposals: Iterable[Proposal]) -> list[Proposal]:
    """A node can be blamed twice, for computing and for collisions."""
    first: dict[str, Proposal] = {}
    for proposal in proposals:
        first.setdefault(proposal.what, proposal)
    return list(first.values())


def _best_of(proposal: Proposal, replanned: bool, timing: Timing, stopped: Callable[[], bool]) -> Plan | None:
    """None: every variant locks up or breaks a rule."""
    promised = []
    for variant in proposal.variants():
        try:
            changed = variant()
            changed = _searched(changed, timing, stopped) if replanned else changed
            promised.append(changed.promising(simulate(changed, timing)))
        except UserError:
            continue
    return min(promised, key=iteration_ns, default=None)


def _worth_it(found: list[Change], searched: list[int]) -> list[Change]:
    """With other paths a change must do more than these do by themselves; but to go without a node costs nothing."""
    order = list(Sort)
    best: dict[str, Change] = {}
    for change in found:
        if change.replanned and change.sort not in (Sort.SEARCH, Sort.LESS):
            change = replace(change, before_ns=min([change.before_ns, *searched]))
        if change.gain < WORTH or (change.sort is Sort.LESS and change.after_ns > min([change.after_ns, *searched])):
            continue
        much_alike = str(change.sort) if change.sort is Sort.MICROBATCHES else change.what
        best[much_alike] = max(best.get(much_alike, change), change, key=lambda each: each.gain)
    left_out = [change.after_ns for change in best.values() if change.sort is Sort.LESS]
    return sorted(
        (each for each in best.values() if each.sort is not Sort.SEARCH or all(each.after_ns < ns for ns in left_out)),
        key=lambda each: (-each.gain, each.replanned, order.index(each.sort)),
    )


def _problem(plan: Plan, timing: Timing) -> Problem:
    """Other paths for the same stages; a full pipeline in the order of the model stays one."""
    in_order = all(plan.visits(lane) == tuple(range(len(plan.stages))) for lane in plan.lanes)
    return Problem(
        plan.cluster,
        plan.workload,
        len(plan.stages),
        plan.visited,
        sizes=tuple(len(stage.nodes) for stage in plan.stages),
        swaps=0 if in_order else rules.MAX_SWAPS,
        timing=timing,
        dispatch=plan.dispatch,
        split_backward=plan.split_backward,
        layers=plan.layers,
        freedoms=NO_FREEDOMS,
    )


def _why_not_replanned(plan: Plan, timing: Timing) -> str:
    if len({len(lane.path) for lane in plan.lanes}) > 1:
        return "its lanes visit different numbers of stages"
    broken = check(replace(plan, expected=None))
    if broken:
        return f"the plan breaks a rule ({broken[0]})"
    try:
        _problem(plan, timing)
    except UserError as error:
        return str(error)
    return ""


def _searched(plan: Plan, timing: Timing, stopped: Callable[[], bool]) -> Plan:
    members = tuple(stage.nodes for stage in plan.stages)
    request = Request(budget_s=SEARCH_S, changes=SEARCHED, placement=members, start=plan, stopped=stopped)
    return make_plan(_problem(plan, timing), Strategy.BEST, request)
