"""The largest model that one card trains through nodes, and its memory against what the planner counts.

    python -m benchmarks.largest [--model llama-8b] [--stages 6] [--optimizer adamw8bit] [--iterations 20]

Nodes are the state machines that run in processes, all in one thread on the card, each with its own stage and
optimizer; activations are recomputed, and sums of gradients are in host memory. The peak is what torch has allocated at
most since all stages were built; the planner's sum is of all nodes, each with as many microbatches as it has lanes.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from benchmarks.gpu import device_name, full_pipeline, peak_bytes, stage_executor
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model_shape import MODELS
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.workload import Workload

TEXT_TOKENS = 2**16  # of the text, which is random and seen again and again: the loss must fall


def counted_bytes(plan: Plan) -> int:
    """What the planner counts for all nodes, as many microbatches on each as there are lanes."""
    work, lanes = plan.workload, len(plan.lanes)
    return sum(
        work.fixed_bytes(number, stage.layers) + lanes * work.held_bytes(stage.layers)
        for number, stage in enumerate(plan.stages)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--stages", type=int, default=6)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw8bit")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    work = Workload(
        MODELS[asked.model],
        asked.sequence,
        asked.samples,
        max(4, asked.stages),
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
    began = time.perf_counter()
    executors = {}
    for node, stage in plan.stage_of.items():
        executors[node] = stage_executor(plan, stage, spec, learning, sampler, asked.device, recompute=True)
        print(f"stage {stage} built after {time.perf_counter() - began:.0f} s", flush=True)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    nodes = VirtualCluster(plan, CoordinatorSettings(learning, asked.iterations), executors)
    nodes.run()
    assert not nodes.coordinator.failure, nodes.coordinator.failure
    took_s, losses = time.perf_counter() - began, [report.loss for report in nodes.reports]
    peak, counted = peak_bytes(), counted_bytes(plan)
    print(
        f"{device_name(asked.device)}: {work.model.parameters / 1e9:.2f}B parameters, {asked.stages} nodes, "
        f"{asked.optimizer}: {len(losses)} iterations in {took_s:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}\n"
        f"peak {peak / 2**30:.1f} GiB, the planner counts {counted / 2**30:.1f}: {peak / counted - 1:+.1%} (goal 5%); "
        f"{peak / work.model.parameters:.2f} bytes a parameter",
        flush=True,
    )


if __name__ == "__main__":
    main()
