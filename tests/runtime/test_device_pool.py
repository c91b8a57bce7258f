"""Nodes with several devices: the same training, one node to all others, and slower when a device is lost."""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skippipe.cluster import DeviceMode
from skippipe.codecs import EncodedTensor, encode
from skippipe.errors import UserError
from skippipe.model.lora import LoraConfig
from skippipe.model.model_spec import ModelSpec, parse_devices
from skippipe.model.sharded_stage import ShardedStep
from skippipe.model.stage_step import StageStep
from skippipe.model.stand_ins import StagePlace
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.planner.problem_spec import cluster_named
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.device_copies import BackgroundCopies
from skippipe.runtime.device_pool import DevicePool
from skippipe.runtime.node.copies import MovingTensor
from skippipe.runtime.node.interfaces import ALL_DEVICES, node_devices
from skippipe.runtime.node.ops import DeviceLost, Op, OpResult, OpThreads, StageTask
from skippipe.runtime.simulation.fault_injection import During, lose
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.train_role import build_node_executor
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import StageHop
from skippipe.training.build_run import build_run
from skippipe.training.job_tables import ModelConfig
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
from tests.helpers.executors import computer_of, noise
from tests.helpers.models import tiny
from tests.helpers.pretrained_jobs import job_in

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


WHOLE, DIVIDED, ENDS_APART = [range(4)], [range(2), range(2, 4)], [range(0), range(4)]


def stage_0(spec: ModelSpec, parts: list[range], optimizer: str, *, split: bool) -> StageStep | ShardedStep:
    """Stage 0 of four, on one device or divided over several; bridges begin at the last."""
    steps = [
        StageStep(
            spec,
            part,
            OptimConfig(optimizer),
            ends=at == 0,
            split_backward=split,
            place=StagePlace(0, 4) if at == len(parts) - 1 else None,
        )
        for at, part in enumerate(parts)
    ]
    return ShardedStep(steps) if len(steps) > 1 else steps[0]


@pytest.mark.parametrize(
    ("parts", "optimizer", "spec", "early"),
    [
        (DIVIDED, "adamw8bit", {}, 0.0),
        (DIVIDED, "sgd", {"bridges": 2}, 0.3),
        (DIVIDED, "muon", {"lora": LoraConfig(2)}, 0.0),
        (ENDS_APART, "adamw", {"lora": LoraConfig(2)}, 0.3),
    ],
    ids=["8 bits", "bridges and early exit", "lora", "lora, no layer beside the ends"],
)
def test_a_divided_stage_computes_what_one_device_does(
    parts: list[range], optimizer: str, spec: dict[str, Any], early: float
) -> None:
    """To the last bit, if nothing is added up in another order; and one can have the state of the other."""
    last_bits = 1e-5 if early and "bridges" in spec else 0.0
    config = tiny("llama", hidden_size=64, vocab_size=96, num_hidden_layers=4)
    models = [stage_0(ModelSpec(config, 3, **spec), each, optimizer, split=bool(early)) for each in (WHOLE, parts)]
    random = torch.Generator().manual_seed(1)
    for number in range(3):
        tokens, labels = torch.randint(0, 96, (2, 2, 6), generator=random)
        hop = StageHop(0, 3, 2) if number else None
        made = []
        for each in models:
            outputs = each.begin((0, number), tokens, hop=hop)
            loss, back = each.head((0, number), outputs, labels, early=early, share=0.5)
            assert each.backward((0, number), back) is None
            if early:
                each.weight_gradients((0, number))
            each.weights.collect()
            made.append((outputs, loss, back, each.weights.gradient.clone()))
            each.weights.step(1e-2, 0.5)
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other, rtol=last_bits, atol=last_bits / 10)
    whole, divided = (each.weights for each in models)
    assert whole.state_values == divided.state_values and whole.trained_values == divided.trained_values
    state = whole.read_state(0, whole.state_values)
    torch.testing.assert_close(divided.read_state(0, len(state)), state, rtol=last_bits, atol=last_bits / 10)
    fresh = stage_0(ModelSpec(config, 4, **spec), parts, optimizer, split=False).weights
    for part in divided.state_parts:
        for first in range(part.start, part.stop, 768):
            fresh.write_state(first, state[first : min(first + 768, part.stop)])
    assert torch.equal(fresh.read_state(0, len(state)), state)


def test_blocks_of_8_bits_do_not_lie_across_devices() -> None:
    with pytest.raises(UserError, match="blocks of 256 numbers would lie across them"):
        stage_0(ModelSpec(tiny("llama", num_hidden_layers=4)), DIVIDED, "adamw8bit", split=False)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw"])
def test_what_an_optimizer_cannot_divide_is_refused_before_nodes_start(tmp_path: Path, optimizer: str) -> None:
    cluster, _ = cluster_named("datacentre:4")
    nodes = tuple(replace(node, devices=2, device_mode=DeviceMode.SHARDED) for node in cluster.nodes)
    replace(cluster, nodes=nodes).save(tmp_path / "cluster.json")
    tiny("llama", num_hidden_layers=6).save_pretrained(tmp_path / "model")
    job = job_in(
        tmp_path,
        "",
        cluster=str(tmp_path / "cluster.json"),
        model=ModelConfig(config=str(tmp_path / "model")),
        learning=OptimConfig(optimizer),
    )
    if optimizer == "adamw":
        build_run(job)
        return
    with pytest.raises(UserError) as caught:
        build_run(job)
    said = str(caught.value)
    assert said.startswith("learning.optimizer: adamw8bit, and '") and "\n" not in said
    assert " over its 2 devices (devices and device_mode in the cluster file): a stage cannot be divided" in said
    assert "hidden size that is no multiple of 256" in said


