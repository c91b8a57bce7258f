"""The command that trains with nodes that torchrun starts, one rank a node:

    torchrun --nproc-per-node 9 -m skippipe.training.torchrun job.toml

Only rank 0 reads the job (see `skippipe.launch.torchrun`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.errors import UserError, run_command
from skippipe.launch.torchrun import Rank, TorchrunLauncher, run_rank

if TYPE_CHECKING:
    from skippipe.runtime.coordinator.interfaces import Callback, StopRequests
    from skippipe.training.build_run import RunSetup


def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file; only rank 0 reads it.")],
    iterations: Annotated[int | None, typer.Option(min=1, help="Instead of the job's.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Output folder, instead of the job's.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the token folder, if elsewhere than rank 0.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="As for 'skippipe train'.")] = False,
    force: Annotated[bool, typer.Option("--force", help="As for 'skippipe train'.")] = False,
    rescue: Annotated[Path | None, typer.Option(help="As for 'skippipe train'.")] = None,
) -> None:
    """Train with one rank of torchrun a node.

    Example: torchrun --nproc-per-node 9 -m skippipe.training.torchrun job.toml
    """
    rank = Rank.from_environment()
    if rank.number > 0:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # a node decides a few times a second: no compiler needed
        from skippipe.runtime.train_role import ROLES

        run_rank(rank, ROLES, tokens)
        return
    from skippipe.training.train_job import run_job, wanted_job

    wanted = wanted_job(job, iterations, output)
    if wanted.transport.peers:
        raise UserError("transport.peers: is for nodes that join by themselves; torchrun's have keys made for the run")

    from skippipe.runtime.train_role import ROLES

    def backend(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> None:
        run = run_setup.run
        logs, device = run.output / "logs", wanted.compute.device
        launcher = TorchrunLauncher(run_setup.node_names, ROLES, rank, logs, device, run.security, tokens)
        run.launch(launcher, callback, stop_requests, run_setup.deeper_runs())

    run_job(wanted, backend, resumed=resume, force=force, rescue=rescue)


def main() -> None:
    run_command(lambda: typer.run(train))


if __name__ == "__main__":
    main()
