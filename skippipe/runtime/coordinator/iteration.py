"""One iteration as the coordinator sees it: microbatches return, gradients are averaged, nodes are lost.

As long as all goes as planned, nodes average by themselves when their tasks are done, and one report from each is all
there is. When a node is lost, the others are rerouted; when all microbatches have returned, every node is asked what it
has accumulated (`Drain`), and that is averaged. If a gradient is not finite, every node is asked once more, and the one
that made it leaves it out.

A microbatch counts for a stage at most once. What a lost node had accumulated is lost with it: the microbatch then
counts for fewer stages, as if it had skipped that one, and the mean is over what the contributions say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.runtime.messages import Average, Averaged, ControlMessage, Drain, DrainAck, MicrobatchDone
from skippipe.runtime.routing import Route, apply_reroute, plan_reroute, routes_of, teacher_routes
from skippipe.whole_paths import planned_teacher_paths


@dataclass
class ContributionLog:
    """Which microbatches have returned, with what loss, and which node has accumulated which of them."""

    returned: dict[int, int] = field(default_factory=dict)
    """Lane → microbatches that have returned; they return in order."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Lane and microbatch → its loss, NaN if no node is left that knew it."""
    contributed: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """Node → lane and microbatch of what it has accumulated."""

    def add_returned(self, lane: int, microbatch: int, loss: float) -> None:
        """One has returned, and so have those before it on its lane, though messages of them may be lost. If it returns
        again, because no node knew that it had, nothing changes but that its loss may be known."""
        self.returned[lane] = max(microbatch + 1, self.returned.get(lane, 0))
        if math.isnan(self.losses.get((lane, microbatch), math.nan)):
            self.losses[lane, microbatch] = loss

    def all_returned(self, routes: Sequence[Route]) -> bool:
        return all(self.returned.get(lane, 0) == route.microbatches for lane, route in enumerate(routes))

    def flaw(self, plan: Plan, node: int, contribution: Iterable[Sequence[int]]) -> str:
        """What cannot be true of the contribution that a node reports; empty if nothing."""
        rows = [tuple(row) for row in contribution]
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

    def add_contribution(self, node: int, contribution: Iterable[Sequence[int]]) -> None:
        self.contributed[node] = frozenset((lane, microbatch) for lane, microbatch in contribution)

    def stage_microbatches(self, plan: Plan) -> list[int]:
        """Microbatches in the gradient of each stage."""
        return [sum(len(self.contributed.get(node, ())) for node in stage.nodes) for stage in plan.stages]

    def loss(self) -> float:
        """Mean over the microbatches whose loss is known."""
        known = [loss for _, loss in sorted(self.losses.items()) if not math.isnan(loss)]
        return sum(known) / len(known) if known else math.nan


NORM_TOLERANCE = 1e-4  # by which the norms of one gradient may differ from machine to machine


class DrainState(Enum):
    AS_PLANNED = "nodes average by themselves when their tasks are done"
    REROUTED = "microbatches go on another way"
    DRAINING = "nodes are asked what they have accumulated"
    AVERAGING = "that is averaged"


