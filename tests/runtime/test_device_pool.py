"""Nodes with several devices: the same training, one node to all others, and slower when a device is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.simulation.fault_injection import During, lose
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.training.reference import ReferenceTrainer
from tests.helpers.exact_training import (
    FULL,
    ITERATIONS,
    LEARNING,
    SKIPPED,
    assert_exact,
    plan_of,
    sampler_of,
    tensors_of,
)

SETTINGS = CoordinatorSettings(LEARNING, ITERATIONS)


def with_devices(plan: Plan, devices: dict[int, int]) -> Plan:
    nodes = tuple(replace(node, devices=devices.get(at, 1)) for at, node in enumerate(plan.cluster.nodes))
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


def test_nodes_of_one_and_of_several_devices_are_one_process() -> None:
    """Stage 0 has a node of three devices beside one of a single one, stage 2 is a node of two."""
    plan, spec = plan_of(SKIPPED, split=True)
    assert_exact(with_devices(plan, {0: 3, 5: 2, 7: 2}), spec)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("during", ["forward", "backward", "averaging", "step"])
def test_a_lost_device_is_a_slower_node(device: int, during: During) -> None:
    """No node is lost; what it has computed is computed again, and counts once."""
    plan = with_devices(plan_of(FULL)[0], {5: 3})
    cluster = VirtualCluster(plan, SETTINGS, faults=[lose(device, node=5).at(iteration=1, during=during)])
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    kinds = [event.kind for _, event in cluster.events]
    assert kinds.count("slow") == kinds.count("restarted") == 1 and "gone" not in kinds
    assert cluster.nodes[5].devices == {0, 1, 2} - {device}
    assert cluster.coordinator.plan.cluster.nodes[5].devices == 2
    for executor in cluster.executor_of.values():
        assert isinstance(executor, SymbolicExecutor)
        assert executor.history == [plan.microbatches] * ITERATIONS


@pytest.mark.parametrize("device", [0, 1])
def test_training_with_a_lost_device_is_one_process(device: int) -> None:
    plan, spec = plan_of(FULL)
    plan = with_devices(plan, {5: 2})
    computers = tensors_of(plan, spec)
    cluster = VirtualCluster(
        plan, SETTINGS, executors=computers, faults=[lose(device, node=5).at(iteration=2, during="backward")]
    )
    cluster.run()
    assert [event.kind for _, event in cluster.events].count("restarted") == 1
    reference = ReferenceTrainer(plan, spec, LEARNING, sampler_of(plan))
    losses = [reference.iteration(number).loss for number in range(ITERATIONS)]
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
    (left,) = computers[5].devices.values()
    torch.testing.assert_close(left.tasks.weights.values, reference.stages[2].weights.values, rtol=1e-4, atol=1e-6)
