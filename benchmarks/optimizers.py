"""Optimizers on one device: bytes a parameter, seconds of a step, whether state in host memory changes a bit, and what
it costs an iteration.

    python -m benchmarks.optimizers --parameters 1e9 --compiled   # on a GPU
    python -m benchmarks.optimizers --device cpu --parameters 2e6

First a stage without a model: weights, gradients, the sum of gradients as after averaging, and the optimizer's state.
Bytes are those that torch has allocated on the card, before the step and at most, against what the planner counts. With
--compiled, steps that torch.compile makes kernels of are measured in this form, too, as nodes with `compute.compiled`
take them. Then whole iterations of a stage of as many parameters: forward and backward passes of `--microbatches`, the
norm and the step, with AdamW's state on the device and in host memory, in turns.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.gpu import synchronize
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.collectives.schedule import Averaging
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model.stage_step import StageStep
from skippipe.model_shape import MODELS, ModelShape
from skippipe.optim.config import OptimConfig
from skippipe.workload import Workload

STEPS = 5
SEQUENCE = 1024
TURNS = 3
KINDS = (
    ("adamw", "none"),
    ("adamw", "averaging"),
    ("adamw", "optimizer"),
    ("adamw8bit", "none"),
    ("adamw8bit", "averaging"),
    ("adamw8bit", "optimizer"),
    ("muon", "none"),
    ("sgd", "none"),
)
COMPILED = ("adamw8bit",)  # of many small operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", choices=("steps", "iterations"))
    parser.add_argument("--microbatches", type=int, nargs="*", default=[4, 10, 24], help="of an iteration")
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch, in sequences of 1024")
    given = parser.parse_args()
    if given.only != "iterations":
        steps(given)
    if given.only != "steps":
        iterations(given)


def steps(given: argparse.Namespace) -> None:
    device = torch.device(given.device)
    width = 4096 if device.type == "cuda" else 256
    rows = max(1, round(given.parameters / width**2))
    shape: ModelShape = replace(MODELS["llama-8b"], vocab=1)
    print(f"{device}: {rows * width**2 / 1e6:.0f}M parameters in matrices of {width} x {width}")
    first: dict[tuple[str, bool], torch.Tensor] = {}
    kinds = [(*kind, False) for kind in KINDS]
    kinds += [(*kind, True) for kind in KINDS if given.compiled and kind[0] in COMPILED]
    for optimizer, offload, compiled in kinds:
        counted = Workload(
            shape, optimizer=optimizer, offload=offload, adapter_parameters=rows * width**2, compute_dtype="fp32"
        )
        held = counted.fixed_bytes(1, 1) - counted.frozen_bytes(1, 1) - counted.working_bytes(1, 1)
        before_b, peak_b, step_s, end = measured(device, rows, width, optimizer, offload, compiled)
        same = ""
        if offload == "none":
            first[optimizer, compiled] = end
            if compiled:
                apart = (end - first[optimizer, False]).abs().max()
                same = f", weights differ by {apart:.1g} at most from those that are not compiled"
        else:
            same = ", same bits" if torch.equal(end, first[optimizer, compiled]) else ", OTHER BITS"
        print(
            f"{optimizer:<10} {offload:<10} {'compiled' if compiled else '':<9}"
            f"{held / rows / width**2:6.2f} bytes a parameter counted, {before_b:6.2f} held, {peak_b:6.2f} in a step; "
            f"{1e3 * step_s:8.1f} ms a step{same}",
            flush=True,
        )


def measured(
    device: torch.device, rows: int, width: int, optimizer: str, offload: str, compiled: bool
) -> tuple[float, float, float, torch.Tensor]:
    """Bytes a parameter between steps and at most, seconds of a step with its norm, and some of the weights in the
    end."""
    random = torch.Generator(device).manual_seed(1)
    named = [
        (f"model.layers.{row}.weight", nn.Parameter(torch.randn(width, width, device=device, generator=random) / 50))
        for row in range(rows)
    ]
    weights = FlatParams(named, OptimConfig(optimizer), offload=offload == "optimizer", compiled=compiled)
    named.clear()
    averager = GradientAverager(weights.gradient, "fp32", offload != "none")
    took_s = []
    before_b = peak_b = 0.0
    for step in range(STEPS):
        weights.gradient.normal_(generator=random)
        summed = summed_alone(averager)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before_b = torch.cuda.memory_allocated() / rows / width**2
        began = time.perf_counter()
        clipped_step(weights, summed)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak_b = torch.cuda.max_memory_allocated() / rows / width**2
        took_s.append(time.perf_counter() - began)
        averager.close(followed=True)
        assert weights.steps == step + 1
    return before_b, peak_b, min(took_s), weights.values[: 2**20].cpu().clone()


def summed_alone(averager: GradientAverager) -> Tensor:
    """The sum of gradients as this node would leave it after averaging with another, of which nothing came."""
    averager.begin(Averaging((0, 1)).schedule)
    for piece in range(2):
        averager.contribute(piece, [], total=True)
    return averager.summed


def clipped_step(weights: FlatParams, summed: Tensor) -> None:
    norm = weights.squared_norm(2, summed)
    weights.step(1e-4, min(1.0, norm**-0.5), summed)


def iterations(given: argparse.Namespace) -> None:
    """What state in host memory costs iterations of several lengths."""
    card = given.device != "cpu"
    shape = MODELS["llama-1.5b" if card else "llama-tiny"]
    layers = max(1, round(given.parameters / shape.layer_parameters)) if card else 2
    sequence = min(SEQUENCE, given.tokens)
    stages = {
        offload: StageStep(
            ModelSpec(llama_config(replace(shape, layers=1 + layers)), seed=0),
            range(1, 1 + layers),
            OptimConfig("adamw"),
            ends=False,
            device=given.device,
            compute_dtype="bf16" if card else "fp32",
            compiled=given.compiled,
            offload=offload,
        )
        for offload in (False, True)
    }
    averagers = {
        offload: GradientAverager(stage.weights.gradient, "fp32", offload) for offload, stage in stages.items()
    }
    inputs, back = torch.randn(2, given.tokens // sequence, sequence, shape.hidden, device=given.device) / 100
    print(
        f"a stage of {stages[False].weights.values.numel() / 1e6:.0f}M parameters, {given.tokens:,} tokens a microbatch"
    )
    for microbatches in given.microbatches:
        took_s: dict[bool, list[float]] = {False: [], True: []}
        for offload in (*took_s, *[each for _ in range(TURNS) for each in took_s]):  # the first two warm up
            took_s[offload].append(iteration_s(stages[offload], averagers[offload], inputs, back, microbatches))
        here_s, host_s = (median(each[1:]) for each in took_s.values())
        print(
            f"{microbatches * given.tokens:8,} tokens an iteration: {here_s:.3f} s with state on the device, "
            f"{host_s:.3f} s in host memory: {host_s / here_s:.2f}",
            flush=True,
        )


def iteration_s(stage: StageStep, averager: GradientAverager, inputs: Tensor, back: Tensor, microbatches: int) -> float:
    synchronize()
    began = time.perf_counter()
    stage.weights.gradient.zero_()
    for number in range(microbatches):
        key = (0, number)
        stage.forward(key, inputs)
        stage.backward(key, back)
    clipped_step(stage.weights, summed_alone(averager))
    averager.close(followed=True)
    synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
