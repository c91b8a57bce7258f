"""One node with k workers against k nodes with one each, on the same cores: iterations a second, bytes averaged.

    python -m benchmarks.devices [--devices 2] [--rounds 3] [--iterations 8]

Two machines for each of two stages of a LLaMA, as processes of this machine with encrypted connections; nothing is
emulated. A machine is one node whose k CPU workers hold the stage each, or k nodes of one worker: as many threads
compute in both, and as many lanes have microbatches on their way. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.local import Reports, run_of, this_machine
from skippipe.data.prepare import prepare
from skippipe.data.token_file import TokenFile
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model_shape import ModelShape
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.workload import Workload

MACHINES, STAGES = 2, 2  # machines of each stage
PER_LANE = 2


def averaged_bytes(plan: Plan, report: IterationReport) -> int:
    """Bytes sent between nodes of the same stage."""
    stage_of = plan.stage_of
    return sum(count for (a, b), count in report.sent_bytes.items() if stage_of[a] == stage_of[b])


def plan_of(vocabulary: int, nodes: int, devices: int) -> Plan:
    """So many nodes on every stage, of so many devices each."""
    shape = ModelShape("four layers", 4, 256, 4, 4, 64, 704, vocabulary)
    lanes = nodes * devices
    workload = Workload(
        shape, 256, 2, lanes * PER_LANE, wire_dtype="bf16", gradient_dtype="fp32", compute_dtype="fp32", max_slots=1
    )
    members = [tuple(range(stage * nodes, (stage + 1) * nodes)) for stage in range(STAGES)]
    paths = [tuple(each[lane % nodes] for each in members) for lane in range(lanes)]
    stages = tuple(Stage(shape.layers // STAGES, each, each) for each in members)
    return Plan(this_machine(STAGES * nodes, devices), workload, stages, tuple(Lane(path, PER_LANE) for path in paths))


def trained(plan: Plan, tokens: TokenFile, iterations: int) -> Reports:
    reports = Reports()
    with tempfile.TemporaryDirectory() as folder:
        run_of(plan, ModelSpec(llama_config(plan.workload.model)), tokens, folder, iterations).launch_local(reports)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)  # what is forked must not have threads
    tokens, k = prepare("classics", 2048), given.devices
    plans = {
        f"one node with {k} workers": plan_of(tokens.vocabulary, MACHINES, k),
        f"{k} nodes": plan_of(tokens.vocabulary, MACHINES * k, 1),
    }
    taken: dict[str, list[float]] = {name: [] for name in plans}
    averaged: dict[str, int] = {}
    for _ in range(given.rounds):
        for name, plan in plans.items():
            reports = trained(plan, tokens, given.iterations)
            taken[name] += reports.seconds[1:]
            averaged[name] = averaged_bytes(plan, reports.all[-1])
            print(f"{name}: {', '.join(f'{each:.2f}' for each in reports.seconds)} s", flush=True)
    for name, seconds in taken.items():
        print(f"{name}: {1 / median(seconds):.3f} iterations/s, {averaged[name] / 1e6:.1f} MB averaged an iteration")
    (one, one_bytes), (several, several_bytes) = ((median(taken[name]), averaged[name]) for name in plans)
    print(f"one node against {k}: {several / one:.2f} of the speed (goal 1.0)")
    print(f"bytes averaged: {one_bytes / several_bytes:.2f} (goal {1 / k:.2f})")


if __name__ == "__main__":
    main()
