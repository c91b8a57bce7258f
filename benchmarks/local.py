"""All nodes on this machine, nothing emulated: tokens a second against one process, start-up, memory.

    python -m benchmarks.local [--iterations 12]

Speed: a LLaMA of 8 layers over 4 nodes with one thread each, a full pipeline, against one process with one thread and
with a thread a core, in alternating rounds. Start-up and memory: 20 nodes with a tiny model; the time from the first
fork, after imports, until all nodes are ready, and each node's private memory beyond its weights, gradients and
optimizer state.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from skippipe.cluster import Cluster, Node
from skippipe.data.prepare import prepare
from skippipe.data.token_file import TokenFile
from skippipe.launch.fork_server import ProcessPool
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model_shape import ModelShape
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node_config import NodeConfig
from skippipe.training.reference import ReferenceTrainer
from skippipe.training.run import Run
from skippipe.workload import Workload

LEARNING = OptimConfig(warmup=2, iterations=1000)


@dataclass
class Reports(Callback):
    """The reports of a run's iterations."""

    all: list[IterationReport] = field(default_factory=list)

    def iteration_done(self, report: IterationReport) -> None:
        self.all.append(report)

    @property
    def seconds(self) -> list[float]:
        return [report.seconds for report in self.all]


@dataclass
class StartAndMemory(Callback):
    began: float = field(default_factory=time.monotonic)
    ready_s: float | None = None
    """From the start until the first iteration began."""
    pool: ProcessPool | None = None
    private_bytes: dict[str, int] = field(default_factory=dict)

    def started(self, pool: ProcessPool) -> None:
        self.pool = pool

    def iteration_done(self, report: IterationReport) -> None:
        if self.ready_s is None:
            self.ready_s = time.monotonic() - self.began - report.seconds
        if self.pool is not None:
            self.private_bytes = {name: private_bytes(pid) for name, pid in self.pool.pids.items()}


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def this_machine(nodes: int, devices: int = 1) -> Cluster:
    """Nodes on this machine, whose links cost next to nothing."""
    machines = tuple(Node(f"n{index}", "here", 1e10, 2**34, devices=devices) for index in range(nodes))
    return Cluster("this machine", machines, np.full((nodes, nodes), 1e-5), np.full((nodes, nodes), 1e9))


def run_of(
    plan: Plan,
    spec: ModelSpec,
    tokens: TokenFile,
    output: str | Path,
    iterations: int,
    learning: OptimConfig = LEARNING,
    rendezvous: str | None = None,
) -> Run:
    """A run of the plan; `launch_local` makes every node a process."""
    given = plan, spec.config.to_dict(), spec.seed, learning, str(tokens.folder), tokens.fingerprint
    settings = CoordinatorSettings(learning, iterations)
    return Run(NodeConfig(*given, rendezvous=rendezvous), spec, tokens.tokenizer(), Path(output), settings)


def speed(tokens: TokenFile, rounds: int, iterations: int) -> None:
    shape = ModelShape("eight layers", 8, 256, 4, 4, 64, 704, tokens.vocabulary)
    workload = Workload(shape, 256, 2, 16, wire_dtype="bf16", compute_dtype="fp32", max_slots=4)
    stages = tuple(Stage(2, (index,), (index,)) for index in range(4))
    plan = Plan(this_machine(4), workload, stages, tuple(Lane((0, 1, 2, 3), 4) for _ in range(4)))
    spec = ModelSpec(llama_config(shape))
    per_iteration = plan.microbatches * 2 * 256
    alone: dict[int, list[float]] = {threads: [] for threads in sorted({1, os.cpu_count() or 1})}
    nodes = []
    for _ in range(rounds):
        torch.set_num_threads(1)  # what is forked must not have threads
        reports = Reports()
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(plan, spec, tokens, folder, iterations)
            run.launch_local(reports)
        nodes += reports.seconds[1:]
        for threads, taken in alone.items():
            torch.set_num_threads(threads)
            oracle = ReferenceTrainer(plan, spec, LEARNING, run.node_config.sampler())
            for number in range(iterations):
                began = time.monotonic()
                oracle.iteration(number)
                if number:
                    taken.append(time.monotonic() - began)
    nodes_s = median(nodes)
    for threads, taken in alone.items():
        print(f"one process, {threads} threads: {per_iteration / median(taken):,.0f} tokens/s")
    best_s = min(median(taken) for taken in alone.values())
    print(
        f"4 nodes, a thread each: {per_iteration / nodes_s:,.0f} tokens/s, {best_s / nodes_s:.2f} of the best "
        "(goal 0.8)"
    )


def start_and_memory(tokens: TokenFile) -> None:
    shape = ModelShape("tiny", 6, 64, 4, 4, 16, 192, tokens.vocabulary)
    workload = Workload(shape, 64, 2, 10, wire_dtype="bf16", compute_dtype="fp32", max_slots=3)
    sizes = (5, 3, 3, 3, 3, 3)
    firsts = [sum(sizes[:index]) for index in range(6)]
    members = [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
    lanes = [
        Lane((data, *(members[stage][(data + turn) % 3] for stage in range(1, 6) if (stage + data) % 5 >= 2)), 1)
        for turn in range(2)
        for data in range(5)
    ]
    stages = tuple(Stage(1, nodes, nodes) for nodes in members)
    plan = Plan(this_machine(20), workload, stages, tuple(lanes))
    watch = StartAndMemory()
    with tempfile.TemporaryDirectory() as folder:
        run_of(plan, ModelSpec(llama_config(shape)), tokens, folder, 5).launch_local(watch, watch.started)
    print(f"20 nodes ready after {watch.ready_s:.1f} s (goal 15)")
    beyond = {}
    for name, private in watch.private_bytes.items():
        stage = plan.stage_of[plan.cluster.number[name]]
        parameters = workload.stage_parameters(stage, 1)
        beyond[name] = private - 12 * parameters - OPTIMIZERS[LEARNING.optimizer].held_bytes(parameters)
    worst = max(beyond, key=lambda name: beyond[name])
    print(
        f"private memory beyond weights, gradients and optimizer: at most {beyond[worst] / 1e6:.0f} MB, "
        f"median {median(beyond.values()) / 1e6:.0f} MB (goal 120)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokens = prepare("classics", 2048)
    start_and_memory(tokens)
    speed(tokens, asked.rounds, asked.iterations)


if __name__ == "__main__":
    main()
