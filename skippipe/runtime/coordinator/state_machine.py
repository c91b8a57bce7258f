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
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.commit_loop import CommitLoop
from skippipe.runtime.coordinator.ends_backup import LOST, EndsBackup
from skippipe.runtime.coordinator.failure_detector import FailureDetector
from skippipe.runtime.coordinator.interfaces import (
    Callback,
    CheckpointStore,
    CoordinatorEnv,
    Event,
    EventKind,
    IterationReport,
)
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.coordinator.membership import Member, Membership, MemberState
from skippipe.runtime.coordinator.recovery import RecoverySourceSelector, StageProgress
from skippipe.runtime.coordinator.replanner import PathLengths, Replanner
from skippipe.runtime.coordinator.settings import CoordinatorState, Deadlines, RecoverySettings
from skippipe.runtime.coordinator.startup import Startup
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.wal_records import RecoveredLog, WalRecord
from skippipe.runtime.fencing import first_number
from skippipe.runtime.messages import (
    Averaged,
    BackupStored,
    ControlMessage,
    DrainAck,
    Failed,
    Heartbeat,
    Hello,
    LinkDown,
    MicrobatchDone,
    Ready,
    Recovered,
    StateRequest,
    Stepped,
    Stop,
)
from skippipe.runtime.task_timing import ClusterEstimator
from skippipe.skip_schedule import SkipSchedule
from skippipe.transport.message import Message

__all__ = [
    "Callback",
    "CheckpointStore",
    "Coordinator",
    "CoordinatorEnv",
    "CoordinatorState",
    "Deadlines",
    "Event",
    "IterationReport",
    "RecoverySettings",
]


