"""A node that comes late and learns the state of its stage, piece by piece, while the others go on.

Weights and optimizer state are numbers that a step changes one by one. So a node can take part in every averaging and
every step from its first iteration on, and meanwhile fetch the state in any order: a number that it has got in an
iteration, as the lender had it in that iteration, is the lender's from then on. What was asked for in one iteration
and comes in the next is out of date, and is asked for again.


State that a node borrows, to learn its stage or to keep a copy, and state that it lends to those who do.

What a replica lends is of an iteration. It is of use to a node in the same iteration, and to one that waits if all of
it is of the iteration that then begins (see `apprentice`). A copy of stage 0's ends is of use at any time: a data node
makes it and lends it, a node of another stage fetches and keeps it, and lends it to whoever rebuilds stage 0.

"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_integer, as_number
from skippipe.runtime.messages import (
    COORDINATOR,
    Backup,
    BackupRequest,
    BackupStored,
    ControlMessage,
    Ready,
    Recovered,
    StateDigest,
    StateRequest,
)
from skippipe.runtime.node.interfaces import NodeEnv, NodePhase
from skippipe.runtime.node.ops import (
    CopyEnds,
    OpenBackup,
    OpQueue,
    PlanTransfer,
    ReadState,
    StateChunk,
    StateSlice,
    StateSource,
    StoreBackup,
    WriteState,
)
from skippipe.transport.message import Message, MessageKind

LEAST_VALUES = 2**12  # in a part
STATE = 1  # the `microbatch` of a chunk that is lent; 0 in the ring
BACKUP = 2  # the same, of a copy of stage 0's ends


class StateReceiver:
    def __init__(
        self, origin: StateSource, assignment: int, ask: Callable[[int, StateRequest | BackupRequest], None]
    ) -> None:
        self.origin = origin
        self.assignment = assignment
        self.complete = False
        self._ask = ask
        self._left: deque[StateSlice] = deque()
        self._seals: dict[int, str] = {}
        self._studied = False
        self._waiting = False
        self._loading = False
        self._iteration: int | None = None
        self._patience_ns = 0
        self._asked_ns: int | None = None

    @property
    def dated(self) -> bool:
        """Does what is lent change with every iteration?"""
        return self.origin.kind == "replica"

    def studied(self, parts: Sequence[StateSlice]) -> None:
        self._studied = True
        self._left.extend(parts)
        self._go_on()

    def begun(self) -> None:
        """Another iteration, or an answer that came too late: ask again, unless an answer is still to come."""
        if self._studied and not self._waiting:  # before, nobody knows what there is to ask for
            self._go_on()

    def lost(self, source: int) -> None:
        """The connection broke: the question or its answer may not have arrived."""
        if self._left and not self._loading and self._left[0].source == source:
            self._go_on()

    def agrees(self, iteration: int) -> bool:
        """While nobody steps, all that is lent must be of one iteration, which is then the one that begins."""
        if self._iteration is None:
            self._iteration = iteration
        return self._iteration == iteration

    def goes_along(self) -> None:
        """From now on others step, and so does this one."""
        self._iteration = None

    def remind(self, now_ns: int, patience_ns: int) -> None:
        """To be called now and then: what got no answer in time is asked for again, with more patience each time."""
        if not self._waiting:
            self._asked_ns = None
        elif self._asked_ns is None:
            self._asked_ns, self._patience_ns = now_ns, max(patience_ns, self._patience_ns)
        elif now_ns > self._asked_ns + self._patience_ns:
            self._asked_ns, self._patience_ns = now_ns, 2 * self._patience_ns
            self._go_on()

    def sealed(self, first: int, digest: str) -> None:
        if self._left and self._left[0].first == first:  # one is asked for at a time; others were asked for before
            self._seals = {first: digest}

    def given(self, sender: int, first: int, payload: Any, *, in_time: bool, backup: bool = False) -> WriteState | None:
        """What came, as work; None if it was not asked for, or comes too late: then less is asked for next time."""
        if self._loading or not self._left or (self._left[0].source, self._left[0].first) != (sender, first):
            return None
        if backup != bool(self._left[0].backup):
            return None
        part = self._left[0]
        digest = self._seals.pop(first, "")
        if not digest and sender != COORDINATOR:  # its seal did not come: it is asked for again before long
            return None
        self._waiting = False
        if not in_time:
            half = part.count // 2
            if half >= LEAST_VALUES:
                self._left[0] = replace(part, first=part.first + half, at=part.at + half, count=part.count - half)
                self._left.appendleft(replace(part, count=half))
            return None
        self._loading = True
        return WriteState(part, payload, digest)

    def loaded(self, sound: bool) -> None:
        self._loading = False
        if sound:
            self._left.popleft()
        self._go_on()

    def _go_on(self) -> None:
        """Ask for the next part, or for the same again."""
        if not self._left:
            self.complete = True
            return
        self._waiting = True
        part = self._left[0]
        if part.backup:
            self._ask(part.source, BackupRequest(part.backup, part.first, part.count, self.assignment))
        else:
            stage = self.origin.stages[self.origin.sources.index(part.source)]
            self._ask(part.source, StateRequest(stage, part.first, part.count, self.assignment))


def state_message(first: int, payload: Any, assignment: int, iteration: int = 0, *, backup: bool = False) -> Message:
    """Numbers of a state on their way to one that learns, as they were in an iteration; or of a copy of stage 0's ends,
    which is of use at any time."""
    high, low = divmod(first, 2**32)  # a large stage has more numbers than one field can count
    return Message(MessageKind.CHUNK, iteration, low, BACKUP if backup else STATE, high, payload, assignment)


def is_state(message: Message) -> bool:
    return message.kind is MessageKind.CHUNK and message.microbatch in (STATE, BACKUP)


def is_backup(message: Message) -> bool:
    """Is it a loan of a copy of stage 0's ends?"""
    return message.kind is MessageKind.CHUNK and message.microbatch == BACKUP


