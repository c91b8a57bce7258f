"""Nodes with several devices: the same training, one node to all others, and slower when a device is lost."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from skippipe.cluster import DeviceMode
from skippipe.errors import UserError
from skippipe.model.model_spec import parse_devices
from skippipe.model.sharded_stage import ShardedStep
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.device_pool import DevicePool
from skippipe.runtime.node.interfaces import ALL_DEVICES, node_devices
from skippipe.runtime.node.ops import Op, OpThreads, StageTask
from skippipe.runtime.simulation.fault_injection import During, lose
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.train_role import build_node_executor
from skippipe.skip_schedule import SkipSchedule
from skippipe.training.reference import ReferenceTrainer
from skippipe.transport.message import Message
from tests.helpers.exact_training import (
    FULL,
    ITERATIONS,
    LEARNING,
    SKIPPED,
    assert_exact,
    brief_of,
    plan_of,
    sampler_of,
    tensors_of,
)

SETTINGS = CoordinatorSettings(LEARNING, ITERATIONS, recovery=RecoverySettings(planning=timedelta(0)))
TIMEOUT_S = 60.0


def with_devices(plan: Plan, devices: dict[int, int], mode: DeviceMode | None = None) -> Plan:
    nodes = tuple(
        replace(node, devices=devices.get(at, 1), device_mode=mode) for at, node in enumerate(plan.cluster.nodes)
    )
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_nodes_of_one_and_of_several_devices_are_one_process(split: bool) -> None:
    """Stage 0 has a node of three devices beside one of a single one, stage 2 is a node of two."""
    plan, spec = plan_of(SKIPPED, split=split)
    plan = with_devices(plan, {0: 3, 5: 2, 7: 2})
    cluster = assert_exact(plan, spec)
    assert {len(cluster.nodes[node].devices) for node in (0, 5, 7)} == {3, 2}


def test_a_stage_divided_over_devices_is_one_process() -> None:
    """Stage 0 with its ends, and stage 3, whose other node has it on one device; what stages add is scaled."""
    recipe = SkipSchedule(residual="scaled")
    plan, spec = plan_of(SKIPPED, (2, 1, 1, 3), split=True, config={"num_hidden_layers": 7})
    plan = with_devices(plan, {0: 2, 1: 2, 6: 3}, DeviceMode.SHARDED)
    config = replace(brief_of(plan, spec), recipe=recipe)
    computers = {
        node: build_node_executor(node, config, ["cpu"] * plan.cluster.nodes[node].devices, sampler_of(plan))
        for node in plan.stage_of
    }
    kinds = {node for node, each in computers.items() if isinstance(each.tasks, ShardedStep)}
    assert kinds == {0, 1, 6}
    cluster = VirtualCluster(plan, replace(SETTINGS, skip_schedule=recipe), executors=computers)
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    reference = ReferenceTrainer(plan, spec, LEARNING, sampler_of(plan), recipe=recipe, iterations=ITERATIONS)
    losses = [reference.iteration(number).loss for number in range(ITERATIONS)]
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
    assert torch.equal(computers[6].tasks.weights.values, computers[7].tasks.weights.values)
    for node in (0, 6):
        weights, expected = computers[node].tasks.weights, reference.stages[plan.stage_of[node]].weights
        assert weights.state_values == expected.state_values
        state = weights.read_state(0, weights.state_values)
        torch.testing.assert_close(state, expected.read_state(0, expected.state_values), rtol=1e-3, atol=1e-6)
        cuts = [0, *np.random.default_rng(node).integers(1, len(state), 9).tolist(), len(state)]
        for first, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
            if first < end:
                weights.write_state(first, 2 * state[first:end])
        assert torch.equal(weights.read_state(0, len(state)), 2 * state)


@pytest.mark.parametrize(("device", "during"), [(1, "forward"), (0, "backward"), (0, "averaging"), (2, "step")])
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


def test_training_with_a_lost_device_is_one_process() -> None:
    """It is the first one, whose state others saw."""
    plan, spec = plan_of(FULL)
    plan = with_devices(plan, {5: 2})
    computers = tensors_of(plan, spec)
    cluster = VirtualCluster(
        plan, SETTINGS, executors=computers, faults=[lose(device=0, node=5).at(iteration=2, during="backward")]
    )
    cluster.run()
    assert [event.kind for _, event in cluster.events].count("restarted") == 1
    reference = ReferenceTrainer(plan, spec, LEARNING, sampler_of(plan))
    losses = [reference.iteration(number).loss for number in range(ITERATIONS)]
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
    pool = computers[5]
    assert isinstance(pool, DevicePool)
    (left,) = pool.devices.values()
    torch.testing.assert_close(left.tasks.weights.values, reference.stages[2].weights.values, rtol=1e-4, atol=1e-6)


class Meeting:
    """An executor whose tasks end only when two of them run at the same time."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2)

    def run(self, op: Op) -> str:
        assert isinstance(op, StageTask)
        self._met.wait(TIMEOUT_S)
        return threading.current_thread().name

    def fits(self, message: Message, expected: object) -> bool:
        return message is expected


def test_every_device_has_a_thread_of_its_own() -> None:
    woken = threading.Event()
    threads = OpThreads(Meeting, woken.set, None, devices=2)
    tasks = [StageTask(0, lane, 0, 0, 2, 0, device=lane) for lane in range(2)]
    for task in tasks:
        threads.start(task)
    deadline = time.monotonic() + TIMEOUT_S
    while len(threads.done) < 2:
        assert woken.wait(deadline - time.monotonic()) and threads.failure is None
        woken.clear()
    assert [name for task in tasks for op, name in threads.done if op is task] == ["compute", "compute-1"]
    threads.stop()
    threads.join(TIMEOUT_S)


def test_devices_of_a_node() -> None:
    assert parse_devices("cpu:3") == ["cpu"] * 3
    assert node_devices(None, "cpu", 2) == node_devices(ALL_DEVICES, "cpu", 2) == ["cpu", "cpu"]
    assert node_devices("cpu:3", "cuda", 1) == ["cpu"] * 3
    for text in ("cpu:0", "cpu:1-2", "cuda:2-1", "tpu", "cuda:a", "cpu:99"):
        with pytest.raises(UserError, match=f"^device '{text}': expected cpu, cpu:K"):
            parse_devices(text)
    with pytest.raises(UserError, match="this machine has 0 CUDA devices"):
        parse_devices("cuda:0-3")
