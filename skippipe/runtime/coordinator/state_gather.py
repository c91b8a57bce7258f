"""Gathering the state of every stage, piece by piece and one stage after another, from a node that holds it."""

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
    """The pieces of all stages, once."""

    holders: Mapping[int, int]
    """Stage → the node that is asked for it."""
    snapshots: bool
    """Gather the snapshots that nodes took for a checkpoint, instead of the weights as they are now."""
    send: Callable[[int, ControlMessage], None]
    store: Callable[[int, int, Any], None]
    """Takes stage, number of the piece, and the piece; None after the last. A stage that starts over has a first piece
    again. Raises WriteFailed if a complete stage is not on disk: then it is held, and no node has to send it again."""
    ids: Iterator[int]
    """Ids for requests: pieces that were requested under another id are not taken."""
    stage: int = field(init=False, default=-1)
    over: bool = field(init=False, default=False)
    unwritten: WriteFailed | None = field(init=False, default=None)
    """Why the stage that has arrived is not on disk."""
    given_up: bool = field(init=False, default=False)
    """Nothing more is requested. The last request is awaited, lest its answer be taken for that to another one."""
    _piece: int = field(init=False, default=0)
    _id: int = field(init=False, default=0)
    _awaits: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._next_stage()

    @property
    def holder(self) -> int:
        """The node whose answer is awaited."""
        return self.holders[self.stage]

    @property
    def is_last(self) -> bool:
        """Is this the last stage?"""
        return self.stage + 1 >= len(self.holders)

    def receive(self, node: int, number: int, piece: int, body: Any) -> bool:
        """Whether the piece was requested."""
        requested = self._awaits and (node, number, piece) == (self.holders.get(self.stage), self._id, self._piece)
        if self.over or not requested:
            return False
        if self.given_up:
            self.over = True
            return True
        if body is None:
            self.end_stage()
        else:
            self.store(self.stage, self._piece, body)
            self._piece += 1
            self._request()
        return True

    def end_stage(self) -> None:
        """All of the stage has arrived; called again if it could not be written."""
        try:
            self.store(self.stage, self._piece, None)
        except WriteFailed as error:
            self.unwritten, self._awaits = error, False
            return
        self.unwritten, self._awaits = None, True
        self._next_stage()

    def lost(self, node: int) -> None:
        """Take nothing more from a node, also not if it comes back, until it is asked again (`restart_stage`)."""
        if not self.over and node == self.holder:
            self._awaits = False

    def restart_stage(self, holders: Mapping[int, int]) -> None:
        """A node is lost: others are asked from now on, for the stage that was on its way from its beginning."""
        self.holders = holders
        if self.unwritten is not None:
            return  # that stage is here
        self._awaits = True
        if not self.over:
            self._piece, self._id = 0, next(self.ids)
            self._request()

    def _next_stage(self) -> None:
        self.stage, self._piece, self._id = self.stage + 1, 0, next(self.ids)
        self.over = self.stage == len(self.holders)
        if not self.over:
            self._request()

    def _request(self) -> None:
        self.send(self.holder, GatherState(self._piece, self.snapshots, self._id))


