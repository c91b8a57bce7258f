"""Commands that search: plan, compare, sweep."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skippipe.cli import inputs
from skippipe.errors import Infeasible
from skippipe.jsonfile import check_writable

if TYPE_CHECKING:
    from skippipe.plan import Plan
    from skippipe.planner.problem import Placement, Problem
    from skippipe.planner.strategies import Progress, Strategy

StrategyName = Annotated[
    Literal["best", "skippipe", "no-tc2", "dtfm-skip", "dtfm"],
    typer.Option(
        help="best (all freedoms at once), skippipe (the study's method), no-tc2 (the same, blind to collisions), "
        "dtfm-skip (blind to the network), dtfm (full pipeline, nothing skipped).",
        rich_help_panel=inputs.SEARCH,
    ),
]
SkippingStrategy = Annotated[
    Literal["best", "skippipe", "no-tc2", "dtfm-skip"],
    typer.Option(help="As in 'skippipe plan'.", rich_help_panel=inputs.SEARCH),
]
KeepStages = Annotated[
    str | None,
    typer.Option(
        metavar="FROM",
        help="Keep the nodes on the stages of this plan file or example (published20) and search paths only.",
        rich_help_panel=inputs.SEARCH,
    ),
]


@inputs.takes(inputs.ProblemOptions)
def plan(
    cluster: inputs.ClusterName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    strategy: StrategyName = "best",
    budget: inputs.Budget = 30,
    changes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="End after so many changes tried, whatever time that takes: the same plan every time (best only).",
            show_default="no limit",
            rich_help_panel=inputs.SEARCH,
        ),
    ] = None,
    seed: inputs.Seed = 0,
    keep_stages: KeepStages = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN", help="Begin with this plan and make it better (best only).", rich_help_panel=inputs.SEARCH
        ),
    ] = None,
    as_json: inputs.Json = False,
    *,
    options: inputs.ProblemOptions,
) -> None:
    """Place nodes on stages and find a path for every microbatch.

    Ctrl-C ends the search and keeps the best plan so far.

    Example: skippipe plan published20 --budget 30 -o plan.json
    """
    if output:
        check_writable(output, Path(cluster))
    placement, options = inputs.with_stages_of(keep_stages, cluster, options)
    problem = inputs.problem_from(cluster, options)
    with interruptible() as stopped:
        search = _Search(seed, math.inf if changes else budget, changes or math.inf, start)
        found, took_s = search.planned(problem, strategy, placement, stopped)
    if output:
        found.save(output)
    if as_json:
        print(json.dumps({**_summary(found, took_s), "plan": found.to_json()}))
        return
    from skippipe.report.grid import plan_grid

    print(plan_grid(found))
    print(f"\nplanned in {took_s:.1f} s" + (f"; written to {output}" if output else "; -o FILE keeps it"))


@inputs.takes(inputs.ProblemOptions)
def compare(
    cluster: inputs.ClusterName,
    out: Annotated[Path | None, typer.Option(help="Write each strategy's plan into this folder.")] = None,
    budget: inputs.Budget = 30,
    seed: inputs.Seed = 0,
    keep_stages: KeepStages = None,
    as_json: inputs.Json = False,
    *,
    options: inputs.ProblemOptions,
) -> None:
    """Plan with every strategy and put them side by side: seconds, bytes moved, collisions.

    Example: skippipe compare published20 --contention-only
    """
    placement, options = inputs.with_stages_of(keep_stages, cluster, options)
    problem = inputs.problem_from(cluster, options)
    from skippipe.planner.strategies import Strategy

    search = _Search(seed, budget)
    full = replace(problem, visited=problem.stages, sizes=(), swaps=0)
    rivals = [(str(each), problem, each) for each in reversed(Strategy)]
    rivals.insert(1, ("best-full", full, Strategy.BEST))  # so that what planning gives and what skipping gives differ
    rows: list[dict[str, Any]] = []
    with interruptible() as stopped:
        for name, asked, each in rivals:
            nothing_skipped = each is Strategy.DTFM or asked is full  # stages of other sizes
            try:
                found, took_s = search.planned(asked, each, None if nothing_skipped else placement, stopped)
            except Infeasible as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if out:
                found.save(out / f"{name}.json")
            rows.append({**_summary(found, took_s), "strategy": name})
            if stopped:
                break
    if not rows:
        raise Infeasible("no strategy has a plan, for the reasons above")
    for row in rows:
        row["ratio"] = row["iteration_s"] / rows[0]["iteration_s"]
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{problem.cluster.name}: {len(problem.cluster)} nodes, {problem.stages} stages, "
          f"{problem.workload.microbatches} microbatches, {problem.timing} timing")  # fmt: skip
    _table(rows, "strategy", rows[0]["strategy"])
    if out:
        print(f"plans written to {out}/")


@inputs.takes(inputs.SweepOptions)
def sweep(
    cluster: inputs.ClusterName,
    strategy: SkippingStrategy = "best",
    budget: inputs.Budget = 20,
    seed: inputs.Seed = 0,
    as_json: inputs.Json = False,
    *,
    options: inputs.SweepOptions,
) -> None:
    """Plan for every skip ratio that the stages allow, from none to all but two.

    Stage sizes follow the demand of each ratio. Where the microbatches do not divide (CC3), they are rounded up, and
    the ratios are between seconds per microbatch.

    Example: skippipe sweep published20 --contention-only
    """
    from skippipe.planner.problem import lane_unit

    first = inputs.problem_from(cluster, inputs.ProblemOptions(**vars(options), skip="0"))
    wanted = first.workload.microbatches
    search = _Search(seed, budget)
    rows: list[dict[str, Any]] = []
    with interruptible() as stopped:
        for visited in range(first.stages, 1, -1):
            unit = lane_unit(first.stages, visited)
            fitting = -(-wanted // unit) * unit
            try:
                workload = replace(first.workload, microbatches=fitting)
                problem = replace(first, visited=visited, sizes=(), workload=workload)
                found, took_s = search.planned(problem, strategy, None, stopped)
            except Infeasible as error:
                rows.append({"visited": visited, "skipped": 1 - visited / first.stages, "infeasible": str(error)})
                continue
            rows.append({"visited": visited, **_summary(found, took_s)})
            if stopped:
                break
    planned = [row for row in rows if "infeasible" not in row]
    if not planned:
        raise Infeasible(rows[-1]["infeasible"])
    for row in planned:
        row["s_per_microbatch"] = row["iteration_s"] / row["microbatches"]
        row["ratio"] = row["s_per_microbatch"] / planned[0]["s_per_microbatch"]
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{first.cluster.name}: {len(first.cluster)} nodes, {first.stages} stages, {first.timing} timing")
    _table(planned, "visited", f"{planned[0]['visited']} visited")
    for row in rows:
        if "infeasible" in row:
            print(f"visiting {row['visited']}: {row['infeasible']}")


@dataclass(frozen=True)
class _Search:
    """How hard to try."""

    seed: int
    budget_s: float
    changes: float = math.inf
    start: Path | None = None

    def planned(
        self, problem: Problem, strategy: str, placement: Placement | None, stopped: list[bool]
    ) -> tuple[Plan, float]:
        """The plan, and the seconds it took to find."""
        from skippipe.plan import Plan
        from skippipe.planner.strategies import Request, Strategy, make_plan

        began = time.monotonic()
        with progress_bar(Strategy(strategy)) as progress:
            request = Request(
                seed=self.seed,
                budget_s=self.budget_s,
                changes=self.changes,
                placement=placement,
                start=Plan.load(self.start) if self.start else None,
                progress=progress,
                stopped=lambda: bool(stopped),
            )
            found = make_plan(problem, Strategy(strategy), request)
        if stopped:
            print("interrupted: this is the best plan so far", file=sys.stderr)
        return found, time.monotonic() - began


@contextmanager
def interruptible() -> Iterator[list[bool]]:
    """The first Ctrl-C fills the list, which ends the search; the second one ends the program."""
    stopped: list[bool] = []

    def stop(*_: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_bar(strategy: Strategy) -> Iterator[Progress]:
    """On a terminal; elsewhere long work is silent."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, share, best_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[strategy]:>9}"), TextColumn("{task.description:<32}"), BarColumn())
    figures = (TextColumn("{task.fields[best]}"), TimeElapsedColumn())
    with Progress(*columns, *figures, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, strategy=str(strategy), best="")

        def show(what: str, share: float, best_s: float | None) -> None:
            best = "" if best_s is None else f"best {best_s:.2f} s"
            bar.update(task, description=what, completed=share, best=best)

        yield show


