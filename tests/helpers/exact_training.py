"""A small model trained over many virtual nodes beside the same training in one process, and plans for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from skippipe.codecs import LOW_RANK
from skippipe.collectives.schedule import Piece
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.model.stand_ins import StagePlace
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.device_pool import DevicePool
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.skip_schedule import PathLength, SkipSchedule
from skippipe.study.traffic import LowRankSum
from skippipe.training.reference import ReferenceTrainer
from skippipe.workload import Workload
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster

ITERATIONS = 3  # the state of optimizers and what encoding has left count from the second on
LEARNING = OptimConfig(rate=3e-3, warmup=2, iterations=ITERATIONS, clip=1.0)
SEQUENCE, SAMPLES = 12, 2
HELD_OUT = 7  # microbatches of held-out samples
TEXT = np.random.default_rng(5).integers(0, 97, 3000)
# Nodes 0, 1 | 2, 3, 4 | 5 | 6, 7: stages with two, three and one replica.
STAGES = ((0, 1), (3, 2, 4), (5,), (6, 7))
FULL = (Lane((0, 2, 5, 6), 1), Lane((1, 3, 5, 7), 2), Lane((0, 4, 5, 7), 1))
SKIPPED = (Lane((0, 2, 6), 1), Lane((1, 5, 7), 2), Lane((0, 3, 5), 1), Lane((1, 4, 6), 1))  # a third of the others
SWAPPED = (Lane((0, 5, 2, 6), 1), Lane((1, 3, 7, 5), 2), Lane((0, 5, 4), 1))


def plan_of(
    lanes: Sequence[Lane],
    layers: Sequence[int] = (1, 1, 1, 2),
    *,
    family: str = "llama",
    split: bool = False,
    stages: Sequence[tuple[int, ...]] = STAGES,
    config: dict[str, Any] | None = None,
    pieces: tuple[Piece, ...] = (),
    bridges: int = 0,
    **workload: Any,
) -> tuple[Plan, ModelSpec]:
    """`pieces` are those of stage 1; the other stages average round rings."""
    spec = ModelSpec(tiny(family, **(config or {})), seed=11, bridges=bridges)
    bridge_parameters = spec.shape.bridge_parameters(bridges, len(stages))
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", "bridge_parameters": bridge_parameters, **workload}
    work = Workload(spec.shape, SEQUENCE, SAMPLES, sum(lane.microbatches for lane in lanes), **said)
    cluster = uniform_cluster(max(max(nodes) for nodes in stages) + 1)
    made = tuple(
        Stage(count, tuple(sorted(ring)), ring, pieces if stage == 1 else ())
        for stage, (count, ring) in enumerate(zip(layers, stages, strict=True))
    )
    return Plan(cluster, work, made, tuple(lanes), split_backward=split), spec


def sampler_of(plan: Plan) -> BatchSampler:
    return BatchSampler(TEXT, SEQUENCE, 3, plan.microbatches, SAMPLES)


def held_out_sampler(microbatches: int) -> BatchSampler:
    return BatchSampler(TEXT[::-1].copy(), SEQUENCE, 4, microbatches, SAMPLES)


def tensors_of(
    plan: Plan, spec: ModelSpec, learning: OptimConfig = LEARNING, recipe: SkipSchedule | None = None
) -> dict[int, StageExecutor]:
    ranges = layer_ranges(tuple(stage.layers for stage in plan.stages))
    work = plan.workload

    def one(stage: int) -> StageExecutor:
        return StageExecutor(
            stage,
            plan.layers,
            work,
            spec,
            StageStep(
                spec,
                ranges[stage],
                learning,
                ends=stage == 0,
                compute_dtype=work.compute_dtype,
                recompute=work.activation_checkpointing,
                split_backward=plan.split_backward,
                place=StagePlace(stage, len(ranges)),
            ),
            sampler_of(plan) if stage == 0 else None,
            recipe=recipe,
            held_out=held_out_sampler(HELD_OUT) if stage == 0 else None,
        )

    return {
        node: cast(StageExecutor, DevicePool([one(stage) for _ in range(devices)])) if devices > 1 else one(stage)
        for node, stage in plan.stage_of.items()
        for devices in [plan.cluster.nodes[node].devices]
    }


def trained(
    plan: Plan,
    spec: ModelSpec,
    learning: OptimConfig = LEARNING,
    recipe: SkipSchedule | None = None,
    *others: Plan,
    plans: Mapping[PathLength, Plan] | None = None,
) -> tuple[VirtualCluster, dict[int, StageExecutor], ReferenceTrainer, list[float]]:
    """Many nodes under disturbed time; one process; and the losses of the latter. The recipe also takes other plans."""
    random = np.random.default_rng(1)
    recipe, plans = recipe or SkipSchedule(), plans or {other.visited: other for other in others}
    computers = tensors_of(plan, spec, learning, recipe)
    before = {node: executor.tasks.weights.values.clone() for node, executor in computers.items()}
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(learning, learning.iterations, skip_schedule=recipe, plans=plans),
        executors=computers,
        disturb=lambda ns: int(ns * random.uniform(0.2, 2)),
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    oracle = ReferenceTrainer(
        plan, spec, learning, sampler_of(plan), recipe=recipe, plans=plans, iterations=learning.iterations
    )
    done = [oracle.iteration(number) for number in range(learning.iterations)]
    visited = {stage for lane in plan.lanes for stage in plan.visits(lane)}
    for node, stage in plan.stage_of.items():
        moved = (computers[node].tasks.weights.values - before[node]).abs().mean() / learning.rate
        assert moved > 1e-3 if stage in visited else moved == 0, f"stage {stage} moved {moved}"
    for report, one in zip(cluster.reports, done, strict=True):
        assert math.isclose(report.rate, one.rate)
    return cluster, computers, oracle, [one.loss for one in done]


class LowRankReference(ReferenceTrainer):
    """One process that sums what low rank leaves of the gradients of replicas, as studies do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rank = LOW_RANK[self.plan.workload.gradient_dtype].rank
        shared = [step for step, each in zip(self.stages, self.plan.stages, strict=True) if len(each.nodes) > 1]
        self.sums = [(LowRankSum(rank, [step.weights]), step.weights) for step in shared]

    def sum_gradients(self) -> None:
        for low_rank, weights in self.sums:
            low_rank.add(0, [weights])


