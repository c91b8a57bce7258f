"""Commands that show what is there: show, a plan or a run that is over; dashboard, a run in the browser."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from skippipe.cli import inspect as inspect_command
from skippipe.cli import plan as plan_command
from skippipe.cli.options import Json, Overwrite, Trace
from skippipe.errors import UserError
from skippipe.json_fields import check_output, exists, json_text, read_json, write_text
from skippipe.value_ranges import PORT

if TYPE_CHECKING:
    from skippipe.runs.history import RunHistory

PICTURES = ("loss.png", "seconds.png", "nodes.png", "links.png", "recorded.png", "plan.png")
FILES = ("plan.json", "metrics.jsonl", "events.jsonl", "journal")


def show(
    shown: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN|RUN",
            help="A plan file, as 'skippipe plan -o' writes it; or the output folder of 'skippipe train'.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write NAME.html or NAME.png, as below, or NAME.json, what --json prints."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page that needs no other file.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Of a plan: write the Gantt chart and the path map as a picture. Of a run: NAME.png gets loss, "
            "seconds, nodes and links in one picture; any other name is a folder of single ones, for papers."
        ),
    ] = None,
    trace: Trace = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show a plan, or what became of a run.

    A plan is printed as a grid; its Gantt chart and its path map can be drawn.

    Of a run that is over, stopped or broken off, it shows what it took against what was promised, loss, bytes, lost
    nodes and what became of them, and how busy every node was. To watch a run that goes on: 'skippipe dashboard'.

    \b
        skippipe show run --html report.html --png report.png

    Example: skippipe show plan.json --html plan.html --png plan.png
    """
    files = _Files.of(output, html, png, trace)
    pictures = files.png if shown.is_dir() and files.png and files.png.suffix.lower() != ".png" else None
    if pictures and pictures.exists() and not pictures.is_dir():
        raise UserError(f"{pictures}: is a file; name a picture that ends with .png, or a folder")
    for path in files:
        for each in map(path.joinpath, PICTURES) if path and path == pictures else [path]:
            if each is not None:
                check_output(each, shown, overwrite=overwrite)
    if not shown.is_dir():
        _check_plan_file(shown)
    written = _show_run(shown, files, pictures, as_json) if shown.is_dir() else _show_plan(shown, files, as_json)
    if written and not as_json:
        print(f"written to {', '.join(map(str, written))}")


class _Files(NamedTuple):
    """What is to be written."""

    json: Path | None
    html: Path | None
    png: Path | None
    trace: Path | None

    @classmethod
    def of(cls, output: Path | None, html: Path | None, png: Path | None, trace: Path | None) -> _Files:
        """With what the ending of `output` asks for."""
        if output is None:
            return cls(None, html, png, trace)
        ending = output.suffix.lower()
        if ending not in (".html", ".png", ".json"):
            raise UserError(f"--output: {output} ends with none of .html, .png and .json")
        if (html and ending == ".html") or (png and ending == ".png"):
            raise UserError(f"--output: {output}, and -{ending.replace('.', '-')} names another: leave one out")
        return cls(
            output if ending == ".json" else None,
            output if ending == ".html" else html,
            output if ending == ".png" else png,
            trace,
        )


def _check_plan_file(file: Path) -> None:
    """UserError if there is no such file, or if it holds a cluster, which another command shows."""
    from skippipe.cluster import FORMAT

    if not exists(file):
        raise UserError(
            f"{file}: no such file or folder; name a plan file, as 'skippipe plan -o' writes it, or the output folder "
            "of a run"
        )
    found = read_json(file)
    if isinstance(found, dict) and found.get("format") == FORMAT:
        raise UserError(f"{file}: is a cluster file, not a plan; 'skippipe cluster {file}' shows it")


