"""The coordinator: begins, keeps the book, says how to step, and what happens when nodes come and go.

A state machine like the node. It moves no tensors while training: per iteration, a few small messages from every node
and one to every node.

A lost node's microbatches go on another way within the iteration (`iteration`); at its end the plan is repaired for
those who are left, nodes that came meanwhile get a place (`teaching`), and what has been decided is noted before
anybody is told (`memory`). So a coordinator that is started again from its notes finds the nodes where they are: they
repeat at most one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.runtime.apprentice import origin_to_json
from skippipe.runtime.collecting import Harvest
from skippipe.runtime.control import (
    COORDINATOR,
    Alive,
    Averaged,
    Begin,
    Broken,
    Contributed,
    Control,
    Failed,
    Hello,
    Learned,
    Proceed,
    Ready,
    Returned,
    Stepped,
    Stop,
    Want,
)
from skippipe.runtime.iteration import Iteration
from skippipe.runtime.measured import Measured
from skippipe.runtime.memory import Memory, Record, commit_record, plan_record
from skippipe.runtime.roster import Peer, Roster, Standing
from skippipe.runtime.settings import Deadlines, Survival
from skippipe.runtime.surroundings import Event, EventKind, IterationReport, Keeper, Surroundings, Watcher
from skippipe.runtime.teaching import Teaching, Trained
from skippipe.runtime.work import Origin
from skippipe.transport.message import Message

SEVERAL = 4
"""Times the heartbeat, or the promised iteration: how long nothing may come back after a repair."""

__all__ = [
    "Coordinator",
    "Deadlines",
    "Event",
    "IterationReport",
    "Keeper",
    "State",
    "Surroundings",
    "Survival",
    "Watcher",
]


class State(Enum):
    JOINING = "to join"
    PREPARING = "to be ready"
    TRAINING = "to average gradients"
    PAUSED = "to take the places of those who are gone"
    STEPPING = "to take the last step"
    COLLECTING = "to send its weights"
    REUNITING = "to come back to a coordinator that was started again"
    DONE = "for nothing"
    FAILED = "for nothing any more"


@dataclass
class Coordinator:
    plan: Plan
    learning: Learning
    surroundings: Surroundings
    watcher: Watcher
    iterations: int
    first: int = 0
    recorded: frozenset[int] = frozenset()
    """The iterations of which every task is reported."""
    kept_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    resumed: bool = False
    """Nodes go on from a checkpoint."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    survival: Survival = field(default_factory=Survival)
    journal: Sequence[Record] = ()
    """What an earlier coordinator of this run has noted."""
    state: State = State.JOINING
    failure: str = ""
    roster: Roster = field(init=False)
    _epoch: int = field(init=False, default=0)
    _changed: bool = field(init=False, default=False)
    """Somebody came or went: the plan is to be renewed."""
    _stepped: set[int] = field(init=False, default_factory=set)
    _early: bool = field(init=False, default=False)
    _finishing: bool = field(init=False, default=False)
    """All iterations are done."""
    _again: int = field(init=False, default=0)
    """How often this iteration was begun again because nothing moved."""
    _places: dict[int, Hello] = field(init=False, default_factory=dict)
    """Where nodes say they are, after a restart of the coordinator."""
    _slow: set[int] = field(init=False, default_factory=set)
    _unfit: set[int] = field(init=False, default_factory=set)
    """Spares that are too small for any stage."""
    _memory: Memory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._since_ns = self._begun_ns = self._ticked_ns = self._tried_ns = self.surroundings.now_ns()
        self.roster = Roster(self.plan.cluster)
        self.trained = Trained.nothing(len(self.plan.stages))
        self._visited = max(len(lane.path) for lane in self.plan.lanes)
        first, cluster = self.first, self.plan.cluster
        if self.journal:
            self._memory = Memory.of(self.journal)
            self.plan = self._memory.plan
            self.trained = self._memory.trained
            self._visited = self._memory.visited
            first = first if self._memory.iteration is None else self._memory.iteration + 1
            self.state = State.REUNITING
        self._measured = Measured(self.plan, cluster, self._since_ns)
        self._harvest = Harvest(self.surroundings)
        self._teaching = Teaching(
            self.roster,
            self.surroundings,
            self.survival,
            self._measured,
            self.trained,
            lambda text, node: self._happened("learning", text, node),
        )
        self._open(first)

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def iteration(self) -> int:
        return self._iteration.number

    @property
    def nodes(self) -> list[int]:
        """That the plan uses, and that average and step."""
        return [node for node in self.roster.working if node in self.plan.stage_of]

    # What it hears

    def hear(self, node: int, control: Control) -> None:
        if self.over:
            return
        self.roster.heard(node, self.surroundings.now_ns())
        if isinstance(control, Hello):
            self._greeted(node, control)
        elif node in self.roster:
            self._told(node, self.roster[node], control)
        elif self.state is not State.REUNITING:
            self.surroundings.tell(node, Stop("you were taken for dead", again=True))

    def _told(self, node: int, peer: Peer, control: Control) -> None:
        match control:
            case Alive():
                peer.doing = control.doing
            case Failed() if self.state in (State.JOINING, State.PREPARING):
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case Failed():
                self._lost(node, control.reason)
            case Want() if self.surroundings.keeper is not None and peer.stage >= 0:
                self._since_ns = self.surroundings.now_ns()
                self.surroundings.give(node, peer.stage, control.first, control.count)
            case Ready():
                self._ready(node, peer)
            case Learned() if peer.standing is Standing.LEARNING:
                self._able(node, peer)
            case Broken() if control.peer in self.roster and control.peer != node:
                if self.state in (State.TRAINING, State.PAUSED):
                    self._cut(node, control.peer)
            case Stepped() if self.state is State.STEPPING:
                self._stepped.add(node)
                self._collect_if_stepped()
            case Returned() | Contributed() | Averaged() if self.state is State.TRAINING:
                self._since_ns = self.surroundings.now_ns()
                if self._iteration.hear(node, control):
                    self._commit()
            case _:  # too late, or nonsense: nothing depends on it
                pass

    def receive(self, node: int, message: Message) -> None:
        """A piece of the weights, or of the copy that was kept for a checkpoint."""
        if self.over or node not in self.roster:
            return
        now_ns = self.surroundings.now_ns()
        self.roster.heard(node, now_ns)
        if self._harvest.receive(node, message) and self.state is State.COLLECTING and not self._early:
            self._since_ns = now_ns
        self._finish_if_collected()

    def complain(self, node: int, what: str) -> None:
        """A node sends what nobody understands; it is dropped."""
        self._happened("refused", f"sends nonsense, later ones are only counted: {what}", node)

    def finish_early(self) -> None:
        """Collect the weights as they are; what is in flight is given up. Before training there is nothing to keep."""
        if self._early or self.over:
            return
        self._early = True
        self.deadlines = replace(self.deadlines, collect=self.deadlines.early)
        if self.state is State.TRAINING:
            self._collect()
        elif self.state in (State.JOINING, State.PREPARING, State.PAUSED, State.REUNITING):
            self._done()
        self._finish_if_collected()

    def lost(self, node: int, how: str) -> None:
        """A connection broke, or a process is known to have ended."""
        if not self.over and node in self.roster:
            self._lost(node, how)

    def fail(self, reason: str) -> None:
        """Give up; the first reason counts."""
        if self.over:
            return
        self.failure = reason
        self.state = State.FAILED
        self._stop_all(Stop(reason))

    # Coming

    def _greeted(self, node: int, hello: Hello) -> None:
        if hello.version != __version__:
            self._refuse(node, hello)
            return
        if self.state is not State.JOINING and self.state is not State.REUNITING and node in self.roster:
            self._lost(node, "it was started again")
        if not self.surroundings.meet(node, hello.address):
            self._happened("refused", f"says that it is at '{hello.address}', where nobody can reach it", node)
            return
        self.roster.add(node, Standing.SPARE, -1, self.surroundings.now_ns())
        match self.state:
            case State.REUNITING:
                self._places[node] = hello
                if self._places.keys() >= set(self.plan.stage_of):
                    self._reunited()
            case State.JOINING:
                self._prepare_if_all_there()
            case State.TRAINING | State.PAUSED:
                self._happened("joined", "is here", node)
                self._place(node)
            case _:
                pass

    def _refuse(self, node: int, hello: Hello) -> None:
        reason = f"node '{self._name(node)}' runs skippipe {hello.version}, this is {__version__}; use one version"
        if self.state is State.JOINING:
            self.fail(reason)
            return
        self._happened("refused", reason, node)
        if self.surroundings.meet(node, hello.address):
            self.surroundings.tell(node, Stop(reason))
            self.surroundings.part(node)

    def _prepare_if_all_there(self) -> None:
        if not all(node in self.roster for node in self.plan.stage_of):
            return
        self._enter(State.PREPARING)
        self._note_plan()
        for index, stage in enumerate(self.plan.stages):
            origin = {}
            if self.resumed:
                assert self.surroundings.keeper is not None
                self.trained.steps[index] = self.surroundings.keeper.steps(index)
                source = Origin("checkpoint", (COORDINATOR,), (index,), (1.0,), self.trained.steps[index])
                origin = origin_to_json(source)
            for node in stage.nodes:
                self.roster[node].standing, self.roster[node].stage = Standing.BUILDING, index
                self.surroundings.welcome(node, self.plan, origin)

    def _place(self, node: int) -> None:
        """Give a node a stage, and have it built; if it cannot reach the others there, it stays a spare for now."""
        from skippipe.planner.staffing import stage_for

        members = self.roster.expected(self.plan)
        now_ns = self.surroundings.now_ns()
        try:
            stage = stage_for(self.plan, members, node)
        except UserError as error:
            if node not in self._unfit:
                self._unfit.add(node)
                self._happened("refused", f"stays a spare: {error}", node)
            return
        if any(self._measured.is_cut(node, other, now_ns) for other in members[stage]):
            return
        self.roster.add(node, Standing.BUILDING, stage, now_ns)
        self.surroundings.welcome(node, _with(self.plan, node, stage), {})

    def _ready(self, node: int, peer: Peer) -> None:
        if peer.standing is Standing.LEARNING:
            self._able(node, peer)
        elif peer.standing is Standing.BUILDING and self.state is State.PREPARING:
            peer.standing = Standing.ABLE
            self._since_ns = self.surroundings.now_ns()
            self._begin_if_ready()
        elif peer.standing is Standing.BUILDING:
            peer.standing = Standing.READY
            self._changed = True
            self._go_on_if_possible()

    def _begin_if_ready(self) -> None:
        if self.state is State.PREPARING and not self.roster.of(Standing.BUILDING):
            self._restart("" if set(self.plan.stage_of) <= set(self.roster.able) else "nodes are missing")

    def _able(self, node: int, peer: Peer) -> None:
        peer.standing, peer.source = Standing.ABLE, None
        self._changed = True
        self._happened("able", f"has the state of stage {peer.stage}", node)
        self._go_on_if_possible()

    def _go_on_if_possible(self) -> None:
        if self.state is State.PAUSED and self._finishing:
            self._collect()
        elif self.state is State.PAUSED:
            self._restart("somebody came")

    def _teach_newcomers(self) -> None:
        for node in self.roster.of(Standing.READY):
            if self.state is State.TRAINING and node in self.plan.stage_of:
                self.surroundings.replan(node, self.plan)
                self._begin(node)
            elif self.state is not State.PAUSED:
                continue
            if not self._teaching.teach(node):
                self.fail(f"nobody is left to learn stage {self.roster[node].stage} from, and there is no checkpoint")
                return
        self._teaching.teach_again()

    # Going

    def _lost(self, node: int, how: str) -> None:
        if not self.survival.survives and self.state is not State.JOINING:
            self.fail(f"node '{self._name(node)}' is gone ({how}) while it was waited for {self.state.value}")
            return
        self._happened("gone", how, node)
        self.roster.remove(node)
        self._places.pop(node, None)
        self.surroundings.part(node)
        self._slow.discard(node)
        if self._harvest.lost(node):
            self._happened("checkpoint", "the one that was being made is given up with the node that held it", node)
        match self.state:
            case State.PREPARING:
                self._begin_if_ready()
            case State.TRAINING if node in self.plan.stage_of:
                self._changed = True
                self._go_on_without(node)
            case State.STEPPING:
                self._collect_if_stepped()
            case State.COLLECTING:
                self._collect()
            case _:
                pass

    def _go_on_without(self, node: int) -> None:
        """Within the iteration: other ways for those that would have come by the lost node."""
        self._since_ns = self.surroundings.now_ns()
        ways = self._iteration.without(node, self.roster.able)
        if ways is None:
            self._restart(f"there is no way around '{self._name(node)}'")
            return
        lanes, skipped = ways
        left_out = f", {skipped} times a stage is left out" if skipped else ""
        text = f"{lanes} lanes go on another way{left_out}" if lanes else "no microbatch needs it any more"
        self._happened("rerouted", text, node)
        self._teaching.teach_again()

    def _cut(self, node: int, other: int) -> None:
        """Two nodes cannot reach each other, though both are there: the iteration starts over without that link."""
        now_ns = self.surroundings.now_ns()
        if self._measured.is_cut(node, other, now_ns) and not self._iteration.uses(node, other):
            return
        self._happened("cut", f"cannot reach '{self._name(other)}'", node)
        self._measured.cut(node, other, now_ns)
        self._changed = True
        for learner, lender in ((node, other), (other, node)):
            if self.roster[learner].source == lender:
                self.roster[learner].source = None
        if self.state is State.PAUSED:
            self._teaching.teach_again()
        elif self.roster[node].stage == self.roster[other].stage:  # they cannot average
            leaves = node if self.roster[node].standing is not Standing.ABLE else other
            self._throw_out(leaves, "it cannot average with the others of its stage")
        else:
            self._restart(f"'{self._name(node)}' cannot reach '{self._name(other)}'")

    def _throw_out(self, node: int, why: str) -> None:
        """It may say hello again, and then begins like any newcomer."""
        self.surroundings.tell(node, Stop(why, again=True))
        self._lost(node, why)

    # Iterations

    def _open(self, number: int) -> None:
        """A new page of the book."""
        self._iteration = Iteration(number, self.plan, self._epoch, set(self.nodes), self._tell_all, self._throw_out)

    def _restart(self, why: str) -> None:
        """Begin the iteration, or begin it again, with a plan for those who are there; or wait for others."""
        self._epoch = max(self._epoch, self._iteration.epoch) + 1
        if why and not self._renewed():
            self._pause(why)
            return
        if why:
            self._happened("restarted", why)
        self._enter(State.TRAINING)
        self._open(self.iteration)
        for node in self.nodes:
            if why:
                self.surroundings.replan(node, self.plan)
            self._begin(node)
        self._join_in()

    def _begin(self, node: int) -> None:
        self.surroundings.tell(node, Begin(self.iteration, self._epoch, self.iteration in self.recorded))

    def _join_in(self) -> None:
        """Those who have built their stage average and step from now on, and learn."""
        self._teach_newcomers()
        self._iteration.nodes = set(self.nodes)

    def _pause(self, why: str) -> None:
        if self.state is not State.PAUSED:
            self._happened("paused", f"{why}, and nobody can take the place; waiting for nodes to join")
            self._enter(State.PAUSED)
        for spare in self.roster.of(Standing.SPARE):
            self._place(spare)
        self._teach_newcomers()

    def _renewed(self) -> bool:
        """Make a plan for those who are there; whether that is possible."""
        from skippipe.planner.repair import repaired

        roster = self.roster
        moved = self._mover()
        if moved is not None:
            self._happened("replanned", f"moves to stage {moved[1]}, which ran short", moved[0])
            roster.add(moved[0], Standing.SPARE, -1, self.surroundings.now_ns())
            self._harvest.lost(moved[0])
        members = [
            [*ring, *(node for node in roster.of(Standing.READY) if roster[node].stage == stage)]
            for stage, ring in enumerate(roster.members(self.plan))
        ]
        began_ns = self.surroundings.now_ns()
        plan = repaired(
            self.plan,
            members,
            roster.able,
            cluster=self._measured.cluster(began_ns, speeds=self.survival.drift > 0),
            budget_s=self.survival.planning.total_seconds() * max(1.0, len(roster.able) / 20),
            visited=self._visited,
        )
        if plan is not None:
            self.plan = plan
            self._changed = False
            self._measured.planned(plan)
            took_s = (self.surroundings.now_ns() - began_ns) / 1e9
            self._note_plan()
            self._happened("replanned", f"{len(roster.able)} nodes take microbatches; planned in {took_s:.2f} s")
        if moved is not None:
            self._place(moved[0])
        return plan is not None

    def _note_plan(self) -> None:
        learning = self.roster.of(Standing.READY, Standing.LEARNING)
        self.surroundings.note(plan_record(self.plan, learning, self.trained, self._visited))

    def _mover(self) -> tuple[int, int] | None:
        """A node that had better move to a stage that ran short, and that stage."""
        from skippipe.planner.staffing import move_for

        roster = self.roster
        if not self._changed or roster.of(Standing.SPARE):
            return None
        found = move_for(self.plan, roster.expected(self.plan), roster.able)
        if found is not None and self._finishing:  # nobody may take the last copy of a stage's weights away
            kept = [node for node in roster.able if roster[node].stage == roster[found[0]].stage]
            found = found if len(kept) > 1 else None
        return found

    def _commit(self) -> None:
        """Everybody has a mean gradient. What is decided now is noted before anybody is told."""
        done, visits, norms = self.iteration + 1, self._iteration.visits, self._iteration.norms
        if self._iteration.spoiled:
            bad = ", ".join(map(str, self._iteration.spoiled))
            self._happened("not-finite", f"the gradient of stage {bad}; whoever has made it has left it out")
        norm, scale = self.learning.clipping(norms)
        if math.isfinite(norm):
            self.trained.stepped(visits, norms)
        else:
            scale = 0.0
            self._happened("not-finite", "the gradient is of no use even so: no step is taken")
        rate = self.learning.rate_at(self.iteration)
        loss = self._iteration.ledger.loss()
        self.watcher.iteration_done(self._report(rate, norm, loss))  # before it is noted: rather twice than never
        self.surroundings.note(commit_record(self.iteration, rate, scale, loss, visits, self.trained))
        self._epoch = self._iteration.epoch
        self._begun_ns, self._again = self.surroundings.now_ns(), 0
        self._measured.update(self._iteration.reports)
        for spare in self.roster.of(Standing.SPARE):
            self._place(spare)
        self._proceed(rate, scale, last=done == self.first + self.iterations)

    def _report(self, rate: float, norm: float, loss: float) -> IterationReport:
        reports = sorted(self._iteration.reports.items())
        return IterationReport(
            iteration=self.iteration,
            loss=loss,
            norm=norm,
            rate=rate,
            seconds=(self.surroundings.now_ns() - self._begun_ns) / 1e9,
            sent_bytes={(node, to): count for node, report in reports for to, count in report.sent_bytes},
            tasks={node: report.tasks for node, report in reports if report.tasks},
            visits=tuple(self._iteration.visits),
            promised_s=self.plan.expected.iteration_s if self.plan.expected else None,
        )

    def _proceed(self, rate: float, scale: float, *, last: bool) -> None:
        done = self.iteration + 1
        before = set(self.nodes)
        new_plan = not last and (self._changed or self._drifted())
        possible = not new_plan or self._renewed()
        holders = self._holders() if self._is_kept(done, last=last) else {}
        for node in sorted(before & set(self.roster.working)):
            if new_plan and possible:
                self.surroundings.replan(node, self.plan)
            waits = last or not possible or node not in self.plan.stage_of
            kept = node in holders.values()
            self.surroundings.tell(node, Proceed(self.iteration, rate, scale, waits, kept, done in self.recorded))
        if last:
            self._stepped = set()
            self._enter(State.STEPPING)
        else:
            self._open(done)
            if possible:
                self._enter(State.TRAINING)
                self._join_in()
            else:
                self._pause("nodes are gone")
        if holders:
            self._harvest.checkpoint(done, self.trained.steps, holders)

    def _drifted(self) -> bool:
        drift = self._measured.drift(self.survival.drift) if self.survival.drift else ""
        if drift:
            self._happened("slow", drift)
        return bool(drift)

    def _is_kept(self, done: int, *, last: bool) -> bool:
        if self._harvest.busy or self.kept_every == 0 or self.surroundings.keeper is None:
            return False
        return last or done % self.kept_every == 0

    def _holders(self) -> dict[int, int]:
        """Of each stage a node that has its state; empty if there is a stage that nobody has."""
        able = self.roster.able
        found = {
            index: next(
                (node for node in (*stage.ring, *able) if node in able and self.roster[node].stage == index), -1
            )
            for index, stage in enumerate(self.plan.stages)
        }
        return {} if -1 in found.values() else found

    # The end

    def _collect_if_stepped(self) -> None:
        if self._stepped >= set(self.nodes):
            self._collect()

    def _collect(self) -> None:
        """The weights, from those who have them."""
        holders = self._holders()
        if not holders:
            missing = ", ".join(map(str, self._empty()))
            if self._early:
                self.fail(f"nobody is left who has the weights of stage {missing}; resume from a checkpoint")
            else:
                self._finishing = self._changed = True
                self._renewed()
                self._pause(f"nobody is left who has the weights of stage {missing}")
            return
        if self.state is not State.COLLECTING:
            self._enter(State.COLLECTING)
        self._harvest.collect(holders)
        self._finish_if_collected()

    def _finish_if_collected(self) -> None:
        if self.state is State.COLLECTING and self._harvest.over and (self._early or not self._harvest.busy):
            self._done()

    def _done(self) -> None:
        self.state = State.DONE
        self.surroundings.note({"done": self.iteration})
        self._stop_all(Stop(""))

    # Patience

    def tick(self) -> None:
        """Give up on those whose deadline has passed. To be called often."""
        now_ns = self.surroundings.now_ns()
        heartbeat_ns = _ns(self.deadlines.heartbeat)
        held_up, self._ticked_ns = now_ns - self._ticked_ns > heartbeat_ns // 2, now_ns
        if held_up:  # nobody could be heard meanwhile
            for node in self.roster:
                self.roster.heard(node, now_ns)
        waiting = self.state in (State.JOINING, State.REUNITING)  # then connections tell
        for node in () if waiting else self.roster.silent(now_ns - heartbeat_ns):
            self.lost(node, f"no sign of life for {self.deadlines.heartbeat.total_seconds():g} s")
        for node in self.roster.building(now_ns - _ns(self.deadlines.ready)) if self.state is State.TRAINING else ():
            self.lost(node, f"it has been building its stage for {self.deadlines.ready.total_seconds():g} s")
        if not self.over and now_ns >= self.deadline_ns():
            self._overdue()
        elif self.state is State.PAUSED and now_ns > self._tried_ns + heartbeat_ns:  # a cut may be forgotten by now
            self._tried_ns = now_ns
            self._go_on_if_possible()
        elif self.state is State.TRAINING:
            self._look_for_slow(now_ns)

    def deadline_ns(self) -> int:
        limit = {
            State.JOINING: self.deadlines.join,
            State.PREPARING: self.deadlines.ready,
            State.PAUSED: self.deadlines.join,
            State.COLLECTING: self.deadlines.collect,
            State.REUNITING: self.deadlines.reunion,
        }.get(self.state, self.deadlines.iteration)
        if self.state is State.TRAINING and self._iteration.is_disturbed and self.plan.expected:
            promised = timedelta(seconds=self.plan.expected.iteration_s)
            limit = min(limit, max(SEVERAL * self.deadlines.heartbeat, SEVERAL * promised))
        return self._since_ns + _ns(limit)

    def _overdue(self) -> None:
        waited = f"waited {(self.surroundings.now_ns() - self._since_ns) / 1e9:.0f} s for"
        missing = self._missing()
        names = ", ".join(self._name(node) for node in missing)
        if self.state is State.REUNITING:
            self._reunited()
        elif self.state is State.TRAINING and self.survival.survives and self._again == 0:
            self._again += 1
            self._restart(f"{waited} {names} {self.state.value}")
        elif self.state is State.PREPARING and self.survival.survives and self.roster.able:
            for node in missing:
                self._lost(node, f"{waited} it {self.state.value}")
        elif self.state is State.PAUSED:
            self.fail(f"{waited} nodes {self.state.value}: stage {', '.join(map(str, self._empty()))} has none")
        else:
            self.fail(f"{waited} {names} {self.state.value}")

    def _look_for_slow(self, now_ns: int) -> None:
        """Those who are waited for longer than the plan promises, though they give signs of life."""
        promised = self.plan.expected
        if promised is None or now_ns < self._begun_ns + 3 * promised.iteration_ns:
            return
        for node in self._missing():
            if node not in self._slow and now_ns > self._since_ns + _ns(self.deadlines.heartbeat):
                self._slow.add(node)
                self._happened("slow", f"is slow, but there: {self.roster[node].doing or 'says nothing'}", node)

    def _missing(self) -> list[int]:
        match self.state:
            case State.COLLECTING:
                return self._harvest.waits_for
            case State.PREPARING:
                return self.roster.of(Standing.BUILDING)
            case State.JOINING:
                return [node for node in sorted(self.plan.stage_of) if node not in self.roster]
            case State.STEPPING:
                return sorted(set(self.nodes) - self._stepped)
            case _:
                return self._iteration.missing

    def _empty(self) -> list[int]:
        held = {self.roster[node].stage for node in self.roster.able}
        return [index for index in range(len(self.plan.stages)) if index not in held]

    # Coming back

    def _reunited(self) -> None:
        """All nodes have come back, or have had time enough: those who are where they should be go on."""
        places, self._places = self._places, {}
        memory, now_ns = self._memory, self.surroundings.now_ns()
        assert memory is not None
        self._epoch = max([self._epoch, *(hello.epoch for hello in places.values())]) + 1
        for node, hello in places.items():
            behind = hello.iteration == memory.iteration and hello.phase == "AVERAGED"
            if node in self.plan.stage_of and hello.phase and (behind or hello.iteration == self.iteration):
                standing = Standing.LEARNING if node in memory.learning else Standing.ABLE
                self.roster.add(node, standing, self.plan.stage_of[node], now_ns)
                if behind:
                    self.surroundings.tell(node, memory.proceed)
                else:
                    self._stepped.add(node)
        if not self.roster.able:
            self._begin_from_checkpoint()
            return
        strangers = self.roster.of(Standing.SPARE)
        there = len(self.roster.peers) - len(strangers)
        self._happened("recovered", f"{there} nodes are where they were, {len(strangers)} are new")
        for node in strangers:
            if places[node].phase:
                self._throw_out(node, "it is not where the others are")
        self._changed = True
        if self.iteration == self.first + self.iterations:
            self._enter(State.STEPPING)
            self._collect_if_stepped()
            return
        self._restart("the coordinator was started again")
        for node in self.roster.of(Standing.SPARE):
            self._place(node)

    def _begin_from_checkpoint(self) -> None:
        """Nobody has any state; whoever is here, or comes, begins where a checkpoint was made."""
        keeper = self.surroundings.keeper
        done = keeper.newest() if keeper is not None else None
        if done is None:
            self.fail("no node is left that was there before, and there is no checkpoint; start anew")
            return
        self.iterations -= done - self.first
        self.first, self.resumed = done, True
        for node in self.roster:
            self.roster.add(node, Standing.SPARE, -1, self.surroundings.now_ns())
        self._enter(State.JOINING)
        self._open(done)
        self._prepare_if_all_there()

    # Small change

    def _enter(self, state: State) -> None:
        self.state = state
        self._since_ns = self.surroundings.now_ns()

    def _happened(self, kind: EventKind, text: str, node: int | None = None) -> None:
        self.watcher.happened(Event(kind, self.iteration, text, "" if node is None else self._name(node)))

    def _tell_all(self, control: Control) -> None:
        for node in self.nodes:
            self.surroundings.tell(node, control)

    def _stop_all(self, stop: Stop) -> None:
        for node in self.roster:
            self.surroundings.tell(node, stop)

    def _name(self, node: int) -> str:
        return self.roster.name(node)


def _with(plan: Plan, node: int, stage: int) -> Plan:
    """A node on a stage: enough to build it from. It gets another plan before it takes a microbatch."""
    stages = []
    for index, each in enumerate(plan.stages):
        ring = tuple(other for other in each.ring if other != node)
        ring = (*ring, node) if index == stage else ring
        stages.append(replace(each, nodes=ring, ring=ring))
    return replace(plan, stages=tuple(stages), expected=None)


def _ns(limit: timedelta) -> int:
    return int(limit.total_seconds() * 1e9)
