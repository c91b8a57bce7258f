"""Fetching the state of every stage, piece by piece and one stage after another, from a node that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from skippipe.runtime.coordinator.interfaces import CheckpointStore, CoordinatorEnv, WriteFailed
from skippipe.runtime.messages import Commit, ControlMessage, GatherState
from skippipe.transport.message import CheckpointPiece, Message, WeightsPiece


@dataclass
class StateGather:
    """`holders` says whom to ask for a stage."""

    holders: Mapping[int, int]
    kept: bool
    """The copies that were made for a checkpoint, instead of the weights as they are now."""
    tell: Callable[[int, ControlMessage], None]
    take: Callable[[int, int, Any], None]
    """Stage, number of the piece, and the piece; None after the last. A stage that starts over has a first again.
    Unwritten if the stage is not on disk after its last: then it is held, and nobody needs to send it again."""
    numbers: Iterator[int]
    """For what is asked: pieces that were asked for under another number are not taken."""
    stage: int = field(init=False, default=-1)
    over: bool = field(init=False, default=False)
    unwritten: WriteFailed | None = field(init=False, default=None)
    """Why the stage that has come is not on disk."""
    given_up: bool = field(init=False, default=False)
    """Nothing more is asked for. What was asked last is waited for, lest it be taken for an answer to somebody else."""
    _piece: int = field(init=False, default=0)
    _number: int = field(init=False, default=0)
    _asked: bool = field(init=False, default=True)

    def begin(self) -> None:
        self._next_stage()

    @property
    def holder(self) -> int:
        """Who has to answer now."""
        return self.holders[self.stage]

    @property
    def is_last(self) -> bool:
        """Is this the last stage?"""
        return self.stage + 1 >= len(self.holders)

    def receive(self, node: int, number: int, piece: int, body: Any) -> bool:
        """Whether it was asked for."""
        asked = self._asked and (node, number, piece) == (self.holders.get(self.stage), self._number, self._piece)
        if self.over or not asked:
            return False
        if self.given_up:
            self.over = True
            return True
        if body is None:
            self.end_stage()
        else:
            self.take(self.stage, self._piece, body)
            self._piece += 1
            self._ask()
        return True

    def end_stage(self) -> None:
        """All of the stage has come; again, if it could not be written."""
        try:
            self.take(self.stage, self._piece, None)
        except WriteFailed as error:
            self.unwritten, self._asked = error, False
            return
        self.unwritten, self._asked = None, True
        self._next_stage()

    def lost(self, node: int) -> None:
        """Nothing more is taken from it, also not if it comes back, until it is asked `again`."""
        if not self.over and node == self.holder:
            self._asked = False

    def again(self, holders: Mapping[int, int]) -> None:
        """Somebody is gone: from now on others are asked, for the stage that was on its way from its beginning."""
        self.holders = holders
        if self.unwritten is not None:
            return  # that stage is here
        self._asked = True
        if not self.over:
            self._piece, self._number = 0, next(self.numbers)
            self._ask()

    def _next_stage(self) -> None:
        self.stage, self._piece, self._number = self.stage + 1, 0, next(self.numbers)
        self.over = self.stage == len(self.holders)
        if not self.over:
            self._ask()

    def _ask(self) -> None:
        self.tell(self.holder, GatherState(self._piece, self.kept, self._number))


@dataclass
class CheckpointGather:
    """The checkpoint that is being made while training goes on; in the end another, and then the weights."""

    env: CoordinatorEnv
    kept_every: int
    """Iterations from one checkpoint to the next; 0: none are made."""
    made: int = -1
    """How many iterations were done when the newest checkpoint was made; −1: there is none."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    weights: StateGather | None = None
    _checkpoint: StateGather | None = None
    _of: tuple[int, tuple[int, ...]] = (0, ())
    _again: bool = False
    """The last checkpoint was made a second time."""

    @property
    def busy(self) -> bool:
        """Is a checkpoint being made?"""
        return self._checkpoint is not None

    @property
    def over(self) -> bool:
        """Are all weights there?"""
        return self.weights is not None and self.weights.over

    @property
    def is_fetched(self) -> bool:
        """Does nobody have to send weights any more, though they may not be on disk?"""
        weights = self.weights
        return self.over or (weights is not None and weights.unwritten is not None and weights.is_last)

    @property
    def unwritten(self) -> WriteFailed | None:
        """Why weights that have come are not on disk."""
        return self.weights.unwritten if self.weights is not None else None

    def store_again(self) -> None:
        if self.weights is not None and self.weights.unwritten is not None:
            self.weights.end_stage()

    @property
    def waits_for(self) -> list[int]:
        for each in (self.weights, self._checkpoint):
            if each is not None and not each.over:
                return [each.holder]
        return []

    def is_due(self, iterations: int) -> bool:
        """Is a checkpoint to be made after so many iterations, while training goes on? Not while another is."""
        return self.lacks(iterations) and not self.busy and iterations % self.kept_every == 0

    def lacks(self, iterations: int) -> bool:
        """Are checkpoints made, but none yet of so many iterations?"""
        return self.kept_every > 0 and self.env.keeper is not None and self.made != iterations

    def last_checkpoint(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> None:
        """All have taken their last step: copies that nobody has asked for before are kept now, and fetched."""
        for node in holders.values():
            self.env.tell(node, Commit(iterations - 1, 0.0, 0.0, last=True, kept=True, recorded=False))
        self.checkpoint(iterations, steps, holders)

    def checkpoint(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> None:
        """Fetch the copies that were kept after so many iterations."""
        self._of = iterations, tuple(steps)
        self._checkpoint = StateGather(holders, True, self.env.tell, self._keeper.save, self.numbers)
        self._checkpoint.begin()

    def keep_again(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> bool:
        """The model is on disk. If the last checkpoint is not, make it once more: there may be room by now, or a rescue
        folder. Whether that was begun."""
        if self._again or not holders or self.made != iterations or not self._keeper.lack():
            return False
        self._again = True
        self._keeper.move()
        self.last_checkpoint(iterations, steps, holders)
        return True

    def collect(self, holders: Mapping[int, int]) -> None:
        """Fetch the weights; what has come already is not fetched again."""
        if self.weights is None:
            self.weights = StateGather(holders, False, self.env.tell, self.env.store, self.numbers)
            self.weights.begin()
        else:
            self.weights.again(holders)

    def receive(self, node: int, message: Message) -> bool:
        """A piece; whether it was asked for."""
        header = message.header
        collection = self._checkpoint if isinstance(header, CheckpointPiece) else self.weights
        asked = (
            collection is not None
            and isinstance(header, (WeightsPiece, CheckpointPiece))
            and collection.receive(node, header.collection, header.piece, message.body)
        )
        checkpoint = self._checkpoint
        if checkpoint is not None and checkpoint.over:
            self._checkpoint = None
            if not checkpoint.given_up:
                self.made = self._of[0]
                self._keeper.saved(*self._of)
        return asked

    def lost(self, node: int) -> bool:
        """Whether a checkpoint was given up with it: only it has the copy."""
        if self.weights is not None:
            self.weights.lost(node)
        checkpoint = self._checkpoint
        if checkpoint is None or node not in checkpoint.holders.values():
            return False
        before, checkpoint.given_up = checkpoint.given_up, True
        if node == checkpoint.holder:
            self._checkpoint = None
        if not before:
            self._keeper.abandon()
        return not before

    @property
    def _keeper(self) -> CheckpointStore:
        assert self.env.keeper is not None
        return self.env.keeper
