"""A node's part in training, as a state machine.

It sees the clock, the network and its computer only through `NodeEnv`, so the same code runs in a process with sockets
and in one thread under virtual time. It never waits: messages and finished work are taken in by `receive` and
`finished`, and `decide` then starts what goes next. Whoever runs it takes in all that happens at one time before it
calls `decide`, as the simulator does.

An iteration: tasks in the order that `dispatch` gives, until none is left; then the stage's ring averages gradients;
then the coordinator, which knows all norms, says how to step; then the next iteration begins.

When nodes are lost, the coordinator says how to go on (`Reroute`, see `routes`). From then on nobody can tell by
counting when all tasks are done, so the coordinator says that too (`Drain`), asks everybody what they have added up,
and has it averaged. A node's own sum of gradients stays untouched until the step, so averaging can begin again at any
time, and what a node has added once it never adds again. What comes that is not foreseen is dropped and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from skippipe.collectives import COLLECTIVES
from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    Averaged,
    Backup,
    Begin,
    Commit,
    ControlMessage,
    Drain,
    DrainAck,
    GatherState,
    Hello,
    NewPlan,
    Ready,
    Recover,
    Reroute,
    Snapshot,
    Stepped,
    Stop,
)
from skippipe.runtime.node.interfaces import IN_ITERATION, NodeEnv, NodePhase
from skippipe.runtime.node.microbatch_scheduler import MicrobatchScheduler, NodeSchedule
from skippipe.runtime.node.ops import (
    CheckFinite,
    ClearGradients,
    CopyEnds,
    DropMicrobatch,
    GradNorm,
    Op,
    OpenBackup,
    OpQueue,
    OptimizerStep,
    PlanTransfer,
    ReadState,
    ReadWeights,
    RingStep,
    SnapshotState,
    StageTask,
    StoreBackup,
    WriteState,
    op_name,
)
from skippipe.runtime.node.ring_protocol import RingProtocol
from skippipe.runtime.node.state_transfer import StateTransfer, is_state
from skippipe.transport.message import Message, MessageKind

__all__ = ["MOST_EARLY", "Node", "NodeEnv", "NodePhase"]

log = logging.getLogger(__name__)
MOST_EARLY = 64  # messages of one sender that are kept because they are ahead of their time


class Node:
    def __init__(self, number: int, plan: Plan, env: NodeEnv) -> None:
        self.number = number
        self.stage = plan.stage_of[number]
        self.phase = NodePhase.WAITING
        self.iteration = -1
        self.epoch = 0
        self._begun_epoch = 0
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → how many messages of that kind were not taken."""
        self._env = env
        self._next_plan: Plan | None = None
        self._next_begin: Begin | None = None
        self._next_changes: list[Reroute | Drain | Average] = []
        self._agenda = OpQueue(env.start)
        self._loans = StateTransfer(self, env, self._agenda)
        self._early: dict[int, list[tuple[Message, int]]] = {}
        self._proceed: Commit | None = None
        self._adopt(plan)
        self._clear(recorded=False)

    def hello(self, address: str, version: str) -> Hello:
        """To a coordinator, which may be another than the one before."""
        if self.iteration < 0:
            return Hello(address, version)
        stepped = self.phase in (NodePhase.STEPPING, NodePhase.WAITING)
        return Hello(address, version, self.epoch, self.iteration + stepped, self.phase.name, self._loans.backup)

    # What it is told

    def hear(self, control: ControlMessage) -> None:
        """From the coordinator."""
        match control:
            case Begin():
                if self.phase is NodePhase.STEPPING:
                    self._next_begin = control
                else:
                    self._begin_as_told(control)
            case Recover():
                self._loans.learn(control.origin, control.assignment)
            case Snapshot() if self.stage == 0:
                self._agenda.add(CopyEnds(control.iterations))
            case Backup() if self.stage != 0:
                self._loans.fetch(control)
            case NewPlan():
                self.replan(Plan.from_json(control.plan))
            case Commit() if self.phase is NodePhase.AVERAGED and control.iteration == self.iteration:
                self.phase = NodePhase.STEPPING
                self._proceed = control
                self._agenda.add(OptimizerStep(control.rate, control.scale))
                if control.kept:
                    self._agenda.add(SnapshotState())
            case Commit() if self.phase is NodePhase.WAITING and control.kept:  # there was no word of a copy before
                self._agenda.add(SnapshotState())
            case Reroute() | Drain() | Average():
                if control.iteration == self.iteration + 1 and self.phase in (NodePhase.STEPPING, NodePhase.WAITING):
                    self._next_changes.append(control)
                elif control.iteration == self.iteration and self.phase in IN_ITERATION and control.epoch >= self.epoch:
                    self._change(control)
                else:
                    self.drop(COORDINATOR, f"{type(control).__name__} while {self.phase.value}")
            case GatherState():  # after the step, if one was asked for
                self._agenda.add(ReadWeights(control.piece, control.kept, control.collection))
            case Stop():
                self.stopped = control
            case _:
                self.drop(COORDINATOR, f"{type(control).__name__} while {self.phase.value}")

    def replan(self, plan: Plan) -> None:
        """From the next iteration on."""
        self._next_plan = plan

    def asked(self, sender: int, control: ControlMessage) -> None:
        """By a node that learns, or told by one that lends."""
        self._loans.asked(sender, control)

    def welcomed(self, origin: dict[str, Any], assignment: int) -> None:
        """The stage is built; its state is as the seed has it, or still to come."""
        if origin:
            self._loans.learn(origin, assignment)
        else:
            self._env.say(Ready(assignment))

    def lost(self, peer: int) -> None:
        """The connection to a peer broke: what was sent last may not have arrived. It takes nothing twice."""
        self._traffic.send_again_to(peer)
        last_sent = self._rounds.last_sent
        if last_sent is not None and self._rounds.receiver(last_sent.step) == peer:
            self._env.send(peer, last_sent)
        self._loans.lost(peer)

    def remind(self, patience_ns: int) -> None:
        """To be called now and then, because answers may be lost."""
        self._loans.remind(patience_ns)

    def receive(self, sender: int, message: Message) -> None:
        """From another node; what comes from one that is ahead is kept until this node gets there."""
        epoch = 0 if is_state(message) else message.epoch  # a loan has the number of what it is for
        ahead = message.iteration > self.iteration or self.phase is NodePhase.WAITING or epoch > self.epoch
        waits = self.phase is NodePhase.WAITING or not self._loans.goes_along
        if not ahead or (is_state(message) and waits):
            self._take(sender, message, self._env.now_ns())
        elif message.iteration > self.iteration + 1 and self.phase is not NodePhase.WAITING:
            self.drop(sender, "too far ahead")
        elif len(early := self._early.setdefault(sender, [])) >= MOST_EARLY + 4 * len(self.plan.lanes):
            self.drop(sender, "too much ahead of its time")
        else:
            early.append((message, self._env.now_ns()))

    def restore(self, message: Message) -> None:
        """State from a checkpoint, from the coordinator."""
        self._loans.borrow(COORDINATOR, message)

    def finished(self, work: Op, result: Any) -> None:
        counts = self._agenda.finished()
        if isinstance(work, CheckFinite) and not result:
            self._traffic.contributed.clear()
        if not counts:
            if isinstance(work, StageTask):
                self._traffic.given_up()
            return
        match work:
            case StageTask():
                self._traffic.ended(result)
                self._average_if_done()
            case RingStep():
                self._passed_on(work.round, result)
            case GradNorm():
                self._report(result)
            case CheckFinite():
                self._say_contributed()
            case OptimizerStep():
                self._stepped()
            case ReadWeights():
                at = max(0, self.iteration), self.stage, work.piece, int(work.kept)
                self._env.send(COORDINATOR, Message(MessageKind.CHUNK, *at, result, work.collection))
            case ReadState() | PlanTransfer() | WriteState() | CopyEnds() | OpenBackup() | StoreBackup():
                if isinstance(work, ReadState) and work.backup:
                    self._traffic.sent_bytes[work.to] += getattr(result.payload, "nbytes", 0)
                self._loans.finished(work, result)
            case _:
                pass

    def decide(self) -> None:
        """Start what goes next, if nothing runs."""
        if self._agenda.doing is not None or self.stopped or self._agenda.start_chore():
            return
        if self.phase not in (NodePhase.RUNNING, NodePhase.SETTLING):
            return
        task = self._traffic.next()
        if task is not None:
            self._agenda.start(task)
        elif self.phase is NodePhase.SETTLING and not self._traffic.put_off:
            self._settled()

    @property
    def doing(self) -> str:
        """For people."""
        work = self._agenda.doing
        if isinstance(work, StageTask):
            at = f"step {work.step} of microbatch {work.microbatch} on lane {work.lane}"
            return f"{at}, iteration {work.iteration + 1}"
        if work is not None:
            return f"{op_name(work)}, iteration {self.iteration + 1}"
        return f"{self.phase.value}, iteration {self.iteration + 1}"

    def talks_to(self) -> set[int]:
        """The nodes before and after this one on its lanes and in its ring; whom it learns from, and who learns."""
        paths = [route.path for route in self._traffic.routes if self.number in route.path]
        pairs = [pair for path in paths for pair in circle(path)]
        pairs += self._collective.link_messages(self._rounds.ring)
        near = {node for pair in pairs if self.number in pair for node in pair}
        return (near | self._loans.lenders | self._loans.borrowers) - {self.number}

    # Iterations

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._collective = COLLECTIVES[plan.workload.collective]
        self._duties = NodeSchedule(self.number, plan)

    def _clear(self, *, recorded: bool) -> None:
        """Nothing of an iteration is there."""
        self._traffic = MicrobatchScheduler(self._duties, self.iteration, self, recorded=recorded)
        self._rounds = RingProtocol(self.number, self.stage, self.plan.stages[self.stage].ring, self._collective)
        self._visits = self.plan.exposure[self.stage]
        self._gone: frozenset[int] = frozenset()
        self._as_planned = True
        self._loans.borrowers.clear()
        self._inspect = False

    def _begin_as_told(self, begin: Begin) -> None:
        self._agenda.give_up(*_OF_AN_ITERATION)
        if self.phase is not NodePhase.WAITING or self._agenda.void:
            self._agenda.add(ClearGradients())
        self.epoch = self._begun_epoch = begin.epoch
        self._begin(begin.iteration, recorded=begin.recorded)

    def _begin(self, iteration: int, *, recorded: bool) -> None:
        if self._next_plan is not None:
            self._adopt(self._next_plan)
            self._next_plan = None
        self.iteration = iteration
        self.phase = NodePhase.RUNNING
        self._proceed = None
        self._clear(recorded=recorded)
        self._take_early()
        self._average_if_done()
        changes, self._next_changes = self._next_changes, []
        for change in changes:
            if change.iteration == iteration and change.epoch >= self.epoch:
                self._change(change)
        self._loans.begun(iteration)

    def _take_early(self) -> None:
        early, self._early = self._early, {}
        for sender, messages in early.items():
            for message, arrived_ns in messages:
                epoch = 0 if is_state(message) else message.epoch
                if (message.iteration, epoch) <= (self.iteration, self.epoch):
                    self._take(sender, message, arrived_ns)
                else:
                    self._early.setdefault(sender, []).append((message, arrived_ns))

    def _stepped(self) -> None:
        assert self._proceed is not None
        proceed, begin = self._proceed, self._next_begin
        self._next_begin = None
        if begin is not None:
            self.phase = NodePhase.WAITING
            self._begin_as_told(begin)
        elif proceed.last:
            self.phase = NodePhase.WAITING
            self._env.say(Stepped(self.iteration))
        else:
            self._begin(self.iteration + 1, recorded=proceed.recorded)

    # What its parts see of the node

    def now_ns(self) -> int:
        return self._env.now_ns()

    def say(self, control: ControlMessage) -> None:
        self._env.say(control)

    def post(self, receiver: int, message: Message) -> None:
        self._env.send(receiver, self._stamped(message))

    def chore(self, work: Op) -> None:
        self._agenda.add(work)

    def drop(self, sender: int, what: str) -> None:
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            who = "the coordinator" if sender == COORDINATOR else self.plan.cluster.nodes[sender].name
            log.warning("dropped a message of %s: %s (later ones are only counted)", who, what)

    def _stamped(self, message: Message) -> Message:
        return replace(message, epoch=self.epoch, sent_ns=self._env.now_ns())

    # Messages from nodes

    def _take(self, sender: int, message: Message, arrived_ns: int) -> None:
        """It is of this iteration, of this epoch or an earlier one; or it is of no use."""
        if is_state(message):
            self._loans.borrow(sender, message)
        elif message.iteration != self.iteration or self.phase not in IN_ITERATION:
            self.drop(sender, "of an iteration that is over")
        elif message.epoch < self._begun_epoch:
            self.drop(sender, "of an iteration that was begun again")
        elif sender in self._gone:
            self.drop(sender, "from a node that was given up")
        elif message.body is None:
            self.drop(sender, f"an empty {message.kind.name.lower()}")
        elif not self._foresees(sender, message):
            self.drop(sender, f"a {message.kind.name.lower()} that does not come here from there")
        elif message.kind is MessageKind.CHUNK and message.epoch != self.epoch:
            self.drop(sender, "a chunk of a ring that was given up")
        elif not self._env.fits(message, self._rounds.at, len(self._rounds.ring)):
            self.drop(sender, f"a {message.kind.name.lower()} of another shape or type")
        elif message.kind is MessageKind.HOP:
            if not self._traffic.take(sender, message, arrived_ns):
                self.drop(sender, "a hop that has been taken before")
        elif self._rounds.take(message):
            self._pass_next()
        else:
            self.drop(sender, "a chunk that has been taken before")

    def _foresees(self, sender: int, message: Message) -> bool:
        if message.kind is MessageKind.HOP:
            return self._traffic.foresees(sender, message)
        return message.kind is MessageKind.CHUNK and self._rounds.foresees(sender, message)

    # When nodes are lost

    def _change(self, change: Reroute | Drain | Average) -> None:
        match change:
            case Reroute():
                self._reroute(change)
            case Drain() if self.phase in IN_ITERATION:
                self._stop_averaging()
                self.epoch = change.epoch
                self._inspect = change.inspect
                self.phase = NodePhase.SETTLING
                self._traffic.settle()
            case Average() if self.phase is NodePhase.SETTLED and change.epoch == self.epoch:
                self._visits = change.visits[self.stage]
                self._take_early()
                self._average()
            case _:
                self.drop(COORDINATOR, f"{type(change).__name__} while {self.phase.value}")

    def _reroute(self, change: Reroute) -> None:
        self._gone |= set(change.gone)
        self._as_planned = False
        self._stop_averaging()
        self.phase = NodePhase.RUNNING
        self.epoch = change.epoch
        if self._traffic.reroute(change):
            self._agenda.void = True
        self._take_early()

    def _stop_averaging(self) -> None:
        """What the ring has done so far is of no use; nothing of this node's own is lost."""
        self._agenda.give_up(*_OF_AVERAGING)
        left = tuple(node for node in self._rounds.ring if node not in self._gone)
        self._rounds = RingProtocol(self.number, self.stage, left, self._collective)

    def _settled(self) -> None:
        """Weight gradients that were put off are added; nothing is left."""
        self.phase = NodePhase.SETTLED
        self._traffic.let_all_go()
        if self._inspect:
            self._agenda.add(CheckFinite())
        else:
            self._say_contributed()
        self._agenda.start_chore()

    def _say_contributed(self) -> None:
        self._env.say(DrainAck(self.iteration, self.epoch, self._account()))

    def _account(self) -> list[list[int]]:
        return [list(each) for each in sorted(self._traffic.contributed)]

    # Averaging

    def _average_if_done(self) -> None:
        if self._traffic.left == 0 and self._as_planned and self.phase is NodePhase.RUNNING:
            self._average()

    def _average(self) -> None:
        self.phase = NodePhase.AVERAGING
        if len(self._rounds.ring) == 1:
            self._agenda.add(GradNorm(self._visits, alone=True))
        else:
            self._agenda.add(self._rounds.begin())

    def _passed_on(self, round_: int, payload: Any) -> None:
        message = self._rounds.message(self.iteration, round_, payload)
        if message is not None:
            message = self._rounds.last_sent = self._stamped(message)
            receiver = self._rounds.receiver(round_)
            self._traffic.sent_bytes[receiver] += getattr(payload, "nbytes", 0)
            self._env.send(receiver, message)
        self._pass_next()

    def _pass_next(self) -> None:
        work = self._rounds.next(self._visits)
        if work is not None:
            self._agenda.add(work)

    def _report(self, squared_norm: float) -> None:
        self.phase = NodePhase.AVERAGED
        traffic = self._traffic
        self._env.say(
            Averaged(
                self.iteration,
                self.epoch,
                squared_norm,
                visits=self._account(),
                tasks=traffic.record,
                sent_bytes=[[receiver, count] for receiver, count in sorted(traffic.sent_bytes.items())],
                speeds=[[kind, *sums] for kind, sums in sorted(traffic.took_ns.items())],
                lags=[[sender, lag_ns / 1e9] for sender, lag_ns in sorted(traffic.lag_ns.items())],
            )
        )


_OF_AVERAGING = (RingStep, GradNorm, CheckFinite)
_OF_AN_ITERATION = (StageTask, DropMicrobatch, *_OF_AVERAGING)