@dataclass
class Iteration:
    number: int
    plan: Plan
    epoch: int
    nodes: set[int]
    """Nodes that average and step; one that is lost is removed."""
    broadcast: Callable[[ControlMessage], None]
    evict: Callable[[int, str], None]
    """Evicts a node that reports what cannot be true, for a reason."""
    log: ContributionLog = field(default_factory=ContributionLog)
    reports: dict[int, Averaged] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)
    """Stages whose gradient was not finite."""
    first_epoch: int = field(init=False)
    """Epoch in which the iteration began, or started over; earlier messages are of an attempt that was given up."""
    _drain: DrainState = DrainState.AS_PLANNED
    _routes: list[Route] = field(init=False)
    _gone: set[int] = field(default_factory=set)
    _teacher: dict[int, tuple[int, ...]] = field(init=False)
    """Lane → the teacher's path."""
    _drained: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._routes = routes_of(self.plan)
        self._teacher = planned_teacher_paths(self.plan)
        self.first_epoch = self.epoch

    def on_message(self, node: int, control: MicrobatchDone | DrainAck | Averaged) -> bool:
        """True when all nodes have averaged, so that `norms` is final."""
        if control.iteration != self.number or node not in self.nodes:
            return False
        match control:
            case MicrobatchDone() if control.epoch >= self.first_epoch:  # a reroute keeps what has returned
                self._on_returned(node, control)
            case DrainAck() if control.epoch == self.epoch and self._drain is DrainState.DRAINING:
                if self._accept_contribution(node, control.contribution):
                    self._drained.add(node)
                    self._average_if_drained()
            case Averaged() if control.epoch == self.epoch and self._drain in (
                DrainState.AS_PLANNED,
                DrainState.AVERAGING,
            ):
                if self._is_sound(node, control) and self._accept_contribution(node, control.contribution):
                    self.reports[node] = control
                    return self.complete()
            case _:  # of an earlier epoch
                pass
        return False

    def reroute(self, node: int, active: list[int]) -> tuple[int, int] | None:
        """A node is lost: how many lanes go another way, and how many places they skip. None: there is no way."""
        self.nodes.discard(node)
        self._gone.add(node)
        self.log.contributed.pop(node, None)
        change = plan_reroute(
            self.plan,
            self._routes,
            active,
            self.log.returned,
            iteration=self.number,
            epoch=self.epoch + 1,
            lost=node,
        )
        if change is None:
            return None
        apply_reroute(self._routes, change)
        paths = teacher_routes(self.plan, self._routes, self._gone)
        if paths is None and not self.log.all_returned(self._routes):
            return None
        self.epoch, self._teacher = change.epoch, paths or {}
        self._drain = DrainState.REROUTED
        self.reports.clear()
        self.broadcast(change)
        self._drain_if_returned()
        return len(change.lanes), len(change.skipped)

    def uses(self, a: int, b: int) -> bool:
        """Does a hop or a message of averaging use the link between two nodes?"""
        paths = [[node for at, node in enumerate(route.path) if at not in route.skipped] for route in self._routes]
        links = {link for path in (*paths, *self._teacher.values()) for link in circle(path)}
        for stage in self.plan.stages:
            links |= stage.averaging.without(self.plan.stage_of.keys() - self.nodes).links
        return (a, b) in links or (b, a) in links

    def complete(self) -> bool:
        """Have all nodes averaged to something finite? If it is not finite, it is averaged again without its maker."""
        if not self.reports.keys() >= self.nodes or self._evict_disagreeing():
            return False
        bad = [stage for stage, norm in enumerate(self.norms) if not math.isfinite(norm)]
        if not bad or self.not_finite:
            return True
        self.not_finite = bad
        self.epoch += 1
        self._start_drain(inspect=True)
        return False

    @property
    def is_disturbed(self) -> bool:
        """Has something happened that the plan did not foresee?"""
        return self._drain is not DrainState.AS_PLANNED

    @property
    def norms(self) -> list[float]:
        """Squared norm of each stage's gradient; 0 where no node holds the stage."""
        reported = [
            [self.reports[node].squared_norm for node in stage.nodes if node in self.reports]
            for stage in self.plan.stages
        ]
        return [next((norm for norm in each if not math.isfinite(norm)), each[0]) if each else 0.0 for each in reported]

    @property
    def stage_microbatches(self) -> list[int]:
        return self.log.stage_microbatches(self.plan)

    @property
    def awaited(self) -> list[int]:
        """Nodes whose report or answer is missing."""
        arrived = self._drained if self._drain is DrainState.DRAINING else self.reports.keys()
        return sorted(self.nodes - arrived)

    def report(self, rate: float, norm: float, seconds: float) -> IterationReport:
        reports = sorted(self.reports.items())
        return IterationReport(
            iteration=self.number,
            loss=self.log.loss(),
            norm=norm,
            rate=rate,
            seconds=seconds,
            sent_bytes={(node, to): count for node, report in reports for to, count in report.sent_bytes},
            tasks={node: report.tasks for node, report in reports if report.tasks},
            stage_microbatches=tuple(self.stage_microbatches),
            plan=self.plan,
            closing={node: tuple(report.closing) for node, report in reports if report.closing},
            copies={node: report.copies for node, report in reports if report.copies},
        )

    def _on_returned(self, node: int, control: MicrobatchDone) -> None:
        lanes = self._routes
        known = control.lane < len(lanes) and control.microbatch < lanes[control.lane].microbatches
        if known and lanes[control.lane].path[0] == node:
            self.log.add_returned(control.lane, control.microbatch, control.loss)
            self._drain_if_returned()

    def _accept_contribution(self, node: int, contribution: list[list[int]]) -> bool:
        if flaw := self.log.flaw(self.plan, node, contribution):
            self.evict(node, f"it {flaw}")
            return False
        self.log.add_contribution(node, contribution)
        return True

    def _is_sound(self, node: int, report: Averaged) -> bool:
        nodes, lanes = len(self.plan.cluster.nodes), len(self.plan.lanes)
        sound = (
            not report.squared_norm < 0
            and all(len(row) == 2 and row[0] < nodes for row in report.sent_bytes)
            and all(len(row) in (6, 7) and row[0] < lanes for row in report.tasks)
            and len(report.closing) in (0, 3)
            and all(len(row) == 6 and row[0] < lanes and row[3] < 2 for row in report.copies)
        )
        if not sound:
            self.evict(node, "its report is of nothing that is in the plan")
        return sound

    def _drain_if_returned(self) -> None:
        if self._drain is DrainState.REROUTED and self.log.all_returned(self._routes):
            self._start_drain(inspect=False)

    def _start_drain(self, *, inspect: bool) -> None:
        self._drain = DrainState.DRAINING
        self._drained = set()
        self.reports.clear()
        self.log.contributed.clear()
        self.broadcast(Drain(self.number, self.epoch, inspect))

    def _average_if_drained(self) -> None:
        if self._drained >= self.nodes:
            self._drain = DrainState.AVERAGING
            self.broadcast(Average(self.number, self.epoch, self.stage_microbatches))

    def _evict_disagreeing(self) -> bool:
        """Evict nodes of a stage whose gradient is not that of most others."""
        for stage in self.plan.stages:
            norms = {node: self.reports[node].squared_norm for node in stage.nodes if node in self.reports}
            if not all(map(math.isfinite, norms.values())):
                continue
            agreeing = {
                node: sum(math.isclose(norm, other, rel_tol=NORM_TOLERANCE) for other in norms.values())
                for node, norm in norms.items()
            }
            if any(count < len(norms) for count in agreeing.values()):
                right = max(agreeing, key=lambda node: agreeing[node])
                name = self.plan.cluster.nodes[right].name
                for node, norm in norms.items():
                    if not math.isclose(norm, norms[right], rel_tol=NORM_TOLERANCE):
                        self.evict(node, f"its gradient is not that of '{name}'")
                return True
        return False
