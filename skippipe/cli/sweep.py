"""The command sweep: how many stages to have, and how many of them to skip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.cli import plan as plan_command
from skippipe.cli.options import (
    BudgetOption,
    ClusterName,
    Json,
    ProblemOptions,
    Seed,
    SweepOptions,
    option,
    pipeline_option,
    problem_from,
    takes,
)
from skippipe.errors import Infeasible
from skippipe.json_fields import check_writable
from skippipe.terminal import interruptible
from skippipe.value_ranges import Range

if TYPE_CHECKING:
    from skippipe.plan import Plan
    from skippipe.planner.problem import Problem
    from skippipe.planner.sweep import InfeasiblePoint, SweepPoint, Trade
    from skippipe.report.summary import Table

LOSS, OUTPUT = "Time against loss", "Output"


@takes(SweepOptions)
def sweep(
    cluster: ClusterName,
    stages: Annotated[
        str | None,
        pipeline_option("Stages of the pipeline; several: 4,6,8 or 4-8.", "6, or 4 under 12 nodes", "-s", "--stages"),
    ] = None,
    penalty: Annotated[
        float,
        Range(0, 1_000),
        option(
            LOSS,
            "Loss that skipping adds per share of the stages, for the same tokens: with 0.3, a third skipped "
            "costs 0.1 nats. 0: only time counts. 'skippipe study' measures it.",
            metavar="NATS",
        ),
    ] = 0.0,
    doubling: Annotated[
        float,
        Range(0.001, 1_000),
        option(
            LOSS,
            "Loss that twice as many tokens take off. With 0.1 and a penalty of 0.3, a third skipped takes twice "
            "as many tokens to the same loss, so it has to be twice as fast.",
            metavar="NATS",
        ),
    ] = 0.1,
    strategy: plan_command.SkippingStrategy = "best",
    budget: BudgetOption = 20,
    seed: Seed = 0,
    png: Annotated[Path | None, option(OUTPUT, "Draw seconds against share skipped.")] = None,
    html: Annotated[Path | None, option(OUTPUT, "The same and the table as a page that needs no other file.")] = None,
    as_json: Json = False,
    *,
    options: SweepOptions,
) -> None:
    """Plan for every share of the stages that can be skipped, and for several numbers of stages; name the best.

    The best is the soonest at the same loss: seconds per microbatch, times the tokens that it takes to make up for what
    skipping adds to the loss, 2^(penalty × share skipped / doubling). A star marks what is efficient: nothing else
    skips less and is faster. All have about as many microbatches; where they do not divide (CC3), they are rounded up.
    The budget is for each plan.

    Example: skippipe sweep published20 --stages 4-6 --penalty 0.3 --png sweep.png
    """
    for picture in (png, html):
        if picture:
            check_writable(picture, Path(cluster))
    from skippipe.planner.problem_spec import PlanSpec, cluster_named, stages_of
    from skippipe.planner.strategies import PlanRequest
    from skippipe.planner.sweep import InfeasiblePoint, SweepPoint, Trade, best, efficient, stage_counts
    from skippipe.planner.sweep import sweep as swept

    found, example = cluster_named(cluster)
    default_stages = stages_of(found, PlanSpec(layers=options.layers), example)
    counts = stage_counts(stages) if stages else [default_stages]
    rows: list[dict[str, Any]] = []

    def ask(count: int, visited: int, microbatches: int | None) -> Problem:
        given = {**vars(options), "microbatches": microbatches}
        problem = problem_from(cluster, ProblemOptions(**given, stages=count, visit=visited))
        return replace(problem, sizes=())  # an example has sizes of its own for one share

    with interruptible() as stopped:

        def planned(problem: Problem) -> Plan:
            plan, took_s = plan_command.planned(problem, strategy, PlanRequest(seed, budget), stopped)
            rows.append(plan_command.summary(plan, took_s))
            return plan

        answers = swept(counts, options.microbatches, ask, planned, lambda: bool(stopped))
    points = [each for each in answers if isinstance(each, SweepPoint)]
    refusals = [each for each in answers if isinstance(each, InfeasiblePoint)]
    if not points:
        raise Infeasible(refusals[0].reason)
    trade = Trade(penalty, doubling)
    winner = best(points, trade)
    for point, good, row in zip(points, efficient(points), rows, strict=True):
        row |= {
            "stages": point.stages,
            "visited": point.visited,
            "s_per_microbatch": point.microbatch_s,
            "ratio": point.microbatch_s / points[0].microbatch_s,
            "s_at_same_loss": point.same_loss_s(trade),
            "efficient": good,
            "best": point is winner,
        }
    table = _table(rows, points[0])
    title = f"{found.name}: {len(found)} nodes, {rows[0]['timing']} timing"
    verdict = _verdict(winner, trade)
    if png or html:
        from skippipe.report.skip_tradeoff import Tradeoff, write_page, write_png

        if png:
            write_png(Tradeoff(points, trade), title, png)
        if html:
            write_page(Tradeoff(points, trade), title, verdict, table, html)
    if as_json:
        print(json.dumps(_in_order(answers, rows)))
        return
    print(title)
    plan_command.show_table(table)
    for line in _refused(refusals):
        print(line)
    print(verdict)


def _in_order(answers: list[SweepPoint | InfeasiblePoint], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the sweep, with the infeasible ones."""
    from skippipe.planner.sweep import InfeasiblePoint

    left = iter(rows)
    return [
        {
            "stages": each.stages,
            "visited": each.visited,
            "skipped": float(each.skipped),
            **({"infeasible": each.reason} if isinstance(each, InfeasiblePoint) else next(left)),
        }
        for each in answers
    ]


def _table(rows: list[dict[str, Any]], first: SweepPoint) -> Table:
    from skippipe.report.summary import Table

    headings = ("stages", "visited", "skipped", "micro-\nbatches", "iteration", "s a micro-\nbatch",
                f"against\n{first.name}", "s at the\nsame loss", "effi-\ncient", "nodes", "planned\nin")  # fmt: skip
    cells = [
        [
            *(str(row["stages"]), str(row["visited"]), f"{row['skipped']:.0%}", str(row["microbatches"])),
            *(f"{row['iteration_s']:.2f} s", f"{row['s_per_microbatch']:.3f}", f"{row['ratio']:.2f}"),
            *(f"{row['s_at_same_loss']:.3f}", "*" if row["efficient"] else "", str(row["nodes_used"])),
            f"{row['planning_s']:.1f} s",
        ]
        for row in rows
    ]
    return Table("Plans", "", headings, cells)


def _refused(refusals: list[InfeasiblePoint]) -> list[str]:
    """A line for each reason that a plan is infeasible, with all lengths of paths that it is for."""
    from skippipe.timeline import ranges_text

    lengths: dict[tuple[int, str], list[int]] = {}
    for each in refusals:
        lengths.setdefault((each.stages, each.reason), []).append(each.visited)
    return [
        f"no plan for {stages} stages, visiting {ranges_text(visited)}: {reason}"
        for (stages, reason), visited in lengths.items()
    ]


def _verdict(winner: SweepPoint, trade: Trade) -> str:
    visiting = f"best: visiting {winner.name} stages, {winner.microbatch_s:.3f} s per microbatch"
    if not trade.penalty:
        return f"{visiting} (only time counts; --penalty says what skipping costs)"
    return (
        f"{visiting}; with {trade.tokens(winner.skipped):.2f} times the tokens to the same loss, as if it took "
        f"{winner.same_loss_s(trade):.3f} s"
    )
