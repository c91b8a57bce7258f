"""Commands for studies: run, report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.cli.command import Command, Group
from skippipe.cli.options import Overwrite
from skippipe.errors import UserError
from skippipe.json_fields import check_empty, write_text
from skippipe.terminal import rich_progress

if TYPE_CHECKING:
    from skippipe.study import planned_time, runner

commands = typer.Typer(
    cls=Group,
    help="What skipping does to the model: train variants with several seeds, and compare them.\n\n"
    "A study file (TOML) names the model, the texts, and variants; each has a recipe that says which share of the "
    "stages is skipped, and when. 'skippipe study run' trains every variant with every seed, in one process and "
    "without nodes; 'skippipe study report' makes tables and pictures, with the seconds that iterations would take on "
    "a cluster.",
    no_args_is_help=True,
)


@commands.command(cls=Command)
def run(
    study: Annotated[Path, typer.Argument(metavar="FILE", help="A study file (TOML).")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="A line of JSON for every run that is done. Runs that are there are not done again."
        ),
    ] = Path("results.jsonl"),
    device: Annotated[str, typer.Option(help="cpu, or cuda (cuda:N): in bfloat16, many times as fast.")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the layers: slow to start, faster from then on.")
    ] = False,
    models: Annotated[
        Path | None, typer.Option(help="Keep the trained models here, each as a Hugging Face folder in bfloat16.")
    ] = None,
) -> None:
    """Train every variant with every seed.

    A small study file:

    \b
        name = "skipping"
        model = "llama-tiny"
        tokens = 2_000_000
        seeds = [0, 1]
        \\[\\[variant]]
        name = "full"
        \\[\\[variant]]
        name = "third"
        recipe = {skip = "1/3 until 75%, 0"}

    Call one variant 'full': the others are held against it. Ctrl-C stops; runs that are done are kept, and the same
    command goes on with the others. On a machine with torch and little else: python -m skippipe.study.

    Example: skippipe study run study.toml -o results.jsonl
    """
    from skippipe.study.config import load_study
    from skippipe.study.runner import run_study

    wanted = load_study(study)
    with _runs_bar() as progress:
        run_study(wanted, output, device, compiled, progress, models)


@commands.command(cls=Command)
def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Files that 'skippipe study run' wrote.")],
    study: Annotated[Path, typer.Option(help="The study file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for tables.md, report.html and pictures.")
    ] = Path("report"),
    no_times: Annotated[
        bool, typer.Option("--no-times", help="Leave out what iterations take on the study's cluster.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make tables and pictures of what is done so far.

    Writes tables.md, report.html (interactive, needs no other file) and PNGs, and prints the first table. What an
    iteration takes is planned for every variant and length of path, some 30 s each, and kept in times.json beside the
    results (times-full.json with full timing, other files with other codecs); later reports take it from there.

    Example: skippipe study report results.jsonl --study study.toml -o report
    """
    if not overwrite:
        check_empty(output, "--overwrite replaces what is written; or name another folder")
    from skippipe.study.config import load_study, read_results
    from skippipe.study.planned_time import planned_times, times_file
    from skippipe.study.plots import write_page, write_pictures
    from skippipe.study.results import outdated_variants, runs_of
    from skippipe.study.tables import all_tables

    wanted = load_study(study)
    missing = [path for path in results if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]}: no such file; 'skippipe study run {study} -o {missing[0]}' makes it")
    runs = runs_of([line for path in results for line in read_results(path)], wanted)
    if not runs:
        raise UserError(f"{results[0]}: no run is done yet")
    others = outdated_variants(runs, wanted)
    warning = f"Made with other settings than {study.name} has now: {', '.join(others)}." if others else ""
    if warning:
        print(warning, file=sys.stderr)
    planned = None
    if not no_times:
        with _plans_bar() as progress:
            planned = planned_times(wanted, times_file(results[0].parent, wanted.planned), progress)
    tables = all_tables(runs, planned)
    title = f"Study '{wanted.name}'"
    sections = [f"# {title}\n", *([f"{warning}\n"] if warning else []), *(table.markdown() for table in tables)]
    write_text(output / "tables.md", "\n".join(sections))
    pictures = write_pictures(runs, planned, output)
    write_page(title, tables, runs, planned, output / "report.html")
    print(tables[0].markdown())
    print(f"{output}/ has tables.md, report.html, {', '.join(path.name for path in pictures)}")


@contextmanager
def _runs_bar() -> Iterator[runner.RunProgress]:
    """A bar for every run on a terminal, lines elsewhere."""
    from skippipe.study.runner import LineProgress

    if not sys.stderr.isatty():
        yield LineProgress()
        return
    from rich.progress import BarColumn, TaskID, TimeRemainingColumn

    columns = ("{task.description:<28}", BarColumn(), "{task.fields[how]}")
    with rich_progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), transient=False) as bar:
        bars: dict[str, TaskID] = {}

        def show(name: str, share: float, how: str) -> None:
            if name not in bars:
                bars[name] = bar.add_task(name, total=1.0, how="")
            bar.update(bars[name], completed=share, how=how)

        yield show


@contextmanager
def _plans_bar() -> Iterator[planned_time.PlanningProgress]:
    """One bar for all plans on a terminal, a line for each elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, share: print(f"planning {what} ({share:.0%} done)", file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, TimeElapsedColumn

    with rich_progress("planning {task.description}", BarColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
