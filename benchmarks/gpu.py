"""One GPU, a 500M LLaMA in bf16: how much of the card's matrix rate one process uses, and what nodes cost on top.

    python -m benchmarks.gpu [--seconds 60] [--samples 16] [--sequence 1024]
    python -m benchmarks.gpu --processes --stages 2 [--security none]

The rate of the card is measured in the same run, with a large bf16 product. Model operations are those of the layers
and the head, forward once and backward twice; nothing that is recomputed or thrown away counts. Nodes are the same
state machines that run in processes, here in one thread on one card, each with its own stage and optimizer. With
`--processes` they are processes and send real bytes, encrypted; without NVIDIA's MPS these share the card in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from skippipe.cluster import Cluster, Node
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.model_shape import MODELS
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node.copies import TO_DEVICE
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.training.reference import ReferenceTrainer
from skippipe.workload import Workload

MICROBATCHES = 12
RECORDED = 4  # one of so many iterations is recorded, task by task
LOG_CHARACTERS = 4_000  # of a node's log that are shown if the run fails
LEAST_LANES = 4  # with fewer the card would wait for messages that are on their way


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_rate(device: str, repeats: int = 50) -> float:
    size = 8192 if device == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - began)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def stage_executor(
    plan: Plan, stage: int, spec: ModelSpec, learning: OptimConfig, sampler: BatchSampler, device: str, **options: Any
) -> StageExecutor:
    """What computes a stage in this process; `options` are those of `StageStep`."""
    tasks = StageStep(
        spec,
        layer_ranges(plan.layers)[stage],
        learning,
        ends=stage == 0,
        device=device,
        compute_dtype=plan.workload.compute_dtype,
        **options,
    )
    return StageExecutor(stage, plan.layers, plan.workload, spec, tasks, sampler, packing=False)


def full_pipeline(workload: Workload, stages: int, device: str = "cuda") -> Plan:
    """One node a stage, all on one card, and every microbatch through all of them. A CPU computes in fp32."""
    compute = "bf16" if device == "cuda" else "fp32"
    lanes = max(stages, LEAST_LANES)
    nodes = tuple(Node(f"n{index}", "here", 4e14, 2**37) for index in range(stages))
    square = (stages, stages)
    cluster = Cluster("one card", nodes, np.full(square, 1e-6), np.full(square, 1e12))
    workload = replace(workload, wire_dtype="bf16", compute_dtype=compute, max_slots=lanes)
    layers = workload.layer_split(stages)
    held = tuple(Stage(count, (index,), (index,)) for index, count in enumerate(layers))
    path = tuple(range(stages))
    return Plan(cluster, workload, held, tuple(Lane(path, workload.microbatches // lanes) for _ in range(lanes)))


def pipeline_of(asked: argparse.Namespace) -> Plan:
    model = MODELS[asked.model]
    return full_pipeline(Workload(model, asked.sequence, asked.samples, MICROBATCHES), asked.stages, asked.device)


def seconds_each(iteration: Callable[[int], object], budget_s: float) -> float:
    """Median over what fits into the budget; three iterations have warmed up and compiled before."""
    synchronize()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - began < budget_s:
        start = time.perf_counter()
        iteration(3 + len(taken))
        synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="llama-500m")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--security", choices=("curve", "none"), default="curve")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    processes_s = as_processes(asked) if asked.processes else None
    torch.set_float32_matmul_precision("high")
    plan = pipeline_of(asked)
    work = plan.workload
    spec = ModelSpec(llama_config(work.model), seed=0)
    learning = OptimConfig(rate=3e-4, warmup=10, iterations=1000)
    tokens = np.random.default_rng(0).integers(0, work.model.vocab, 4_000_000)
    sampler = BatchSampler(tokens, work.sequence_tokens, 0, plan.microbatches, work.samples_per_microbatch)
    per_iteration = plan.microbatches * work.samples_per_microbatch * work.sequence_tokens
    operations = plan.microbatches * (3 * work.forward_flops(work.model.layers) + work.head_flops(1))
    rate, compiled = matrix_rate(asked.device), asked.device == "cuda"
    print(f"{device_name(asked.device)}: large bf16 products at {rate / 1e12:.3g} TFLOP/s", flush=True)

    oracle = ReferenceTrainer(plan, spec, learning, sampler, device=asked.device, compiled=compiled)
    losses = [oracle.iteration(number).loss for number in range(3)]
    alone_s = seconds_each(oracle.iteration, asked.seconds)
    share = operations / alone_s / rate
    print(
        f"one process: {alone_s:.3f} s an iteration of {per_iteration:,} tokens, "
        f"{per_iteration / alone_s:,.0f} tokens/s, {operations / alone_s / 1e12:.0f} TFLOP/s, "
        f"{share:.1%} of the matrix rate (goal 35%), {peak_bytes() / 2**30:.0f} GiB",
        flush=True,
    )
    if processes_s is not None:
        print(f"{asked.stages} processes: {alone_s / processes_s:.2f} of one process (goal 0.8 for two)", flush=True)
        return
    del oracle
    torch.cuda.empty_cache()

    computers = {
        node: stage_executor(plan, stage, spec, learning, sampler, asked.device, compiled=compiled)
        for node, stage in plan.stage_of.items()
    }
    done: list[float] = []

    class Clock(Callback):
        def iteration_done(self, report: IterationReport) -> None:  # noqa: ARG002
            synchronize()
            done.append(time.perf_counter())

    count = max(8, round(asked.seconds / alone_s))
    nodes = VirtualCluster(plan, CoordinatorSettings(learning, count), computers, callback=Clock())
    nodes.run()
    assert not nodes.coordinator.failure, nodes.coordinator.failure
    taken = sorted(b - a for a, b in pairwise(done[2:]))
    nodes_s = taken[len(taken) // 2]
    print(
        f"{asked.stages} nodes on the card: {nodes_s:.3f} s an iteration, "
        f"{alone_s / nodes_s:.2f} of one process (goal 0.8)"
    )
    apart = max(abs(a - b.loss) / a for a, b in zip(losses, nodes.reports[:3], strict=True))
    print(f"losses of the first three iterations differ by {apart:.1e} at most", flush=True)


def copy_wait_s(report: IterationReport) -> dict[int, float]:
    """Node → seconds of a recorded iteration in which its tasks were begun and waited for what they need to come to the
    device."""
    waited: dict[int, float] = {}
    for node, rows in report.copies.items():
        begun_ns = {tuple(task[:3]): task[4] for task in report.tasks.get(node, ())}
        came = ((tuple(row[:3]), row[5]) for row in rows if row[3] == TO_DEVICE)
        waited[node] = sum(max(0, end_ns - begun_ns.get(task, end_ns)) for task, end_ns in came) / 1e9
    return waited


def as_processes(asked: argparse.Namespace) -> float:
    """Seconds of an iteration. Forked before this process touches the card."""
    from skippipe.data.prepare import prepare
    from skippipe.runtime.node_config import NodeConfig
    from skippipe.training.run import Run

    plan = pipeline_of(asked)
    spec = ModelSpec(llama_config(plan.workload.model), seed=0)
    tokens = prepare("classics", 2048)
    learning = OptimConfig(rate=3e-4, warmup=10, iterations=1000)
    node_config = NodeConfig(
        plan,
        spec.config.to_dict(),
        0,
        learning,
        str(tokens.folder),
        tokens.fingerprint,
        asked.device,
        compiled=asked.device == "cuda",
    )
    taken: list[float] = []
    waited: list[float] = []

    class Clock(Callback):
        def iteration_done(self, report: IterationReport) -> None:
            taken.append(report.seconds)
            if report.copies:
                waited.append(max(copy_wait_s(report).values()) / report.seconds)

    with tempfile.TemporaryDirectory() as folder:
        count = max(8, round(asked.seconds))
        settings = CoordinatorSettings(node_config.learning, count, recorded=range(4, count, RECORDED))
        run = Run(node_config, spec, tokens.tokenizer(), Path(folder), settings, security=asked.security)
        try:
            run.launch_local(Clock())
        except BaseException:
            for log in Path(folder).glob("logs/*"):
                print(log.name, log.read_text()[-LOG_CHARACTERS:], sep="\n", flush=True)
            raise
    per_iteration = plan.microbatches * asked.samples * asked.sequence
    each_s = median(taken[3:])
    print(
        f"{asked.stages} processes on the card: {each_s:.3f} s an iteration, {per_iteration / each_s:,.0f} tokens/s",
        flush=True,
    )
    if waited:
        print(f"a node's tasks wait for copies for {median(waited):.2%} of an iteration (goal 3%)", flush=True)
    return each_s


if __name__ == "__main__":
    main()
