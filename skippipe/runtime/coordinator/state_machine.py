"""The coordinator's state machine: from the first node that joins to the last weights that are stored.

It moves no tensors while training: per iteration, a few small messages from every node and one to every node. It takes
messages and lost nodes in, and decides what follows. Each state has a part that does the work: `startup` until all
nodes are ready, `commit_loop` while training, with the plan of `replanner` and the state sources of `recovery`,
`state_gather` for checkpoints and weights, `run_end` when training ends; `failure_detector` looks at the clock,
`reachability` at who can call whom.

A decision is in the write-ahead log before any node is told (`wal_records`). So a coordinator that is restarted from
its log finds the nodes where they are, and they repeat at most one iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from skippipe import __version__
from skippipe.plan import Plan
from skippipe.runtime.coordinator.cluster_estimator import ClusterEstimator
from skippipe.runtime.coordinator.commit_loop import CommitLoop
from skippipe.runtime.coordinator.failure_detector import FailureDetector
from skippipe.runtime.coordinator.interfaces import (
    Callback,
    CoordinatorEnv,
    CoordinatorState,
    Event,
    EventKind,
)
from skippipe.runtime.coordinator.membership import Member, Membership, MemberState
from skippipe.runtime.coordinator.reachability import Reachability
from skippipe.runtime.coordinator.recovery import EmbeddingBackup, RecoverySourceSelector, StageProgress
from skippipe.runtime.coordinator.replanner import PathLengths, Replanner
from skippipe.runtime.coordinator.run_end import RunEnd
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.startup import Startup
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.validation import Validation
from skippipe.runtime.coordinator.wal_records import RecoveredLog, WalRecord
from skippipe.runtime.fencing import first_id
from skippipe.runtime.messages import (
    Averaged,
    BackupStored,
    ControlMessage,
    Devices,
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
    Validated,
)
from skippipe.runtime.relay_pool import RelayInfo
from skippipe.runtime.state_source import MalformedWeights
from skippipe.transport.message import Message


@dataclass
class Coordinator:
    initial_plan: Plan
    """The plan that the run starts with; `plan` is the one in use."""
    settings: CoordinatorSettings
    env: CoordinatorEnv
    callback: Callback
    wal: Sequence[WalRecord] = ()
    """What an earlier coordinator of this run has logged."""
    first_term: int = 0
    """The term of this coordinator, at least: others were there before the model grew."""
    leaves_nodes: bool = False
    """Does the run end without stopping nodes, which then wait for another coordinator?"""
    state: CoordinatorState = field(init=False)
    failure: str = ""
    membership: Membership = field(init=False)
    term: int = field(init=False)
    """How many coordinators this run had before."""
    progress: StageProgress = field(init=False)
    _timed_out: int = field(init=False, default=-1)
    """The last iteration that started over because its deadline had passed."""

    def __post_init__(self) -> None:
        env, settings, plan = self.env, self.settings, self.initial_plan
        log = RecoveredLog.read(self.wal, plan, settings.plans)
        self.state = CoordinatorState.REJOINING if self.wal else CoordinatorState.JOINING
        self.term, self.progress = max(log.term, self.first_term), log.progress
        if self.term:
            env.append_wal({"term": self.term})
        ids = count(first_id(self.term) + 1)
        resumed_from, recovery = settings.resumed_from, settings.recovery
        self.membership = membership = Membership(plan.cluster, ids=ids)
        self._detector = FailureDetector(self, membership, env, settings.deadlines)
        self._gather = CheckpointGather(
            *(env, settings.checkpoint_every, -1 if resumed_from is None else resumed_from, ids),
            grows_at=settings.iterations if settings.grows else None,
        )
        estimator = ClusterEstimator(
            log.plan, plan.cluster, env.now_ns(), membership.out_only, membership.relays, membership.relay_only_pairs
        )
        backup = EmbeddingBackup(recovery.backup_every if recovery.fault_tolerant else 0, membership, env, estimator)
        lengths = PathLengths(
            settings.skip_schedule, settings.iterations, log.visited, {**settings.plans, log.visited: log.plan}
        )
        self._replanner = Replanner(
            *(log.plan, lengths, estimator, recovery, membership, log.progress, self._gather, backup),
            *(env, self.log_event),
        )
        self._recovery = RecoverySourceSelector(
            membership, env, recovery, estimator, log.progress, backup, self.log_event
        )
        self._validation = Validation(settings.validation, env, settings.first_iteration)
        self._commits = CommitLoop(
            *(self, settings, membership, self._replanner, self._recovery, self._gather, self._detector),
            *(self._validation, env, self.callback),
        )
        if self.first_term:  # tensors of iterations that are done again may still be on their way
            self._commits.epoch = first_id(self.term)
        self._startup = Startup(
            self, log, resumed_from is not None, membership, env, self._replanner, self._recovery, self._commits
        )
        self._end = RunEnd(
            *(self, settings, membership, self._gather, self._commits, self._validation, self._replanner),
            *(self._detector, env, self.callback),
        )
        self._reachability = Reachability(self, membership, env, self._replanner, self._startup.go_on_if_complete)
        self._commits.open(settings.first_iteration if log.iteration is None else log.iteration + 1)

    @property
    def over(self) -> bool:
        return self.state in (CoordinatorState.DONE, CoordinatorState.FAILED)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._replanner.plan

    @property
    def iteration(self) -> int:
        """The number of the current iteration."""
        return self._commits.current.number

    @property
    def is_disturbed(self) -> bool:
        """Has something happened in this iteration that the plan did not foresee?"""
        return self._commits.current.is_disturbed

    @property
    def _is_beginning(self) -> bool:
        """Nodes are new: what is wrong with one of them is said before it costs anything."""
        new = self.state in (CoordinatorState.JOINING, CoordinatorState.PREPARING)
        return new and not self.settings.nodes_are_there

    @property
    def is_disk_full(self) -> bool:
        return self._end.is_disk_full

    @property
    def has_grown(self) -> bool:
        """The run has ended for its model to grow: another coordinator goes on from the last checkpoint."""
        return self._end.has_grown

    @property
    def may_begin(self) -> bool:
        return self._startup.may_begin

    @property
    def nodes(self) -> list[int]:
        """Nodes of the plan that average and step."""
        return self._commits.nodes

    def awaited(self) -> list[int]:
        """Nodes that the coordinator waits for."""
        match self.state:
            case CoordinatorState.GATHERING:
                return self._gather.awaited
            case CoordinatorState.PREPARING:
                return self.membership.in_state(MemberState.BUILDING)
            case CoordinatorState.JOINING:
                return self._startup.missing
            case CoordinatorState.STEPPING:
                return self._end.awaits_step
            case CoordinatorState.VALIDATING:
                return self._validation.awaited
            case _:
                return self._commits.current.awaited

    # Messages

    def on_message(self, node: int, control: ControlMessage) -> None:
        if self.over:
            return
        self.membership.seen(node, self.env.now_ns())
        if isinstance(control, Hello):
            self._on_hello(node, control)
        elif node in self.membership:
            self._on_member_message(node, self.membership[node], control)
        elif self.state is not CoordinatorState.REJOINING:
            self.env.send(node, Stop("declared dead", again=True))

    def _on_member_message(self, node: int, member: Member, control: ControlMessage) -> None:
        match control:
            case Heartbeat():
                member.activity, member.busy_s = control.doing, control.busy_s
            case Failed() if self._is_beginning:
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case Failed():
                self._remove(node, control.reason)
            case StateRequest() if self.env.checkpoint_store is not None and control.assignment == member.assignment:
                self._detector.progress()
                self.env.send_checkpoint_state(node, member.stage, control)
            case Ready() if control.assignment == member.assignment:
                self._on_ready(node, member)
            case Recovered() if control.assignment == member.assignment and member.state is MemberState.RECOVERING:
                self._activate(node, member)
            case Devices():
                self._commits.on_devices(node, control)
            case BackupStored():
                self._recovery.backup_stored(node, control)
            case LinkDown() if control.peer in self.membership and control.peer != node:
                self._detector.link_reported(node, control)
            case Stepped() if self.state is CoordinatorState.STEPPING and control.iteration + 1 == self._commits.end:
                self._end.stepped(node)
            case MicrobatchDone() | DrainAck() | Averaged() if self.state is CoordinatorState.TRAINING:
                self._commits.on_message(node, control)
            case Validated() if self.state is CoordinatorState.VALIDATING:
                self._commits.on_validated(node, control)
            case _:  # too late, or meaningless: nothing depends on it
                pass

    def on_piece(self, node: int, message: Message) -> None:
        """A piece of the weights, or of a snapshot for a checkpoint, has arrived."""
        if self.over or node not in self.membership:
            return
        self.membership.seen(node, self.env.now_ns())
        try:
            requested = self._gather.receive(node, message)
        except MalformedWeights as error:
            self.evict(node, str(error))
            return
        if self.state is CoordinatorState.GATHERING:
            self._end.on_piece(requested)

    def on_malformed(self, node: int, what: str) -> None:
        """A node has sent a message that cannot be read; it is dropped."""
        self.log_event("refused", f"sends malformed messages, later ones are only counted: {what}", node)

    def on_reach(self, node: int, unanswered: str | None, site: str = "") -> None:
        self._reachability.reach_known(node, unanswered, site)

    def on_relay(self, name: str, info: RelayInfo | None) -> None:
        self._reachability.relay_known(name, info)

    def on_relay_only(self, a: int, b: int, relay_only: bool) -> None:
        self._reachability.relay_only_known(a, b, relay_only)

    def _on_hello(self, node: int, hello: Hello) -> None:
        if hello.version != __version__:
            self._refuse(node, hello)
            return
        starting = self.state in (CoordinatorState.JOINING, CoordinatorState.REJOINING)
        if not starting and node in self.membership:
            self._remove(node, "it was restarted")
        if not self.env.connect(node, hello.address):
            self.log_event("refused", f"says that it is at '{hello.address}', where no node can reach it", node)
            return
        self.membership.add(node, MemberState.SPARE, -1, self.env.now_ns())
        if starting:
            self._startup.joined(node, hello)
        elif self.state is CoordinatorState.PREPARING:
            self.log_event("joined", "is here", node)
            self._startup.rejoined(node)
        elif self.state in (CoordinatorState.TRAINING, CoordinatorState.VALIDATING, CoordinatorState.PAUSED):
            self.log_event("joined", "is here", node)
            self._replanner.place(node, self.iteration)

    def _refuse(self, node: int, hello: Hello) -> None:
        reason = f"node '{self._name(node)}' runs skippipe {hello.version}, this is {__version__}; use one version"
        if self.state is CoordinatorState.JOINING and self._is_beginning:
            self.fail(reason)
            return
        self.log_event("refused", reason, node)
        if self.env.connect(node, hello.address):
            self.env.send(node, Stop(reason))
            self.env.disconnect(node)

    def _on_ready(self, node: int, member: Member) -> None:
        """A node has built its stage and, if it was told to, fetched its state."""
        if member.state is MemberState.RECOVERING:
            self._activate(node, member)
        elif member.state is MemberState.BUILDING and self.state is CoordinatorState.PREPARING:
            member.state = MemberState.ACTIVE
            self._detector.progress()
            self._startup.begin_if_ready()
        elif member.state is MemberState.BUILDING:
            member.state = MemberState.READY
            self._replanner.changed = True
            self._resume_if_paused()

    def _activate(self, node: int, member: Member) -> None:
        member.state, member.sources = MemberState.ACTIVE, ()
        self._replanner.changed = True
        self.log_event("recovered", f"has the state of stage {member.stage}", node)
        self._resume_if_paused()

    def _resume_if_paused(self) -> None:
        if self.state is CoordinatorState.PAUSED:
            self._end.gather_weights() if self._end.lacks_stage else self._commits.restart("a plan is possible again")

    # Failures

    def node_lost(self, node: int, how: str) -> None:
        """A connection broke, a process ended, or a node is silent."""
        if not self.over and node in self.membership:
            self._remove(node, how)

    def evict(self, node: int, reason: str) -> None:
        """Remove a node that is there; it may join again, and then begins like any newcomer."""
        self.env.send(node, Stop(reason, again=True))
        self._remove(node, reason)

    def _remove(self, node: int, how: str) -> None:
        if not self.settings.recovery.fault_tolerant and self.state is not CoordinatorState.JOINING:
            self.fail(f"node '{self._name(node)}' is gone ({how}) while it was waited for {self.state.value}")
            return
        self.log_event("lost", how, node)
        self.membership.remove(node)
        self._startup.lost(node)
        self.env.disconnect(node)
        if self._gather.lost(node):
            self.log_event("checkpoint", "the one that was being made is given up with the node that held it", node)
        match self.state:
            case CoordinatorState.PREPARING:
                self._startup.begin_if_ready()
            case CoordinatorState.TRAINING if node in self.plan.stage_of:
                self._commits.reroute(node)
            case CoordinatorState.VALIDATING if node in self.plan.stage_of:
                self._replanner.changed = True
                self._commits.give_up_validation(f"'{self._name(node)}' is gone", lost=True)
            case CoordinatorState.STEPPING | CoordinatorState.GATHERING:
                self._end.node_lost()
            case _:
                pass

    def link_down(self, node: int, report: LinkDown) -> None:
        """Two nodes that are alive cannot reach each other."""
        if self.state is CoordinatorState.VALIDATING and self._validation.uses(node, report.peer):
            self._commits.give_up_validation(f"'{self._name(node)}' cannot reach '{self._name(report.peer)}'")
        if self.state in (CoordinatorState.TRAINING, CoordinatorState.PAUSED):
            self._commits.link_down(node, report)

    def tick(self) -> None:
        """To be called often: deadlines pass."""
        self._detector.tick()

    def deadline_ns(self) -> int:
        """When something happens even if no message arrives."""
        return self._detector.deadline_ns()

    def deadline_passed(self, waited: str) -> None:
        """The state has lasted too long: start over, continue without the awaited nodes, or fail and name them."""
        state, awaited, fault_tolerant = self.state, self.awaited(), self.settings.recovery.fault_tolerant
        names, unwritten = ", ".join(map(self._name, awaited)) or "a relay", self._gather.unwritten
        if state is CoordinatorState.REJOINING:
            self._startup.finish_rejoin()
        elif state is CoordinatorState.JOINING and self._startup.is_enough:
            self._startup.begin_without_missing(waited)
        elif state is CoordinatorState.TRAINING and fault_tolerant and self._timed_out != self.iteration:
            self._timed_out = self.iteration
            self._commits.restart(f"{waited} {names} {state.value}")
        elif state is CoordinatorState.VALIDATING:
            self._commits.give_up_validation(f"{waited} {names} {state.value}")
        elif state is CoordinatorState.PREPARING and fault_tolerant and self.membership.active:
            for node in awaited:
                self.node_lost(node, f"{waited} it {state.value}")
        elif state is CoordinatorState.GATHERING and unwritten is not None:
            self.detach(f"{unwritten}; {waited} disk space; {unwritten.ways}")
        elif state is CoordinatorState.PAUSED:
            self.fail(f"{waited} nodes {state.value}: {self._commits.lacking}")
        else:
            self.fail(f"{waited} {names} {state.value}")

    def retry(self) -> None:
        """Try again what was not possible: to train, if paused; to write the weights, if the disk was full."""
        if self.state is CoordinatorState.PAUSED:
            self._resume_if_paused()
        else:
            self._end.retry_write()

    def fail(self, reason: str) -> None:
        """End the run and all nodes; the first reason counts."""
        if not self.over:
            self.failure, self.state = reason, CoordinatorState.FAILED
            self._stop_all(Stop(reason))

    def detach(self, reason: str) -> None:
        """End without stopping nodes: those that outlive their coordinator keep their state for the next one."""
        self.failure, self.state = reason, CoordinatorState.FAILED

    # The end of the run

    def on_stop_requests(self, requests: int) -> None:
        """One request: the run ends after this iteration. Two: at once."""
        self._end.on_stop_requests(requests)

    def await_last_step(self, stepped: set[int]) -> None:
        self._end.await_last_step(stepped)

    def gather_weights(self) -> None:
        self._end.gather_weights()

    def finish(self, stop: Stop | None) -> None:
        """All is on disk: the run ends. Without a `stop`, nodes wait for another coordinator."""
        self.state = CoordinatorState.DONE
        if stop is not None:
            self._stop_all(stop)
            if stop.again:
                for node in self.membership:
                    self.env.disconnect(node)

    def enter(self, state: CoordinatorState) -> None:
        self.state = state
        self._detector.progress()

    def log_event(self, kind: EventKind, text: str, node: int | None = None) -> None:
        self.callback.happened(Event(kind, self.iteration, text, "" if node is None else self._name(node)))

    def _stop_all(self, stop: Stop) -> None:
        for node in self.membership:
            self.env.send(node, stop)

    def _name(self, node: int) -> str:
        return self.membership.name(node)
