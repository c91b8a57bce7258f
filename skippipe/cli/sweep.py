"""The command sweep: plans for every share of the stages that can be skipped, and the best of them at the same loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from skippipe.cli.options import (
    Budget,
    ClusterName,
    Json,
    JsonFile,
    Overwrite,
    ProblemOptions,
    Seed,
    SweepOptions,
    codec_budget,
    numbers_of,
    option,
    pipeline_option,
    problem_from,
    search_option,
    takes,
)
from skippipe.cli.plan import search_plan, show_table, summary
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import check_output, json_text, write_text
from skippipe.skip_schedule import USUAL
from skippipe.terminal import interruptible
from skippipe.value_ranges import NATS, Range

if TYPE_CHECKING:
    from skippipe.plan import Plan
    from skippipe.planner.problem import Problem
    from skippipe.planner.sweep import CodecPoint, InfeasiblePoint, SweepPoint, Trade, UsualRun
    from skippipe.report.summary import Table

LOSS, OUTPUT = "Time against loss", "Output"
MEASURED_PENALTY = 0.5
"""Nats per share of the stages: a third, skipped all along, cost 0.16 to 0.17 nats (docs/results-learning.md)."""
DOUBLING = 0.1
SkippingStrategy = Annotated[
    Literal["best", "skippipe", "no-tc2", "dtfm-skip"], search_option("As in 'skippipe plan'.")
]


@takes(SweepOptions)
def sweep(
    cluster: ClusterName,
    stages: Annotated[
        str | None,
        pipeline_option("Stages of the pipeline; several: 4,6,8 or 4-8.", "6, or 4 under 12 nodes", "-s", "--stages"),
    ] = None,
    penalty: Annotated[
        float | None,
        Range(0, 1_000),
        option(
            LOSS,
            "Loss that skipping adds per share of the stages, for the same tokens: with 0.3, a third skipped "
            "costs 0.1 nats. 0: only time counts. 'skippipe study' measures it.",
            f"{MEASURED_PENALTY:g}, as measured with a third skipped all along",
            metavar="NATS",
        ),
    ] = None,
    doubling: Annotated[
        float | None,
        Range(0.001, 1_000),
        option(
            LOSS,
            "Loss that twice as many tokens take off. With 0.1 and a penalty of 0.3, a third skipped takes twice "
            "as many tokens to the same loss, so it has to be twice as fast.",
            f"{DOUBLING:g}",
            metavar="NATS",
        ),
    ] = None,
    output: JsonFile = None,
    strategy: SkippingStrategy = "best",
    budget: Budget = 20,
    seed: Seed = 0,
    png: Annotated[Path | None, option(OUTPUT, "Draw seconds against share skipped, or against nats.")] = None,
    html: Annotated[Path | None, option(OUTPUT, "The same and the table as a page that needs no other file.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: SweepOptions,
) -> None:
    """Plan for every share of the stages that can be skipped, and for several numbers of stages; name the best.

    The best is the soonest at the same loss: seconds per microbatch, times the tokens that it takes to make up for what
    skipping adds to the loss, 2^(penalty × share skipped / doubling). A star marks what is efficient: nothing else
    skips less and is faster. All have about as many microbatches; where they do not divide (CC3), they are rounded up.
    The budget is for each plan.

    With several --nats it plans for each of these instead, with as many stages skipped as is usual: what a loss by
    smaller codecs buys.

    Example: skippipe sweep published20 --stages 4-6 --penalty 0.3 --png sweep.png
    """
    files = [path for path in (output, png, html) if path]
    for path in files:
        check_output(path, Path(cluster), overwrite=overwrite)
    if options.nats is not None and "," in options.nats:
        for name, value in (("--penalty", penalty), ("--doubling", doubling)):
            if value is not None:
                raise UserError(f"{name}: weighs what skipping costs, and several --nats skip alike: leave one out")
        found = _codec_points(cluster, stages, options, strategy=strategy, seed=seed, budget_s=budget)
        _show_codecs(*found, output, png, html, as_json=as_json)
        return
    if penalty == 0 and doubling is not None:
        raise UserError("--doubling: says what a penalty costs in tokens, and --penalty 0 has none: leave one out")
    from skippipe.planner.problem import PlanRequest
    from skippipe.planner.problem_spec import PlanSpec, cluster_named, stages_of
    from skippipe.planner.sweep import InfeasiblePoint, SweepPoint, Trade, best, efficient, stage_counts, usual_run
    from skippipe.planner.sweep import sweep as swept

    known, example = cluster_named(cluster)
    default_stages = stages_of(known, PlanSpec(layers=options.layers), example)
    counts = stage_counts(stages) if stages else [default_stages]
    rows: list[dict[str, Any]] = []

    def ask(count: int, visited: int, microbatches: int | None) -> Problem:
        given = {**vars(options), "microbatches": microbatches}
        problem = problem_from(cluster, ProblemOptions(**given, stages=count, visit=visited))
        return replace(problem, sizes=())  # an example has sizes of its own for one share

    with interruptible() as stopped:

        def planned(problem: Problem) -> Plan:
            plan, took_s = search_plan(problem, strategy, PlanRequest(seed, budget), stopped)
            rows.append(summary(plan, took_s))
            return plan

        answers = swept(counts, options.microbatches, ask, planned, lambda: bool(stopped))
    points = [each for each in answers if isinstance(each, SweepPoint)]
    refusals = [each for each in answers if isinstance(each, InfeasiblePoint)]
    if not points:
        raise Infeasible(refusals[0].reason)
    trade = Trade(MEASURED_PENALTY if penalty is None else penalty, doubling or DOUBLING)
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
    table = _sweep_table(rows, points[0])
    title = f"{known.name}: {len(known)} nodes, {rows[0]['timing']} timing"
    verdict = _verdict(winner, trade, measured=penalty is None)
    if png or html:
        from skippipe.report.tradeoff import Tradeoff, write_skipped_page, write_skipped_png

        if png:
            write_skipped_png(Tradeoff(points, trade), title, png)
        if html:
            write_skipped_page(Tradeoff(points, trade), title, verdict, table, html)
    usual = [] if trade.penalty == 0 else [_usual(count, usual_run(points, count, trade.doubling)) for count in counts]
    notes = [*_refused(refusals), *_written(files), *filter(None, usual), verdict]
    _answer(_in_order(answers, rows), title, table, notes, output, as_json=as_json)


def _written(files: list[Path]) -> list[str]:
    return [f"written to {', '.join(map(str, files))}"] if files else []


def _answer(
    rows: list[dict[str, Any]], title: str, table: Table, notes: list[str], output: Path | None, *, as_json: bool
) -> None:
    """What the command has found: in the output file, and as JSON or as a table with notes."""
    if output:
        write_text(output, json_text(rows) + "\n")
    if as_json:
        print(json.dumps(rows))
        return
    print(title)
    show_table(table)
    for line in notes:
        print(line)


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


def _sweep_table(rows: list[dict[str, Any]], first: SweepPoint) -> Table:
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


def _verdict(winner: SweepPoint, trade: Trade, *, measured: bool) -> str:
    visiting = f"best: visiting {winner.name} stages, {winner.microbatch_s:.3f} s per microbatch"
    if not trade.penalty:
        return f"{visiting} (only time counts; --penalty says what skipping costs)"
    said = (
        f"{visiting}; with {trade.tokens(winner.skipped):.2f} times the tokens to the same loss, as if it took "
        f"{winner.same_loss_s(trade):.3f} s"
    )
    penalty = f"penalty of {trade.penalty:g} nats per share skipped"
    if not measured:
        return f"{said} ({penalty})"
    return f"{said} (measured {penalty} all along; --penalty sets another; 0: only time counts)"


def _usual(stages: int, run: UsualRun | None) -> str:
    if run is None:
        return ""
    return (
        f"'skippipe train' skips less than all along: by its default, {USUAL}, {stages} stages take "
        f"{run.microbatch_s:.3f} s per microbatch on average, and {run.to_same_loss:.2f} of the full pipeline's time "
        "to the same loss"
    )


def _codec_points(
    cluster: str, stages: str | None, options: SweepOptions, *, strategy: str, seed: int, budget_s: float
) -> tuple[list[CodecPoint], list[dict[str, Any]]]:
    """A plan for each of several --nats, and its row."""
    from skippipe.planner.problem import PlanRequest
    from skippipe.planner.sweep import stage_counts, sweep_codecs

    counts = stage_counts(stages) if stages else [None]
    if len(counts) > 1:
        raise UserError("--stages: with several --nats give one number of stages")
    budgets = [codec_budget(options, each) for each in sorted(set(numbers_of(options.nats or "", "--nats", NATS)))]
    problem = problem_from(cluster, ProblemOptions(**{**vars(options), "nats": None, "prices": None}, stages=counts[0]))
    took_s: dict[Plan, float] = {}
    with interruptible() as stopped:

        def planned(problem: Problem) -> Plan:
            plan, took = search_plan(problem, strategy, PlanRequest(seed, budget_s), stopped)
            took_s[plan] = took
            return plan

        points = sweep_codecs(problem, budgets, planned, lambda: bool(stopped))
    rows = []
    for point in points:
        row = summary(point.plan, took_s.get(point.plan, 0.0))
        shares = {"budget_nats": point.budget, "nats": point.nats, "ratio": point.iteration_s / points[0].iteration_s}
        rows.append(shares | row)
    return points, rows


def _show_codecs(
    points: list[CodecPoint],
    rows: list[dict[str, Any]],
    output: Path | None,
    png: Path | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    from skippipe.report.summary import Table

    plan = points[0].plan
    title = f"{plan.cluster.name}: {len(plan.cluster)} nodes, {rows[0]['timing']} timing"
    headings = (
        "nats\nallowed",
        "nats\nspent",
        "iteration",
        "against\nfirst",
        "samples\n/ s",
        "moved\nGB",
        "nodes",
        "codecs",
    )
    cells = [
        [
            *(f"{row['budget_nats']:g}", f"{row['nats']:.2g}", f"{row['iteration_s']:.2f} s", f"{row['ratio']:.2f}"),
            *(f"{row['samples_per_s']:.2f}", f"{row['bytes_moved'] / 1e9:.1f}", str(row["nodes_used"]), row["codecs"]),
        ]
        for row in rows
    ]
    table = Table("Plans", "", headings, cells)
    last = points[-1]
    verdict = (
        f"{last.nats:.2g} nats take {1 - last.iteration_s / points[0].iteration_s:.0%} off the iteration: "
        f"{points[0].iteration_s:.2f} s to {last.iteration_s:.2f} s"
    )
    if png or html:
        from skippipe.report.tradeoff import write_codecs_page, write_codecs_png

        if png:
            write_codecs_png(points, title, png)
        if html:
            write_codecs_page(points, title, verdict, table, html)
    files = [path for path in (output, png, html) if path]
    _answer(rows, title, table, [*_written(files), verdict], output, as_json=as_json)
