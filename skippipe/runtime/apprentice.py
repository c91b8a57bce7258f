"""A node that comes late and learns the state of its stage, piece by piece, while the others go on.

Weights and optimizer state are numbers that a step changes one by one. So a node can take part in every averaging and
every step from its first iteration on, and meanwhile fetch the state in any order: a number that it has got in an
iteration, as the lender had it in that iteration, is the lender's from then on. What was asked for in one iteration
and comes in the next is out of date, and is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from skippipe.errors import UserError
from skippipe.jsonfile import Fields, as_integer, as_number
from skippipe.runtime.control import COORDINATOR, Want, WantBackup
from skippipe.runtime.work import Load, Origin, Part
from skippipe.transport.message import Kind, Message

LEAST_VALUES = 2**12  # in a part
LOAN = 1  # the `microbatch` of a chunk that is lent; 0 in the ring
BACKUP = 2  # the same, of a copy of stage 0's ends


class Apprentice:
    def __init__(self, origin: Origin, assignment: int, ask: Callable[[int, Want | WantBackup], None]) -> None:
        self.origin = origin
        self.assignment = assignment
        self.complete = False
        self._ask = ask
        self._left: deque[Part] = deque()
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

    def studied(self, parts: Sequence[Part]) -> None:
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

    def given(self, sender: int, first: int, payload: Any, *, in_time: bool, backup: bool = False) -> Load | None:
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
        return Load(part, payload, digest)

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
            self._ask(part.source, WantBackup(part.backup, part.first, part.count, self.assignment))
        else:
            stage = self.origin.stages[self.origin.sources.index(part.source)]
            self._ask(part.source, Want(stage, part.first, part.count, self.assignment))


def loan(first: int, payload: Any, assignment: int, iteration: int = 0, *, backup: bool = False) -> Message:
    """Numbers of a state on their way to one that learns, as they were in an iteration; or of a copy of stage 0's ends,
    which is of use at any time."""
    high, low = divmod(first, 2**32)  # a large stage has more numbers than one field can count
    return Message(Kind.CHUNK, iteration, low, BACKUP if backup else LOAN, high, payload, assignment)


def is_loan(message: Message) -> bool:
    return message.kind is Kind.CHUNK and message.microbatch in (LOAN, BACKUP)


def is_backup(message: Message) -> bool:
    """Is it a loan of a copy of stage 0's ends?"""
    return message.kind is Kind.CHUNK and message.microbatch == BACKUP


def first_of(message: Message) -> int:
    """The place of a loan's first number."""
    return message.step * 2**32 + message.lane


def origin_to_json(origin: Origin) -> dict[str, Any]:
    """A checkpoint's source is the coordinator, which need not be said."""
    return {
        "kind": origin.kind,
        "sources": [each for each in origin.sources if each != COORDINATOR],
        "stages": list(origin.stages),
        "shares": list(origin.shares),
        "steps": origin.steps,
        **({} if origin.backup is None else {"backup": list(origin.backup)}),
    }


def origin_from_json(value: dict[str, Any]) -> Origin:
    fields = Fields(value, "origin")
    kind = fields.text("kind", ("replica", "checkpoint", "neighbours"))
    sources = tuple(as_integer(each, fields.at("sources")) for each in fields.items("sources"))
    if kind == "checkpoint":
        sources = (COORDINATOR,)
    origin = Origin(
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
