"""The command line: all commands. Heavy libraries (numba, plotly, matplotlib) are imported by the command that needs
them, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer
from typer.main import get_command

import skippipe
from skippipe.cli import eval, generate, heal, members, profile, serve, show, study, sweep
from skippipe.cli import inspect as inspect_command
from skippipe.cli import node as node_command
from skippipe.cli import plan as plan_command
from skippipe.cli import train as train_command
from skippipe.cli.command import Command, Group
from skippipe.cli.options import check_ranges_of

app = typer.Typer(
    name="skippipe",
    cls=Group,
    help="Train and serve large language models over machines that are far apart, unequal and unreliable.\n\n"
    "Start with: skippipe compare published20 --full-timing, then skippipe job and skippipe train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        print(f"skippipe {skippipe.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


app.command("cluster", cls=Command)(check_ranges_of(inspect_command.cluster))
app.command("profile", cls=Command)(check_ranges_of(profile.profile))
app.command("plan", cls=Command)(check_ranges_of(plan_command.plan))
app.command("check", cls=Command)(check_ranges_of(inspect_command.check_plan))
app.command("simulate", cls=Command)(check_ranges_of(inspect_command.simulate_plan))
app.command("compare", cls=Command)(check_ranges_of(plan_command.compare))
app.command("sweep", cls=Command)(check_ranges_of(sweep.sweep))
app.command("show", cls=Command)(check_ranges_of(show.show))
app.command("why", cls=Command)(check_ranges_of(inspect_command.why))
app.command("prepare", cls=Command)(check_ranges_of(train_command.prepare))
app.command("job", cls=Command)(check_ranges_of(train_command.job))
app.command("train", cls=Command)(check_ranges_of(train_command.train))
app.command("dashboard", cls=Command)(check_ranges_of(show.dashboard))
app.command("grow", cls=Command)(check_ranges_of(train_command.grow))
app.command("export", cls=Command)(check_ranges_of(train_command.export))
app.command("heal", cls=Command)(check_ranges_of(heal.heal))
app.command("score", cls=Command)(check_ranges_of(eval.score))
app.command("eval", cls=Command)(check_ranges_of(eval.evaluate))
app.command("generate", cls=Command)(check_ranges_of(generate.generate))
app.command("serve", cls=Command)(check_ranges_of(serve.serve))
app.command("node", cls=Command)(check_ranges_of(node_command.node))
app.command("relay", cls=Command)(check_ranges_of(node_command.relay))
app.command("doctor", cls=Command)(check_ranges_of(node_command.doctor))
app.command("keys", cls=Command)(check_ranges_of(members.keys))
app.command("invite", cls=Command)(check_ranges_of(members.invite))
app.command("members", cls=Command)(check_ranges_of(members.list_members))
app.command("revoke", cls=Command)(check_ranges_of(members.revoke))
app.add_typer(study.commands, name="study")


@cache
def command_line() -> Callable[..., object]:
    """All commands with their options, read from the signatures above once in a process: it takes a moment."""
    return get_command(app)