@pytest.mark.parametrize(("device", "during"), [(1, "forward"), (0, "backward"), (0, "averaging"), (2, "step")])
def test_a_lost_device_is_a_slower_node(device: int, during: During) -> None:
    """No node is lost; what it has computed is computed again, and counts once."""
    plan = with_devices(plan_of(FULL)[0], {5: 3})
    cluster = VirtualCluster(plan, SETTINGS, faults=[lose(device, node=5).at(iteration=1, during=during)])
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    kinds = [event.kind for _, event in cluster.events]
    assert kinds.count("slow") == kinds.count("restarted") == 1 and "lost" not in kinds
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


class RecordedCopies(BackgroundCopies):
    """Copies of one device; `ahead` says of each tensor that a task was given whether it was brought there before."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.ahead: list[bool] = []

    def decode(self, encoded: EncodedTensor) -> torch.Tensor:
        self.ahead.append(isinstance(encoded, MovingTensor) and encoded.copy in self._ahead)
        return super().decode(encoded)


def test_what_comes_is_copied_to_the_device_that_computes_on_it() -> None:
    """Before its task begins, and without a change to what is computed."""
    plan, spec = plan_of(FULL)
    plan = with_devices(plan, {5: 2})
    losses = []
    for beside in (False, True):
        computers = tensors_of(plan, spec)
        pool = computers[5]
        assert isinstance(pool, DevicePool)
        copies = [RecordedCopies() for _ in pool.devices]
        for device, each in pool.devices.items() if beside else ():
            each._copies = copies[device]
        cluster = VirtualCluster(plan, SETTINGS, executors=computers)
        cluster.run()
        assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
        losses.append([report.loss for report in cluster.reports])
    assert losses[0] == losses[1]
    assert all(len(each.ahead) >= 2 * ITERATIONS for each in copies)
    assert all(all(each.ahead) for each in copies)


def test_what_was_copied_to_another_device_is_copied_again() -> None:
    """A guess may be wrong, and a device may fail."""
    first, second = BackgroundCopies("cpu"), RecordedCopies()
    values = torch.arange(6.0).reshape(2, 3)
    came = encode(values, "fp32")
    guessed = first.bring(came)
    assert torch.equal(second.decode(guessed), values)
    assert second.ahead == [False]
    assert guessed is not came and torch.equal(first.decode(guessed), values)
    pool = DevicePool([computer_of(1), computer_of(1)])
    pool.lose(1, "it is hot")
    assert pool.prefetch(came, 1) is came


class BrokenDevice(StageExecutor):
    """A device that fails in every task, as soon as the other one is in a task, too."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def run(self, _work: Op) -> Any:
        self._both.wait(TIMEOUT_S)
        raise torch.AcceleratorError("it is hot")

    def take_over(self, former: StageExecutor) -> None:
        """There is nothing to keep."""


def test_of_devices_that_fail_at_the_same_time_one_is_reported_and_the_last_ends_the_node() -> None:
    both = threading.Barrier(2)
    pool, found = DevicePool([BrokenDevice(both), BrokenDevice(both)]), []
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within what one does about its device
    try:
        with ThreadPoolExecutor(2) as threads:
            for result in [threads.submit(pool.run, StageTask(0, at, 0, 1, 2, 0, device=at)) for at in range(2)]:
                found.append(result.exception(TIMEOUT_S) or result.result())
    finally:
        sys.setswitchinterval(switch_s)
    assert sorted(type(each).__name__ for each in found) == ["AcceleratorError", "DeviceLost"]
    assert len(pool.devices) == 1


def test_the_loss_of_a_device_is_reported_once_while_others_compute() -> None:
    """Another task may begin while the loss is written to the log."""
    pool = DevicePool([computer_of(1), BrokenDevice(threading.Barrier(1))])
    begun: list[Any] = []

    class Other(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
            begun.append(pool.run(StageTask(0, 1, 0, 1, 2, 0, encode(noise(1), "fp32"), device=0)))

    log, handler = logging.getLogger("skippipe.runtime.device_pool"), Other()
    log.addHandler(handler)
    try:
        lost = pool.run(StageTask(0, 0, 0, 1, 2, 0, device=1))
    finally:
        log.removeHandler(handler)
    assert lost == DeviceLost(1, "it is hot")
    assert [type(each) for each in begun] == [OpResult]


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

    def prefetch(self, given: object, _device: int) -> object:
        return given


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
    with pytest.raises(UserError, match=r"^device 'cuda:3': torch .* or use cpu$"):
        parse_devices("cuda:0-3")


def test_nodes_that_a_job_starts_on_one_machine_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [node_devices(None, "cuda", 1, before) for before in range(5)] == [[f"cuda:{n}"] for n in (0, 1, 2, 3, 0)]
    assert node_devices(None, "cuda", 2, 3) == ["cuda:3", "cuda:0"]
    assert node_devices(ALL_DEVICES, "cuda", 1, 3) == [f"cuda:{number}" for number in range(4)]
    assert node_devices("cuda:1-2", "cuda", 1, 3) == ["cuda:1", "cuda:2"]
