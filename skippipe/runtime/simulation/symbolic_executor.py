"""An executor that computes nothing, but checks that no microbatch is missing, doubled or out of order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from skippipe.collectives.schedule import Schedule
from skippipe.plan import Plan
from skippipe.runtime.node import ops
from skippipe.runtime.node.microbatch_scheduler import MicrobatchKey
from skippipe.runtime.state_source import StateChunk, StateSlice, StateSource
from skippipe.transport.message import GradientPiece, Message


@dataclass(frozen=True)
class Trail:
    """Stands for an activation or its gradient: the step that it is meant for, if no place is skipped on the way."""

    lane: int
    microbatch: int
    step: int
    nbytes: int = 0
    teaches: bool = False
    """It is of the teacher's pass."""


@dataclass(frozen=True)
class Gradient:
    """Stands for a piece of a summed gradient: which microbatches are in it, and how often."""

    piece: int
    microbatches: Counter[MicrobatchKey]
    nbytes: int = 0


class SymbolicState(tuple[tuple[MicrobatchKey, ...], ...]):
    """Stands for a stage's state that is sent or copied, with that of the ends."""

    ends: tuple[tuple[MicrobatchKey, ...], ...] = ()


PIECES = 2  # of a copy of the ends


class SymbolicExecutor:
    """An `Executor` whose tensors are the sets of microbatches that are in them."""

    def __init__(self, node: int, plan: Plan) -> None:
        self._node = node
        self._has_ends = plan.stage_of.get(node) == 0
        self._split = plan.split_backward
        self._stage, self._stages = plan.stage_of.get(node, -1), len(plan.stages)
        self._teacher = plan.workload.teacher
        self._slots = plan.slots[node] // plan.workers[node]
        self._held: dict[MicrobatchKey, int] = {}
        """Microbatch → the device that has it."""
        self._kept: tuple[Any, ...] | None = None
        self._sum: Counter[MicrobatchKey] = Counter()
        self._expected: set[int] = set()
        """Pieces of the attempt at averaging that this node has not contributed to."""
        self._pieces: dict[int, Counter[MicrobatchKey]] = {}
        """Totals that this node has adopted."""
        self._number_of_pieces = self._of_round = 0
        self._mean: Counter[MicrobatchKey] = Counter()
        self.state: list[tuple[MicrobatchKey, ...]] = []
        """Stands for the weights: the microbatches in the gradient of every step taken, from the first."""
        self.ends: list[tuple[MicrobatchKey, ...]] = []
        """Stands for embedding, final norm and head; empty as the seed has them, and on other stages than 0."""
        self._rebuilt = False
        self._backup: tuple[int, tuple[tuple[MicrobatchKey, ...], ...]] | None = None
        self._incoming: list[tuple[MicrobatchKey, ...]] = []
        self.poison = False
        """The next gradient that is added up is NaN."""
        self._spoiled = False
        self._lost: list[ops.DeviceLost] = []
        """Devices that have failed, of which no operation has been told so."""

    def lose(self, device: int, reason: str) -> None:
        """One of several devices fails."""
        self._lost.append(ops.DeviceLost(device, reason))

    @property
    def has_backup(self) -> bool:
        """Does it hold a whole copy of the ends?"""
        return self._backup is not None

    @property
    def history(self) -> list[int]:
        """The number of microbatches in the mean gradient of every step taken."""
        return [len(each) for each in self.state]

    def run(self, op: ops.Op) -> Any:
        if self._lost and isinstance(op, (ops.StageTask, *ops.OPS_OF_AVERAGING)):
            return self._lost.pop()
        match op:
            case ops.StageTask():
                return self._task(op)
            case ops.EvaluateSamples():
                return self._evaluate(op)
            case ops.TeacherForward():
                return self._teach(op)
            case ops.DropMicrobatch():
                self._held.pop((op.lane, op.microbatch), None)
            case ops.ClearGradients():
                self._held.clear()
                self._sum.clear()
                self._spoiled = False
            case ops.CheckFinite():
                sound, self._spoiled = not self._spoiled, False
                if not sound:
                    self._sum.clear()
                return sound
            case ops.BeginAveraging():
                self._expected, self._of_round = set(range(op.schedule.pieces)), len(op.schedule.shares)
                self._number_of_pieces, self._pieces = len(self._expected), {}
            case ops.ContributePiece():
                return self._contribute(op)
            case ops.AdoptPiece():
                assert op.piece not in self._expected, "a total without this node's contribution"
                assert op.given.piece == op.piece, (op.given, op.piece)
                self._pieces[op.piece] = op.given.microbatches.copy()
            case ops.GradNorm():
                whole = [self._sum] if op.alone else list(self._pieces.values())
                assert op.alone or len(whole) == self._number_of_pieces > 0, f"totals are missing: {self._pieces}"
                assert all(piece == whole[0] for piece in whole), (self._node, whole)
                assert all(count == 1 for count in whole[0].values()), f"a microbatch counts twice: {whole[0]}"
                assert whole[0].total() == op.stage_microbatches, (self._node, whole[0], op.stage_microbatches)
                self._mean, self._pieces = whole[0].copy(), {}
                return float("nan") if self._spoiled else float(op.stage_microbatches)
            case ops.OptimizerStep():
                assert not self._held, "a microbatch is still here"
                if op.scale > 0:
                    self.state.append(tuple(sorted(self._mean)))
                    if self._has_ends:
                        self.ends.append(self.state[-1])
                self._sum.clear()
                self._mean.clear()
                self._spoiled = False
            case ops.ReadWeights():
                return None if op.piece else self._kept if op.from_snapshot else self._copy_state()
            case ops.PlanTransfer():
                return self._plan_transfer(op.origin)
            case ops.ReadState():
                return self._read_state(op)
            case ops.WriteState():
                self._write_state(op)
                return True
            case ops.SnapshotState():
                self._kept = self._copy_state()
            case ops.CopyBackup():
                self._backup = op.iterations, tuple(self.ends)
            case ops.OpenBackup():
                self._incoming = []
                return _backup_slices(op.source, op.iterations)
            case ops.StoreBackup():
                self._incoming += op.given
                if op.part.at == PIECES - 1:
                    self._backup = op.part.backup, tuple(self._incoming)
                return True
        return None

    def fits(self, message: Message, expected: Schedule) -> bool:
        if isinstance(header := message.header, GradientPiece):
            piece = expected.transfers[header.transfer].piece
            return isinstance(message.body, Gradient) and message.body.piece == piece
        return isinstance(message.body, Trail)

    def prefetch(self, given: Any, _device: int) -> Any:
        return given

    def _copy_state(self) -> SymbolicState:
        state = SymbolicState(self.state)
        state.ends = tuple(self.ends)
        return state

    def _plan_transfer(self, origin: StateSource) -> list[StateSlice]:
        self._rebuilt = origin.kind == "neighbours"
        if origin.kind == "replica":
            return [StateSlice(origin.sources[0], 0, 1, 0)]
        parts = [StateSlice(source, 0, 1, 0, added=at > 0) for at, source in enumerate(origin.sources)]
        return parts if origin.backup is None else [*parts, *_backup_slices(*origin.backup)]

    def _read_state(self, op: ops.ReadState) -> StateChunk:
        if not op.backup:
            return StateChunk(self._copy_state(), "sound")
        if self._backup is None or self._backup[0] != op.backup:
            return StateChunk(None, "")
        whole = self._backup[1]
        half = len(whole) // PIECES
        return StateChunk(whole[half:] if op.first else whole[:half], "sound")

    def _write_state(self, op: ops.WriteState) -> None:
        if op.part.backup:
            self.ends = [*(self.ends if op.part.at else ()), *op.given]
        elif not op.part.added:
            self.state = list(op.given)
            if self._has_ends and not self._rebuilt:
                self.ends = list(getattr(op.given, "ends", op.given))

    def _task(self, task: ops.StageTask) -> ops.OpResult:
        which = task.lane, task.microbatch
        if task.step < task.length:
            self._held[which] = task.device
            assert list(self._held.values()).count(task.device) <= self._slots, "more microbatches than memory slots"
        elif task.step > task.length:
            assert self._held.get(which) == task.device, f"the backward pass of a microbatch that is not here: {task}"
            if task.is_weights or not self._split:
                del self._held[which]
                self._add(which, counts=task.counts)
        hidden = self._teacher == "hidden" and task.length < task.step < 2 * task.length
        taught = task.length < self._stages and (hidden or (self._teacher != "" and task.step == task.length))
        passed = self._stage if hidden else self._stages
        assert task.teacher_hidden == (Trail(*which, passed, teaches=True) if taught else None), task
        if 0 < task.step <= 2 * task.length:
            given = task.given
            assert (given.lane, given.microbatch) == which
            assert given.step <= task.step
        return ops.OpResult(Trail(*which, task.step + 1), 0.0 if task.step == task.length else None)

    def _evaluate(self, task: ops.EvaluateSamples) -> ops.OpResult:
        assert task.step == 0 or task.given == Trail(task.lane, task.microbatch, task.step)
        assert len(self.state) <= task.iteration + 1, "a step of another iteration is in the weights"
        return ops.OpResult(Trail(task.lane, task.microbatch, task.step + 1), float(task.microbatch), 1)

    def _teach(self, task: ops.TeacherForward) -> ops.OpResult:
        assert task.step == 0 or task.given == Trail(task.lane, task.microbatch, task.step, teaches=True)
        assert len(self.state) <= task.iteration, "a step of another iteration is in the weights"
        return ops.OpResult(Trail(task.lane, task.microbatch, task.step + 1, teaches=True))

    def _add(self, which: MicrobatchKey, *, counts: bool) -> None:
        if counts:
            self._sum[which] += 1
            self._spoiled = self._spoiled or self.poison
            self.poison = False

    def _contribute(self, op: ops.ContributePiece) -> Gradient:
        self._expected.remove(op.piece)
        earlier = range(op.piece // self._of_round * self._of_round)
        assert self._pieces.keys() >= set(earlier), "a contribution before all totals of the round before are here"
        microbatches = self._sum.copy()
        for each in op.given:
            assert each.piece == op.piece, (each, op.piece)
            microbatches += each.microbatches
        if op.total:
            self._pieces[op.piece] = microbatches.copy()
        return Gradient(op.piece, microbatches)


def _backup_slices(source: int, iterations: int) -> list[StateSlice]:
    return [StateSlice(source, piece, 1, piece, backup=iterations) for piece in range(PIECES)]
