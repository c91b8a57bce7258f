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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from skippipe import __version__
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.recipe import Recipe
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
from skippipe.runtime.lengths import Lengths
from skippipe.runtime.measured import Measured
from skippipe.runtime.memory import Memory, Record, commit_record, plan_record
from skippipe.runtime.patience import Patience
from skippipe.runtime.replanning import Replanning, with_node
from skippipe.runtime.roster import Peer, Roster, Standing
from skippipe.runtime.settings import Deadlines, Survival
from skippipe.runtime.states import State
from skippipe.runtime.surroundings import Event, EventKind, IterationReport, Keeper, Surroundings, Watcher
from skippipe.runtime.teaching import Teaching, Trained
from skippipe.runtime.work import Origin
from skippipe.transport.message import Message

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


@dataclass
class Coordinator:
    plan: Plan
    learning: Learning
    surroundings: Surroundings
    watcher: Watcher
    iterations: int
    first: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    """Says how long paths are in which iteration."""
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """For paths of these lengths, on the same stages; one that is missing is made when its turn comes."""
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
    _places: dict[int, Hello] = field(init=False, default_factory=dict)
    """Where nodes say they are, after a restart of the coordinator."""
    _memory: Memory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        now_ns = self.surroundings.now_ns()
        self._patience = Patience(self, now_ns)
        self.roster = Roster(self.plan.cluster)
        self.trained = Trained.nothing(len(self.plan.stages))
        visited = self.plan.visited
        first, cluster = self.first, self.plan.cluster
        if self.journal:
            self._memory = Memory.of(self.journal)
            self.plan = self._memory.plan
            self.trained = self._memory.trained
            visited = self._memory.visited
            first = first if self._memory.iteration is None else self._memory.iteration + 1
            self.state = State.REUNITING
        self._measured = Measured(self.plan, cluster, now_ns)
        plans = {**self.plans, visited: self.plan}
        self._lengths = Lengths(self.recipe, self.first + self.iterations, visited, plans)
        self._replanning = Replanning(self.roster, self._measured, self.survival, self._lengths)
        self._harvest = Harvest(self.surroundings)
        self._teaching = Teaching(
            self.roster,
            self.surroundings,
            self.survival,
            self._measured,
            self.trained,
            lambda text, node: self.happened("learning", text, node),
        )
        self._open(first)

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def is_disturbed(self) -> bool:
        """Has something happened in this iteration that the plan did not foresee?"""
        return self._iteration.is_disturbed

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
                self._patience.renew()
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
                self._patience.renew()
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
            self._patience.renew()
        self._finish_if_collected()

    def complain(self, node: int, what: str) -> None:
        """A node sends what nobody understands; it is dropped."""
        self.happened("refused", f"sends nonsense, later ones are only counted: {what}", node)

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

    def tick(self) -> None:
        """To be called often: deadlines pass."""
        self._patience.tick()

    def deadline_ns(self) -> int:
        """When something happens even if nobody says anything."""
        return self._patience.deadline_ns()

    def missing(self) -> list[int]:
        """Who is waited for."""
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
            self.happened("refused", f"says that it is at '{hello.address}', where nobody can reach it", node)
            return
        self.roster.add(node, Standing.SPARE, -1, self.surroundings.now_ns())
        match self.state:
            case State.REUNITING:
                self._places[node] = hello
                if self._places.keys() >= set(self.plan.stage_of):
                    self.reunited()
            case State.JOINING:
                self._prepare_if_all_there()
            case State.TRAINING | State.PAUSED:
                self.happened("joined", "is here", node)
                self._place(node)
            case _:
                pass

    def _refuse(self, node: int, hello: Hello) -> None:
        reason = f"node '{self._name(node)}' runs skippipe {hello.version}, this is {__version__}; use one version"
        if self.state is State.JOINING:
            self.fail(reason)
            return
        self.happened("refused", reason, node)
        if self.surroundings.meet(node, hello.address):
            self.surroundings.tell(node, Stop(reason))
            self.surroundings.part(node)

    def _prepare_if_all_there(self) -> None:
        if not all(node in self.roster for node in self.plan.stage_of):
            return
        self._enter(State.PREPARING)
        self.plan = self._replanning.turned(self.plan, self.iteration, self.plan.stage_of) or self.plan
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

    def _place_spares(self) -> None:
        for node in self.roster.of(Standing.SPARE):
            self._place(node)

    def _place(self, node: int) -> None:
        """Give a node a stage, and have it built; if that cannot be now, it stays a spare."""
        now_ns = self.surroundings.now_ns()
        known = node in self._replanning.unfit
        stage = self._replanning.stage_for(self.plan, node, now_ns)
        if stage is not None:
            self.roster.add(node, Standing.BUILDING, stage, now_ns)
            self.surroundings.welcome(node, with_node(self.plan, node, stage), {})
        elif node in self._replanning.unfit and not known:
            self.happened("refused", f"stays a spare: {self._replanning.unfit[node]}", node)

    def _ready(self, node: int, peer: Peer) -> None:
        if peer.standing is Standing.LEARNING:
            self._able(node, peer)
        elif peer.standing is Standing.BUILDING and self.state is State.PREPARING:
            peer.standing = Standing.ABLE
            self._patience.renew()
            self._begin_if_ready()
        elif peer.standing is Standing.BUILDING:
            peer.standing = Standing.READY
            self._changed = True
            self.go_on_if_possible()

    def _begin_if_ready(self) -> None:
        if self.state is State.PREPARING and not self.roster.of(Standing.BUILDING):
            self.restart("" if set(self.plan.stage_of) <= set(self.roster.able) else "nodes are missing")

    def _able(self, node: int, peer: Peer) -> None:
        peer.standing, peer.sources = Standing.ABLE, ()
        self._changed = True
        self.happened("able", f"has the state of stage {peer.stage}", node)
        self.go_on_if_possible()

    def go_on_if_possible(self) -> None:
        if self.state is State.PAUSED and self._finishing:
            self._collect()
        elif self.state is State.PAUSED:
            self.restart("somebody came")

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
        self.happened("gone", how, node)
        self.roster.remove(node)
        self._places.pop(node, None)
        self.surroundings.part(node)
        if self._harvest.lost(node):
            self.happened("checkpoint", "the one that was being made is given up with the node that held it", node)
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
        self._patience.renew()
        ways = self._iteration.without(node, self.roster.able)
        if ways is None:
            self.restart(f"there is no way around '{self._name(node)}'")
            return
        lanes, skipped = ways
        left_out = f", {skipped} times a stage is left out" if skipped else ""
        text = f"{lanes} lanes go on another way{left_out}" if lanes else "no microbatch needs it any more"
        self.happened("rerouted", text, node)
        self._teaching.teach_again()

    def _cut(self, node: int, other: int) -> None:
        """Two nodes cannot reach each other, though both are there: the iteration starts over without that link."""
        now_ns = self.surroundings.now_ns()
        if self._measured.is_cut(node, other, now_ns) and not self._iteration.uses(node, other):
            return
        self.happened("cut", f"cannot reach '{self._name(other)}'", node)
        self._measured.cut(node, other, now_ns)
        self._changed = True
        for learner, lender in ((node, other), (other, node)):
            if lender in self.roster[learner].sources:
                self.roster[learner].sources = ()
        if self.state is State.PAUSED:
            self._teaching.teach_again()
        elif self.roster[node].stage == self.roster[other].stage:  # they cannot average
            leaves = node if self.roster[node].standing is not Standing.ABLE else other
            self._throw_out(leaves, "it cannot average with the others of its stage")
        else:
            self.restart(f"'{self._name(node)}' cannot reach '{self._name(other)}'")

    def _throw_out(self, node: int, why: str) -> None:
        """It may say hello again, and then begins like any newcomer."""
        self.surroundings.tell(node, Stop(why, again=True))
        self._lost(node, why)

    # Iterations

    def _open(self, number: int) -> None:
        """A new page of the book."""
        self._iteration = Iteration(number, self.plan, self._epoch, set(self.nodes), self._tell_all, self._throw_out)

    def restart(self, why: str) -> None:
        """Begin the iteration, or begin it again, with a plan for those who are there; or wait for others."""
        self._epoch = max(self._epoch, self._iteration.epoch) + 1
        if why and not self._renewed(self.iteration):
            self._pause(why)
            return
        if why:
            self.happened("restarted", why)
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
            self.happened("paused", f"{why}, and nobody can take the place; waiting for nodes to join")
            self._enter(State.PAUSED)
        self._place_spares()
        self._teach_newcomers()

    def _renewed(self, iteration: int) -> bool:
        """Make a plan for those who are there, from this iteration on; whether that is possible."""
        roster, began_ns = self.roster, self.surroundings.now_ns()
        moved = self._replanning.mover(self.plan, finishing=self._finishing) if self._changed else None
        if moved is not None:
            self.happened("replanned", f"moves to stage {moved[1]}, which ran short", moved[0])
            roster.add(moved[0], Standing.SPARE, -1, began_ns)
            self._harvest.lost(moved[0])
        plan = self._replanning.plan(self.plan, iteration, began_ns)
        if plan is not None:
            self.plan = plan
            self._changed = False
            self._measured.planned(plan)
            took_s = (self.surroundings.now_ns() - began_ns) / 1e9
            self._note_plan()
            self.happened("replanned", f"{len(roster.able)} nodes take microbatches; planned in {took_s:.2f} s")
        if moved is not None:
            self._place(moved[0])
        return plan is not None

    def _turned(self, iteration: int) -> bool:
        """Take the plan for paths of another length, if the recipe has them from this iteration on."""
        plan = self._replanning.turned(self.plan, iteration, self.roster.able)
        if plan is None:
            return False
        self.plan = plan
        self._note_plan()
        return True

    def _note_plan(self) -> None:
        """In full once; later its name will do, as long as nobody comes or goes."""
        length = self._lengths.now
        if length in self._lengths.noted:
            self.surroundings.note({"turn": length})
            return
        self._lengths.noted.add(length)
        learning = self.roster.of(Standing.READY, Standing.LEARNING)
        self.surroundings.note(plan_record(self.plan, learning, self.trained, length))

    def _commit(self) -> None:
        """Everybody has a mean gradient. What is decided now is noted before anybody is told."""
        done, visits, norms = self.iteration + 1, self._iteration.visits, self._iteration.norms
        if self._iteration.spoiled:
            bad = ", ".join(map(str, self._iteration.spoiled))
            self.happened("not-finite", f"the gradient of stage {bad}; whoever has made it has left it out")
        norm, scale = self.learning.clipping(norms)
        if math.isfinite(norm):
            self.trained.stepped(visits, norms)
        else:
            scale = 0.0
            self.happened("not-finite", "the gradient is of no use even so: no step is taken")
        rate = self.learning.rate_at(self.iteration)
        report = self._iteration.report(rate, norm, self._patience.iteration_s)
        self.watcher.iteration_done(report)  # before it is noted: rather twice than never
        self.surroundings.note(commit_record(self.iteration, rate, scale, report.loss, visits, self.trained))
        self._epoch = self._iteration.epoch
        self._patience.iteration_done()
        self._measured.update(self._iteration.reports)
        self._place_spares()
        self._proceed(rate, scale, last=done == self.first + self.iterations)

    def _proceed(self, rate: float, scale: float, *, last: bool) -> None:
        done = self.iteration + 1
        before = set(self.nodes)
        outdated = not last and (self._changed or self._drifted())
        possible = not outdated or self._renewed(done)
        new_plan = outdated or (not last and self._turned(done))
        holders = self.roster.holders(self.plan) if self._is_kept(done, last=last) else {}
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
            self.happened("slow", drift)
        return bool(drift)

    def _is_kept(self, done: int, *, last: bool) -> bool:
        if self._harvest.busy or self.kept_every == 0 or self.surroundings.keeper is None:
            return False
        return last or done % self.kept_every == 0

    # The end

    def _collect_if_stepped(self) -> None:
        if self._stepped >= set(self.nodes):
            self._collect()

    def _collect(self) -> None:
        """The weights, from those who have them."""
        holders = self.roster.holders(self.plan)
        if not holders:
            missing = ", ".join(map(str, self.roster.empty(len(self.plan.stages))))
            if self._early:
                self.fail(f"nobody is left who has the weights of stage {missing}; resume from a checkpoint")
            else:
                self._finishing = self._changed = True
                self._renewed(self.iteration)
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

    # Coming back

    def reunited(self) -> None:
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
        self.happened("recovered", f"{there} nodes are where they were, {len(strangers)} are new")
        for node in strangers:
            if places[node].phase:
                self._throw_out(node, "it is not where the others are")
        self._changed = True
        if self.iteration == self.first + self.iterations:
            self._enter(State.STEPPING)
            self._collect_if_stepped()
            return
        self.restart("the coordinator was started again")
        self._place_spares()

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
        self._patience.renew()

    def happened(self, kind: EventKind, text: str, node: int | None = None) -> None:
        self.watcher.happened(Event(kind, self.iteration, text, "" if node is None else self._name(node)))

    def _tell_all(self, control: Control) -> None:
        for node in self.nodes:
            self.surroundings.tell(node, control)

    def _stop_all(self, stop: Stop) -> None:
        for node in self.roster:
            self.surroundings.tell(node, stop)

    def _name(self, node: int) -> str:
        return self.roster.name(node)
