"""Compiles the kernels that tests need, before their workers start: or each worker would compile them for itself.

python -m tests.compile_kernels          # those of the planner, which need no torch
python -m tests.compile_kernels codecs
"""

from __future__ import annotations

import sys
from dataclasses import replace

from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.repair.repair import compile_repair
from skippipe.planner.strategies import compile_search
from skippipe.presets import datacentre
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.workload import Workload


def compile_teacher() -> None:
    """The simulation of a plan with a teacher, of nodes with one device and with several."""
    work = Workload(MODELS["llama-30m"], microbatches=2, teacher="logits")
    cluster = datacentre(3)
    stages = tuple(Stage(4, (node,), (node,)) for node in range(3))
    for devices in (1, 2):
        nodes = tuple(replace(node, devices=devices) for node in cluster.nodes)
        simulate(
            Plan(replace(cluster, nodes=nodes), work, stages, (Lane((0, 1), 1), Lane((0, 2), 1))),
            Timing.CONTENTION_ONLY,
        )


def compile_codecs() -> None:
    import torch

    from skippipe.codecs import CODECS, decode, encode

    for codec in CODECS:
        for dtype in (torch.float32, torch.bfloat16):
            decode(encode(torch.ones(2**12, dtype=dtype), codec))


if __name__ == "__main__":
    if sys.argv[1:] == ["codecs"]:
        compile_codecs()
    else:
        compile_repair()
        compile_search()
        compile_teacher()
