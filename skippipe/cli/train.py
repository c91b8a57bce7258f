"""Commands for training and what it needs: prepare, job, train, grow, export."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from skippipe.cli.options import (
    OutputFolder,
    Overwrite,
    one_folder,
)
from skippipe.errors import UserError
from skippipe.json_fields import check_empty, check_output, write_text
from skippipe.terminal import interruptible
from skippipe.training.train_job import begin_run, build_setup, plan_job, run_job, wanted_job
from skippipe.value_ranges import ITERATIONS, VOCABULARY, Choices


def job(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file.")] = None,
    short: Annotated[bool, typer.Option("--short", help="Only the fields that most jobs set.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Print a job file with every field that training takes, its default and what it is for; codecs as advised today.

    Example: skippipe job --short -o job.toml
    """
    from skippipe.toml_config import example, field_places
    from skippipe.training.job_config import ADVISED, FOR_STUDIES, SHORT, JobConfig

    omitted = set(field_places(JobConfig)).difference(SHORT, ADVISED) if short else FOR_STUDIES
    more = "\n# `skippipe job` has all others." if short else ""
    text = (
        "# A job for `skippipe train`. Every field may be left out. The values are the defaults,\n"
        f"# except for {' and '.join(ADVISED)}, whose defaults stand beside them.{more}\n\n"
        f"{example(JobConfig, advised=ADVISED, omitted=omitted)}"
    )
    if output is None:
        print(text, end="")
    else:
        check_output(output, overwrite=overwrite)
        write_text(output, text)
        print(f"written to {output}")


