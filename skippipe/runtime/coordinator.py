"""The coordinator: what it waits for, from the first hello to the last weights, and who takes part meanwhile.

A state machine like the node. It moves no tensors while training: per iteration, a few small messages from every node
and one to every node.

It hears everybody and decides what follows in the state that it is in. To get everybody together is up to `gathering`,
to train to `progress`, the plan to `replanning`, to fetch weights to `collecting`. What was decided is noted before
anybody is told (`memory`): so a coordinator that is started again from its notes finds the nodes where they are, and
they repeat at most one iteration.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from skippipe import __version__
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.recipe import Recipe
from skippipe.runtime.collecting import Harvest
from skippipe.runtime.control import (
    Alive,
    Averaged,
    Broken,
    Contributed,
    Control,
    Copied,
    Failed,
    Hello,
    Learned,
    Ready,
    Returned,
    Stepped,
    Stop,
    Want,
)
from skippipe.runtime.ends_backup import LOST, EndsBackup
from skippipe.runtime.fencing import first_number
from skippipe.runtime.gathering import Gathering
from skippipe.runtime.iteration import Iteration
from skippipe.runtime.lengths import Lengths
from skippipe.runtime.measured import Measured
from skippipe.runtime.memory import Memory, Record
from skippipe.runtime.patience import Patience
from skippipe.runtime.progress import Progress
from skippipe.runtime.replanning import Replanning
from skippipe.runtime.roster import Peer, Roster, Standing
from skippipe.runtime.settings import Deadlines, Survival
from skippipe.runtime.states import State
from skippipe.runtime.surroundings import Event, EventKind, IterationReport, Keeper, Surroundings, Watcher
from skippipe.runtime.teaching import Teaching, Trained
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
    planned: Plan
    """To begin with; `plan` is the one in use."""
    learning: Learning
    surroundings: Surroundings
    watcher: Watcher
    iterations: int
    first: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    """Says how long paths are in which iteration."""
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """For paths of these lengths, on the same stages; one that is missing is made when its turn comes."""
    recorded: Container[int] = frozenset()
    """The iterations of which every task is reported."""
    kept_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    resumed: bool = False
    """Nodes go on from a checkpoint."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    survival: Survival = field(default_factory=Survival)
    journal: Sequence[Record] = ()
    """What an earlier coordinator of this run has noted."""
    state: State = field(init=False)
    failure: str = ""
    roster: Roster = field(init=False)
    term: int = field(init=False)
    """How many coordinators this run had before."""
    trained: Trained = field(init=False)
    _stepped: set[int] = field(init=False, default_factory=set)
    """Those who have taken the last step."""
    _soon: bool = field(init=False, default=False)
    _early: bool = field(init=False, default=False)
    _finishing: bool = field(init=False, default=False)
    """All iterations are done."""

    def __post_init__(self) -> None:
        surroundings, cluster, happened = self.surroundings, self.planned.cluster, self.happened
        memory = Memory.of(self.journal) if self.journal else Memory.nothing(self.planned)
        self.state = State.REUNITING if self.journal else State.JOINING
        numbers = count(first_number(memory.term) + 1)
        self.roster = roster = Roster(cluster, numbers=numbers)
        self.term = memory.term
        if self.journal:
            surroundings.note({"term": self.term})
        self.trained = trained = memory.trained
        self._patience = Patience(self, surroundings.now_ns())
        self._harvest = Harvest(surroundings, self.kept_every, self.first if self.resumed else -1, numbers)
        measured = Measured(memory.plan, cluster, surroundings.now_ns())
        every = self.survival.backup_every if self.survival.survives else 0
        ends = EndsBackup(every, roster, surroundings, measured)
        plans, end = {**self.plans, memory.visited: memory.plan}, self.first + self.iterations
        self._replanning = Replanning(
            memory.plan,
            Lengths(self.recipe, end, memory.visited, plans),
            measured,
            self.survival,
            roster,
            trained,
            self._harvest,
            ends,
            surroundings,
            happened,
        )
        teaching = Teaching(roster, surroundings, self.survival, measured, trained, ends, happened)
        self._teaching = teaching
        self._progress = Progress(
            self,
            end,
            self.learning,
            self.recorded,
            roster,
            self._replanning,
            teaching,
            self._harvest,
            self._patience,
            surroundings,
            self.watcher,
        )
        self._gathering = Gathering(
            memory, self.resumed, roster, surroundings, self._replanning, teaching, self._progress
        )
        self._progress.open(self.first if memory.iteration is None else memory.iteration + 1)

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def plan(self) -> Plan:
        """In use."""
        return self._replanning.plan

    @property
    def iteration(self) -> int:
        return self._iteration.number

    @property
    def is_disturbed(self) -> bool:
        """Has something happened in this iteration that the plan did not foresee?"""
        return self._iteration.is_disturbed

    @property
    def nodes(self) -> list[int]:
        """That the plan uses, and that average and step."""
        return self._progress.nodes

    @property
    def _iteration(self) -> Iteration:
        return self._progress.now

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
                peer.doing, peer.busy_s = control.doing, control.busy_s
            case Failed() if self.state in (State.JOINING, State.PREPARING):
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case Failed():
                self._lost(node, control.reason)
            case Want() if self.surroundings.keeper is not None and control.assignment == peer.assignment:
                self._patience.renew()
                self.surroundings.give(node, peer.stage, control)
            case Ready() if control.assignment == peer.assignment:
                self._ready(node, peer)
            case Learned() if control.assignment == peer.assignment and peer.standing is Standing.LEARNING:
                self._able(node, peer)
            case Copied():
                self._teaching.copied(node, control)
            case Broken() if control.peer in self.roster and control.peer != node:
                self._patience.complained(node, control)
            case Stepped() if self.state is State.STEPPING and control.iteration + 1 == self._progress.end:
                self._stepped.add(node)
                self._collect_if_stepped()
            case Returned() | Contributed() | Averaged() if self.state is State.TRAINING:
                self._progress.hear(node, control)
            case _:  # too late, or nonsense: nothing depends on it
                pass

    def receive(self, node: int, message: Message) -> None:
        """A piece of the weights, or of the copy that was kept for a checkpoint."""
        if self.over or node not in self.roster:
            return
        now_ns = self.surroundings.now_ns()
        self.roster.heard(node, now_ns)
        asked = self._harvest.receive(node, message)
        if self.state is not State.COLLECTING:
            return
        if asked and not self._early:
            self._patience.renew()
        self._go_on_collecting()

    def complain(self, node: int, what: str) -> None:
        """A node sends what nobody understands; it is dropped."""
        self.happened("refused", f"sends nonsense, later ones are only counted: {what}", node)

    def asked_to_end(self, times: int) -> None:
        """Once: after this iteration. Twice: at once."""
        if times > 1:
            self.finish_early()
        elif times:
            self.finish_soon()

    def finish_soon(self) -> None:
        """The iteration that is under way is the last, as if no more had been asked for. Without one, it is over."""
        if self._soon or self.over:
            return
        self._soon = True
        if self.state is State.TRAINING:
            self._progress.end = self.iteration + 1
            self.happened("ending", "after this iteration, as was asked; Ctrl-C again ends it at once")
        else:
            self.finish_early()

    def finish_early(self) -> None:
        """Collect the weights as they are; what is in flight is given up. Before training there is nothing to keep."""
        if self._early or self.over:
            return
        self._early = True
        self.deadlines = replace(self.deadlines, collect=self.deadlines.early, room=self.deadlines.early)
        if self.state is State.TRAINING:
            self.watcher.measured(self._replanning.measured.as_found())
            self._collect()
        elif self.state is State.COLLECTING and self._harvest.weights is None:
            self._patience.renew()
            self._collect()
        elif self.state in (State.JOINING, State.PREPARING, State.PAUSED, State.REUNITING):
            self._done()

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

    @property
    def lacking(self) -> str:
        """What nobody has, so that nothing goes on."""
        empty = ", ".join(map(str, self.roster.empty(len(self.plan.stages))))
        return LOST if self._teaching.ends.is_lost else f"stage {empty} has none"

    def missing(self) -> list[int]:
        """Who is waited for."""
        match self.state:
            case State.COLLECTING:
                return self._harvest.waits_for
            case State.PREPARING:
                return self.roster.of(Standing.BUILDING)
            case State.JOINING:
                return self._gathering.missing
            case State.STEPPING:
                return sorted(set(self.nodes) - self._stepped)
            case _:
                return self._iteration.missing

    def leave(self, reason: str) -> None:
        """Give up, but dismiss nobody: nodes that outlive their coordinator keep their state for the next one."""
        self.failure, self.state = reason, State.FAILED

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
                self._gathering.came_back(node, hello)
                if not self._gathering.missing:
                    self.reunited()
            case State.JOINING:
                self._prepare_if_all_there()
            case State.TRAINING | State.PAUSED:
                self.happened("joined", "is here", node)
                self._replanning.place(node, self.iteration)
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
        if not self._gathering.missing:
            self.enter(State.PREPARING)
            self._gathering.prepare()

    def _ready(self, node: int, peer: Peer) -> None:
        if peer.standing is Standing.LEARNING:
            self._able(node, peer)
        elif peer.standing is Standing.BUILDING and self.state is State.PREPARING:
            peer.standing = Standing.ABLE
            self._patience.renew()
            self._begin_if_ready()
        elif peer.standing is Standing.BUILDING:
            peer.standing = Standing.READY
            self._replanning.changed = True
            self.go_on_if_possible()

    def _begin_if_ready(self) -> None:
        if self.state is not State.PREPARING or self.roster.of(Standing.BUILDING):
            return
        if self.iteration >= self._progress.end:  # the checkpoint is of the end: only the weights are missing
            self._collect()
        else:
            self._progress.restart("" if set(self.plan.stage_of) <= set(self.roster.able) else "nodes are missing")

    def _able(self, node: int, peer: Peer) -> None:
        peer.standing, peer.sources = Standing.ABLE, ()
        self._replanning.changed = True
        self.happened("able", f"has the state of stage {peer.stage}", node)
        self.go_on_if_possible()

    def go_on_if_possible(self) -> None:
        if self.state is State.PAUSED and self._finishing:
            self._collect()
        elif self.state is State.PAUSED:
            self._progress.restart("somebody came")

    def restart(self, why: str) -> None:
        """Begin the iteration again, with a plan for those who are there; or wait for others."""
        self._progress.restart(why)

    def cut(self, node: int, broken: Broken) -> None:
        """Two nodes that are there cannot reach each other."""
        if self.state in (State.TRAINING, State.PAUSED):
            self._progress.complained(node, broken)

    # Going

    def _lost(self, node: int, how: str) -> None:
        if not self.survival.survives and self.state is not State.JOINING:
            self.fail(f"node '{self._name(node)}' is gone ({how}) while it was waited for {self.state.value}")
            return
        self.happened("gone", how, node)
        self.roster.remove(node)
        self._gathering.lost(node)
        self.surroundings.part(node)
        if self._harvest.lost(node):
            self.happened("checkpoint", "the one that was being made is given up with the node that held it", node)
        match self.state:
            case State.PREPARING:
                self._begin_if_ready()
            case State.TRAINING if node in self.plan.stage_of:
                self._progress.without(node)
            case State.STEPPING:
                self._collect_if_stepped()
            case State.COLLECTING:
                self._go_on_collecting() if self._harvest.is_fetched else self._collect()
            case _:
                pass

    def throw_out(self, node: int, why: str) -> None:
        """It may say hello again, and then begins like any newcomer."""
        self.surroundings.tell(node, Stop(why, again=True))
        self._lost(node, why)

    # The end

    def _collect_if_stepped(self) -> None:
        if self._stepped >= set(self.nodes):
            self._collect()

    def _collect(self) -> None:
        """A checkpoint of the end and then the weights, from those who have them. In this order, because a stage that
        is lost with the last who holds it comes from the newest checkpoint."""
        holders = self.roster.holders(self.plan)
        if not holders:
            missing = ", ".join(map(str, self.roster.empty(len(self.plan.stages))))
            if self._early:
                self.fail(f"nobody is left who has the weights of stage {missing}; resume from a checkpoint")
            else:
                self._finishing = self._replanning.changed = True
                self._replanning.renew(self.iteration, finishing=True)
                self._progress.pause(f"nobody is left who has the weights of stage {missing}")
            return
        if self.state is not State.COLLECTING:
            self.enter(State.COLLECTING)
        if self._early or not self._harvest.lacks(self._progress.end):
            self._harvest.collect(holders)
        elif not self._harvest.busy:
            self._harvest.last_checkpoint(self._progress.end, self.trained.steps, holders)

    def store_again(self) -> None:
        """What has come could not be written; perhaps there is room by now."""
        self._harvest.store_again()
        self._go_on_collecting()

    def _go_on_collecting(self) -> None:
        harvest = self._harvest
        if self._patience.waits_for_room(harvest.unwritten):
            return
        if harvest.over and (self._early or not harvest.busy):
            holders = {} if self._early else self.roster.holders(self.plan)
            if not harvest.keep_again(self._progress.end, self.trained.steps, holders):
                self._done()
        elif harvest.weights is None and not harvest.busy:
            self._collect()

    def _done(self) -> None:
        if self._stepped and self._harvest.lacks(self._progress.end):
            self.happened("checkpoint", "none of the last iteration: the run was ended before it was made")
        self.state = State.DONE
        self.surroundings.note({"done": self.iteration})
        self._stop_all(Stop(""))

    # Coming back

    def reunited(self) -> None:
        """All nodes have come back, or have had time enough: those who are where they should be go on."""
        stepped, strays = self._gathering.reunite()
        if not self.roster.able:
            self._begin_from_checkpoint()
            return
        strangers = len(self.roster.of(Standing.SPARE))
        there = len(self.roster.peers) - strangers
        self.happened("recovered", f"{there} nodes are where they were, {strangers} are new")
        for node in strays:
            self.throw_out(node, "it is not where the others are")
        if self.over:
            return
        self._replanning.changed = True
        if self.iteration == self._progress.end:
            self._stepped = stepped
            self.enter(State.STEPPING)
            self._collect_if_stepped()
            return
        self._progress.restart("the coordinator was started again")

    def _begin_from_checkpoint(self) -> None:
        if self._gathering.rewind():
            self.enter(State.JOINING)
            self._prepare_if_all_there()
        else:
            self.fail("no node is left that was there before, and there is no checkpoint; start anew")

    # Small change

    def enter(self, state: State) -> None:
        self.state = state
        self._patience.renew()

    def happened(self, kind: EventKind, text: str, node: int | None = None) -> None:
        self.watcher.happened(Event(kind, self.iteration, text, "" if node is None else self._name(node)))

    def _stop_all(self, stop: Stop) -> None:
        for node in self.roster:
            self.surroundings.tell(node, stop)

    def _name(self, node: int) -> str:
        return self.roster.name(node)
