"""The book of an iteration: which microbatch is back, with what loss, and whose gradient it is part of, stage by stage.

A microbatch counts for a stage at most once. What a lost node had added up is lost with it: the microbatch then counts
for fewer stages, as if it had skipped that one, and the mean is over those that are in the book.


One iteration as the coordinator sees it: microbatches that come back, gradients that are averaged, nodes that go.

As long as all goes as planned, nodes average by themselves when their tasks are done, and one report from each is all
there is. When a node is lost, the others are told other ways; when all microbatches are back, everybody is asked what
was added up, and that is averaged. If a gradient is not finite, everybody is asked once more, and whoever has made it
leaves it out.

"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from skippipe.collectives import COLLECTIVES
from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.runtime.messages import Average, Averaged, ControlMessage, Drain, DrainAck, MicrobatchDone
from skippipe.runtime.routing import Route, apply, rerouted, routes_of


@dataclass
class ContributionLog:
    returned: dict[int, int] = field(default_factory=dict)
    """Lane → microbatches that are back; they come back in order."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Lane and microbatch → its loss, NaN if nobody is left who knew it."""
    contributed: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """Node → lane and microbatch of what it has added up."""

    def back(self, lane: int, microbatch: int, loss: float) -> None:
        """One is back, and so are those before it on its lane, though word of them may be lost. That it is back again,
        because nobody knew, changes nothing but that its loss may be known."""
        self.returned[lane] = max(microbatch + 1, self.returned.get(lane, 0))
        if math.isnan(self.losses.get((lane, microbatch), math.nan)):
            self.losses[lane, microbatch] = loss

    def all_back(self, routes: Sequence[Route]) -> bool:
        return all(self.returned.get(lane, 0) == route.microbatches for lane, route in enumerate(routes))

    def flaw(self, plan: Plan, node: int, visits: Iterable[Sequence[int]]) -> str:
        """What cannot be true of a node's account; empty if nothing."""
        rows = [tuple(row) for row in visits]
        if not all(
            len(row) == 2 and row[0] < len(plan.lanes) and row[1] < plan.lanes[row[0]].microbatches for row in rows
        ):
            return "counts microbatches that are not in the plan"
        if len(set(rows)) < len(rows):
            return "counts a microbatch twice"
        stage = plan.stage_of[node]
        for other, theirs in self.contributed.items():
            if other != node and plan.stage_of.get(other) == stage and theirs & set(rows):
                return f"counts a microbatch that node '{plan.cluster.nodes[other].name}' counts too"
        return ""

    def account(self, node: int, visits: Iterable[Sequence[int]]) -> None:
        self.contributed[node] = frozenset((lane, microbatch) for lane, microbatch in visits)

    def visits(self, plan: Plan) -> list[int]:
        """How many microbatches are in the gradient of each stage."""
        return [sum(len(self.contributed.get(node, ())) for node in stage.nodes) for stage in plan.stages]

    def loss(self) -> float:
        """Mean over the microbatches whose loss is known."""
        known = [loss for _, loss in sorted(self.losses.items()) if not math.isnan(loss)]
        return sum(known) / len(known) if known else math.nan


AGREE = 1e-4  # by which the norms of one gradient may differ from machine to machine


class DrainState(Enum):
    NO = "tasks and averaging as planned"
    RUNNING = "microbatches go on another way"
    ASKED = "everybody is asked what was added up"
    AVERAGING = "that is averaged"


