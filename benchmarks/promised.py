"""Does a run take the time that the simulator promised? 20 emulated nodes, all four strategies.

    python -m benchmarks.promised [--iterations 12] [--time 0.1] [--cluster published20] [--teacher hidden]

Every node is a process on this machine that trains its stage of a tiny LLaMA; links are as slow as the cluster file
makes them and no task ends before its planned time, all scaled by `--time`. What is compared is the median time of an
iteration, the first left out, with the plan's promise under full timing. `--teacher`: a third of the stages is skipped
all along, and the whole model teaches, by its logits, or by its hidden states as well.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.local import Reports
from skippipe.skip_schedule import SkipSchedule
from skippipe.training.build_run import build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import BatchConfig, DataConfig, EmulationConfig, PipelineConfig, Strategies
from skippipe.workload import TEACHERS

STRATEGIES: tuple[Strategies, ...] = ("dtfm", "dtfm-skip", "no-tc2", "skippipe")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--time", type=float, default=0.1)
    parser.add_argument("--cluster", default="published20")
    parser.add_argument("--split-backward", action="store_true")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--teacher", choices=TEACHERS, default="")
    asked = parser.parse_args()
    taught = SkipSchedule("1/3", distill=0.9, distill_hidden=1.0 if asked.teacher == "hidden" else 0.0)
    torch.set_num_threads(1)
    job = JobConfig(
        cluster=asked.cluster,
        iterations=asked.iterations,
        data=DataConfig(vocabulary=512),
        batch=BatchConfig(sequence=64, samples=2),
        emulation=EmulationConfig(enabled=True, time=asked.time),
        recipe=taught if asked.teacher else SkipSchedule(),
    )
    print(f"{'strategy':<10} {'promised':>9} {'measured':>9} {'ratio':>6}   spread")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in asked.strategies.split(","):
            pipeline = PipelineConfig(strategy=strategy, budget_s=10, split_backward=asked.split_backward)
            run_setup = build_run(replace(job, pipeline=pipeline, output=str(Path(folder) / strategy)))
            promised_s = run_setup.plan.promise.iteration_s
            taken = Reports()
            run_setup.run.launch_local(taken)
            measured_s = median(taken.seconds[1:])
            results[strategy] = promised_s, measured_s
            print(
                f"{strategy:<10} {promised_s:8.3f}s {measured_s:8.3f}s {measured_s / promised_s:6.3f}   "
                f"{min(taken.seconds[1:]):.3f} … {max(taken.seconds[1:]):.3f}",
                flush=True,
            )
    if {"dtfm", "skippipe"} <= results.keys():
        promised, found = (results["skippipe"][index] / results["dtfm"][index] for index in (0, 1))
        print(f"skippipe / dtfm: {promised:.3f} promised, {found:.3f} measured")


if __name__ == "__main__":
    main()