@dataclass
class CheckpointGather:
    """The checkpoint that is being made while training goes on; in the end another one, and then the weights."""

    env: CoordinatorEnv
    every: int
    """Iterations from one checkpoint to the next; 0: none are made."""
    made: int = -1
    """Completed iterations of the newest checkpoint; −1: there is none."""
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    grows_at: int | None = None
    """Completed iterations of the checkpoint from which the model grows, which must be on disk; None: of none."""
    unwritten_checkpoint: WriteFailed | None = None
    """Why that is not on disk."""
    weights: StateGather | None = None
    _checkpoint: StateGather | None = None
    validated: tuple[int, float] | None = None
    """Completed iterations, and held-out loss after them, of the newest evaluation."""
    _of: tuple[int, tuple[int, ...], float | None] = (0, (), None)
    """Completed iterations, optimizer steps and held-out loss of the checkpoint that is being made."""
    _repeated: bool = False
    """The last checkpoint was made a second time."""

    @property
    def busy(self) -> bool:
        """Is a checkpoint being made?"""
        return self._checkpoint is not None

    @property
    def over(self) -> bool:
        """Are all weights on disk?"""
        return self.weights is not None and self.weights.over

    @property
    def is_fetched(self) -> bool:
        """Have all weights arrived, though they may not be on disk?"""
        weights = self.weights
        return self.over or (weights is not None and weights.unwritten is not None and weights.is_last)

    @property
    def unwritten(self) -> WriteFailed | None:
        """Why weights that have arrived, or the checkpoint from which the model grows, are not on disk."""
        return self.weights.unwritten if self.weights is not None else self.unwritten_checkpoint

    def retry_write(self) -> None:
        if self.weights is not None and self.weights.unwritten is not None:
            self.weights.end_stage()

    @property
    def awaited(self) -> list[int]:
        """Nodes that have to send a piece."""
        for each in (self.weights, self._checkpoint):
            if each is not None and not each.over:
                return [each.holder]
        return []

    def is_due(self, iterations: int) -> bool:
        """Is a checkpoint to be made after so many iterations, while training goes on? Not while another is."""
        return self.lacks(iterations) and not self.busy and iterations % self.every == 0

    def lacks(self, iterations: int) -> bool:
        """Are checkpoints made, but none yet of so many iterations?"""
        return self.every > 0 and self.env.checkpoint_store is not None and self.made != iterations

    def snapshot_and_gather(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> None:
        """Nodes wait between two iterations, or after the last: they take snapshots now, which are gathered."""
        for node in holders.values():
            self.env.send(node, Commit(iterations - 1, 0.0, 0.0, wait=True, snapshot=True))
        self.checkpoint(iterations, steps, holders)

    def checkpoint(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> None:
        """Gather the snapshots that were taken after so many iterations."""
        known = self.validated is not None and self.validated[0] == iterations
        self._of = iterations, tuple(steps), self.validated[1] if known and self.validated else None
        self._checkpoint = StateGather(holders, True, self.env.send, self._store.save, self.ids)

    def repeat_last(self, iterations: int, steps: Sequence[int], holders: Mapping[int, int]) -> bool:
        """The model is on disk. If the last checkpoint is not, make it once more: there may be space by now, or a
        rescue folder. Whether that was begun."""
        if self._repeated or not holders or self.made != iterations or not self._store.lack():
            return False
        self._repeated = True
        self._store.move()
        self.snapshot_and_gather(iterations, steps, holders)
        return True

    def gather_weights(self, holders: Mapping[int, int]) -> None:
        """Gather the weights; stages that have arrived are not gathered again."""
        if self.weights is None:
            self.weights = StateGather(holders, False, self.env.send, self.env.store_weights, self.ids)
        else:
            self.weights.restart_stage(holders)

    def receive(self, node: int, message: Message) -> bool:
        """Take a piece; whether it was requested."""
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
                self._store.saved(*self._of)
                self._check_written()
        return asked

    def _check_written(self) -> None:
        if self.made == self.grows_at:
            lack = self._store.lack()
            what = f"the checkpoint from which the model grows cannot be written: {lack}"
            self.unwritten_checkpoint = WriteFailed(what, "make room, and go on with --resume") if lack else None

    def lost(self, node: int) -> bool:
        """Whether a checkpoint was given up with a lost node: only that node has the snapshot."""
        if self.weights is not None:
            self.weights.lost(node)
        checkpoint = self._checkpoint
        if checkpoint is None or node not in checkpoint.holders.values():
            return False
        before, checkpoint.given_up = checkpoint.given_up, True
        if node == checkpoint.holder:
            self._checkpoint = None
        if not before:
            self._store.abandon()
        return not before

    @property
    def _store(self) -> CheckpointStore:
        assert self.env.checkpoint_store is not None
        return self.env.checkpoint_store
