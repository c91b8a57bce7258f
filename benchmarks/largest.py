"""The largest model that one card trains through nodes, and its memory against what the planner counts.

    python -m benchmarks.largest [--model llama-8b] [--stages 6] [--optimizer adamw8bit] [--compiled]

Nodes are the state machines that run in processes, all in one thread on the card, each with its own stage and
optimizer; activations are recomputed, and sums of gradients would be in host memory if stages had replicas. Weights are
drawn on the card. The peak is what torch has allocated at most since all stages were built; the planner's sum is of all
nodes, each with as many microbatches as it has lanes, where one computes at a time. Every iteration prints a line, with
the seconds of each kind of operation; what is said at the end is said when it is interrupted, too.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import LEAST_LANES, device_name, full_pipeline, peak_bytes, stage_executor, synchronize
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model_shape import MODELS
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.node.ops import Op, StageTask
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.workload import Workload

TEXT_TOKENS = 2**16  # of the text, which is random and seen again and again: the loss must fall


def counted_bytes(plan: Plan) -> int:
    """What the planner counts for all nodes, as many microbatches on each as there are lanes; only one computes."""
    work, lanes = plan.workload, len(plan.lanes)
    working = [work.working_bytes(stage, layers) for stage, layers in enumerate(plan.layers)]
    held = sum(
        work.fixed_bytes(number, stage.layers) + lanes * work.held_bytes(stage.layers)
        for number, stage in enumerate(plan.stages)
    )
    return held - sum(working) + max(working)


class TimedExecutor:
    """An executor that counts the seconds of its operations, each to its end on the card."""

    def __init__(self, executor: StageExecutor, seconds: dict[str, float]) -> None:
        self._executor = executor
        self._seconds = seconds

    def run(self, work: Op) -> Any:
        began = time.perf_counter()
        result = self._executor.run(work)
        synchronize()
        kind = type(work).__name__
        if isinstance(work, StageTask):
            kind = "head" if work.step == work.length else "forward" if work.step < work.length else "backward"
        self._seconds[kind] += time.perf_counter() - began
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class Progress(Callback):
    """Prints a line for every iteration, and what was found after the last one: final weights are gathered then."""

    def __init__(self, plan: Plan, iterations: int, seconds: dict[str, float]) -> None:
        self._plan = plan
        self._iterations = iterations
        self._losses: list[float] = []
        self._took_s: list[float] = []
        self._seconds = seconds
        self._began = time.perf_counter()

    def iteration_done(self, report: IterationReport) -> None:
        now = time.perf_counter()
        self._losses.append(report.loss)
        self._took_s.append(now - self._began)
        spent = ", ".join(
            f"{kind} {taken:.2f}" for kind, taken in sorted(self._seconds.items(), key=lambda each: -each[1])[:6]
        )
        print(
            f"iteration {len(self._losses)}: loss {report.loss:.3f}, {self._took_s[-1]:.2f} s, "
            f"peak {peak_bytes() / 2**30:.1f} GiB ({spent})",
            flush=True,
        )
        if len(self._losses) == self._iterations:
            self.summarise()
        self._seconds.clear()
        self._began = time.perf_counter()

    def summarise(self) -> None:
        if not self._losses:
            return
        work, device = self._plan.workload, device_name("cuda" if peak_bytes() else "cpu")
        peak, counted = peak_bytes(), counted_bytes(self._plan)
        print(
            f"{device}: {work.model.parameters / 1e9:.2f}B parameters, {len(self._plan.stages)} nodes, "
            f"{work.optimizer}: {len(self._losses)} iterations of {self._plan.microbatches} microbatches in "
            f"{sum(self._took_s):.0f} s, {median(self._took_s):.2f} s each, "
            f"loss {self._losses[0]:.3f} to {self._losses[-1]:.3f}\n"
            f"peak {peak / 2**30:.1f} GiB, the planner counts {counted / 2**30:.1f}: {peak / counted - 1:+.1%} "
            f"(goal 5%); {peak / work.model.parameters:.2f} bytes a parameter",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--stages", type=int, default=6)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw8bit")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="layers, and the optimizer's step")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    work = Workload(
        MODELS[asked.model],
        asked.sequence,
        asked.samples,
        max(LEAST_LANES, asked.stages),
        activation_checkpointing=True,
        optimizer=asked.optimizer,
        offload="averaging",
    )
    plan = full_pipeline(work, asked.stages, asked.device)
    work = plan.workload
    spec = ModelSpec(llama_config(work.model), seed=0)
    learning = OptimConfig(asked.optimizer, rate=1e-4, warmup=5, iterations=1000)
    text = np.random.default_rng(0).integers(0, min(256, work.model.vocab), TEXT_TOKENS)
    sampler = BatchSampler(text, work.sequence_tokens, 0, plan.microbatches, work.samples_per_microbatch)
    began, seconds = time.perf_counter(), defaultdict[str, float](float)
    executors = {}
    for node, stage in plan.stage_of.items():
        with torch.device(asked.device):  # weights are drawn there
            made = stage_executor(
                plan, stage, spec, learning, sampler, asked.device, recompute=True, compiled=asked.compiled
            )
        executors[node] = TimedExecutor(made, seconds)
        print(f"stage {stage} built after {time.perf_counter() - began:.0f} s", flush=True)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was found is said
    progress = Progress(plan, asked.iterations, seconds)
    alone = RecoverySettings(backup_every=0, fault_tolerant=False)
    settings = CoordinatorSettings(learning, asked.iterations, recovery=alone)
    nodes = VirtualCluster(plan, settings, executors, callback=progress)
    try:
        nodes.run()
        assert not nodes.coordinator.failure, nodes.coordinator.failure
    except KeyboardInterrupt:
        progress.summarise()


if __name__ == "__main__":
    main()
