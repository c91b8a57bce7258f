"""A node's computer on real tensors: a stage of a model, its data, its gradient ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skippipe import dispatch
from skippipe.compiled import plain
from skippipe.model.tasks import StageTasks
from skippipe.plan import Plan
from skippipe.runtime.ring import GradientRing
from skippipe.runtime.work import Keep, Load, Measure, Outcome, Pass, Reduce, Show, Step, Task, Work
from skippipe.text.sampler import Sampler
from skippipe.transport.packed import Packed, pack, unpack

SHOWN_VALUES = 2**22  # of the weights in one message, 16 MiB
NO_OUTCOME = Outcome(None)
is_weights = plain(dispatch.is_weights)


class Tensors:
    """Runs the work of one node. Tensors come and go packed, or as they are within one process."""

    def __init__(
        self,
        node: int,
        plan: Plan,
        tasks: StageTasks,
        sampler: Sampler | None,
        *,
        packing: bool = True,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.tasks = tasks
        self._plan = plan
        self._sampler = sampler
        self._packing = packing
        self._reduce = reduce
        self._visits = 0
        self._kept: Tensor | None = None
        ring = plan.stages[plan.stage_of[node]].ring
        dtype = plan.workload.gradient_dtype
        self._ring = GradientRing(tasks.weights.gradient, ring.index(node), len(ring), dtype)
        work = plan.workload
        self._shape = (work.samples_per_microbatch, work.sequence_tokens, work.model.hidden)

    def run(self, work: Work) -> Any:
        match work:
            case Task():
                return self._task(work)
            case Pass():
                return self._ring.turn(work.round, work.given)
            case Reduce():
                assert self._reduce is not None
                return self._reduce(self.tasks.weights.gradient)
            case Measure():
                self._visits = work.visits
                self.tasks.weights.divide_gradient(work.visits)
                return self.tasks.weights.squared_norm()
            case Step():
                if self._visits:  # a stage that nobody visited stays as it is
                    self.tasks.weights.step(work.rate, work.scale)
                return None
            case Show():
                whole = self._kept if work.kept else self.tasks.weights.values
                assert whole is not None, "nothing was kept"
                values = whole[work.piece * SHOWN_VALUES : (work.piece + 1) * SHOWN_VALUES]
                if len(values):
                    return pack(values, "fp32")
                self._kept = None if work.kept else self._kept
                return None
            case Keep():
                self._kept = torch.cat([part.cpu() for part in self.tasks.weights.state])
                return None
            case Load(given=None):
                self.tasks.weights.steps = work.steps
                return None
            case Load():
                self._load(work.piece * SHOWN_VALUES, unpack(work.given, self.tasks.device))
                return None

    def _load(self, start: int, values: Tensor) -> None:
        """A piece of weights, means and squares, one after another."""
        for part in self.tasks.weights.state:
            here = values[max(0, -start) : max(0, len(part) - start)]
            if len(here):
                part[max(0, start) : max(0, start) + len(here)] = here
            start -= len(part)

    def _task(self, task: Task) -> Outcome:
        length = len(self._plan.lanes[task.lane].path)
        key = task.lane, task.microbatch
        if task.step == 0:
            tokens, _ = self._batch(task)
            return Outcome(self._out(self.tasks.begin(key, tokens)))
        if is_weights(task.step, length):
            self.tasks.weight_gradients(key)
            return NO_OUTCOME
        given = self._in(task.given)
        if task.step < length:
            return Outcome(self._out(self.tasks.forward(key, given)))
        if task.step == length:
            _, labels = self._batch(task)
            loss, gradient = self.tasks.head(given, labels)
            return Outcome(self._out(gradient), loss)
        back = self.tasks.backward(key, given)
        return NO_OUTCOME if back is None else Outcome(self._out(back))

    def _batch(self, task: Task) -> tuple[Tensor, Tensor]:
        assert self._sampler is not None, "only data nodes read text"
        inputs, labels = self._sampler.batch(task.iteration, self._plan.microbatch(task.lane, task.microbatch))
        return torch.from_numpy(inputs).to(self.tasks.device), torch.from_numpy(labels).to(self.tasks.device)

    def _out(self, tensor: Tensor) -> Any:
        dtype = self._plan.workload.wire_dtype
        return pack(tensor, dtype, share=True) if self._packing else rounded(tensor, dtype)

    def _in(self, given: Any) -> Tensor:
        if isinstance(given, Packed):
            wire = self._plan.workload.wire_dtype
            if given.shape != self._shape or given.dtype != wire:
                raise ValueError(
                    f"a {given.dtype} tensor of shape {list(given.shape)} came instead of {wire} {list(self._shape)}"
                )
            return unpack(given, self.tasks.device)
        tensor: Tensor = given
        return tensor.float()


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """What is left of a tensor after a hop."""
    if dtype == "fp32":
        return tensor.float()
    if dtype == "bf16":
        return tensor.to(torch.bfloat16)
    return unpack(pack(tensor, dtype), tensor.device)
