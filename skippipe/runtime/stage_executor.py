"""A node's computer on real tensors: a stage of a model, its data, its averager.

It knows the stage and the model, and nothing of lanes, rings or other nodes: the plan may change while it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from skippipe import dispatch
from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.collectives import MakeAverager
from skippipe.collectives.ring import GradientRing
from skippipe.data.batch_sampler import BatchSampler
from skippipe.jit import python_version
from skippipe.model.flat_params import layout, layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage_step import StageStep
from skippipe.runtime.neighbour_init import ends_of, init_from_backup, init_from_neighbours
from skippipe.runtime.node.ops import (
    CheckFinite,
    ClearGradients,
    CopyEnds,
    DropMicrobatch,
    GradNorm,
    Op,
    OpenBackup,
    OpResult,
    OptimizerStep,
    PlanTransfer,
    ReadState,
    ReadWeights,
    RingStep,
    SnapshotState,
    StageTask,
    StateChunk,
    StateSlice,
    StateSource,
    StoreBackup,
    WriteState,
)
from skippipe.runtime.node.state_transfer import LEAST_VALUES
from skippipe.skip_schedule import SkipSchedule
from skippipe.transport.message import Message, MessageKind
from skippipe.workload import Workload

SHOWN_VALUES = 2**22  # of a state in one message, 16 MiB
BACKUP_VALUES = 2**20  # at most, of a copy that is fetched while all go on: 4 MiB
NO_OUTCOME = OpResult(None)
is_weights = python_version(dispatch.is_weights)


class StageExecutor:
    """Runs the work of one node. Tensors come and go packed, or as they are within one process."""

    def __init__(
        self,
        stage: int,
        layers: tuple[int, ...],
        workload: Workload,
        spec: ModelSpec,
        tasks: StageStep,
        sampler: BatchSampler | None,
        *,
        recipe: SkipSchedule | None = None,
        packing: bool = True,
        make_averager: MakeAverager = GradientRing,
    ) -> None:
        """`layers` of each stage, this one and the others; a `sampler` where microbatches set out."""
        self.tasks = tasks
        self._stage = stage
        self._layers = layers
        self._spec = spec
        self._sampler = sampler
        self._recipe = recipe or SkipSchedule()
        self._microbatches = workload.microbatches
        self._packing = packing
        self._averager = make_averager(tasks.weights.gradient, workload.gradient_dtype)
        self._measured: tuple[int, Tensor | None] | None = None
        """What the sum of gradients is divided by, and that sum if it lies beside this node's own."""
        self._kept: Tensor | None = None
        self._backup: tuple[int, Tensor] | None = None
        """A copy of stage 0's ends, and after how many iterations it was made: its own, to lend it, or one to keep."""
        self._incoming: tuple[int, Tensor] | None = None
        """The next one to keep, as far as it has come."""
        self._hop_values = workload.activation_bytes // 4
        self._wire_dtype = workload.wire_dtype
        self._shape = (workload.samples_per_microbatch, workload.sequence_tokens, workload.model.hidden)

    def run(self, work: Op) -> Any:
        match work:
            case StageTask():
                return self._task(work)
            case DropMicrobatch():
                return self.tasks.drop((work.lane, work.microbatch))
            case ClearGradients():
                self.tasks.forget()
                return self._zero()
            case CheckFinite():
                return self._inspect()
            case RingStep():
                return self._averager.turn(work.round, work.at, work.size, work.given)
            case GradNorm():
                return self._measure(work.visits, alone=work.alone)
            case OptimizerStep():
                return self._step(work.rate, work.scale)
            case ReadWeights():
                return self._show(work.piece, kept=work.kept)
            case SnapshotState():
                self._kept = torch.cat([part.cpu() for part in self.tasks.weights.state])
                return None
            case PlanTransfer():
                return self._study(work.origin)
            case ReadState():
                return self._lend(work.first, work.count, work.backup)
            case WriteState():
                return self._load(work.part, work.given, work.digest)
            case CopyEnds():
                self._backup = work.iterations, torch.cat([each.flatten().cpu() for each in self._ends()])
                return None
            case OpenBackup():
                return self._open_backup(work.source, work.iterations)
            case StoreBackup():
                return self._store_backup(work.part, work.given, work.digest)

    def fits(self, message: Message, at: int, size: int) -> bool:
        body = message.body
        if not self._packing:
            return isinstance(body, (Tensor, EncodedTensor))
        if not isinstance(body, EncodedTensor):
            return False
        if message.kind is MessageKind.CHUNK:
            return self._averager.fits(body, message.step + 1, at, size)
        return body.shape == self._shape and body.dtype == self._wire_dtype

    def _inspect(self) -> bool:
        gradient = self.tasks.weights.gradient
        sound = bool(torch.stack(torch.aminmax(gradient)).isfinite().all())  # NaN is both the least and the largest
        if not sound:
            gradient.zero_()
        return sound

    def _measure(self, visits: int, *, alone: bool) -> float:
        """Any number of times: an iteration may be averaged again, with others or with nobody."""
        summed = None if alone else self._averager.summed
        count = self._recipe.divisor(visits, self._microbatches)
        self._measured = count, summed
        return self.tasks.weights.squared_norm(count, summed)

    def _step(self, rate: float, scale: float) -> None:
        if scale == 0:
            return self._zero()
        assert self._measured is not None, "a step along a gradient that was not measured"
        count, summed = self._measured
        if count == 0:  # a stage that nobody visited stays as it is
            return self._zero()
        self.tasks.weights.step(rate, scale / count, summed)
        self._averager.close(followed=True)
        self._measured = None
        return None

    def _zero(self) -> None:
        self.tasks.weights.gradient.zero_()
        self._averager.close(followed=False)
        self._measured = None

    def _show(self, piece: int, *, kept: bool) -> EncodedTensor | None:
        whole = self._kept if kept else self.tasks.weights.values
        assert whole is not None, "nothing was kept"
        values = whole[piece * SHOWN_VALUES : (piece + 1) * SHOWN_VALUES]
        if len(values):
            return encode(values, "fp32")
        self._kept = None if kept else self._kept
        return None

    def _study(self, origin: StateSource) -> list[StateSlice]:
        """From neighbours come weights only: Adam's means begin at zero. What they do not have (see `rebuilding`) comes
        from a copy that somebody keeps; without one it stays as it is, in a new process as the seed has it."""
        weights = self.tasks.weights
        weights.steps = origin.steps
        if origin.kind == "neighbours":
            weights.mean.zero_()
            weights.square.zero_()
            parts = init_from_neighbours(
                self._spec, self._layers, self._stage, origin.sources, origin.stages, origin.shares
            )
            if origin.backup is not None:
                parts += init_from_backup(layout(self.tasks.model.named_weights()), *origin.backup)
        else:
            parts = [StateSlice(origin.sources[0], 0, 3 * len(weights.values), 0)]
        return [piece for part in parts for piece in in_pieces(part)]

    def _lend(self, first: int, count: int, backup: int) -> StateChunk:
        """Of the state, or of a copy of the ends that was made after `backup` iterations."""
        size = 3 * len(self.tasks.weights.values)
        if backup:
            size = len(self._backup[1]) if self._backup is not None and self._backup[0] == backup else 0
        if first < 0 or not 0 < count <= SHOWN_VALUES or first + count > size:
            return StateChunk(None, "")
        if backup:
            assert self._backup is not None
            lent = encode(self._backup[1][first : first + count], "fp32")
        else:
            lent = encode(torch.cat(self.tasks.weights.stretch(first, count)), "fp32", share=True)
        return StateChunk(lent, sha256(lent.data).hexdigest())

    def _ends(self) -> list[Tensor]:
        values = self.tasks.weights.values
        places = ends_of(layout(self.tasks.model.named_weights()))
        return [values[place.start : place.start + place.size] for place in places]

    def _open_backup(self, source: int, iterations: int) -> list[StateSlice]:
        size = sum(place.size for place in ends_of(layout_of_stage(self._spec, self._layers, 0)))
        self._incoming = iterations, torch.empty(size)
        most = min(BACKUP_VALUES, max(LEAST_VALUES, self._hop_values))  # so that no hop waits longer than for a hop
        return list(in_pieces(StateSlice(source, 0, size, 0, backup=iterations), most))

    def _store_backup(self, part: StateSlice, given: Any, digest: str) -> bool:
        assert self._incoming is not None
        if not _is_sound(part, given, digest):
            return False
        copy = self._incoming[1]
        copy[part.at : part.at + part.count] = decode(given)
        if part.at + part.count == len(copy):  # pieces come in order
            self._backup, self._incoming = self._incoming, None
        return True

    def _load(self, part: StateSlice, given: Any, digest: str) -> bool:
        if not _is_sound(part, given, digest):
            return False
        values = decode(given, self.tasks.device)
        if part.share != 1:
            values.mul_(part.share)
        start = 0
        for here in self.tasks.weights.stretch(part.at, part.count):
            came = values[start : start + len(here)]
            if part.added:
                here.add_(came)
            else:
                here.copy_(came)
            start += len(here)
        return True

    def _task(self, task: StageTask) -> OpResult:
        key = task.lane, task.microbatch
        if task.step == 0:
            tokens, _ = self._batch(task)
            return OpResult(self._out(self.tasks.begin(key, tokens)))
        if is_weights(task.step, task.length):
            self.tasks.weight_gradients(key, counts=task.counts)
            return NO_OUTCOME
        given = self._in(task.given)
        if task.step < task.length:
            drive = self._recipe.drive(len(self._layers), task.length)
            return OpResult(self._out(self.tasks.forward(key, given, drive)))
        if task.step == task.length:
            _, labels = self._batch(task)
            early = self._recipe.early_exit
            loss, gradient = self.tasks.head(key, given, labels, early=early, counts=task.counts)
            return OpResult(self._out(gradient), loss)
        back = self.tasks.backward(key, given, counts=task.counts)
        return NO_OUTCOME if back is None else OpResult(self._out(back))

    def _batch(self, task: StageTask) -> tuple[Tensor, Tensor]:
        assert self._sampler is not None, "only data nodes read text"
        inputs, labels = self._sampler.batch(task.iteration, task.data)
        return torch.from_numpy(inputs).to(self.tasks.device), torch.from_numpy(labels).to(self.tasks.device)

    def _out(self, tensor: Tensor) -> Any:
        dtype = self._wire_dtype
        return encode(tensor, dtype, share=True) if self._packing else CODECS[dtype].rounded(tensor)

    def _in(self, given: Any) -> Tensor:
        if isinstance(given, EncodedTensor):
            wire = self._wire_dtype
            if given.shape != self._shape or given.dtype != wire:
                raise ValueError(
                    f"a {given.dtype} tensor of shape {list(given.shape)} came instead of {wire} {list(self._shape)}"
                )
            return decode(given, self.tasks.device)
        tensor: Tensor = given
        return tensor.float()


def _is_sound(part: StateSlice, given: Any, digest: str) -> bool:
    """Is it what was asked for, and as it was sent?"""
    if not isinstance(given, EncodedTensor) or given.dtype != "fp32" or given.shape != (part.count,):
        return False
    return not digest or sha256(given.data).hexdigest() == digest


def in_pieces(part: StateSlice, most: int | None = None) -> Iterator[StateSlice]:
    """That fit into a message."""
    most = most or SHOWN_VALUES
    for start in range(0, part.count, most):
        count = min(most, part.count - start)
        yield replace(part, first=part.first + start, at=part.at + start, count=count)
