"""A few iterations of a tiny model over six nodes, on real tensors under virtual time; and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skippipe.collectives import COLLECTIVES, GroupConfig
from skippipe.collectives.schedule import Piece
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.training.reference import ReferenceTrainer
from skippipe.workload import Workload
from tests.helpers.executors import LAYERS, SAMPLES, SEQUENCE, computer_of
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster

LEARNING = OptimConfig(rate=1e-3, warmup=0, iterations=9, clip=0)
LANES = (Lane((0, 1, 4), 2), Lane((0, 2, 5), 1), Lane((0, 3, 4), 1))
STAGES = ((0,), (1, 3, 2), (4, 5))


@dataclass(frozen=True)
class SmallRun:
    plan: Plan
    cluster: VirtualCluster
    losses: list[float]
    """Of one process."""
    weights: list[list[torch.Tensor]]
    """[stage][replica]"""


def small_run(iterations: int, pieces: tuple[Piece, ...] = (), **workload: Any) -> SmallRun:
    """`pieces` are those of stage 1, which is held by three nodes."""
    spec = ModelSpec(tiny("llama", num_hidden_layers=sum(LAYERS)), 7)
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", **workload}
    count = sum(lane.microbatches for lane in LANES)
    stages = tuple(
        Stage(layers, tuple(sorted(nodes)), nodes, pieces if stage == 1 else ())
        for stage, (layers, nodes) in enumerate(zip(LAYERS, STAGES, strict=True))
    )
    plan = Plan(uniform_cluster(6), Workload(spec.shape, SEQUENCE, SAMPLES, count, **said), stages, LANES)
    executors = {}
    for node, stage in plan.stage_of.items():
        group = GroupConfig(node, STAGES, None, "cpu")
        joined = COLLECTIVES[plan.workload.collective].join(group)
        executors[node] = computer_of(stage, make_averager=joined, **workload)
    cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, iterations), executors=executors)
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    sampler = BatchSampler(np.random.default_rng(1).integers(0, 97, 2000), SEQUENCE, 3, count, SAMPLES)
    reference = ReferenceTrainer(plan, spec, LEARNING, sampler)
    losses = [reference.iteration(number).loss for number in range(iterations)]
    weights = [[executors[node].tasks.weights.values for node in nodes] for nodes in STAGES]
    return SmallRun(plan, cluster, losses, weights)
