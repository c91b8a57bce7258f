"""Nodes with several devices: what they hold, and what they do side by side. Rules are in docs/formats.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippipe.cluster import DeviceMode, Node
from skippipe.cost_model import Room, device_bytes, device_layers, device_mode, room_of
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.simulator import simulate
from skippipe.timeline import Task
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster

LLAMA = Workload(MODELS["llama-8b"], sequence_tokens=2048, activation_checkpointing=True, max_slots=3)
GIB = 2**30


def test_where_the_stage_fits_one_device_each_holds_it() -> None:
    node = Node("n", "here", 1e14, 200 * GIB, devices=4)
    assert room_of(replace(node, devices=1), LLAMA, 1, 8) == Room(3, 1)
    assert room_of(node, LLAMA, 1, 8) == Room(12, 4)
    assert room_of(replace(node, device_mode=DeviceMode.SHARDED), LLAMA, 1, 8) == Room(3, 1)


@pytest.mark.parametrize(("stage", "divided"), [(0, (0, 2, 3, 3)), (1, (2, 2, 2, 2))])
def test_where_it_does_not_its_layers_are_divided(stage: int, divided: tuple[int, ...]) -> None:
    """Embedding and head take as much memory as six layers."""
    node = Node("n", "here", 1e14, 26 * GIB, devices=4)
    assert room_of(replace(node, devices=1), LLAMA, stage, 8).slots == 0
    assert room_of(replace(node, device_mode=DeviceMode.REPLICAS), LLAMA, stage, 8).slots == 0
    assert device_layers(LLAMA, stage, 8, 4) == divided
    assert device_mode(node, LLAMA, stage, 8) is DeviceMode.SHARDED
    assert room_of(node, LLAMA, stage, 8) == Room(3, 1)
    needed = device_bytes(node, LLAMA, stage, 8, 2)
    assert room_of(replace(node, memory_bytes=needed - 1), LLAMA, stage, 8).slots == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_bridges_are_on_the_last_device_alone(stage: int) -> None:
    """So the sum over the devices is what the runtime holds, and what a node with all on one device does."""
    workload = replace(LLAMA, bridge_parameters=10**9, bridge_rank=64)
    node = Node("n", "here", 1e14, GIB, devices=3, device_mode=DeviceMode.SHARDED)
    layers = device_layers(workload, stage, 6, 3)
    parts = [(0 if stage == 0 and at == 0 else 1, each) for at, each in enumerate(layers)]
    needed = [LLAMA.fixed_bytes(*part) + LLAMA.held_bytes(part[1]) for part in parts]
    bridges = workload.fixed_bytes(1, 1) - LLAMA.fixed_bytes(1, 1)
    assert bridges == 20 * 10**9
    bridges += workload.held_bytes(1) - LLAMA.held_bytes(1)
    most = max(*needed[:-1], needed[-1] + bridges)
    assert device_bytes(node, workload, stage, 6, 1) == most
    assert room_of(replace(node, memory_bytes=most), workload, stage, 6) == Room(1, 1)
    assert room_of(replace(node, memory_bytes=most - 1), workload, stage, 6).slots == 0


def two_stages(devices: int, slots: int, *lanes: tuple[int, int], upload: float | None = None) -> Plan:
    """Nodes 0, 1 and 3 hold stage 0, node 2, which has several devices, stage 1."""
    cluster = uniform_cluster(4)
    many = replace(cluster.nodes[2], devices=devices, upload_bytes_per_s=upload)
    nodes = (*cluster.nodes[:2], many, cluster.nodes[3])
    stages = (Stage(4, (0, 1, 3), (0, 1, 3)), Stage(4, (2,), (2,)))
    workload = Workload(TINY, 16, 1, len(lanes), max_slots=slots)
    return Plan(replace(cluster, nodes=nodes), workload, stages, tuple(Lane(path, 1) for path in lanes))


def on_stage_1(plan: Plan) -> dict[tuple[int, int], Task]:
    """Its tasks by lane and step."""
    return {(task.lane, task.step): task for task in simulate(plan).tasks if task.node == 2}


def test_as_many_tasks_run_side_by_side_as_there_are_devices() -> None:
    alone, together = (on_stage_1(two_stages(devices, 3, (0, 2), (1, 2))) for devices in (1, 2))
    forward_ns = alone[0, 1].end_ns - alone[0, 1].start_ns
    assert alone[1, 1].start_ns - alone[1, 1].ready_ns == forward_ns
    assert [(together[lane, 1].start_ns, together[lane, 1].device) for lane in (0, 1)] == [
        (together[0, 1].ready_ns, 0),
        (together[1, 1].ready_ns, 1),
    ]


def test_a_microbatch_stays_on_the_device_that_has_its_activations() -> None:
    """Two devices with a slot each: the third lane waits until one of the others has done its backward, though both
    devices are free meanwhile."""
    plan = two_stages(2, 1, (0, 2), (1, 2), (3, 2))
    tasks = on_stage_1(plan)
    backward_ends = [tasks[lane, 3].end_ns for lane in (0, 1)]
    assert [tasks[lane, step].device for lane in (0, 1) for step in (1, 3)] == [0, 0, 1, 1]
    assert tasks[2, 1].ready_ns < min(backward_ends) == tasks[2, 1].start_ns
    assert tasks[2, 1].device == 0


def test_messages_leave_in_the_order_in_which_tasks_end() -> None:
    """The backward of lane 0 starts before the forward of lane 1, which is shorter and ends first."""
    plan = two_stages(2, 3, (0, 2), (1, 2), upload=1e4)
    before = on_stage_1(plan)
    hop_ns, busy_ns, overtaken_ns = int(plan.costs.hop_ns[1, 2]), int(plan.costs.upload_ns[0, 2, 0]), 100_000
    late_s = (before[0, 3].start_ns + overtaken_ns - hop_ns) / 1e9  # for the forward of node 1 to take
    slow = replace(plan.cluster.nodes[1], flops_per_s=plan.workload.forward_flops(4) / late_s)
    cluster = replace(plan.cluster, nodes=(plan.cluster.nodes[0], slow, *plan.cluster.nodes[2:]))
    plan = replace(plan, cluster=cluster)
    tasks = on_stage_1(plan)
    forward, backward = tasks[1, 1], tasks[0, 3]
    assert backward.start_ns < forward.start_ns < forward.end_ns < backward.end_ns
    ready = {(task.lane, task.step): task.ready_ns for task in simulate(plan).tasks}
    back_ns = int(plan.costs.hop_ns[2, 0])
    assert ready[1, 2] == forward.end_ns + back_ns
    assert ready[0, 4] == forward.end_ns + busy_ns + back_ns