@dataclass
class Coordinator:
    planned: Plan
    """To begin with; `plan` is the one in use."""
    learning: OptimConfig
    env: CoordinatorEnv
    callback: Callback
    iterations: int
    first: int = 0
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
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
    survival: RecoverySettings = field(default_factory=RecoverySettings)
    wal: Sequence[WalRecord] = ()
    """What an earlier coordinator of this run has noted."""
    state: CoordinatorState = field(init=False)
    failure: str = ""
    membership: Membership = field(init=False)
    term: int = field(init=False)
    """How many coordinators this run had before."""
    trained: StageProgress = field(init=False)
    _stepped: set[int] = field(init=False, default_factory=set)
    """Those who have taken the last step."""
    _soon: bool = field(init=False, default=False)
    _early: bool = field(init=False, default=False)
    _finishing: bool = field(init=False, default=False)
    """All iterations are done."""

    def __post_init__(self) -> None:
        env, cluster, happened = self.env, self.planned.cluster, self.happened
        memory = RecoveredLog.of(self.wal) if self.wal else RecoveredLog.nothing(self.planned)
        self.state = CoordinatorState.REUNITING if self.wal else CoordinatorState.JOINING
        numbers = count(first_number(memory.term) + 1)
        self.membership = membership = Membership(cluster, numbers=numbers)
        self.term = memory.term
        if self.wal:
            env.note({"term": self.term})
        self.trained = trained = memory.trained
        self._patience = FailureDetector(self, env.now_ns())
        self._harvest = CheckpointGather(env, self.kept_every, self.first if self.resumed else -1, numbers)
        measured = ClusterEstimator(memory.plan, cluster, env.now_ns())
        every = self.survival.backup_every if self.survival.survives else 0
        ends = EndsBackup(every, membership, env, measured)
        plans, end = {**self.plans, memory.visited: memory.plan}, self.first + self.iterations
        self._replanning = Replanner(
            memory.plan,
            PathLengths(self.recipe, end, memory.visited, plans),
            measured,
            self.survival,
            membership,
            trained,
            self._harvest,
            ends,
            env,
            happened,
        )
        teaching = RecoverySourceSelector(membership, env, self.survival, measured, trained, ends, happened)
        self._teaching = teaching
        self._progress = CommitLoop(
            self,
            end,
            self.learning,
            self.recorded,
            membership,
            self._replanning,
            teaching,
            self._harvest,
            self._patience,
            env,
            self.callback,
        )
        self._gathering = Startup(memory, self.resumed, membership, env, self._replanning, teaching, self._progress)
        self._progress.open(self.first if memory.iteration is None else memory.iteration + 1)

    @property
    def over(self) -> bool:
        return self.state in (CoordinatorState.DONE, CoordinatorState.FAILED)

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

    def hear(self, node: int, control: ControlMessage) -> None:
        if self.over:
            return
        self.membership.heard(node, self.env.now_ns())
        if isinstance(control, Hello):
            self._greeted(node, control)
        elif node in self.membership:
            self._told(node, self.membership[node], control)
        elif self.state is not CoordinatorState.REUNITING:
            self.env.tell(node, Stop("you were taken for dead", again=True))

    def _told(self, node: int, peer: Member, control: ControlMessage) -> None:
        match control:
            case Heartbeat():
                peer.doing, peer.busy_s = control.doing, control.busy_s
            case Failed() if self.state in (CoordinatorState.JOINING, CoordinatorState.PREPARING):
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case Failed():
                self._lost(node, control.reason)
            case StateRequest() if self.env.keeper is not None and control.assignment == peer.assignment:
                self._patience.renew()
                self.env.give(node, peer.stage, control)
            case Ready() if control.assignment == peer.assignment:
                self._ready(node, peer)
            case Recovered() if control.assignment == peer.assignment and peer.standing is MemberState.LEARNING:
                self._able(node, peer)
            case BackupStored():
                self._teaching.copied(node, control)
            case LinkDown() if control.peer in self.membership and control.peer != node:
                self._patience.complained(node, control)
            case Stepped() if self.state is CoordinatorState.STEPPING and control.iteration + 1 == self._progress.end:
                self._stepped.add(node)
                self._collect_if_stepped()
            case MicrobatchDone() | DrainAck() | Averaged() if self.state is CoordinatorState.TRAINING:
                self._progress.hear(node, control)
            case _:  # too late, or nonsense: nothing depends on it
                pass

    def receive(self, node: int, message: Message) -> None:
        """A piece of the weights, or of the copy that was kept for a checkpoint."""
        if self.over or node not in self.membership:
            return
        now_ns = self.env.now_ns()
        self.membership.heard(node, now_ns)
        asked = self._harvest.receive(node, message)
        if self.state is not CoordinatorState.COLLECTING:
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
        if self.state is CoordinatorState.TRAINING:
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
        if self.state is CoordinatorState.TRAINING:
            self.callback.measured(self._replanning.measured.as_found())
            self._collect()
        elif self.state is CoordinatorState.COLLECTING and self._harvest.weights is None:
            self._patience.renew()
            self._collect()
        elif self.state in (
            CoordinatorState.JOINING,
            CoordinatorState.PREPARING,
            CoordinatorState.PAUSED,
            CoordinatorState.REUNITING,
        ):
            self._done()

    def lost(self, node: int, how: str) -> None:
        """A connection broke, or a process is known to have ended."""
        if not self.over and node in self.membership:
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
        empty = ", ".join(map(str, self.membership.empty(len(self.plan.stages))))
        return LOST if self._teaching.ends.is_lost else f"stage {empty} has none"

    def missing(self) -> list[int]:
        """Who is waited for."""
        match self.state:
            case CoordinatorState.COLLECTING:
                return self._harvest.waits_for
            case CoordinatorState.PREPARING:
                return self.membership.of(MemberState.BUILDING)
            case CoordinatorState.JOINING:
                return self._gathering.missing
            case CoordinatorState.STEPPING:
                return sorted(set(self.nodes) - self._stepped)
            case _:
                return self._iteration.missing

    def leave(self, reason: str) -> None:
        """Give up, but dismiss nobody: nodes that outlive their coordinator keep their state for the next one."""
        self.failure, self.state = reason, CoordinatorState.FAILED

    def fail(self, reason: str) -> None:
        """Give up; the first reason counts."""
        if self.over:
            return
        self.failure = reason
        self.state = CoordinatorState.FAILED
        self._stop_all(Stop(reason))

    # Coming

    def _greeted(self, node: int, hello: Hello) -> None:
        if hello.version != __version__:
            self._refuse(node, hello)
            return
        if (
            self.state is not CoordinatorState.JOINING
            and self.state is not CoordinatorState.REUNITING
            and node in self.membership
        ):
            self._lost(node, "it was started again")
        if not self.env.meet(node, hello.address):
            self.happened("refused", f"says that it is at '{hello.address}', where nobody can reach it", node)
            return
        self.membership.add(node, MemberState.SPARE, -1, self.env.now_ns())
        match self.state:
            case CoordinatorState.REUNITING:
                self._gathering.came_back(node, hello)
                if not self._gathering.missing:
                    self.reunited()
            case CoordinatorState.JOINING:
                self._prepare_if_all_there()
            case CoordinatorState.TRAINING | CoordinatorState.PAUSED:
                self.happened("joined", "is here", node)
                self._replanning.place(node, self.iteration)
            case _:
                pass

    def _refuse(self, node: int, hello: Hello) -> None:
        reason = f"node '{self._name(node)}' runs skippipe {hello.version}, this is {__version__}; use one version"
        if self.state is CoordinatorState.JOINING:
            self.fail(reason)
            return
        self.happened("refused", reason, node)
        if self.env.meet(node, hello.address):
            self.env.tell(node, Stop(reason))
            self.env.part(node)

    def _prepare_if_all_there(self) -> None:
        if not self._gathering.missing:
            self.enter(CoordinatorState.PREPARING)
            self._gathering.prepare()

    def _ready(self, node: int, peer: Member) -> None:
        if peer.standing is MemberState.LEARNING:
            self._able(node, peer)
        elif peer.standing is MemberState.BUILDING and self.state is CoordinatorState.PREPARING:
            peer.standing = MemberState.ABLE
            self._patience.renew()
            self._begin_if_ready()
        elif peer.standing is MemberState.BUILDING:
            peer.standing = MemberState.READY
            self._replanning.changed = True
            self.go_on_if_possible()

    def _begin_if_ready(self) -> None:
        if self.state is not CoordinatorState.PREPARING or self.membership.of(MemberState.BUILDING):
            return
        if self.iteration >= self._progress.end:  # the checkpoint is of the end: only the weights are missing
            self._collect()
        else:
            self._progress.restart("" if set(self.plan.stage_of) <= set(self.membership.able) else "nodes are missing")

    def _able(self, node: int, peer: Member) -> None:
        peer.standing, peer.sources = MemberState.ABLE, ()
        self._replanning.changed = True
        self.happened("able", f"has the state of stage {peer.stage}", node)
        self.go_on_if_possible()

    def go_on_if_possible(self) -> None:
        if self.state is CoordinatorState.PAUSED and self._finishing:
            self._collect()
        elif self.state is CoordinatorState.PAUSED:
            self._progress.restart("somebody came")

    def restart(self, why: str) -> None:
        """Begin the iteration again, with a plan for those who are there; or wait for others."""
        self._progress.restart(why)

    def cut(self, node: int, broken: LinkDown) -> None:
        """Two nodes that are there cannot reach each other."""
        if self.state in (CoordinatorState.TRAINING, CoordinatorState.PAUSED):
            self._progress.complained(node, broken)

    # Going

    def _lost(self, node: int, how: str) -> None:
        if not self.survival.survives and self.state is not CoordinatorState.JOINING:
            self.fail(f"node '{self._name(node)}' is gone ({how}) while it was waited for {self.state.value}")
            return
        self.happened("gone", how, node)
        self.membership.remove(node)
        self._gathering.lost(node)
        self.env.part(node)
        if self._harvest.lost(node):
            self.happened("checkpoint", "the one that was being made is given up with the node that held it", node)
        match self.state:
            case CoordinatorState.PREPARING:
                self._begin_if_ready()
            case CoordinatorState.TRAINING if node in self.plan.stage_of:
                self._progress.without(node)
            case CoordinatorState.STEPPING:
                self._collect_if_stepped()
            case CoordinatorState.COLLECTING:
                self._go_on_collecting() if self._harvest.is_fetched else self._collect()
            case _:
                pass

    def throw_out(self, node: int, why: str) -> None:
        """It may say hello again, and then begins like any newcomer."""
        self.env.tell(node, Stop(why, again=True))
        self._lost(node, why)

    # The end

    def _collect_if_stepped(self) -> None:
        if self._stepped >= set(self.nodes):
            self._collect()

    def _collect(self) -> None:
        """A checkpoint of the end and then the weights, from those who have them. In this order, because a stage that
        is lost with the last who holds it comes from the newest checkpoint."""
        holders = self.membership.holders(self.plan)
        if not holders:
            missing = ", ".join(map(str, self.membership.empty(len(self.plan.stages))))
            if self._early:
                self.fail(f"nobody is left who has the weights of stage {missing}; resume from a checkpoint")
            else:
                self._finishing = self._replanning.changed = True
                self._replanning.renew(self.iteration, finishing=True)
                self._progress.pause(f"nobody is left who has the weights of stage {missing}")
            return
        if self.state is not CoordinatorState.COLLECTING:
            self.enter(CoordinatorState.COLLECTING)
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
            holders = {} if self._early else self.membership.holders(self.plan)
            if not harvest.keep_again(self._progress.end, self.trained.steps, holders):
                self._done()
        elif harvest.weights is None and not harvest.busy:
            self._collect()

    def _done(self) -> None:
        if self._stepped and self._harvest.lacks(self._progress.end):
            self.happened("checkpoint", "none of the last iteration: the run was ended before it was made")
        self.state = CoordinatorState.DONE
        self.env.note({"done": self.iteration})
        self._stop_all(Stop(""))

    # Coming back

    def reunited(self) -> None:
        """All nodes have come back, or have had time enough: those who are where they should be go on."""
        stepped, strays = self._gathering.reunite()
        if not self.membership.able:
            self._begin_from_checkpoint()
            return
        strangers = len(self.membership.of(MemberState.SPARE))
        there = len(self.membership.peers) - strangers
        self.happened("recovered", f"{there} nodes are where they were, {strangers} are new")
        for node in strays:
            self.throw_out(node, "it is not where the others are")
        if self.over:
            return
        self._replanning.changed = True
        if self.iteration == self._progress.end:
            self._stepped = stepped
            self.enter(CoordinatorState.STEPPING)
            self._collect_if_stepped()
            return
        self._progress.restart("the coordinator was started again")

    def _begin_from_checkpoint(self) -> None:
        if self._gathering.rewind():
            self.enter(CoordinatorState.JOINING)
            self._prepare_if_all_there()
        else:
            self.fail("no node is left that was there before, and there is no checkpoint; start anew")

    # Small change

    def enter(self, state: CoordinatorState) -> None:
        self.state = state
        self._patience.renew()

    def happened(self, kind: EventKind, text: str, node: int | None = None) -> None:
        self.callback.happened(Event(kind, self.iteration, text, "" if node is None else self._name(node)))

    def _stop_all(self, stop: Stop) -> None:
        for node in self.membership:
            self.env.tell(node, stop)

    def _name(self, node: int) -> str:
        return self.membership.name(node)