@dataclass
class Iteration:
    number: int
    plan: Plan
    epoch: int
    nodes: set[int]
    """That average and step; one that is lost is taken out."""
    tell_all: Callable[[ControlMessage], None]
    throw_out: Callable[[int, str], None]
    """A node that says what cannot be true, and why."""
    ledger: ContributionLog = field(default_factory=ContributionLog)
    reports: dict[int, Averaged] = field(default_factory=dict)
    spoiled: list[int] = field(default_factory=list)
    """Stages whose gradient was not finite."""
    begun_epoch: int = field(init=False)
    """In which it was begun, or begun again; what was said before is of an attempt that was given up."""
    _settling: DrainState = DrainState.NO
    _routes: list[Route] = field(init=False)
    _answered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._routes = routes_of(self.plan)
        self.begun_epoch = self.epoch

    def hear(self, node: int, control: MicrobatchDone | DrainAck | Averaged) -> bool:
        """Whether all is averaged, so that `norms` is final."""
        if control.iteration != self.number or node not in self.nodes:
            return False
        match control:
            case MicrobatchDone() if control.epoch >= self.begun_epoch:  # ways that change keep what has come back
                self._returned(node, control)
            case DrainAck() if control.epoch == self.epoch and self._settling is DrainState.ASKED:
                if self._accounted(node, control.visits):
                    self._answered.add(node)
                    self._average_if_answered()
            case Averaged() if control.epoch == self.epoch and self._settling in (DrainState.NO, DrainState.AVERAGING):
                if self._is_sound(node, control) and self._accounted(node, control.visits):
                    self.reports[node] = control
                    return self.complete()
            case _:  # of an epoch that is over
                pass
        return False

    def without(self, node: int, able: list[int]) -> tuple[int, int] | None:
        """A node is lost: how many lanes go on another way, and how many places they skip. None: there is no way."""
        self.nodes.discard(node)
        self.ledger.contributed.pop(node, None)
        change = rerouted(
            self.plan,
            self._routes,
            able,
            self.ledger.returned,
            iteration=self.number,
            epoch=self.epoch + 1,
            gone=[node],
        )
        if change is None:
            return None
        self.epoch = change.epoch
        apply(self._routes, change)
        self._settling = DrainState.RUNNING
        self.reports.clear()
        self.tell_all(change)
        self._settle_if_back()
        return len(change.lanes), len(change.skipped)

    def uses(self, a: int, b: int) -> bool:
        """Does anything go from one of these nodes to the other?"""
        ways = [[node for at, node in enumerate(route.path) if at not in route.skipped] for route in self._routes]
        hops = [pair for way in ways for pair in circle(way)]
        collective = COLLECTIVES[self.plan.workload.collective]
        for stage in self.plan.stages:
            hops += collective.link_messages([node for node in stage.ring if node in self.nodes])
        return any({a, b} == set(pair) for pair in hops)

    def complete(self) -> bool:
        """Has everybody averaged, and to something finite? If not finite, it is done again without."""
        if not self.reports.keys() >= self.nodes or self._disagreeing():
            return False
        bad = [stage for stage, norm in enumerate(self.norms) if not math.isfinite(norm)]
        if not bad or self.spoiled:
            return True
        self.spoiled = bad
        self.epoch += 1
        self._ask(inspect=True)
        return False

    @property
    def is_disturbed(self) -> bool:
        """Has something happened that the plan did not foresee?"""
        return self._settling is not DrainState.NO

    @property
    def norms(self) -> list[float]:
        """Squared, of each stage's gradient; 0 where nobody holds the stage."""
        said = [
            [self.reports[node].squared_norm for node in stage.nodes if node in self.reports]
            for stage in self.plan.stages
        ]
        return [next((norm for norm in each if not math.isfinite(norm)), each[0]) if each else 0.0 for each in said]

    @property
    def visits(self) -> list[int]:
        return self.ledger.visits(self.plan)

    @property
    def missing(self) -> list[int]:
        """Who has not said what is waited for."""
        heard = self._answered if self._settling is DrainState.ASKED else self.reports.keys()
        return sorted(self.nodes - heard)

    def report(self, rate: float, norm: float, seconds: float) -> IterationReport:
        reports = sorted(self.reports.items())
        return IterationReport(
            iteration=self.number,
            loss=self.ledger.loss(),
            norm=norm,
            rate=rate,
            seconds=seconds,
            sent_bytes={(node, to): count for node, report in reports for to, count in report.sent_bytes},
            tasks={node: report.tasks for node, report in reports if report.tasks},
            visits=tuple(self.visits),
            plan=self.plan,
        )

    def _returned(self, node: int, control: MicrobatchDone) -> None:
        lanes = self._routes
        known = control.lane < len(lanes) and control.microbatch < lanes[control.lane].microbatches
        if known and lanes[control.lane].path[0] == node:
            self.ledger.back(control.lane, control.microbatch, control.loss)
            self._settle_if_back()

    def _accounted(self, node: int, visits: list[list[int]]) -> bool:
        if flaw := self.ledger.flaw(self.plan, node, visits):
            self.throw_out(node, f"it {flaw}")
            return False
        self.ledger.account(node, visits)
        return True

    def _is_sound(self, node: int, report: Averaged) -> bool:
        nodes, lanes = len(self.plan.cluster.nodes), len(self.plan.lanes)
        sound = (
            not report.squared_norm < 0
            and all(len(row) == 2 and row[0] < nodes for row in report.sent_bytes)
            and all(len(row) == 6 and row[0] < lanes for row in report.tasks)
        )
        if not sound:
            self.throw_out(node, "its report is of nothing that is in the plan")
        return sound

    def _settle_if_back(self) -> None:
        if self._settling is DrainState.RUNNING and self.ledger.all_back(self._routes):
            self._ask(inspect=False)

    def _ask(self, *, inspect: bool) -> None:
        self._settling = DrainState.ASKED
        self._answered = set()
        self.reports.clear()
        self.ledger.contributed.clear()
        self.tell_all(Drain(self.number, self.epoch, inspect))

    def _average_if_answered(self) -> None:
        if self._answered >= self.nodes:
            self._settling = DrainState.AVERAGING
            self.tell_all(Average(self.number, self.epoch, self.visits))

    def _disagreeing(self) -> bool:
        """Nodes of a stage whose gradient is not that of most others are thrown out."""
        for stage in self.plan.stages:
            said = {node: self.reports[node].squared_norm for node in stage.nodes if node in self.reports}
            if not all(map(math.isfinite, said.values())):
                continue
            alike = {
                node: sum(math.isclose(norm, other, rel_tol=AGREE) for other in said.values())
                for node, norm in said.items()
            }
            if any(count < len(said) for count in alike.values()):
                right = max(alike, key=lambda node: alike[node])
                name = self.plan.cluster.nodes[right].name
                for node, norm in said.items():
                    if not math.isclose(norm, said[right], rel_tol=AGREE):
                        self.throw_out(node, f"its gradient is not that of '{name}'")
                return True
        return False