def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file; 'skippipe job' prints one.")],
    iterations: Annotated[int | None, ITERATIONS, typer.Option(help="Instead of the job's.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder, instead of the job's.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="processes: every node as a process here, or, with transport.peers, wherever it joins from. "
            "one-process: no nodes, the same paths and data in this process. virtual: every node's own code on real "
            "tensors in one thread, in the seconds that the plan gives. ray: one Ray actor a node."
        ),
    ] = "processes",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Begin anew where a run is already: its folder is renamed, to NAME.old-TIME."),
    ] = False,
    rescue: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where model and last checkpoint go if the output folder cannot be written in the end. While a run "
            "waits for room, the same command with --rescue in another terminal gives it the folder.",
        ),
    ] = None,
    drill: Annotated[
        list[int] | None,
        ITERATIONS,
        typer.Option(help="Kill a node's process when so many iterations are done, to see the repair."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="host:port of a Ray cluster, for --engine ray; none: RAY_ADDRESS, or a Ray of this machine."),
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Show the run in the browser at this port of 127.0.0.1, as 'skippipe dashboard' would.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Train nothing: read the text, make the plans, and say how long all iterations would take on the "
            "machines of the cluster.",
        ),
    ] = False,
) -> None:
    """Train a model along planned paths.

    On one machine this starts every node itself. With transport.peers in the job it waits for nodes that join from
    other machines ('skippipe node'). The output folder gets the plan, metrics.jsonl, traces and the trained model.

    Nodes may be lost and come back: training goes on, and events.jsonl says what was done about it.

    A folder that holds a run is not trained into: --resume goes on with that run, --force sets it aside whole.

    Ctrl-C or SIGTERM stops, and keeps the model as far as it was trained. --resume goes on from the last checkpoint;
    or, if the coordinator is gone and its nodes still wait for it, from where they are.

    Example: skippipe train job.toml --iterations 20
    """
    wanted = wanted_job(job, iterations, output)
    from skippipe.training.backends import BACKENDS

    Choices(BACKENDS).check(engine, "--engine")
    if ray_address is not None:
        if engine != "ray":
            raise UserError(f"--ray-address: goes with --engine ray, not with '{engine}'")
        os.environ["RAY_ADDRESS"] = ray_address
    if drill and (engine != "processes" or wanted.transport.peers):
        raise UserError("--drill: is for nodes that are processes of this machine")
    if resume and force:
        raise UserError("--force: begins anew, and --resume goes on; give one of them")
    nodes_here = engine != "ray" and not wanted.transport.peers
    if dry_run:
        given = {"resume": resume, "force": force, "rescue": rescue, "drill": drill, "dashboard": dashboard}
        for name, value in given.items():
            if value:
                raise UserError(f"--{name}: is for a run, and --dry-run begins none; leave one of them out")
        plan_job(wanted, nodes_here=nodes_here, listens=engine == "processes")
        return
    if rescue is not None:
        from skippipe.training.run_folder import set_rescue_folder

        process = set_rescue_folder(Path(wanted.output), rescue)
        if process is not None:
            print(f"{wanted.output}: the run that is going on (process {process}) now has a rescue folder: {rescue}")
            return
    from skippipe.dashboard.server import dashboard_process

    with dashboard_process(Path(wanted.output), dashboard, resumed=resume) if dashboard is not None else nullcontext():
        drills = frozenset(drill or ())
        run_job(
            wanted, BACKENDS[engine], nodes_here=nodes_here, resumed=resume, drills=drills, force=force, rescue=rescue
        )


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's output folder: its newest one.")
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Where the model goes; or -o FOLDER.")] = None,
    output: OutputFolder = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: the checkpoint with the lowest held-out loss, not the newest.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with LoRA: the adapters alone, in peft's layout.")
    ] = False,
    score: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What 'skippipe eval' has written of the model as JSON, for the model card: what is lost with stages "
            "missing. None: the run's eval.json, if there is one.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Upload the folder to the Hugging Face hub, as NAME or ORGANISATION/NAME."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: only you and your organisation see it there.")
    ] = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint, which transformers loads.

    It has the tokenizer with its chat template, the ids that begin and end a text, and a model card (README.md) with
    recipe, data and losses. Adapters of a run with LoRA are merged into the model, unless --adapter asks for them by
    themselves.

    \b
        skippipe export run model/ --best --push my-name/my-model --private

    Example: skippipe export run model/
    """
    from skippipe.checkpoint.format import MANIFEST, Checkpoints, hold
    from skippipe.checkpoint.locate import newest_checkpoint

    if private and push is None:
        raise UserError("--private: goes with --push, which uploads the model")
    if score is not None and not score.is_file():
        raise UserError(f"--score: {score}: no such file; 'skippipe eval' writes one")
    place = checkpoint
    if (checkpoint / MANIFEST).is_file():
        if best:
            raise UserError(f"--best: {checkpoint} is one checkpoint; name the output folder of the run")
        hold(checkpoint)
    elif best:
        found_best = Checkpoints.of_run(checkpoint).hold_best()
        if found_best is None:
            raise UserError(
                f"--best: no checkpoint of {checkpoint} has a held-out loss; [validation] in the job makes them"
            )
        place = found_best.place
    else:
        place = newest_checkpoint(checkpoint)
    folder = one_folder(folder, output)
    check_empty(folder)
    if adapter and score is not None:
        raise UserError("--score: is for the model card, which adapters alone do not have; leave out one of them")
    from skippipe.checkpoint.hf_export import hub_api  # these import torch, which takes seconds
    from skippipe.checkpoint.hf_export import push as upload
    from skippipe.checkpoint.manager import export as exported
    from skippipe.checkpoint.manager import export_adapter

    api = hub_api(push) if push is not None else None
    manifest = export_adapter(place, folder) if adapter else exported(place, folder, score)
    what = "adapter" if adapter else "model"
    print(f"{place}: the {what} after {manifest.iterations} iterations is in {folder}/")
    if push is not None:
        print(f"{folder}: is on the hub now, at {upload(api, folder, push, private=private)}")


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
        config = "llama-46m"       config = "llama-46m"
        layers = 8
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
            run_setup = build_setup(wanted, stopped, nodes_here=False, folder=folder)
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


def prepare(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...",
            help="Text, JSON lines or Parquet, also compressed; folders of them; hf:NAME for a dataset; or 'classics'.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to make.")],
    vocabulary: Annotated[
        int | None, VOCABULARY, typer.Option(help="Train a byte-level BPE of this size on the texts.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer: a Hugging Face folder, or a folder of tokens.")
    ] = None,
    field: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The field of records that has the text.", show_default="text; of conversations none"
        ),
    ] = "",
    loss_on: Annotated[
        str,
        typer.Option(
            metavar="answers|all", help="Of conversations: the loss is taken of these tokens.", show_default="answers"
        ),
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the tokens of other texts, which is refused otherwise.")
    ] = False,
) -> None:
    """Turn texts into a folder of tokens, once.

    Jobs ('data.folder') and studies ('train', 'tests') take the folder; copied to other machines, it saves them the
    work. Held-out text must have the tokenizer of the text that was trained on.

    Example: skippipe prepare books.txt.xz --vocabulary 8192 -o tokens/books
    """
    from skippipe.data.prepare import prepare as prepared

    if (vocabulary is None) == (tokenizer is None):
        raise UserError("say one of --vocabulary, to train a tokenizer, and --tokenizer, to use one that is there")
    last = ""

    def progress(what: str, share: float) -> None:
        nonlocal last
        line = f"{what} ({share:.0%})" if share else what
        if line != last:
            print(line, file=sys.stderr)
        last = line

    found = prepared(
        texts, tokenizer or vocabulary or 0, output, progress, field=field, loss_on=loss_on, overwrite=overwrite
    )
    print(f"{output}: {found.summary}, a vocabulary of {found.vocabulary:,}")
