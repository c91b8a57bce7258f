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

from skippipe.learning import Learning
from skippipe.runtime.accusations import MOST_BELIEVED
from skippipe.runtime.collecting import Harvest
from skippipe.runtime.control import Averaged, Begin, Broken, Contributed, Control, Proceed, Returned
from skippipe.runtime.ends_backup import LOST
from skippipe.runtime.iteration import Iteration
from skippipe.runtime.memory import commit_record
from skippipe.runtime.patience import Patience
from skippipe.runtime.replanning import Replanning
from skippipe.runtime.roster import Roster, Standing
from skippipe.runtime.states import State
from skippipe.runtime.surroundings import EventKind, Surroundings, Watcher
from skippipe.runtime.teaching import Teaching

WAYS_ON = "start anew, with checkpoint.every, survive.backup_every or a second data node"


class Lead(Protocol):
    """What iterations see of the coordinator."""

    @property
    def state(self) -> State: ...

    def enter(self, state: State) -> None: ...

    def fail(self, reason: str) -> None: ...

    def throw_out(self, node: int, why: str) -> None: ...

    def happened(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass
class Progress:
    lead: Lead
    end: int
    """The number of iterations from the very first, when all are done."""
    learning: Learning
    recorded: Container[int]
    """The iterations of which every task is reported."""
    roster: Roster
    replanning: Replanning
    teaching: Teaching
    harvest: Harvest
    patience: Patience
    surroundings: Surroundings
    watcher: Watcher
    epoch: int = 0
    now: Iteration = field(init=False)
    _said_lost: bool = field(init=False, default=False)

    @property
    def nodes(self) -> list[int]:
        """That the plan uses, and that average and step."""
        return [node for node in self.roster.working if node in self.replanning.plan.stage_of]

    def open(self, number: int) -> None:
        """A new page of the book."""
        plan, nodes = self.replanning.plan, set(self.nodes)
        self.now = Iteration(number, plan, self.epoch, nodes, self._tell_all, self.lead.throw_out)
        self.teaching.ends.done = number

    def hear(self, node: int, control: Returned | Contributed | Averaged) -> None:
        self.patience.renew()
        if self.now.hear(node, control):
            self._commit()

    # When nodes and links are lost, and when nodes come

    def without(self, node: int) -> None:
        """Within the iteration: other ways for those that would have come by a lost node."""
        self.patience.renew()
        self.replanning.changed = True
        ways = self.now.without(node, self.roster.able)
        if ways is None:
            self.restart(f"there is no way around '{self.roster.name(node)}'")
            return
        lanes, skipped = ways
        left_out = f", {skipped} times a stage is left out" if skipped else ""
        text = f"{lanes} lanes go on another way{left_out}" if lanes else "no microbatch needs it any more"
        self.lead.happened("rerouted", text, node)
        self.teaching.teach_again()

    def complained(self, node: int, broken: Broken) -> None:
        """A node cannot reach another. One that has not heard of the last change says so again if it is still so."""
        heard = node not in self.now.nodes or broken.epoch >= self.now.epoch
        needed = Standing.SPARE not in (self.roster[node].standing, self.roster[broken.peer].standing)
        if needed and (heard or self.lead.state is State.PAUSED):
            self.cut(node, broken.peer)

    def cut(self, node: int, other: int) -> None:
        """Two nodes cannot reach each other, though both are there: what needs that link goes on without it.

        If work is lost by that, it is at the accuser's own cost (see `accusations`)."""
        now_ns, measured, roster = self.surroundings.now_ns(), self.replanning.measured, self.roster
        paused = self.lead.state is State.PAUSED
        used, together = not paused and self.now.uses(node, other), roster[node].stage == roster[other].stage
        if measured.is_cut(node, other, now_ns) and not used:
            return
        measured.accusations.hear(node, other, now_ns)
        charged = measured.accusations.charge(node, other, now_ns) if not paused and (used or together) else []
        if len(charged) > MOST_BELIEVED:
            self._discredit(node, charged, now_ns)
            return
        self.lead.happened("cut", f"cannot reach '{roster.name(other)}'", node)
        measured.cut(node, other, now_ns)
        self.replanning.changed = True
        for learner, lender in ((node, other), (other, node)):
            if lender in roster[learner].sources:
                roster[learner].sources = ()
        if not paused and together:  # they cannot average
            newcomer = other not in roster.able and len(charged) <= 1  # whoever complains again is doubted more
            doubtful = measured.accusations.is_shared(node, other, now_ns) or newcomer
            leaves = other if doubtful and node in roster.able else node
            self.lead.throw_out(leaves, "it cannot average with the others of its stage")
        elif used:
            self.restart(f"'{roster.name(node)}' cannot reach '{roster.name(other)}'")
        else:
            self.teaching.teach_again()

    def _discredit(self, node: int, charged: list[int], now_ns: int) -> None:
        """It has cost the others too much work by now: it leaves, and they go on."""
        names = ", ".join(f"'{self.roster.name(each)}'" for each in charged)
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
        self.lead.enter(State.TRAINING)
        self.open(self.now.number)
        for node in self.nodes:
            if why:
                self.surroundings.replan(node, self.replanning.plan)
            self._begin(node)
        self._join_in()

    def pause(self, why: str) -> None:
        said, self._said_lost = self._said_lost, self.teaching.ends.is_lost
        if self._said_lost and not said:
            self.lead.happened("paused", f"{LOST}; training does not go on with new ones: {WAYS_ON}")
            self.lead.enter(State.PAUSED)
        elif self.lead.state is not State.PAUSED:
            coming = self.roster.of(Standing.BUILDING, Standing.READY, Standing.LEARNING)
            names = ", ".join(f"'{self.roster.name(node)}'" for node in coming)
            what = f"{names} will take the place" if coming else "nobody can take the place; waiting for nodes to join"
            self.lead.happened("paused", f"{why}, and {what}")
            self.lead.enter(State.PAUSED)
        self._teach_newcomers()

    def _begin(self, node: int) -> None:
        number = self.now.number
        self.surroundings.tell(node, Begin(number, self.epoch, number in self.recorded))

    def _join_in(self) -> None:
        """Those who have built their stage average and step from now on, and learn."""
        self._teach_newcomers()
        self.now.nodes = set(self.nodes)

    def _teach_newcomers(self) -> None:
        for node in self.roster.of(Standing.READY):
            if self.lead.state is State.TRAINING and node in self.replanning.plan.stage_of:
                self.surroundings.replan(node, self.replanning.plan)
                self._begin(node)
            elif self.lead.state is not State.PAUSED:
                continue
            if not self.teaching.teach(node):
                stage = self.roster[node].stage
                self.lead.fail(f"nobody is left to learn stage {stage} from, and there is no checkpoint")
                return
        self.teaching.teach_again()

    def _tell_all(self, control: Control) -> None:
        for node in self.nodes:
            self.surroundings.tell(node, control)

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
        self.watcher.iteration_done(report)  # before it is noted: rather twice than never
        self.surroundings.note(commit_record(now.number, rate, scale, report.loss, visits, trained))
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
        holders = self.roster.holders(replanning.plan) if due else {}
        for node in sorted(before & set(self.roster.working)):
            if new_plan and possible:
                self.surroundings.replan(node, replanning.plan)
            waits = last or not possible or node not in replanning.plan.stage_of
            kept = node in holders.values()
            self.surroundings.tell(node, Proceed(self.now.number, rate, scale, waits, kept, done in self.recorded))
        if last:
            self.lead.enter(State.STEPPING)
        else:
            self.open(done)
            if possible:
                self.lead.enter(State.TRAINING)
                self._join_in()
            else:
                self.pause("nodes are gone")
        if possible and not last:
            self.teaching.ends.committed(replanning.plan)
        if holders or last:
            self.watcher.measured(replanning.measured.as_found())
        if holders:
            self.harvest.checkpoint(done, replanning.trained.steps, holders)
