"""State transfer between nodes: a node that joins during training fetches the state of its stage from its peers.

Optimizer state is values that a step changes one by one, or in blocks. So a node can take part in every averaging and
every step from its first iteration on, and meanwhile fetch the state: a value that it has received in an iteration, as
its source had it in that iteration, equals the source's from then on. So do weights, if they come after all of the
optimizer's state, which their step follows. What was requested in one iteration and arrives in the next is out of date,
and is requested again.

The state of a replica belongs to an iteration. It is of use to a node in the same iteration, and to one that waits if
all of it is of the iteration that then begins: the replica may learn later than this node that a step is committed. A
copy of stage 0's ends is of use at any time: a data node makes it, a node of another stage fetches and keeps it, and
both send it to a node that rebuilds stage 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skippipe.optim.interface import BLOCK
from skippipe.runtime.messages import (
    COORDINATOR,
    BackupRequest,
    BackupStored,
    ControlMessage,
    FetchBackup,
    Ready,
    Recovered,
    StateDigest,
    StateRequest,
)
from skippipe.runtime.node.interfaces import NodeEnv, NodePhase
from skippipe.runtime.node.ops import (
    LEAST_VALUES,
    CopyBackup,
    OpenBackup,
    OpQueue,
    PlanTransfer,
    ReadState,
    StoreBackup,
    WriteState,
)
from skippipe.runtime.state_source import StateChunk, StateSlice, StateSource
from skippipe.transport.message import BackupPiece, Message, StatePiece


class StateReceiver:
    """Requests the slices of one state, one after another, until all of them are written."""

    def __init__(
        self, origin: StateSource, assignment: int, request: Callable[[int, StateRequest | BackupRequest], None]
    ) -> None:
        self.origin = origin
        self.assignment = assignment
        self.complete = False
        self._request = request
        self._left: deque[StateSlice] = deque()
        self._digests: dict[int, str] = {}
        self._planned = False
        self._waiting = False
        self._writing = False
        self._iteration: int | None = None
        self._timeout_ns = 0
        self._requested_ns: int | None = None

    @property
    def is_versioned(self) -> bool:
        """Does the state at its source change with every iteration?"""
        return self.origin.kind == "replica"

    def planned(self, slices: Sequence[StateSlice]) -> None:
        """These slices make up the state."""
        self._planned = True
        self._left.extend(slices)
        self._go_on()

    def iteration_begun(self) -> None:
        """Another iteration, or an answer that came too late: request again, unless an answer is still to come."""
        if self._planned and not self._waiting:
            self._go_on()

    def reconnected(self, source: int) -> None:
        """The connection broke: the request or its answer may not have arrived."""
        if self._left and not self._writing and self._left[0].source == source:
            self._go_on()

    def is_of_same_iteration(self, iteration: int) -> bool:
        """Before the first step, all slices must be of one iteration, which is then the one that begins."""
        if self._iteration is None:
            self._iteration = iteration
        return self._iteration == iteration

    def join_stepping(self) -> None:
        """From now on the other nodes step, and so does this one."""
        self._iteration = None

    def retry(self, now_ns: int, timeout_ns: int) -> None:
        """To be called now and then: what got no answer in time is requested again, with twice the timeout."""
        if not self._waiting:
            self._requested_ns = None
        elif self._requested_ns is None:
            self._requested_ns, self._timeout_ns = now_ns, max(timeout_ns, self._timeout_ns)
        elif now_ns > self._requested_ns + self._timeout_ns:
            self._requested_ns, self._timeout_ns = now_ns, 2 * self._timeout_ns
            self._go_on()

    def expects(self, sender: int, assignment: int) -> bool:
        """Is it an answer to a request of this transfer?"""
        return not self.complete and sender in self.origin.all_sources and assignment == self.assignment

    def set_digest(self, first: int, digest: str) -> None:
        if self._left and self._left[0].first == first:  # one slice is requested at a time; others were before
            self._digests = {first: digest}

    def accept(self, sender: int, message: Message, *, in_time: bool) -> WriteState | None:
        """The operation that writes a piece; None if it was not requested, or comes too late: then less is requested
        next time."""
        header = message.header
        if self._writing or not self._left or not isinstance(header, (StatePiece, BackupPiece)):
            return None
        part = self._left[0]
        if (part.source, part.first, bool(part.backup)) != (sender, header.first, isinstance(header, BackupPiece)):
            return None
        digest = self._digests.pop(part.first, "")
        if not digest and sender != COORDINATOR:  # its digest did not come: it is requested again before long
            return None
        self._waiting = False
        if not in_time:
            half = part.count // 2 // BLOCK * BLOCK
            if half >= LEAST_VALUES:
                self._left[0] = replace(part, first=part.first + half, at=part.at + half, count=part.count - half)
                self._left.appendleft(replace(part, count=half))
            return None
        self._writing = True
        return WriteState(part, message.body, digest)

    def written(self, sound: bool) -> None:
        """The last piece has been written, unless its digest was wrong."""
        self._writing = False
        if sound:
            self._left.popleft()
        self._go_on()

    def _go_on(self) -> None:
        """Request the next slice, or the same again."""
        if not self._left:
            self.complete = True
            return
        self._waiting = True
        part = self._left[0]
        if part.backup:
            self._request(part.source, BackupRequest(part.backup, part.first, part.count, self.assignment))
        else:
            stage = self.origin.stages[self.origin.sources.index(part.source)]
            self._request(part.source, StateRequest(stage, part.first, part.count, self.assignment))


class StateHolder(Protocol):
    """The node whose state is sent and received."""

    @property
    def stage(self) -> int: ...

    @property
    def phase(self) -> NodePhase: ...

    @property
    def iteration(self) -> int: ...

    def drop(self, sender: int, what: str) -> None:
        """Count a message that is of no use."""


class StateTransfer:
    """A node's side of all transfers: the state that it receives, the copy that it fetches, what it sends to peers."""

    def __init__(self, holder: StateHolder, env: NodeEnv, ops: OpQueue) -> None:
        self.requesters: set[int] = set()
        """Peers that have requested state in this iteration."""
        self._holder = holder
        self._env = env
        self._ops = ops
        self._recovery: StateReceiver | None = None
        self._fetch: StateReceiver | None = None
        """Fetches a copy of stage 0's ends; its assignment is the iterations that were done when that was made."""
        self.backup = 0
        """Iterations that were done when the whole copy was made that this node keeps; 0: it keeps none."""

    @property
    def source_nodes(self) -> set[int]:
        """Nodes that state is requested of."""
        return {node for each in self._active for node in each.origin.all_sources} - {COORDINATOR}

    @property
    def _active(self) -> list[StateReceiver]:
        return [each for each in (self._recovery, self._fetch) if each is not None and not each.complete]

    @property
    def is_versioned(self) -> bool:
        """Does this node receive state that belongs to an iteration?"""
        return self._recovery is not None and self._recovery.is_versioned and not self._recovery.complete

    def recover(self, origin: StateSource, assignment: int) -> None:
        """Fetch the state of the stage from there."""
        self._ops.cancel(PlanTransfer, WriteState)
        self._recovery = StateReceiver(origin, assignment, self._request)
        self._ops.add(PlanTransfer(origin))

    def fetch_backup(self, backup: FetchBackup) -> None:
        """Fetch a copy of stage 0's ends. The one that is kept stays until the new one is whole."""
        self._ops.cancel(OpenBackup, StoreBackup)
        source = StateSource("backup", (backup.source,), (0,), (1.0,), 0)
        self._fetch = StateReceiver(source, backup.iterations, self._request)
        self._ops.add(OpenBackup(backup.source, backup.iterations))

    def _request(self, source: int, request: StateRequest | BackupRequest) -> None:
        self._env.send_control(request, source)

    def iteration_begun(self, iteration: int) -> None:
        if self._recovery is None or not self.is_versioned:
            return
        if self._recovery.is_of_same_iteration(iteration):
            self._recovery.join_stepping()
            self._recovery.iteration_begun()
        else:  # the other nodes have gone on while this one waited
            self.recover(self._recovery.origin, self._recovery.assignment)

    def handle_control(self, sender: int, control: ControlMessage) -> None:
        """A request of a peer, or the digest of what it sends next."""
        match control:
            case StateRequest() if control.stage == self._holder.stage and (
                self._recovery is None or self._recovery.complete
            ):
                self.requesters.add(sender)
                self._ops.add(ReadState(control.first, control.count, sender, control.assignment))
            case BackupRequest():
                self.requesters.add(sender)
                self._ops.add(ReadState(control.first, control.count, sender, control.assignment, control.iterations))
            case StateDigest() if waiting := [
                each for each in self._active if each.expects(sender, control.assignment)
            ]:
                for each in waiting:
                    each.set_digest(control.first, control.digest)
            case _:
                self._holder.drop(sender, f"{type(control).__name__} of no use here")

    def receive(self, sender: int, message: Message) -> None:
        """A piece that was requested is written; one that comes too late is requested again."""
        recovery, phase, header = self._recovery, self._holder.phase, message.header
        assert isinstance(header, (StatePiece, BackupPiece))
        is_backup = isinstance(header, BackupPiece)
        if is_backup and self._fetch is not None and self._fetch.expects(sender, header.assignment):
            piece = self._fetch.accept(sender, message, in_time=True)
            if piece is not None:
                self._ops.add(StoreBackup(piece.part, piece.given, piece.digest))
            return
        if recovery is None or header.assignment != recovery.assignment:
            self._holder.drop(sender, "state that was not requested")
            return
        iteration = header.iteration if isinstance(header, StatePiece) else 0
        if not recovery.is_versioned:
            in_time = True
        elif phase is NodePhase.WAITING:  # and so does every other node, but the source may have its last step to take
            begins = max(recovery.origin.iterations, self._holder.iteration + 1)
            in_time = iteration == begins and recovery.is_of_same_iteration(iteration)
        else:
            in_time = iteration == self._holder.iteration and phase is not NodePhase.STEPPING
        write = recovery.accept(sender, message, in_time=in_time)
        if write is not None:
            self._ops.add(write)
        elif in_time:
            self._holder.drop(sender, "state that was not requested")
        elif phase is not NodePhase.STEPPING:
            recovery.iteration_begun()

    def finished(
        self, op: PlanTransfer | WriteState | ReadState | CopyBackup | OpenBackup | StoreBackup, result: Any
    ) -> None:
        match op:
            case ReadState():
                self._send(op, result)
            case CopyBackup():
                self._env.send_control(BackupStored(op.iterations))
            case OpenBackup() | StoreBackup() if self._fetch is not None:
                if isinstance(op, OpenBackup):
                    self._fetch.planned(result)
                else:
                    self._fetch.written(result)
                if self._fetch.complete:
                    self.backup = self._fetch.assignment
                    self._env.send_control(BackupStored(self.backup))
            case PlanTransfer() | WriteState() if self._recovery is not None:
                if isinstance(op, PlanTransfer):
                    self._recovery.planned(result)
                else:
                    self._recovery.written(result)
                if self._recovery.complete:
                    waits, assignment = self._holder.phase is NodePhase.WAITING, self._recovery.assignment
                    done = Ready(assignment) if waits else Recovered(self._holder.iteration, assignment)
                    self._env.send_control(done)
            case _:
                pass

    def reconnected(self, peer: int) -> None:
        """The connection broke: a request or its answer may not have arrived."""
        for each in self._active:
            each.reconnected(peer)

    def retry(self, timeout_ns: int) -> None:
        """To be called now and then, because answers may be lost."""
        for each in self._active:
            each.retry(self._env.now_ns(), timeout_ns)

    def _send(self, op: ReadState, chunk: StateChunk) -> None:
        if chunk.payload is None:
            self._holder.drop(op.to, "a request for state that is not here")
            if op.backup:
                self._env.send_control(BackupStored(self.backup))  # the coordinator took it for another one
            return
        self._env.send_control(StateDigest(op.first, chunk.digest, op.assignment), op.to)
        version = self._holder.iteration + (self._holder.phase is NodePhase.WAITING)  # after the step, the next one's
        if self._holder.iteration < 0:
            version = 0 if self._recovery is None else self._recovery.origin.iterations
        piece = BackupPiece(op.first, op.assignment) if op.backup else StatePiece(version, op.first, op.assignment)
        self._env.send(op.to, Message(piece, chunk.payload))
