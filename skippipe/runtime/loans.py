"""State that a node borrows, to learn its stage or to keep a copy, and state that it lends to those who do.

What a replica lends is of an iteration. It is of use to a node in the same iteration, and to one that waits if all of
it is of the iteration that then begins (see `apprentice`). A copy of stage 0's ends is of use at any time: a data node
makes it and lends it, a node of another stage fetches and keeps it, and lends it to whoever rebuilds stage 0.
"""

from __future__ import annotations

from typing import Any, Protocol

from skippipe.errors import UserError
from skippipe.runtime.agenda import Agenda
from skippipe.runtime.apprentice import Apprentice, first_of, is_backup, is_loan, loan, origin_from_json
from skippipe.runtime.control import COORDINATOR, Backup, Control, Copied, Learned, Ready, Seal, Want, WantBackup
from skippipe.runtime.outside import Outside, Phase
from skippipe.runtime.work import CopyEnds, Lend, Load, Loan, OpenBackup, Origin, StoreBackup, Study
from skippipe.transport.message import Message


class Holder(Protocol):
    """The node whose state it is."""

    @property
    def stage(self) -> int: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def iteration(self) -> int: ...

    def drop(self, sender: int, what: str) -> None:
        """A message that is of no use."""


class Loans:
    def __init__(self, holder: Holder, outside: Outside, agenda: Agenda) -> None:
        self.borrowers: set[int] = set()
        """Who has asked in this iteration."""
        self._holder = holder
        self._outside = outside
        self._agenda = agenda
        self._learning: Apprentice | None = None
        self._fetching: Apprentice | None = None
        """A copy of stage 0's ends, to keep it; its assignment is after how many iterations that was made."""
        self.backup = 0
        """After how many iterations the whole copy was made that this node keeps; 0: it keeps none."""

    @property
    def lenders(self) -> set[int]:
        """The nodes that are asked."""
        return {node for each in self._borrowing for node in each.origin.lenders} - {COORDINATOR}

    @property
    def _borrowing(self) -> list[Apprentice]:
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

    def asked(self, sender: int, control: Control) -> None:
        """By a node that learns, or told by one that lends."""
        learning = self._learning
        match control:
            case Want() if control.stage == self._holder.stage and (learning is None or learning.complete):
                self.borrowers.add(sender)
                self._agenda.add(Lend(control.first, control.count, sender, control.assignment))
            case WantBackup():
                self.borrowers.add(sender)
                self._agenda.add(Lend(control.first, control.count, sender, control.assignment, control.iterations))
            case Seal() if asking := [
                each for each in self._borrowing if self._expects(sender, control.assignment, each)
            ]:
                for each in asking:
                    each.sealed(control.first, control.digest)
            case _:
                self._holder.drop(sender, f"{type(control).__name__} of no use here")

    def fetch(self, backup: Backup) -> None:
        """A copy of stage 0's ends. The one that is kept stays until the new one is whole."""
        self._agenda.give_up(OpenBackup, StoreBackup)
        source = Origin("backup", (backup.source,), (0,), (1.0,), 0)
        ask = self._outside.say
        self._fetching = Apprentice(source, backup.iterations, lambda lender, want: ask(want, lender))
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
        if learning is None or not is_loan(message) or message.epoch != learning.assignment:
            self._holder.drop(sender, "state that was not asked for")
            return
        if phase is Phase.WAITING:  # so does everybody else
            in_time = not learning.dated or learning.agrees(message.iteration)
        else:
            in_iteration = message.iteration == self._holder.iteration and phase is not Phase.STEPPING
            in_time = not learning.dated or in_iteration
        load = learning.given(sender, first_of(message), message.body, in_time=in_time, backup=backup)
        if load is not None:
            self._agenda.add(load)
        elif in_time:
            self._holder.drop(sender, "state that was not asked for")
        elif phase is not Phase.STEPPING:
            learning.begun()

    def finished(self, work: Study | Load | Lend | CopyEnds | OpenBackup | StoreBackup, result: Any) -> None:
        match work:
            case Lend():
                self._lend(work, result)
            case CopyEnds():
                self._outside.say(Copied(work.iterations))
            case OpenBackup() | StoreBackup() if self._fetching is not None:
                if isinstance(work, OpenBackup):
                    self._fetching.studied(result)
                else:
                    self._fetching.loaded(result)
                if self._fetching.complete:
                    self.backup = self._fetching.assignment
                    self._outside.say(Copied(self.backup))
            case Study() if self._learning is not None:
                self._learning.studied(result)
                self._say_if_learned(self._learning)
            case Load() if self._learning is not None:
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
            each.remind(self._outside.now_ns(), patience_ns)

    def _study(self, source: Origin, assignment: int) -> None:
        self._agenda.give_up(Study, Load)
        self._learning = Apprentice(source, assignment, lambda lender, want: self._outside.say(want, lender))
        self._agenda.add(Study(source))

    @staticmethod
    def _expects(sender: int, assignment: int, borrower: Apprentice) -> bool:
        """Whether this is an answer to what it has asked."""
        return not borrower.complete and sender in borrower.origin.lenders and assignment == borrower.assignment

    def _say_if_learned(self, learning: Apprentice) -> None:
        if learning.complete:
            waits, number = self._holder.phase is Phase.WAITING, learning.assignment
            self._outside.say(Ready(number) if waits else Learned(self._holder.iteration, number))

    def _lend(self, work: Lend, lent: Loan) -> None:
        if lent.payload is None:
            self._holder.drop(work.to, "asks for state that there is none of")
            if work.backup:
                self._outside.say(Copied(self.backup))  # the coordinator took it for another one
            return
        self._outside.say(Seal(work.first, lent.digest, work.assignment), work.to)
        if work.backup:
            self._outside.send(work.to, loan(work.first, lent.payload, work.assignment, backup=True))
            return
        stepped = self._holder.phase is Phase.WAITING
        version = max(0, self._holder.iteration + stepped)  # after the step, it is the next one's
        self._outside.send(work.to, loan(work.first, lent.payload, work.assignment, version))