def assert_replicas_alike(plan: Plan, computers: dict[int, StageExecutor]) -> None:
    """To the last bit."""
    for stage in plan.stages:
        values = computers[stage.nodes[0]].tasks.weights.values
        for executor in (computers[node] for node in stage.nodes):
            for each in executor.devices.values() if isinstance(executor, DevicePool) else [executor]:
                assert torch.equal(each.tasks.weights.values, values)


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The mean difference of two models' weights."""
    assert some.keys() == others.keys()
    return float(torch.cat([(some[name] - others[name]).flatten().abs() for name in some]).mean())


def assert_exact(
    plan: Plan,
    spec: ModelSpec,
    learning: OptimConfig = LEARNING,
    recipe: SkipSchedule | None = None,
    *others: Plan,
    plans: Mapping[PathLength, Plan] | None = None,
) -> VirtualCluster:
    cluster, computers, oracle, losses = trained(plan, spec, learning, recipe, *others, plans=plans)
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
    assert_replicas_alike(plan, computers)
    expected = oracle.weights()
    found = weights_of(plan, computers)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6, msg=partial(_named, name))
    return cluster


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"


def weights_of(plan: Plan, computers: dict[int, StageExecutor]) -> dict[str, torch.Tensor]:
    return {
        name: each.detach()
        for stage in plan.stages
        for name, each in computers[stage.nodes[0]].tasks.model.trained_weights()
    }


def brief_of(plan: Plan, spec: ModelSpec) -> NodeConfig:
    return NodeConfig(plan, spec.config.to_dict(), spec.seed, LEARNING, "tokens", "0" * 64)
