"""The computers of nodes, on a tiny model: made, averaged and stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from skippipe.learning import Learning
from skippipe.model.blueprint import Blueprint
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.runtime.tensors import Tensors
from skippipe.runtime.work import Measure, Pass, Step
from skippipe.text.sampler import Sampler
from skippipe.transport.packed import Packed
from skippipe.workload import Workload
from tests.models import tiny

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
    reduce: Callable[[torch.Tensor], Any] | None = None,
    **workload: Any,
) -> Tensors:
    blueprint = Blueprint(tiny(family, num_hidden_layers=sum(layers), **(config or {})), seed)
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", **workload}
    work = Workload(blueprint.shape, SEQUENCE, SAMPLES, MICROBATCHES, **said)
    tasks = StageTasks(
        blueprint,
        layer_ranges(layers)[stage],
        Learning(clip=0),
        ends=stage == 0,
        compute_dtype=work.compute_dtype,
        recompute=recompute,
        split_backward=split,
    )
    text = np.random.default_rng(1).integers(0, 97, 2000)
    sampler = Sampler(text, SEQUENCE, 3, MICROBATCHES, SAMPLES) if stage == 0 else None
    return Tensors(stage, layers, work, blueprint, tasks, sampler, reduce=reduce)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (SAMPLES, SEQUENCE, 32), generator=torch.Generator().manual_seed(seed))


def gradient_of(computer: Tensors) -> torch.Tensor:
    return computer.tasks.weights.gradient.clone()


def state_of(computer: Tensors) -> torch.Tensor:
    return torch.cat(computer.tasks.weights.state)


def ring(computers: Sequence[Tensors], rounds: int | None = None) -> None:
    """Everybody in step, up to a round."""
    size = len(computers)
    passed: list[Packed | None] = [None] * size
    for number in range(2 * size - 1 if rounds is None else rounds):
        passed = [each.run(Pass(number, at, size, passed[at - 1])) for at, each in enumerate(computers)]


def stepped(computer: Tensors, visits: int, *, alone: bool = True) -> tuple[float, torch.Tensor]:
    norm = computer.run(Measure(visits, alone))
    computer.run(Step(RATE, 1.0))
    assert not gradient_of(computer).any()
    return norm, state_of(computer)