def first_of(message: Message) -> int:
    """The place of a loan's first number."""
    return message.step * 2**32 + message.lane


def origin_to_json(origin: StateSource) -> dict[str, Any]:
    """A checkpoint's source is the coordinator, which need not be said."""
    return {
        "kind": origin.kind,
        "sources": [each for each in origin.sources if each != COORDINATOR],
        "stages": list(origin.stages),
        "shares": list(origin.shares),
        "steps": origin.steps,
        **({} if origin.backup is None else {"backup": list(origin.backup)}),
    }


def origin_from_json(value: dict[str, Any]) -> StateSource:
    fields = Fields(value, "origin")
    kind = fields.text("kind", ("replica", "checkpoint", "neighbours"))
    sources = tuple(as_integer(each, fields.at("sources")) for each in fields.items("sources"))
    if kind == "checkpoint":
        sources = (COORDINATOR,)
    origin = StateSource(
        kind=kind,  # type: ignore[arg-type]
        sources=sources,
        stages=tuple(as_integer(each, fields.at("stages")) for each in fields.items("stages")),
        shares=tuple(as_number(each, fields.at("shares")) for each in fields.items("shares")),
        steps=fields.integer("steps"),
        backup=_backup_from_json(fields) if fields.mentions("backup") else None,
    )
    fields.close()
    if not len(origin.sources) == len(origin.stages) == len(origin.shares) > 0:
        raise UserError("origin: sources, stages and shares must be as many, and at least one")
    return origin


def _backup_from_json(fields: Fields) -> tuple[int, int]:
    found = [as_integer(each, fields.at("backup")) for each in fields.items("backup")]
    if len(found) != 2:
        raise UserError("origin.backup: expected a node and a number of iterations")
    return found[0], found[1]


class StateHolder(Protocol):
    """The node whose state it is."""

    @property
    def stage(self) -> int: ...

    @property
    def phase(self) -> NodePhase: ...

    @property
    def iteration(self) -> int: ...

    def drop(self, sender: int, what: str) -> None:
        """A message that is of no use."""


