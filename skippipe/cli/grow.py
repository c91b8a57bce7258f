"""The command that makes a trained model deeper: grow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skippipe.terminal import interruptible
from skippipe.training.train_job import begin_run, build_setup, wanted_job


def grow(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Output folder of the run that trained the smaller model.")
    ],
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="Job file of the deeper model; its output folder gets a checkpoint.")
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="If the job's output folder holds a run already, rename that folder, to NAME.old-TIME."
        ),
    ] = False,
) -> None:
    """Make a deeper model of a trained one, and go on with that.

    The first layers stay first and the last stay last; what lies between is repeated until there are enough: stages
    0 1 2 3 become 0 1 2 1 2 3. Weights and the optimizer's state are copied, and the newest checkpoint of RUN becomes
    one of JOB, after as many iterations.

    A smaller model takes less time an iteration. One that is trained for two thirds of the run and then grows can end
    where the whole model would, had it been trained all along.

    Both jobs are one run: the same text, seed, batch and learning, and the same model but for the number of its layers.
    The first ends early, the second goes to the end:

    \b
        small.toml                 whole.toml
        output = "run-8"           output = "run-12"
        iterations = 650           iterations = 1000
        \\[model]                    \\[model]
        config = "8.json"          config = "12.json"
        \\[learning]                 \\[learning]
        iterations = 1000          iterations = 1000

    \b
        skippipe train small.toml
        skippipe grow run-8 whole.toml
        skippipe train whole.toml --resume

    Example: skippipe grow run-8 whole.toml
    """
    wanted = wanted_job(job, None, None)
    from skippipe.training import depth_growth
    from skippipe.training.run_folder import open_run_folder

    young = depth_growth.young_of(run)
    depth_growth.check_job(young, wanted)
    with open_run_folder(Path(wanted.output), force=force) as folder:
        with interruptible() as stopped:
            run_setup = build_setup(wanted, stopped, nodes_here=False, resumed=False, drills=frozenset(), folder=folder)
        if stopped:
            raise KeyboardInterrupt
        grown = depth_growth.grow(young, run_setup.run, lambda: begin_run(folder, run_setup))
        run_setup.save_plans()
    other = depth_growth.other_batch(run, run_setup.plan)
    if other:
        print(f"warning: {other}: some text is left out or repeated; say the same in [batch]", file=sys.stderr)
    print(
        f"{young.place}: {sum(young.manifest.layers)} layers become {len(grown.donors)}, copies of "
        f"{' '.join(map(str, grown.donors))}"
    )
    print(f"{grown.place}: goes on after {young.manifest.iterations} iterations with: skippipe train {job} --resume")
