"""All commands under one roof. Heavy rooms (numba, plotly, matplotlib) are entered only by the command that needs
them, so that `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

import skippipe
from skippipe.cli import (
    dashboard,
    evaluating,
    generating,
    growing,
    planning,
    profiling,
    reading,
    scoring,
    serving,
    showing,
    study,
    sweeping,
    text,
    training,
    why,
)
from skippipe.cli.inputs import ranged

app = typer.Typer(
    name="skippipe",
    help="Train large language models over machines that are far apart, unequal and unreliable.\n\n"
    "Start with: skippipe compare published20 --contention-only, then skippipe job and skippipe train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"skippipe {skippipe.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


app.command("cluster")(ranged(reading.cluster))
app.command("profile")(ranged(profiling.profile))
app.command("plan")(ranged(planning.plan))
app.command("check")(ranged(reading.check_plan))
app.command("simulate")(ranged(reading.simulate_plan))
app.command("compare")(ranged(planning.compare))
app.command("sweep")(ranged(sweeping.sweep))
app.command("show")(ranged(showing.show))
app.command("why")(ranged(why.why))
app.command("prepare")(ranged(text.prepare))
app.command("job")(ranged(training.job))
app.command("train")(ranged(training.train))
app.command("dashboard")(ranged(dashboard.dashboard))
app.command("grow")(ranged(growing.grow))
app.command("export")(ranged(training.export))
app.command("score")(ranged(scoring.score))
app.command("eval")(ranged(evaluating.evaluate))
app.command("generate")(ranged(generating.generate))
app.command("serve")(ranged(serving.serve))
app.command("node")(ranged(training.node))
app.command("keys")(ranged(training.keys))
app.add_typer(study.commands, name="study")
