"""Iteration after iteration: how one is begun, goes on when nodes or links are lost, begins again, and is committed.

A lost node's microbatches go on another way within the iteration (`iteration`); at its end the plan is repaired for
those who are left (`replanning`), and nodes that came meanwhile take part and learn (`teaching`). If there is no plan
for those who are there, training pauses until somebody comes.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol

from skippipe.optim.config import OptimConfig
from skippipe.runtime.coordinator.ends_backup import LOST
from skippipe.runtime.coordinator.failure_detector import FailureDetector
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorEnv, EventKind
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.coordinator.membership import MOST_BELIEVED, Membership, MemberState
from skippipe.runtime.coordinator.recovery import RecoverySourceSelector
from skippipe.runtime.coordinator.replanner import Replanner
from skippipe.runtime.coordinator.settings import CoordinatorState
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.wal_records import commit_record
from skippipe.runtime.messages import Averaged, Begin, Commit, ControlMessage, DrainAck, LinkDown, MicrobatchDone

WAYS_ON = "start anew, with checkpoint.every, survive.backup_every or a second data node"


class CommitContext(Protocol):
    """What iterations see of the coordinator."""

    @property
    def state(self) -> CoordinatorState: ...

    def enter(self, state: CoordinatorState) -> None: ...

    def fail(self, reason: str) -> None: ...

    def throw_out(self, node: int, why: str) -> None: ...

    def happened(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass
class CommitLoop:
    lead: CommitContext
    end: int
    """The number of iterations from the very first, when all are done."""
    learning: OptimConfig
    recorded: Container[int]
    """The iterations of which every task is reported."""
    membership: Membership
    replanning: Replanner
    teaching: RecoverySourceSelector
    harvest: CheckpointGather
    patience: FailureDetector
    env: CoordinatorEnv
    callback: Callback
    epoch: int = 0
    now: Iteration = field(init=False)
    _said_lost: bool = field(init=False, default=False)

    @property
    def nodes(self) -> list[int]:
        """That the plan uses, and that average and step."""
        return [node for node in self.membership.working if node in self.replanning.plan.stage_of]

    def open(self, number: int) -> None:
        """A new page of the book."""
        plan, nodes = self.replanning.plan, set(self.nodes)
        self.now = Iteration(number, plan, self.epoch, nodes, self._tell_all, self.lead.throw_out)
        self.teaching.ends.done = number

    def hear(self, node: int, control: MicrobatchDone | DrainAck | Averaged) -> None:
        self.patience.renew()
        if self.now.hear(node, control):
            self._commit()

    # When nodes and links are lost, and when nodes come

    def without(self, node: int) -> None:
        """Within the iteration: other ways for those that would have come by a lost node."""
        self.patience.renew()
        self.replanning.changed = True
        ways = self.now.without(node, self.membership.able)
        if ways is None:
            self.restart(f"there is no way around '{self.membership.name(node)}'")
            return
        lanes, skipped = ways
        left_out = f", {skipped} times a stage is left out" if skipped else ""
        text = f"{lanes} lanes go on another way{left_out}" if lanes else "no microbatch needs it any more"
        self.lead.happened("rerouted", text, node)
        self.teaching.teach_again()

    def complained(self, node: int, broken: LinkDown) -> None:
        """A node cannot reach another. One that has not heard of the last change says so again if it is still so."""
        heard = node not in self.now.nodes or broken.epoch >= self.now.epoch
        needed = MemberState.SPARE not in (self.membership[node].standing, self.membership[broken.peer].standing)
        if needed and (heard or self.lead.state is CoordinatorState.PAUSED):
            self.cut(node, broken.peer)

    def cut(self, node: int, other: int) -> None:
        """Two nodes cannot reach each other, though both are there: what needs that link goes on without it.

        If work is lost by that, it is at the accuser's own cost (see `accusations`)."""
        now_ns, measured, membership = self.env.now_ns(), self.replanning.measured, self.membership
        paused = self.lead.state is CoordinatorState.PAUSED
        used, together = not paused and self.now.uses(node, other), membership[node].stage == membership[other].stage
        if measured.is_cut(node, other, now_ns) and not used:
            return
        measured.accusations.hear(node, other, now_ns)
        charged = measured.accusations.charge(node, other, now_ns) if not paused and (used or together) else []
        if len(charged) > MOST_BELIEVED:
            self._discredit(node, charged, now_ns)
            return
        self.lead.happened("cut", f"cannot reach '{membership.name(other)}'", node)
        measured.cut(node, other, now_ns)
        self.replanning.changed = True
        for learner, lender in ((node, other), (other, node)):
            if lender in membership[learner].sources:
                membership[learner].sources = ()
        if not paused and together:  # they cannot average
            newcomer = other not in membership.able and len(charged) <= 1  # whoever complains again is doubted more
            doubtful = measured.accusations.is_shared(node, other, now_ns) or newcomer
            leaves = other if doubtful and node in membership.able else node
            self.lead.throw_out(leaves, "it cannot average with the others of its stage")
        elif used:
            self.restart(f"'{membership.name(node)}' cannot reach '{membership.name(other)}'")
        else:
            self.teaching.teach_again()

    def _discredit(self, node: int, charged: list[int], now_ns: int) -> None:
        """It has cost the others too much work by now: it leaves, and they go on."""
        names = ", ".join(f"'{self.membership.name(each)}'" for each in charged)
        bar_s = self.replanning.measured.accusations.bar(node, now_ns) / 1e9
        said = f"it says that it cannot reach {len(charged)} nodes of which nobody else complains ({names})"
        self.lead.throw_out(node, f"{said}; it may take part again after {bar_s:g} s")

    def restart(self, why: str) -> None:
        """Begin the iteration, or begin it again, with a plan for those who are there; or wait for others."""
        self.epoch = max(self.epoch, self.now.epoch) + 1
        if why and not self.replanning.renew(self.now.number):
            self.pause(why)
            return
        if why:
            self.lead.happened("restarted", why)
        self.lead.enter(CoordinatorState.TRAINING)
        self.open(self.now.number)
        for node in self.nodes:
            if why:
                self.env.replan(node, self.replanning.plan)
            self._begin(node)
        self._join_in()

    def pause(self, why: str) -> None:
        said, self._said_lost = self._said_lost, self.teaching.ends.is_lost
        if self._said_lost and not said:
            self.lead.happened("paused", f"{LOST}; training does not go on with new ones: {WAYS_ON}")
            self.lead.enter(CoordinatorState.PAUSED)
        elif self.lead.state is not CoordinatorState.PAUSED:
            coming = self.membership.of(MemberState.BUILDING, MemberState.READY, MemberState.LEARNING)
            names = ", ".join(f"'{self.membership.name(node)}'" for node in coming)
            what = f"{names} will take the place" if coming else "nobody can take the place; waiting for nodes to join"
            self.lead.happened("paused", f"{why}, and {what}")
            self.lead.enter(CoordinatorState.PAUSED)
        self._teach_newcomers()

    def _begin(self, node: int) -> None:
        number = self.now.number
        self.env.tell(node, Begin(number, self.epoch, number in self.recorded))

    def _join_in(self) -> None:
        """Those who have built their stage average and step from now on, and learn."""
        self._teach_newcomers()
        self.now.nodes = set(self.nodes)

    def _teach_newcomers(self) -> None:
        for node in self.membership.of(MemberState.READY):
            if self.lead.state is CoordinatorState.TRAINING and node in self.replanning.plan.stage_of:
                self.env.replan(node, self.replanning.plan)
                self._begin(node)
            elif self.lead.state is not CoordinatorState.PAUSED:
                continue
            if not self.teaching.teach(node):
                stage = self.membership[node].stage
                self.lead.fail(f"nobody is left to learn stage {stage} from, and there is no checkpoint")
                return
        self.teaching.teach_again()

    def _tell_all(self, control: ControlMessage) -> None:
        for node in self.nodes:
            self.env.tell(node, control)

    # When all is averaged

    def _commit(self) -> None:
        """Everybody has a mean gradient. What is decided now is noted before anybody is told."""
        now, trained, visits, norms = self.now, self.replanning.trained, self.now.visits, self.now.norms
        if now.spoiled:
            bad = ", ".join(map(str, now.spoiled))
            self.lead.happened("not-finite", f"the gradient of stage {bad}; whoever has made it has left it out")
        norm, scale = self.learning.clipping(norms)
        if math.isfinite(norm):
            trained.stepped(visits, norms)
        else:
            scale = 0.0
            self.lead.happened("not-finite", "the gradient is of no use even so: no step is taken")
        rate = self.learning.rate_at(now.number)
        report = now.report(rate, norm, self.patience.iteration_s)
        self.callback.iteration_done(report)  # before it is noted: rather twice than never
        self.env.note(commit_record(now.number, rate, scale, report.loss, visits, trained))
        self.epoch = now.epoch
        self.patience.iteration_done()
        self.replanning.measured.update(now.reports)
        self._proceed(rate, scale, last=now.number + 1 == self.end)

    def _proceed(self, rate: float, scale: float, *, last: bool) -> None:
        replanning, done, before = self.replanning, self.now.number + 1, set(self.nodes)
        outdated = not last and replanning.is_outdated(done)
        possible = not outdated or replanning.renew(done)
        new_plan = outdated or (not last and replanning.turn(done))
        due = not last and self.harvest.is_due(done)  # the last one is made when all have stepped
        holders = self.membership.holders(replanning.plan) if due else {}
        for node in sorted(before & set(self.membership.working)):
            if new_plan and possible:
                self.env.replan(node, replanning.plan)
            waits = last or not possible or node not in replanning.plan.stage_of
            kept = node in holders.values()
            self.env.tell(node, Commit(self.now.number, rate, scale, waits, kept, done in self.recorded))
        if last:
            self.lead.enter(CoordinatorState.STEPPING)
        else:
            self.open(done)
            if possible:
                self.lead.enter(CoordinatorState.TRAINING)
                self._join_in()
            else:
                self.pause("nodes are gone")
        if possible and not last:
            self.teaching.ends.committed(replanning.plan)
        if holders or last:
            self.callback.measured(replanning.measured.as_found())
        if holders:
            self.harvest.checkpoint(done, replanning.trained.steps, holders)