def _summary(plan: Plan, took_s: float) -> dict[str, Any]:
    from skippipe.costs import seconds
    from skippipe.simulate import simulate
    from skippipe.timeline import Timing

    assert plan.expected is not None
    expected = plan.expected
    plain = expected if expected.timing is Timing.CONTENTION_ONLY else simulate(plan, Timing.CONTENTION_ONLY)
    return {
        "strategy": plan.strategy,
        "timing": str(expected.timing),
        "skipped": plan.skipped,
        "microbatches": plan.microbatches,
        "iteration_s": expected.iteration_s,
        "last_backward_s": seconds(expected.last_backward_ns),
        "contention_only_s": plain.iteration_s,
        "collision_s": expected.collision_s,
        "bytes_moved": expected.bytes_moved,
        "nodes_used": len(plan.stage_of),
        "planning_s": took_s,
    }


def _table(rows: list[dict[str, Any]], key: str, against: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    headings = ("skipped", "micro-\nbatches", "last\nbackward", "iteration", f"against\n{against}")
    table.add_column(key)
    for heading in (*headings, "moved\nGB", "collisions", "nodes", "planned\nin"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row[key]),
            f"{row['skipped']:.0%}",
            str(row["microbatches"]),
            f"{row['last_backward_s']:.2f} s",
            f"{row['iteration_s']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['bytes_moved'] / 1e9:.2f}",
            f"{row['collision_s']:.1f} s",
            str(row["nodes_used"]),
            f"{row['planning_s']:.1f} s",
        )
    Console(width=None if sys.stdout.isatty() else 110, markup=False).print(table)