def _show_plan(plan: Path, files: _Files, as_json: bool) -> list[Path]:
    """Print a plan, and write these files."""
    from skippipe.report.summary import plan_grid

    _, html, png, trace = files
    found, timeline = inspect_command.simulated(plan)
    print(json.dumps(found.to_json()) if as_json else plan_grid(found))
    if files.json:
        found.save(files.json)
    if html:
        from skippipe.report.html import write_html

        write_html(found, timeline, html)
    if png:
        from skippipe.report.png import write_png

        write_png(found, timeline, png)
    if trace:
        from skippipe.report.gantt import write_trace

        write_trace(found, timeline, trace)
    return [path for path in files if path]


def _show_run(folder: Path, files: _Files, pictures: Path | None, as_json: bool) -> list[Path]:
    """Print what became of a run, and write these files, or single pictures into a folder; gives all written files."""
    from skippipe.report.run.summary import run_json
    from skippipe.runs.history import read_history

    _, html, png, trace = files
    history = read_history(folder)
    if trace:
        raise UserError(_no_trace(history))
    if as_json:
        print(json.dumps(run_json(history), allow_nan=False))
    else:
        _print_run(history)
    if files.json:
        write_text(files.json, json_text(run_json(history)) + "\n")
    if html:
        from skippipe.report.run.html import write_run_html

        write_run_html(history, html)
    if pictures:
        from skippipe.report.run.png import write_run_pngs

        names = write_run_pngs(history, pictures)
        return [path for path in (files.json, html) if path] + [pictures / name for name in names]
    if png:
        from skippipe.report.run.png import write_run_png

        write_run_png(history, png)
    return [path for path in files if path]


def _no_trace(history: RunHistory) -> str:
    from skippipe.runs.tail import trace_name

    if not history.recorded:
        return f"--trace: no iteration of {history.folder} was recorded; 'recorded' under [report] in the job says when"
    last = history.folder / "traces" / trace_name(history.recorded[-1].iteration)
    return f"--trace: recorded iterations are such files already; open {last}"


def _print_run(history: RunHistory) -> None:
    from skippipe.report.run.summary import run_figures, short_nodes_table

    print(f"{history.name}:")
    figures = run_figures(history)
    width = max(len(name) for name, _ in figures)
    for name, value in figures:
        print(f"  {name:{width}}  {value}")
    for outage in history.outages:
        text = "; ".join(filter(None, (outage.why, outage.answer, outage.end)))
        print(f"iteration {outage.iteration + 1:5}  lost: '{outage.node}' {text}")
    table = short_nodes_table(history)
    print(f"\n{table.title}. {table.note}".rstrip())
    plan_command.show_table(table)
    if history.missing:
        print("not on record:")
        for each in history.missing:
            print(f"  {each}")


def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run that goes on, or is over.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than loopback: with SKIPPIPE_DASHBOARD_TOKEN set only.")
    ] = "127.0.0.1",
    port: Annotated[int, PORT, typer.Option(help="0: any.")] = 8090,
) -> None:
    """Show a run in the browser: nodes, links, paths, Gantt chart, loss, events.

    It follows the files in the run's output folder, so it can be started and ended at any time, also on another machine
    that has the folder. Nothing can be changed from there. Ctrl-C ends it. 'skippipe train --dashboard 8090' starts the
    same beside a run.

    Example: skippipe dashboard run
    """
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # nothing is simulated here: no compiler needed
    from skippipe.dashboard import server as dashboard_server

    if not run.is_dir():
        raise UserError(f"{run}: is no folder; name the output folder of a run")
    dashboard_server.check_installed()
    settings = dashboard_server.access_settings(host)
    with dashboard_server.listen(host, port, "--port") as listener:
        if not any((run / file).exists() for file in FILES):
            print(f"{run}: there is nothing of a run yet; the page fills when there is", file=sys.stderr)
        print(f"{run} is shown at {dashboard_server.url_of(listener)}; Ctrl-C ends it", flush=True)
        dashboard_server.run(run, listener, settings)
