"""The state machine of a node that trains.

It sees the clock, the network and its executor only through `NodeEnv`, so the same code runs in a process with sockets
and in one thread under virtual time. It never waits: messages and finished operations are handed to `receive`,
`handle_control` and `finished`, and `decide` then starts what goes next. The caller hands over all that happens at one
time before it calls `decide`, as the simulator does.

An iteration: tasks in the order that `dispatch` gives, until none is left; then the nodes of a stage average gradients
by its schedule; then the coordinator, which knows all norms, commits the step; then the next iteration begins.

When nodes are lost, the coordinator decides how to go on (`Reroute`, see `routing`). From then on no node can tell by
counting when all tasks are done, so the coordinator announces that too (`Drain`), collects what every node has added
up, and has it averaged. A node's own sum of gradients stays untouched until the step, so averaging can begin again at
any time, and what a node has added once it never adds again. Messages that are not expected are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skippipe.collectives import COLLECTIVES
from skippipe.collectives.schedule import Averaging
from skippipe.constraints import circle
from skippipe.plan import Plan
from skippipe.runtime.fencing import EarlyMessages, version_of
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    Begin,
    Commit,
    ControlMessage,
    Devices,
    Drain,
    DrainAck,
    FetchBackup,
    GatherState,
    Hello,
    MakeBackup,
    NewPlan,
    Ready,
    Recover,
    Reroute,
    Stepped,
    Stop,
    TasksDone,
    Validate,
)
from skippipe.runtime.node import ops
from skippipe.runtime.node.averaging_protocol import AveragingProtocol
from skippipe.runtime.node.forward_passes import Evaluation, TeacherPasses
from skippipe.runtime.node.interfaces import (
    BETWEEN_ITERATIONS,
    IN_ITERATION,
    BaseNode,
    NodeEnv,
    NodePhase,
    TensorReceiver,
)
from skippipe.runtime.node.microbatch_scheduler import MicrobatchScheduler, NodeSchedule
from skippipe.runtime.node.state_transfer import StateTransfer
from skippipe.runtime.routing import teacher_routes
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import (
    BackupPiece,
    CheckpointPiece,
    GradientPiece,
    Hop,
    Message,
    StatePiece,
    TeacherHop,
    ValidationHop,
    WeightsPiece,
)

MOST_EARLY = 64  # messages of one sender that are kept because they are ahead of their time


class TrainingNode(BaseNode):
    """One node of a run: its phase in the iteration, its tasks, its part in averaging, and its state transfers."""

    def __init__(self, number: int, plan: Plan, env: NodeEnv, devices: int | None = None) -> None:
        """`devices`: as many as the node has that work side by side; none: those of the plan."""
        super().__init__(number, env)
        self.devices = set(range(devices or plan.workers[number]))
        self.stage = plan.stage_of[number]
        self.phase = NodePhase.WAITING
        self.iteration = -1
        self.epoch = 0
        self._begun_epoch = 0
        self._next_plan: Plan | None = None
        self._next_begin: Begin | None = None
        self._next_changes: list[Reroute | Drain | Average] = []
        self.ops = ops.OpQueue(env.start)
        self._transfer = StateTransfer(self, env, self.ops)
        self._evaluation = Evaluation(number, env, self.drop)
        self._teacher = TeacherPasses(number, env)
        self._early = EarlyMessages()
        self._peers_done: dict[int, tuple[int, int]] = {}
        """Peer whose download is shared → the last epoch, and iteration, in which it has done its tasks."""
        self._commit: Commit | None = None
        self._committed_ns = self._step_ns = 0
        """When the last `Commit` came, and how long its step took."""
        self._adopt(plan)
        self._clear(recorded=False)

    def hello(self, address: str, version: str) -> Hello:
        """The announcement to a coordinator, which may be another than the one before."""
        if self.iteration < 0:
            return Hello(address, version)
        stepped = self.phase in BETWEEN_ITERATIONS
        return Hello(address, version, self.epoch, self.iteration + stepped, self.phase.name, self._transfer.backup)

    # Control messages

    def handle_control(self, control: ControlMessage) -> None:
        """A message of the coordinator."""
        match control:
            case Begin():
                if self.phase is NodePhase.STEPPING:
                    self._next_begin = control
                else:
                    self._restart(control)
            case Recover():
                self._transfer.recover(control.origin, control.assignment)
            case MakeBackup() if self.stage == 0:
                self.ops.add(ops.CopyBackup(control.iterations))
            case FetchBackup() if self.stage != 0:
                self._transfer.fetch_backup(control)
            case NewPlan():
                self.replan(Plan.from_json(control.plan))
            case Commit() if self.phase is NodePhase.AVERAGED and control.iteration == self.iteration:
                self.phase = NodePhase.STEPPING
                self._commit, self._committed_ns = control, self._env.now_ns()
                self.ops.add(ops.OptimizerStep(control.rate, control.scale))
                if control.snapshot:
                    self.ops.add(ops.SnapshotState())
            # no copy was requested before; until the next step the state is that after this one
            case Commit(snapshot=True) if self.phase in BETWEEN_ITERATIONS or control.iteration == self.iteration - 1:
                self.ops.add(ops.SnapshotState())
            case Commit() if self.phase is NodePhase.WAITING and control.wait and control.iteration == self.iteration:
                self._env.send_control(Stepped(self.iteration))  # to a coordinator that was restarted after the step
            case Reroute() | Drain() | Average():
                if control.iteration == self.iteration + 1 and self.phase in BETWEEN_ITERATIONS:
                    self._next_changes.append(control)
                elif control.iteration == self.iteration and self.phase in IN_ITERATION and control.epoch >= self.epoch:
                    self._change(control)
                else:
                    self.drop(COORDINATOR, f"{type(control).__name__} while {self.phase.value}")
            case Validate() if self.phase in BETWEEN_ITERATIONS and control.iteration == self.iteration:
                self._evaluation.begin(control)
            case GatherState():  # after the step, if one was committed
                self.ops.add(ops.ReadWeights(control.piece, control.from_snapshot, control.collection))
            case Stop():
                self.stopped = control
            case _:
                self.drop(COORDINATOR, f"{type(control).__name__} while {self.phase.value}")

    def replan(self, plan: Plan) -> None:
        """Adopt a plan from the next iteration on."""
        self._next_plan = plan

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        """A message of another node."""
        if isinstance(control, TasksDone):
            version = control.epoch, control.iteration  # one that comes late, or again, takes nothing back
            self._peers_done[sender] = max(version, self._peers_done.get(sender, version))
        else:
            self._transfer.handle_control(sender, control)

    def executor_ready(self, origin: StateSource | None, assignment: int) -> None:
        """The stage is built; its state is as the seed has it, or still to come."""
        if len(self.devices) != self.plan.workers[self.number]:
            self._env.send_control(Devices(len(self.devices)))
        if origin is not None:
            self._transfer.recover(origin, assignment)
        else:
            self._env.send_control(Ready(assignment))

    def reconnected(self, peer: int) -> None:
        """The connection to a peer broke: what was sent last may not have arrived. The peer takes nothing twice."""
        self._scheduler.send_again_to(peer)
        for receiver, message in self._averaging.unacknowledged.values():
            if receiver == peer:
                self._env.send(receiver, message)
        if self.phase in (NodePhase.AVERAGING, NodePhase.AVERAGED):
            self._announce_done([peer])
        self._transfer.reconnected(peer)
        self._evaluation.reconnected(peer)
        self._teacher.reconnected(peer)

    def retry_requests(self, timeout_ns: int) -> None:
        """To be called now and then, because answers may be lost."""
        self._transfer.retry(timeout_ns)

    def receive(self, sender: int, message: Message) -> None:
        """A tensor from another node, or state from the coordinator; what comes from a node that is ahead is kept until
        this node gets there."""
        is_state = isinstance(message.header, (StatePiece, BackupPiece))
        iteration, epoch = version_of(message)
        waits = self.phase is NodePhase.WAITING
        ahead = waits or iteration > self.iteration or epoch > self.epoch
        if isinstance(message.header, ValidationHop):
            self._evaluation.receive(sender, message)
        elif not ahead or (is_state and (waits or not self._transfer.is_versioned)):
            self._take(sender, message, self._env.now_ns())
        elif iteration > self.iteration + 1 and not waits:
            self.drop(sender, "too far ahead")
        elif not self._early.keep(sender, message, self._env.now_ns(), self._most_early):
            self.drop(sender, "too much ahead of its time")

    def finished(self, op: ops.Op, result: Any) -> None:
        """An operation that was started is done."""
        counts = self.ops.finished(op)
        if isinstance(result, ops.DeviceLost):
            self._lose_device(result)
            return
        if isinstance(op, ops.CheckFinite) and not result:
            self._scheduler.contributed.clear()
        if not counts:
            if isinstance(op, ops.StageTask):
                self._scheduler.discard_running(op)
            return
        match op:
            case ops.StageTask():
                self._scheduler.finish(op, result)
                self._average_if_done()
            case ops.EvaluateSamples():
                self._evaluation.finished(op, result)
            case ops.TeacherForward():
                receiver = self._teacher.finished(op, result)
                if receiver is not None:
                    self._scheduler.sent_bytes[receiver] += getattr(result.payload, "nbytes", 0)
                    self._average_if_done()
            case ops.ContributePiece() | ops.AdoptPiece():
                self._averaging.finished(op, op.given if isinstance(op, ops.AdoptPiece) else result)  # as it came
            case ops.GradNorm():
                self._report(result)
            case ops.CheckFinite():
                self._acknowledge_drain()
            case ops.OptimizerStep():
                self._stepped()
            case ops.ReadWeights():
                numbers = self.stage, op.piece, op.collection
                header = CheckpointPiece(*numbers) if op.from_snapshot else WeightsPiece(*numbers)
                self._env.send(COORDINATOR, Message(header, result))
            case _ if isinstance(op, ops.OPS_OF_TRANSFER):
                if isinstance(op, ops.ReadState) and op.backup:
                    self._scheduler.sent_bytes[op.to] += getattr(result.payload, "nbytes", 0)
                self._transfer.finished(op, result)

    def decide(self) -> None:
        """Start the operation that goes next, if none runs; of tasks, one for each device."""
        self._send_pieces()
        if self.stopped or self.ops.start_next():
            return
        if self.ops.running:
            if all(isinstance(each, ops.StageTask) for each in self.ops.running) and not self._start_teaching():
                self._start_tasks()
            return
        if self.phase is NodePhase.WAITING and (samples := self._evaluation.next()) is not None:
            self.ops.start(samples)
        if self._start_teaching():
            return
        if self.phase is NodePhase.AVERAGING and (op := self._averaging.next(self._stage_microbatches)) is not None:
            self.ops.start(op)
        self._start_tasks()
        if self.phase is NodePhase.DRAINING and not self._scheduler.has_deferred:
            self._finish_draining()

    def _start_teaching(self) -> bool:
        """Start the teacher's next step, if one is here: a head waits for it. It runs alone, so where several devices
        compute, no other task starts before it."""
        if self.phase is not NodePhase.RUNNING or not self._teacher.advance(self._scheduler.newest):
            return False
        if not self.ops.running and (step := self._teacher.next()) is not None:
            self.ops.start(step)
        return True

    def _start_tasks(self) -> None:
        if self.phase not in (NodePhase.RUNNING, NodePhase.DRAINING):
            return
        while (task := self._scheduler.next()) is not None:
            self.ops.start(task)

    @property
    def doing(self) -> str:
        """The operation that runs, or what the node waits for, in words for people."""
        op = self.ops.running[0] if self.ops.running else None
        if isinstance(op, ops.StageTask):
            return f"step {op.step} of microbatch {op.microbatch} on lane {op.lane}, iteration {op.iteration + 1}"
        return f"{self.phase.value if op is None else ops.op_name(op)}, iteration {self.iteration + 1}"

    @property
    def averagings(self) -> Sequence[Averaging]:
        """How the nodes of each stage that are left average."""
        return self._averaging.averagings

    def active_peers(self) -> set[int]:
        """The nodes before and after this one on its lanes, those that it averages with, and those that it exchanges
        state with."""
        paths = [route.path for route in self._scheduler.routes if self.number in route.path]
        near = {node for path in paths for pair in circle(path) if self.number in pair for node in pair}
        near |= self._averaging.peers | self._evaluation.peers | self._teacher.peers
        return (near | self._transfer.source_nodes | self._transfer.requesters) - {self.number}

    # Iterations

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        most_pieces = max(len(plan.cluster.nodes), len(plan.stages[self.stage].pieces))
        self._most_early = MOST_EARLY + (6 if plan.workload.teacher else 4) * len(plan.lanes) + most_pieces
        self._schedule = NodeSchedule(self.number, plan)

    def _clear(self, *, recorded: bool) -> None:
        """Forget all of the iteration before."""
        self._scheduler = MicrobatchScheduler(
            self._schedule, self.iteration, self, self._env, self.ops, self._teacher, recorded=recorded
        )
        self._stage_microbatches = self.plan.exposure[self.stage]
        self._gone: frozenset[int] = frozenset()
        self._averaging = self._new_attempt()
        self._as_planned = True
        self._check_finite = False
        self._transfer.requesters.clear()

    def _restart(self, begin: Begin) -> None:
        self.ops.cancel(*ops.OPS_OF_ITERATION)
        if self.phase is not NodePhase.WAITING or self.ops.cancelled:
            self.ops.add(ops.ClearGradients())
        self.epoch = self._begun_epoch = begin.epoch
        self._begin(begin.iteration, recorded=begin.recorded)

    def _begin(self, iteration: int, *, recorded: bool) -> None:
        if self._next_plan is not None:
            self._adopt(self._next_plan)
            self._next_plan = None
        self.iteration = iteration
        self.phase = NodePhase.RUNNING
        self._evaluation.end(iteration)
        self._commit = None
        self._clear(recorded=recorded)
        self._take_early()
        self._average_if_done()
        changes, self._next_changes = self._next_changes, []
        for change in changes:
            if change.iteration == iteration and change.epoch >= self.epoch:
                self._change(change)
        self._transfer.iteration_begun(iteration)

    def _take_early(self) -> None:
        for each in self._early.due((self.iteration, self.epoch)):
            self._take(*each)

    def _stepped(self) -> None:
        assert self._commit is not None
        commit, begin, self._next_begin = self._commit, self._next_begin, None
        self._step_ns = self._env.now_ns() - self._committed_ns
        if begin is not None:
            self.phase = NodePhase.WAITING
            self._restart(begin)
        elif commit.wait:
            self.phase = NodePhase.WAITING
            self._env.send_control(Stepped(self.iteration))
        else:
            self._begin(self.iteration + 1, recorded=commit.recorded)

    # Messages from nodes

    def _name_of(self, node: int) -> str:
        return self.plan.cluster.nodes[node].name

    def _take(self, sender: int, message: Message, arrived_ns: int) -> None:
        """A message of this iteration, and of this epoch or an earlier one; any other is dropped."""
        header, label = message.header, message.kind.label
        if isinstance(header, (StatePiece, BackupPiece)):
            self._transfer.receive(sender, message)
        elif not isinstance(header, (Hop, GradientPiece, TeacherHop)):
            self.drop(sender, f"{label} that does not come here from there")
        elif header.iteration != self.iteration or self.phase not in IN_ITERATION:
            self.drop(sender, "of an iteration that is over")
        elif header.epoch < self._begun_epoch:
            self.drop(sender, "of an iteration that was begun again")
        elif sender in self._gone:
            self.drop(sender, "from a node that was declared lost")
        elif message.body is None:
            self.drop(sender, f"{label} without a tensor")
        elif not isinstance(header, Hop) and header.epoch != self.epoch:
            self.drop(sender, f"{label} of an attempt that was given up")
        elif not self._receiver(header).expects(sender, header):
            self.drop(sender, f"{label} that does not come here from there")
        elif not self._fits(message):
            self.drop(sender, f"{label} of another shape or type")
        elif not self._receiver(header).take(sender, message, arrived_ns):
            self.drop(sender, f"{label} that has been taken before")

    def _fits(self, message: Message) -> bool:
        """What is passed on as it is, is for its receiver to check."""
        relayed = isinstance(message.header, GradientPiece) and self._averaging.is_relay(message.header)
        return relayed or self._env.fits(message, self._averaging.schedule)

    def _receiver(self, header: Hop | GradientPiece | TeacherHop) -> TensorReceiver:
        if isinstance(header, Hop):
            return self._scheduler
        return self._teacher if isinstance(header, TeacherHop) else self._averaging

    # When nodes are lost

    def _change(self, change: Reroute | Drain | Average) -> None:
        match change:
            case Reroute():
                self._reroute(change)
            case Drain() if self.phase in IN_ITERATION:
                self._stop_averaging()
                self.epoch = change.epoch
                self._check_finite = change.inspect
                self.phase = NodePhase.DRAINING
                self._scheduler.drain()
            case Average() if self.phase is NodePhase.DRAINED and change.epoch == self.epoch:
                self._stage_microbatches = change.stage_microbatches[self.stage]
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
        self.ops.cancel_running(self._scheduler.reroute(change))
        paths = teacher_routes(self.plan, self._scheduler.routes, self._gone)
        self._teacher.reroute([lane for lane, *_ in change.lanes], paths or {}, (self.iteration, self.epoch))
        self._take_early()

    def _lose_device(self, lost: ops.DeviceLost) -> None:
        """Go on with the others: all of the iteration is done again, because what that one has added up is gone."""
        known, epoch = lost.device not in self.devices, None
        self.devices.discard(lost.device)
        if self.phase in IN_ITERATION:
            self.ops.cancel(*ops.OPS_OF_ITERATION)
            self.phase, epoch = NodePhase.RESTARTING, self.epoch
        if not known or epoch is not None:
            self._env.send_control(Devices(len(self.devices), lost.reason, epoch))

    def _stop_averaging(self) -> None:
        """Discard what averaging has done so far; this node's own sum is not touched."""
        self.ops.cancel(*ops.OPS_OF_AVERAGING)
        self._averaging = self._new_attempt()

    def _new_attempt(self) -> AveragingProtocol:
        """All nodes derive the same schedules from the plan and the nodes that were lost."""
        averagings = [each.without(self._gone) for each in self.plan.averagings]
        in_messages = COLLECTIVES[self.plan.workload.collective].in_messages
        shared = [at for at, node in enumerate(self.plan.cluster.nodes) if node.download_bytes_per_s]
        return AveragingProtocol(self.number, self.stage, averagings, in_messages=in_messages, shared=shared)

    def _finish_draining(self) -> None:
        """Weight gradients that were deferred are added; nothing is left."""
        self.phase = NodePhase.DRAINED
        self._scheduler.release_all()
        if self._check_finite:
            self.ops.add(ops.CheckFinite())
        else:
            self._acknowledge_drain()
        self.ops.start_next()

    def _acknowledge_drain(self) -> None:
        self._env.send_control(DrainAck(self.iteration, self.epoch, self._scheduler.contribution))

    # Averaging

    def _average_if_done(self) -> None:
        if self._scheduler.is_done and self._as_planned and self.phase is NodePhase.RUNNING:
            self._average()

    def _average(self) -> None:
        self.phase = NodePhase.AVERAGING
        self._averaging.begin()
        self._scheduler.averaging_begins()
        self._announce_done(sorted(self._averaging.peers))

    def _announce_done(self, peers: Sequence[int]) -> None:
        """Tell those that send pieces here to begin, if they wait for that."""
        if self.plan.cluster.nodes[self.number].download_bytes_per_s:
            for peer in peers:
                self._env.send_control(TasksDone(self.iteration, self.epoch), peer)

    def _send_pieces(self) -> None:
        done = [peer for peer, version in self._peers_done.items() if version == (self.epoch, self.iteration)]
        for _, stage, transfer, receiver, body in self._averaging.take_outgoing(done):
            message = Message(GradientPiece(self.iteration, stage, transfer, self.epoch), body, self._env.now_ns())
            self._averaging.unacknowledged[stage, transfer] = receiver, message
            self._scheduler.sent_bytes[receiver] += getattr(body, "nbytes", 0)
            self._env.send(receiver, message)

    def _report(self, squared_norm: float) -> None:
        self.phase = NodePhase.AVERAGED
        self._env.send_control(self._scheduler.report(squared_norm, self._step_ns))