class StateTransfer:
    def __init__(self, holder: StateHolder, env: NodeEnv, agenda: OpQueue) -> None:
        self.borrowers: set[int] = set()
        """Who has asked in this iteration."""
        self._holder = holder
        self._env = env
        self._agenda = agenda
        self._learning: StateReceiver | None = None
        self._fetching: StateReceiver | None = None
        """A copy of stage 0's ends, to keep it; its assignment is after how many iterations that was made."""
        self.backup = 0
        """After how many iterations the whole copy was made that this node keeps; 0: it keeps none."""

    @property
    def lenders(self) -> set[int]:
        """The nodes that are asked."""
        return {node for each in self._borrowing for node in each.origin.lenders} - {COORDINATOR}

    @property
    def _borrowing(self) -> list[StateReceiver]:
        return [each for each in (self._learning, self._fetching) if each is not None and not each.complete]

    @property
    def goes_along(self) -> bool:
        """Does it learn while others step, so that what is lent is of an iteration?"""
        return self._learning is not None and self._learning.dated and not self._learning.complete

    def learn(self, origin: dict[str, Any], assignment: int) -> None:
        try:
            source = origin_from_json(origin)
        except UserError as error:
            self._holder.drop(COORDINATOR, str(error))
            return
        self._study(source, assignment)

    def begun(self, iteration: int) -> None:
        if self._learning is None or not self.goes_along:
            return
        if self._learning.agrees(iteration):
            self._learning.goes_along()
            self._learning.begun()
        else:  # others have gone on while this one waited
            self._study(self._learning.origin, self._learning.assignment)

    def asked(self, sender: int, control: ControlMessage) -> None:
        """By a node that learns, or told by one that lends."""
        learning = self._learning
        match control:
            case StateRequest() if control.stage == self._holder.stage and (learning is None or learning.complete):
                self.borrowers.add(sender)
                self._agenda.add(ReadState(control.first, control.count, sender, control.assignment))
            case BackupRequest():
                self.borrowers.add(sender)
                self._agenda.add(
                    ReadState(control.first, control.count, sender, control.assignment, control.iterations)
                )
            case StateDigest() if asking := [
                each for each in self._borrowing if self._expects(sender, control.assignment, each)
            ]:
                for each in asking:
                    each.sealed(control.first, control.digest)
            case _:
                self._holder.drop(sender, f"{type(control).__name__} of no use here")

    def fetch(self, backup: Backup) -> None:
        """A copy of stage 0's ends. The one that is kept stays until the new one is whole."""
        self._agenda.give_up(OpenBackup, StoreBackup)
        source = StateSource("backup", (backup.source,), (0,), (1.0,), 0)
        ask = self._env.say
        self._fetching = StateReceiver(source, backup.iterations, lambda lender, want: ask(want, lender))
        self._agenda.add(OpenBackup(backup.source, backup.iterations))

    def borrow(self, sender: int, message: Message) -> None:
        """What was asked for is taken over; what comes too late is asked for again."""
        learning, phase, fetching = self._learning, self._holder.phase, self._fetching
        backup = is_backup(message)
        if backup and fetching is not None and self._expects(sender, message.epoch, fetching):
            piece = fetching.given(sender, first_of(message), message.body, in_time=True, backup=True)
            if piece is not None:
                self._agenda.add(StoreBackup(piece.part, piece.given, piece.digest))
            return
        if learning is None or not is_state(message) or message.epoch != learning.assignment:
            self._holder.drop(sender, "state that was not asked for")
            return
        if phase is NodePhase.WAITING:  # so does everybody else
            in_time = not learning.dated or learning.agrees(message.iteration)
        else:
            in_iteration = message.iteration == self._holder.iteration and phase is not NodePhase.STEPPING
            in_time = not learning.dated or in_iteration
        load = learning.given(sender, first_of(message), message.body, in_time=in_time, backup=backup)
        if load is not None:
            self._agenda.add(load)
        elif in_time:
            self._holder.drop(sender, "state that was not asked for")
        elif phase is not NodePhase.STEPPING:
            learning.begun()

    def finished(
        self, work: PlanTransfer | WriteState | ReadState | CopyEnds | OpenBackup | StoreBackup, result: Any
    ) -> None:
        match work:
            case ReadState():
                self._lend(work, result)
            case CopyEnds():
                self._env.say(BackupStored(work.iterations))
            case OpenBackup() | StoreBackup() if self._fetching is not None:
                if isinstance(work, OpenBackup):
                    self._fetching.studied(result)
                else:
                    self._fetching.loaded(result)
                if self._fetching.complete:
                    self.backup = self._fetching.assignment
                    self._env.say(BackupStored(self.backup))
            case PlanTransfer() if self._learning is not None:
                self._learning.studied(result)
                self._say_if_learned(self._learning)
            case WriteState() if self._learning is not None:
                self._learning.loaded(result)
                self._say_if_learned(self._learning)
            case _:
                pass

    def lost(self, peer: int) -> None:
        """The connection broke: a question or its answer may not have arrived."""
        for each in self._borrowing:
            each.lost(peer)

    def remind(self, patience_ns: int) -> None:
        """To be called now and then, because answers may be lost."""
        for each in self._borrowing:
            each.remind(self._env.now_ns(), patience_ns)

    def _study(self, source: StateSource, assignment: int) -> None:
        self._agenda.give_up(PlanTransfer, WriteState)
        self._learning = StateReceiver(source, assignment, lambda lender, want: self._env.say(want, lender))
        self._agenda.add(PlanTransfer(source))

    @staticmethod
    def _expects(sender: int, assignment: int, borrower: StateReceiver) -> bool:
        """Whether this is an answer to what it has asked."""
        return not borrower.complete and sender in borrower.origin.lenders and assignment == borrower.assignment

    def _say_if_learned(self, learning: StateReceiver) -> None:
        if learning.complete:
            waits, number = self._holder.phase is NodePhase.WAITING, learning.assignment
            self._env.say(Ready(number) if waits else Recovered(self._holder.iteration, number))

    def _lend(self, work: ReadState, lent: StateChunk) -> None:
        if lent.payload is None:
            self._holder.drop(work.to, "asks for state that there is none of")
            if work.backup:
                self._env.say(BackupStored(self.backup))  # the coordinator took it for another one
            return
        self._env.say(StateDigest(work.first, lent.digest, work.assignment), work.to)
        if work.backup:
            self._env.send(work.to, state_message(work.first, lent.payload, work.assignment, backup=True))
            return
        stepped = self._holder.phase is NodePhase.WAITING
        version = max(0, self._holder.iteration + stepped)  # after the step, it is the next one's
        self._env.send(work.to, state_message(work.first, lent.payload, work.assignment, version))
