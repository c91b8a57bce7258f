"""The executor of a training node on real tensors: a stage of the model, its data, its averager, its state.

It knows the stage and the model, and nothing of lanes or other nodes: the plan may change while it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skippipe.codecs import CODECS, LOW_RANK, EncodedTensor, decode, encode, gradient_codec
from skippipe.collectives import Averager, MakeAverager
from skippipe.collectives.low_rank import LowRankAverager, factored_matrices
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.collectives.schedule import Schedule
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.model.sharded_stage import ShardedStep
from skippipe.model.stage_step import StageStep, TeacherHidden
from skippipe.model.stand_ins import is_bridge
from skippipe.optim.interface import BLOCK
from skippipe.runtime.device_copies import Copies, copies_of
from skippipe.runtime.neighbour_init import embedding_slots, init_from_backup, init_from_neighbours
from skippipe.runtime.node import ops
from skippipe.runtime.state_source import StateChunk, StateSlice, StateSource
from skippipe.skip_schedule import SkipSchedule
from skippipe.transport.message import GradientPiece, Message
from skippipe.workload import Workload

CHUNK_VALUES = 2**22  # numbers of a state in one message: 16 MiB
BACKUP_VALUES = 2**20  # the most of a backup, which is fetched while training goes on: 4 MiB
NO_RESULT = ops.OpResult(None)
Starts = npt.NDArray[np.bool_]
"""Where conversations begin, [samples, sequence]."""


class StageExecutor:
    """Runs the operations of one node. Tensors come and go encoded, or as they are within one process."""

    def __init__(
        self,
        stage: int,
        layers: tuple[int, ...],
        workload: Workload,
        spec: ModelSpec,
        tasks: StageStep | ShardedStep,
        sampler: BatchSampler | None,
        *,
        recipe: SkipSchedule | None = None,
        packing: bool = True,
        make_averager: MakeAverager = GradientAverager,
        held_out: BatchSampler | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`layers` are those of every stage. The nodes of stage 0, where microbatches begin, need a `sampler`, and one
        of `held_out` samples if these are evaluated while training. `copies`: None for those that its device needs."""
        self.tasks = cast(StageStep, tasks)  # a `ShardedStep` has all that is used here
        self._copies = copies or copies_of(tasks.device)
        self._stage = stage
        self._layers = layers
        self._spec = spec
        self._sampler = sampler
        self._held_out = held_out
        self._recipe = recipe or SkipSchedule()
        self._microbatches = workload.microbatches
        self._packing = packing
        self._averager = self._make_averager(workload, make_averager)
        self._averaged: tuple[int, Tensor | None] | None = None
        """What the sum of gradients is divided by, and that sum if it lies beside this node's own."""
        self._snapshot: Tensor | None = None
        """Weights and optimizer state as a checkpoint is to have them."""
        self._backup: tuple[int, Tensor] | None = None
        """The newest complete backup of stage 0's ends, and after how many iterations it was made."""
        self._incoming_backup: tuple[int, Tensor] | None = None
        """The next backup, as far as it has come."""
        self._hop_values = workload.activation_bytes // 4
        self._wire_dtype, self._back_dtype = workload.wire_dtype, gradient_codec(workload.wire_dtype)
        self._wire_dtypes = workload.hop_dtypes
        self._shape = (workload.samples_per_microbatch, workload.sequence_tokens, workload.model.hidden)

    def _make_averager(self, workload: Workload, make: MakeAverager) -> Averager:
        weights, offload = self.tasks.weights, workload.offload != "none"
        codec = workload.stage_gradient_dtype(self._stage)
        low_rank = LOW_RANK.get(codec)
        if low_rank is None:
            return make(weights.gradient, codec, offload)
        if len(workload.gradient_rounds(self._stage, self._layers[self._stage])) == 1:
            return make(weights.gradient, low_rank.factors, offload)
        slots = [(slot.start, slot.shape) for slot in weights.slots if not is_bridge(slot.name)]
        return LowRankAverager(weights.gradient, low_rank, factored_matrices(slots, low_rank), make, offload)

    def run(self, work: ops.Op) -> Any:
        match work:
            case ops.StageTask():
                return self._settled(self._task(work))
            case ops.EvaluateSamples():
                return self._settled(self._evaluate(work))
            case ops.TeacherForward():
                return self._settled(self._teach(work))
            case ops.DropMicrobatch():
                return self.tasks.drop((work.lane, work.microbatch))
            case ops.ClearGradients():
                self.tasks.drop_all()
                return self._clear_gradients()
            case ops.CheckFinite():
                return self._check_finite()
            case ops.BeginAveraging():
                self.tasks.weights.collect()
                return self._averager.begin(work.schedule)
            case ops.ContributePiece():
                return self._averager.contribute(work.piece, work.given, total=work.total)
            case ops.AdoptPiece():
                return self._averager.adopt(work.piece, work.given)
            case ops.GradNorm():
                return self._grad_norm(work.stage_microbatches, alone=work.alone)
            case ops.OptimizerStep():
                return self._step(work.rate, work.scale)
            case ops.ReadWeights():
                return self._read_weights(work.piece, from_snapshot=work.from_snapshot)
            case ops.SnapshotState():
                return self._take_snapshot()
            case ops.PlanTransfer():
                return self._plan_transfer(work.origin)
            case ops.ReadState():
                return self._read_state(work.first, work.count, work.backup)
            case ops.WriteState():
                return self._write_state(work.part, work.given, work.digest)
            case ops.CopyBackup():
                ends = embedding_slots(self.tasks.weights.slots)
                self._backup = (
                    work.iterations,
                    self._on_host([range(slot.start, slot.start + slot.size) for slot in ends]),
                )
                return None
            case ops.OpenBackup():
                return self._open_backup(work.source, work.iterations)
            case ops.StoreBackup():
                return self._store_backup(work.part, work.given, work.digest)

    def fits(self, message: Message, expected: Schedule) -> bool:
        body, header = message.body, message.header
        if not self._packing:
            return isinstance(body, (Tensor, EncodedTensor))
        if not isinstance(body, EncodedTensor):
            return False
        if isinstance(header, GradientPiece):
            return self._averager.fits(body, expected, expected.transfers[header.transfer].piece)
        return self._is_hop(body)

    def _is_hop(self, body: EncodedTensor) -> bool:
        return body.shape == self._shape and body.dtype in self._wire_dtypes

    def prefetch(self, given: Any, _device: int = 0) -> Any:
        return self._copies.bring(given) if isinstance(given, EncodedTensor) and self._is_hop(given) else given

    def _settled(self, result: ops.OpResult) -> ops.OpResult:
        """A result that was computed, apart from what is on its way to the host; within one process nobody waits."""
        if not self._packing:
            return result
        self._copies.settle()
        return result if result.loss is None else result._replace(loss=float(result.loss))

    def _check_finite(self) -> bool:
        self.tasks.weights.collect()
        gradient = self.tasks.weights.gradient
        sound = bool(torch.stack(torch.aminmax(gradient)).isfinite().all())  # NaN is both the least and the largest
        if not sound:
            gradient.zero_()
        return sound

    def _grad_norm(self, stage_microbatches: int, *, alone: bool) -> float:
        """Squared norm of the mean gradient. It may be asked for again: averaging is repeated when a peer is lost."""
        if alone:
            self.tasks.weights.collect()
        summed = None if alone else self._averager.summed
        count = self._recipe.divisor(stage_microbatches, self._microbatches)
        self._averaged = count, summed
        return self.tasks.weights.squared_norm(count, summed)

    def _step(self, rate: float, scale: float) -> None:
        if scale == 0:
            return self._clear_gradients()
        assert self._averaged is not None, "a step before the norm of its gradient was taken"
        count, summed = self._averaged
        if count == 0:  # a stage without a visit stays as it is
            return self._clear_gradients()
        self.tasks.weights.step(rate, scale / count, summed)
        self._averager.close(followed=summed is not None)
        self._averaged = None
        return None

    def follow(self, leader: StageExecutor) -> None:
        """Have this device of the node step along the gradient that another one has averaged."""
        assert leader._averaged is not None, "a step before the norm of its gradient was taken"
        count, summed = leader._averaged
        self.tasks.weights.gradient.copy_(leader.tasks.weights.gradient if summed is None else summed)
        self._averaged = count, None

    def take_over(self, former: StageExecutor) -> None:
        """Keep what only the node's first device keeps, now that this one is the first."""
        self._snapshot = former._snapshot
        self._backup, self._incoming_backup = former._backup, former._incoming_backup

    def _clear_gradients(self) -> None:
        self.tasks.weights.clear_gradient()
        self._averager.close(followed=False)
        self._averaged = None

    def _take_snapshot(self) -> None:
        """Copy what training changes to the host."""
        self._snapshot = self._on_host([range(self.tasks.weights.trained_values)])

    def _on_host(self, parts: Sequence[range]) -> Tensor:
        """Parts of the state, one after another, read piece by piece: in more bits than it may be held in."""
        found, at = torch.empty(sum(map(len, parts))), 0
        for part in parts:
            for first in range(part.start, part.stop, CHUNK_VALUES):
                count = min(CHUNK_VALUES, part.stop - first)
                found[at : at + count] = self.tasks.weights.read_state(first, count)
                at += count
        return found

    def _read_weights(self, piece: int, *, from_snapshot: bool) -> EncodedTensor | None:
        """A chunk of the snapshot for a checkpoint, or of the weights as they are; None after the last one, and then
        the snapshot is freed."""
        weights, first = self.tasks.weights, piece * CHUNK_VALUES
        assert self._snapshot is not None or not from_snapshot, "there is no snapshot"
        size = weights.trained_values if from_snapshot else len(weights.state_parts[0])
        if count := max(0, min(CHUNK_VALUES, size - first)):
            copied = self._snapshot if from_snapshot else None
            values = weights.read_state(first, count) if copied is None else copied[first : first + count]
            return encode(values, "fp32")
        self._snapshot = None if from_snapshot else self._snapshot
        return None

    def _plan_transfer(self, origin: StateSource) -> list[StateSlice]:
        """Weights come last: a step that is taken before they are here follows the whole optimizer state.

        From neighbours come weights only: optimizer state begins at zero. What neighbours do not have (see
        `neighbour_init`) comes from the backup of stage 0's ends; without one it stays as it is, in a new process as
        the seed has it."""
        weights = self.tasks.weights
        weights.steps = origin.steps
        if origin.kind == "neighbours":
            weights.clear_state()
            parts = init_from_neighbours(
                self._spec, self._layers, self._stage, origin.sources, origin.stages, origin.shares
            )
            if origin.backup is not None:
                parts += init_from_backup(weights.slots, *origin.backup)
        else:
            values, *others = weights.state_parts
            parts = [StateSlice(origin.sources[0], each.start, len(each), each.start) for each in (*others, values)]
        return [piece for part in parts for piece in in_chunks(part)]

    def _read_state(self, first: int, count: int, backup: int) -> StateChunk:
        """A range of the state, or of the backup of stage 0's ends that was made after `backup` iterations."""
        size = self.tasks.weights.state_values
        if backup:
            size = len(self._backup[1]) if self._backup is not None and self._backup[0] == backup else 0
        if first < 0 or not 0 < count <= CHUNK_VALUES or first + count > size:
            return StateChunk(None, "")
        if backup:
            assert self._backup is not None
            chunk = encode(self._backup[1][first : first + count], "fp32")
        else:
            chunk = encode(self.tasks.weights.read_state(first, count), "fp32", share=True)
        return StateChunk(chunk, sha256(chunk.data).hexdigest())

    def _open_backup(self, source: int, iterations: int) -> list[StateSlice]:
        size = sum(place.size for place in embedding_slots(layout_of_stage(self._spec, self._layers, 0)))
        self._incoming_backup = iterations, torch.empty(size)
        most = min(BACKUP_VALUES, max(ops.LEAST_VALUES, self._hop_values))  # so that no hop waits longer than for a hop
        return list(in_chunks(StateSlice(source, 0, size, 0, backup=iterations), most))

    def _store_backup(self, part: StateSlice, given: Any, digest: str) -> bool:
        assert self._incoming_backup is not None
        if not _is_intact(part, given, digest):
            return False
        values = self._incoming_backup[1]
        values[part.at : part.at + part.count] = decode(given)
        if part.at + part.count == len(values):  # chunks come in order
            self._backup, self._incoming_backup = self._incoming_backup, None
        return True

    def _write_state(self, part: StateSlice, given: Any, digest: str) -> bool:
        if not _is_intact(part, given, digest):
            return False
        values = decode(given, self.tasks.device)
        if part.share != 1:
            values.mul_(part.share)
        self.tasks.weights.write_state(part.at, values, added=part.added)
        return True

    def _task(self, task: ops.StageTask) -> ops.OpResult:
        key = task.lane, task.microbatch
        if task.step == 0:
            tokens, _ = self._batch(task)
            assert self._sampler is not None
            starts = self._sampler.starts(task.iteration, task.data)
            begun = self.tasks.begin(key, tokens, self._on_device(starts), task.hop)
            return ops.OpResult(self._encode_hop(begun, task.wire_dtype, starts))
        if task.is_weights:
            self.tasks.weight_gradients(key, counts=task.counts)
            return NO_RESULT
        given = self._decode_hop(task.given)
        if task.step < task.length:
            residual_scale = self._recipe.residual_scale(len(self._layers), task.length)
            starts = self._starts(task.given)
            outputs = self.tasks.forward(key, given, residual_scale, self._on_device(starts), task.hop)
            return ops.OpResult(self._encode_hop(outputs, task.wire_dtype, starts))
        if task.step == task.length:
            _, labels = self._batch(task)
            assert self._sampler is not None
            early, share = self._recipe.early_exit, self._sampler.share(task.iteration, task.data)
            loss, gradient = self.tasks.head(
                key, given, labels, early=early, share=share, counts=task.counts, teacher=self._teacher_hidden(task)
            )
            return ops.OpResult(self._encode_hop(gradient, task.wire_dtype or self._back_dtype), loss)
        back = self.tasks.backward(key, given, counts=task.counts, teacher=self._teacher_hidden(task))
        return NO_RESULT if back is None else ops.OpResult(self._encode_hop(back, task.wire_dtype or self._back_dtype))

    def _teacher_hidden(self, task: ops.StageTask) -> TeacherHidden | None:
        if task.teacher_hidden is None:
            return None
        return TeacherHidden(self._decode_hop(task.teacher_hidden), self._recipe.distill, self._recipe.distill_hidden)

    def _teach(self, task: ops.TeacherForward) -> ops.OpResult:
        if task.step == 0:
            assert self._sampler is not None
            given, _ = self._batch(task)
            starts = self._sampler.starts(task.iteration, task.data)
        else:
            given, starts = self._decode_hop(task.given), self._starts(task.given)
        outputs = self.tasks.evaluate(given, self._on_device(starts))
        return ops.OpResult(self._encode_hop(outputs, task.wire_dtype, starts))

    def _evaluate(self, task: ops.EvaluateSamples) -> ops.OpResult:
        if 0 < task.step < task.length:
            starts = self._starts(task.given)
            outputs = self.tasks.evaluate(self._decode_hop(task.given), self._on_device(starts))
            return ops.OpResult(self._encode_hop(outputs, "", starts))
        assert self._held_out is not None, "only data nodes read text"
        inputs, labels = self._held_out.batch(0, task.microbatch)
        if task.step == 0:
            starts = self._held_out.starts(0, task.microbatch)
            tokens = torch.from_numpy(inputs).to(self.tasks.device)
            outputs = self.tasks.evaluate(tokens, self._on_device(starts))
            return ops.OpResult(self._encode_hop(outputs, "", starts))
        targets = torch.from_numpy(labels).to(self.tasks.device)
        loss = self.tasks.evaluate_head(self._decode_hop(task.given), targets)
        return ops.OpResult(None, loss, int((labels >= 0).sum()))

    def _batch(self, task: ops.StageTask | ops.TeacherForward) -> tuple[Tensor, Tensor]:
        assert self._sampler is not None, "only data nodes read text"
        inputs, labels = self._sampler.batch(task.iteration, task.data)
        return torch.from_numpy(inputs).to(self.tasks.device), torch.from_numpy(labels).to(self.tasks.device)

    def _encode_hop(self, tensor: Tensor, dtype: str, starts: Starts | None = None) -> Any:
        """What goes to the next node; with conversations, activations say where they begin."""
        dtype = dtype or self._wire_dtype
        if starts is not None:
            return replace(self._copies.encode(tensor, dtype), starts=np.packbits(starts).tobytes())
        return self._copies.encode(tensor, dtype) if self._packing else CODECS[dtype].rounded(tensor)

    def _starts(self, given: Any) -> Starts | None:
        """Where conversations begin in activations that came."""
        if not isinstance(given, EncodedTensor) or not given.starts:
            return None
        samples, sequence, _ = self._shape
        bits = np.unpackbits(np.frombuffer(given.starts, np.uint8), count=samples * sequence)
        return bits.reshape(samples, sequence).astype(np.bool_)

    def _on_device(self, starts: Starts | None) -> Tensor | None:
        return None if starts is None else torch.from_numpy(starts).to(self.tasks.device)

    def _decode_hop(self, given: Any) -> Tensor:
        if isinstance(given, EncodedTensor):
            if not self._is_hop(given):
                wanted = f"{' or '.join(sorted(self._wire_dtypes))} {list(self._shape)}"
                raise ValueError(f"a {given.dtype} tensor of shape {list(given.shape)} came instead of {wanted}")
            return self._copies.decode(given)
        tensor: Tensor = given
        return tensor.float()


def _is_intact(part: StateSlice, given: Any, digest: str) -> bool:
    """Whether a chunk has the type and length that were requested, and the digest that was sent for it."""
    if not isinstance(given, EncodedTensor) or given.dtype != "fp32" or given.shape != (part.count,):
        return False
    return not digest or sha256(given.data).hexdigest() == digest


def in_chunks(part: StateSlice, most: int | None = None) -> Iterator[StateSlice]:
    """Slices of this one that fit into a message each, of whole blocks."""
    most = most or CHUNK_VALUES
    most -= most % BLOCK
    for start in range(0, part.count, most):
        count = min(most, part.count - start)
        yield replace(part, first=part.first + start, at=part.at + start, count=count)
