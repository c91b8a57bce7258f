"""The computers of nodes, on a tiny model: made, averaged and stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skippipe.codecs import EncodedTensor
from skippipe.collectives import MakeAverager
from skippipe.collectives.ring import GradientRing
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.optim.config import OptimConfig
from skippipe.runtime.node.ops import GradNorm, OptimizerStep, RingStep
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.workload import Workload
from tests.helpers.models import tiny

LAYERS = (2, 1, 2)
SEQUENCE, SAMPLES, MICROBATCHES = 10, 2, 4
RATE = 1e-2


def computer_of(
    stage: int,
    family: str = "llama",
    *,
    layers: tuple[int, ...] = LAYERS,
    seed: int = 7,
    config: dict[str, Any] | None = None,
    split: bool = False,
    recompute: bool = False,
    make_averager: MakeAverager = GradientRing,
    optimizer: str = "adamw",
    **workload: Any,
) -> StageExecutor:
    spec = ModelSpec(tiny(family, num_hidden_layers=sum(layers), **(config or {})), seed)
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", **workload}
    work = Workload(spec.shape, SEQUENCE, SAMPLES, MICROBATCHES, **said)
    tasks = StageStep(
        spec,
        layer_ranges(layers)[stage],
        OptimConfig(optimizer, clip=0),
        ends=stage == 0,
        compute_dtype=work.compute_dtype,
        recompute=recompute,
        split_backward=split,
    )
    text = np.random.default_rng(1).integers(0, 97, 2000)
    sampler = BatchSampler(text, SEQUENCE, 3, MICROBATCHES, SAMPLES) if stage == 0 else None
    return StageExecutor(stage, layers, work, spec, tasks, sampler, make_averager=make_averager)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (SAMPLES, SEQUENCE, 32), generator=torch.Generator().manual_seed(seed))


def gradient_of(executor: StageExecutor) -> torch.Tensor:
    return executor.tasks.weights.gradient.clone()


def state_of(executor: StageExecutor) -> torch.Tensor:
    return torch.cat([part.float() for part in executor.tasks.weights.state])


def ring(computers: Sequence[StageExecutor], rounds: int | None = None) -> None:
    """Everybody in step, up to a round."""
    size = len(computers)
    passed: list[EncodedTensor | None] = [None] * size
    for number in range(2 * size - 1 if rounds is None else rounds):
        passed = [each.run(RingStep(number, at, size, passed[at - 1])) for at, each in enumerate(computers)]


def stepped(executor: StageExecutor, visits: int, *, alone: bool = True) -> tuple[float, torch.Tensor]:
    norm = executor.run(GradNorm(visits, alone))
    executor.run(OptimizerStep(RATE, 1.0))
    assert not gradient_of(executor).any()
    return norm, state_of(executor)
