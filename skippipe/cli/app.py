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


app.command("cluster")(reading.cluster)
app.command("profile")(profiling.profile)
app.command("plan")(planning.plan)
app.command("check")(reading.check_plan)
app.command("simulate")(reading.simulate_plan)
app.command("compare")(planning.compare)
app.command("sweep")(sweeping.sweep)
app.command("show")(showing.show)
app.command("why")(why.why)
app.command("prepare")(text.prepare)
app.command("job")(training.job)
app.command("train")(training.train)
app.command("dashboard")(dashboard.dashboard)
app.command("grow")(growing.grow)
app.command("export")(training.export)
app.command("score")(scoring.score)
app.command("eval")(evaluating.evaluate)
app.command("generate")(generating.generate)
app.command("serve")(serving.serve)
app.command("node")(training.node)
app.command("keys")(training.keys)
app.add_typer(study.commands, name="study")
