"""Training over processes against training in one: losses of 20 iterations and final weights, in fp32.

    python -m benchmarks.exact

llama-tiny on the classics. Every node is a process of its own, with encrypted connections; the oracle passes the same
microbatches through the same stages in one process. A case passes if no loss is off by more than RTOL of itself, and no
tensor of weights by more than RTOL of itself, both as norms. Single weights are shown too: replicas add up in another
order, and where a gradient is next to nothing, Adam, which divides by its size, makes the last digits visible. A
gradient that was wrong would move weights by a learning rate, 3e-4.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file

from benchmarks.local import Reports, run_of, this_machine
from skippipe.collectives.schedule import Piece
from skippipe.data.prepare import prepare
from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.training.reference import ReferenceTrainer
from skippipe.transport.addresses import free_port
from skippipe.validate import validate
from skippipe.workload import Workload

ITERATIONS = 20
LEARNING = OptimConfig(warmup=5, iterations=ITERATIONS)
RTOL = 1e-4
REPLICAS = (2, 1, 2, 1, 1, 1)
EVEN, UNEVEN = (2, 2, 2, 2, 2, 2), (1, 3, 2, 1, 4, 1)
FULL = ((0, 1, 2, 3, 4, 5),) * 5
SKIPPED = ((0, 1, 2, 3), (0, 2, 3, 4), (0, 3, 4, 5), (0, 1, 4, 5), (0, 1, 2, 5))  # 4 of 6 stages, each other one thrice
REORDERED = ((0, 2, 1, 3), (0, 2, 4, 3), (0, 3, 5, 4), (0, 1, 5, 4), (0, 2, 1, 5))


@dataclass(frozen=True)
class Case:
    name: str
    visits: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...] = EVEN
    split: bool = False
    engine: str = "ring"
    pieces: tuple[Piece, ...] = ()
    """How stage 2 averages, which is then held by three nodes: 3, 4 and 5."""


CASES = (
    Case("full pipeline", FULL),
    Case("full pipeline, split backward", FULL, split=True),
    Case("a third skipped", SKIPPED),
    Case("a third skipped, split backward", SKIPPED, split=True),
    Case("reordered", REORDERED),
    Case("uneven stages", SKIPPED, UNEVEN),
    Case("reordered, uneven, split backward", REORDERED, UNEVEN, True),
    Case("a third skipped, direct exchange", SKIPPED, engine="auto", pieces=(Piece(3, 2), Piece(4, 1), Piece(5, 1))),
    Case(
        "reordered, averaged along trees",
        REORDERED,
        engine="auto",
        pieces=(Piece(3, 2, ((4, 5),)), Piece(4, 1, ((3, 5),))),
    ),
    Case("full pipeline, averaged by torch", FULL, engine="torch"),
    Case("reordered, split, averaged by torch", REORDERED, split=True, engine="torch"),
)


def plan_of(case: Case, spec: ModelSpec) -> Plan:
    """Eight nodes or nine; every lane goes to the next replica of each stage on its way."""
    replicas = (*REPLICAS[:2], 3, *REPLICAS[3:]) if case.pieces else REPLICAS
    nodes = iter(range(sum(replicas)))
    members = [tuple(next(nodes) for _ in range(size)) for size in replicas]
    turns = [cycle(each) for each in members]
    lanes = tuple(Lane(tuple(next(turns[stage]) for stage in visits), 1) for visits in case.visits)
    stages = tuple(
        Stage(layers, each, each, case.pieces if stage == 2 else ())
        for stage, (layers, each) in enumerate(zip(case.layers, members, strict=True))
    )
    workload = Workload(spec.shape, 64, 2, len(lanes), wire_dtype="fp32", compute_dtype="fp32", collective=case.engine)
    plan = Plan(this_machine(sum(replicas)), workload, stages, lanes, split_backward=case.split)
    assert not validate(plan)
    return plan


@dataclass
class Differences:
    """Of weights: the largest of all tensors."""

    norm: float = 0.0
    """Of the difference, as a share of the tensor's."""
    largest: float = 0.0
    """Of a single weight."""
    of_rms: float = 0.0
    """The same, as a share of the tensor's root mean square."""

    @classmethod
    def between(cls, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Differences:
        assert found.keys() == expected.keys()
        most = cls()
        for name, each in expected.items():
            off = found[name] - each
            largest = float(off.abs().max())
            most.norm = max(most.norm, float(off.norm() / each.norm()))
            most.largest = max(most.largest, largest)
            most.of_rms = max(most.of_rms, largest / float(each.square().mean().sqrt()))
        return most


def main() -> None:
    torch.set_num_threads(1)
    tokens = prepare("classics", 2048)
    spec = ModelSpec(config_named("llama-tiny", tokens.vocabulary))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        runs = []
        cases = [case for case in CASES if case.engine != "torch" or torch.distributed.is_available()]
        for index, case in enumerate(cases):  # all of them first: a process that has computed gradients may not fork
            reports, output = Reports(), Path(name) / str(index)
            rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}" if case.engine == "torch" else None
            run = run_of(plan_of(case, spec), spec, tokens, output, ITERATIONS, LEARNING, rendezvous)
            run.launch_local(reports)
            files = sorted((output / "model").glob("*.safetensors"))
            weights = {name: each for file in files for name, each in load_file(file).items()}
            runs.append((case, run.node_config, [report.loss for report in reports.all], weights))
    print(f"{'largest difference':<38} {'losses':>9} {'weights':>9} {'single':>9} {'of RMS':>9}")
    for case, node_config, found, weights in runs:
        oracle = ReferenceTrainer(node_config.plan, spec, LEARNING, node_config.sampler())
        expected = [oracle.iteration(number).loss for number in range(ITERATIONS)]
        off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        weights_off = Differences.between(weights, oracle.weights())
        figures = (off, weights_off.norm, weights_off.largest, weights_off.of_rms)
        verdict = "pass" if off <= RTOL and weights_off.norm <= RTOL else "FAIL"
        print(f"{case.name:<38}", *(f"{figure:>9.1e}" for figure in figures), f" {verdict}", flush=True)
    print(f"{len(runs)} cases in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
