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

PLANNING, TRAINING, MODEL = "Plan", "Train", "Use and improve a model"
MACHINES = "Machines and keys"
app = typer.Typer(
    name="skippipe",
    cls=Group,
    help="Train and serve large language models over machines that are far apart, unequal and unreliable.\n\n"
    'To see what it is about: skippipe generate austen "It is a truth" --keep 1/2 writes with half of a model. Then '
    "skippipe compare regions:12 plans a pipeline over 12 machines, and skippipe job and skippipe train train a model; "
    "to fine-tune yours, name it there as model.weights.",
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


def _add(name: str, panel: str, command: Callable[..., None]) -> None:
    app.command(name, cls=Command, rich_help_panel=panel)(check_ranges_of(command))


_add("cluster", PLANNING, inspect_command.cluster)
_add("profile", PLANNING, profile.profile)
_add("plan", PLANNING, plan_command.plan)
_add("check", PLANNING, inspect_command.check_plan)
_add("simulate", PLANNING, inspect_command.simulate_plan)
_add("compare", PLANNING, plan_command.compare)
_add("sweep", PLANNING, sweep.sweep)
_add("show", PLANNING, show.show)
_add("why", PLANNING, inspect_command.why)
_add("prepare", TRAINING, train_command.prepare)
_add("job", TRAINING, train_command.job)
_add("train", TRAINING, train_command.train)
_add("dashboard", TRAINING, show.dashboard)
_add("grow", TRAINING, train_command.grow)
_add("export", TRAINING, train_command.export)
_add("generate", MODEL, generate.generate)
_add("eval", MODEL, eval.evaluate)
_add("score", MODEL, eval.score)
_add("heal", MODEL, heal.heal)
_add("serve", MODEL, serve.serve)
_add("node", MACHINES, node_command.node)
_add("relay", MACHINES, node_command.relay)
_add("doctor", MACHINES, node_command.doctor)
_add("keys", MACHINES, members.keys)
_add("invite", MACHINES, members.invite)
_add("members", MACHINES, members.list_members)
_add("revoke", MACHINES, members.revoke)
app.add_typer(study.commands, name="study", rich_help_panel=TRAINING)


@cache
def command_line() -> Callable[..., object]:
    """All commands with their options, read from the signatures above once in a process: it takes a moment."""
    return get_command(app)
