"""Commands that search plans: plan, compare; and what the command sweep shares with them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skippipe.cli.options import (
    Budget,
    ClusterName,
    Json,
    Overwrite,
    ProblemOptions,
    Seed,
    problem_from,
    search_option,
    takes,
    with_stages_of,
    workload_option,
)
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import check_output
from skippipe.terminal import interruptible, plan_progress, print_table
from skippipe.value_ranges import MICROBATCHES, POSITIVE, Range

if TYPE_CHECKING:
    from skippipe.jitter import Spread
    from skippipe.plan import Plan
    from skippipe.planner.problem import PlanProgress, PlanRequest, Problem
    from skippipe.report.summary import Table

BOUND_SHARE = 0.2  # of the budget, for a proof of how good a plan could be
LATE = 2 / 3  # of a search: from here on, it should not improve much
REPORTED_GAIN = 0.01  # of the iteration

StrategyName = Annotated[
    Literal["best", "skippipe", "no-tc2", "dtfm-skip", "dtfm"],
    search_option(
        "best (optimises everything at once), skippipe (as in its paper), no-tc2 (the same, ignores collisions), "
        "dtfm-skip (round robin, ignores the network), dtfm (full pipeline, nothing skipped)."
    ),
]
KeepStages = Annotated[
    str | None,
    search_option(
        "Keep the nodes on the stages of this plan file or example (published20) and search paths only.", metavar="FROM"
    ),
]


@takes(ProblemOptions)
def plan(
    cluster: ClusterName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    strategy: StrategyName = "best",
    budget: Budget = 30,
    search_steps: Annotated[
        int | None,
        POSITIVE,
        search_option(
            "End after so many moves tried, whatever time that takes: the same plan every time (best only).",
            "no limit",
        ),
    ] = None,
    seed: Seed = 0,
    most_microbatches: Annotated[
        int | None,
        MICROBATCHES,
        workload_option(
            "The planner chooses how many microbatches an iteration has, from --microbatches up to this: as many as "
            "train the most samples a second (best only).",
            "as many as --microbatches says",
        ),
    ] = None,
    keep_stages: KeepStages = None,
    start: Annotated[
        Path | None, search_option("Begin with this plan and make it better (best only).", metavar="PLAN")
    ] = None,
    robust: Annotated[
        float,
        Range(0, 2),
        search_option(
            "Of the plans found, take the one that is best in 95 of 100 iterations when nodes and links are now "
            "and then slower: 0.2 is a standard deviation of 20% (best only; see 'skippipe simulate --jitter').",
            "no jitter",
            metavar="JITTER",
        ),
    ] = 0.0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: ProblemOptions,
) -> None:
    """Place nodes on stages and find a path for every microbatch.

    Ctrl-C ends the search and keeps the best plan so far.

    Example: skippipe plan published20 --budget 30 -o plan.json
    """
    if output:
        check_output(output, Path(cluster), overwrite=overwrite)
    if robust and strategy != "best":
        raise UserError(f"--robust chooses among plans of the strategy best, and {strategy} has one: leave one out")
    for name, value in (("--search-steps", search_steps), ("--start", start)):
        if value is not None and strategy != "best":
            raise UserError(f"{name} is for the strategy best, and {strategy} has no use for it: leave one out")
    if most_microbatches and (strategy != "best" or start):
        raise UserError(
            "--most-microbatches asks the strategy best for several plans: leave out --strategy and --start"
        )
    placement, options = with_stages_of(keep_stages, cluster, options)
    problem = problem_from(cluster, options)
    from skippipe.cost_model import seconds
    from skippipe.plan import Plan
    from skippipe.planner.problem import PlanRequest
    from skippipe.planner.sweep import choose_batch_size
    from skippipe.planner.whatif.advisor import choices, left_out
    from skippipe.report.summary import plan_digest

    request = PlanRequest(
        seed=seed,
        budget_s=math.inf if search_steps else budget,
        changes=search_steps or math.inf,
        bound_s=BOUND_SHARE * budget,
        robust=robust,
        placement=placement,
        start=Plan.load(start) if start else None,
    )
    looks: list[Plan] = []
    began = time.monotonic()
    with interruptible() as stopped:
        if most_microbatches:
            with _on_terminal(request, "best", stopped) as shown:
                found, looks = choose_batch_size(problem, most_microbatches, shown)
        else:
            found, _ = search_plan(problem, strategy, request, stopped)
    took_s = time.monotonic() - began
    if output:
        found.save(output)
    chosen = choices(problem, found) if strategy == "best" else []
    if as_json:
        more: dict[str, Any] = {"jitter": _spread(found, robust).to_json()} if robust else {}
        more["choices"] = [each.to_json() for each in chosen]
        if looks:
            more["batches"] = {str(each.microbatches): each.samples_per_s for each in looks}
        print(json.dumps({**summary(found, took_s), **more, "plan": found.to_json()}))
        return
    print(plan_digest(found))
    if options.wire is None and options.gradients is None and options.nats is None:
        from skippipe.training.job_config import ADVISED

        wire, gradients = ADVISED.values()
        print(f"\nno codecs were named; to plan for those of 'skippipe job': --wire {wire} --gradients {gradients}")
    if looks:
        print("\nsamples a second, at a first look: "
              + ", ".join(f"{each.samples_per_s:.3g} with {each.microbatches} microbatches" for each in looks)
              + f"; in the end {found.samples_per_s:.3g} with {found.microbatches}")  # fmt: skip
    if chosen:
        now_ns = found.promise.iteration_ns
        said = [
            f"{each.variable} {each.chosen} ({each.instead}: {each.iteration_ns / now_ns - 1:+.1%})" for each in chosen
        ]
        print(f"\nchosen, and what the next best would cost on the same paths: {'; '.join(said)}")
    names = [node.name for node in found.cluster.nodes]
    for reason, nodes in left_out(found).items():
        print(f"\nwithout {', '.join(repr(names[node]) for node in nodes)}: {reason}")
    if found.gap is not None and found.lower_bound_ns is not None:
        bound_s = seconds(found.lower_bound_ns)
        print(f"\nno plan can take less than {bound_s:.2f} s (proven); this one is {found.gap:.1%} above that")
    if robust:
        print(f"\nwith a jitter of {robust:.0%}: {_spread(found, robust)}")
    print(f"\nplanned in {took_s:.1f} s" + (f"; written to {output}" if output else "; -o FILE keeps it"))


@takes(ProblemOptions)
def compare(
    cluster: ClusterName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write each strategy's plan into this folder.")
    ] = None,
    budget: Budget = 30,
    seed: Seed = 0,
    keep_stages: KeepStages = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: ProblemOptions,
) -> None:
    """Plan with every strategy and put them side by side: seconds, bytes moved, collisions.

    Example: skippipe compare published20 --full-timing
    """
    placement, options = with_stages_of(keep_stages, cluster, options)
    problem = problem_from(cluster, options)
    from skippipe.planner.problem import PlanRequest, Strategy

    request = PlanRequest(seed, budget)
    full = replace(problem, visited=problem.stages, sizes=(), swaps=0)
    rivals = [(str(each), problem, each) for each in reversed(Strategy)]
    rivals.insert(1, ("best-full", full, Strategy.BEST))  # so that what planning gives and what skipping gives differ
    if output:
        for name, *_ in rivals:
            check_output(output / f"{name}.json", Path(cluster), overwrite=overwrite)
    rows: list[dict[str, Any]] = []
    with interruptible() as stopped:
        for name, variant, each in rivals:
            nothing_skipped = each is Strategy.DTFM or variant is full  # stages of other sizes
            try:
                for_variant = replace(request, placement=None if nothing_skipped else placement)
                found, took_s = search_plan(variant, each, for_variant, stopped)
            except Infeasible as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if output:
                found.save(output / f"{name}.json")
            rows.append({**summary(found, took_s), "strategy": name})
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
    show_table(_table(rows))
    if output:
        print(f"written to {output}/")


def search_plan(problem: Problem, strategy: str, request: PlanRequest, stopped: list[int]) -> tuple[Plan, float]:
    """The plan, and the seconds it took to find."""
    from skippipe.planner.problem import Strategy
    from skippipe.planner.strategies import make_plan

    began = time.monotonic()
    with _on_terminal(request, strategy, stopped) as shown:
        gains = Gains(shown.progress)
        found = make_plan(problem, Strategy(strategy), replace(shown, progress=gains))
    if gains.late > REPORTED_GAIN and not stopped:
        print(
            f"{strategy}: the last third of the search still took off {gains.late:.0%}; "
            "with a longer --budget it would find more",
            file=sys.stderr,
        )
    return found, time.monotonic() - began


@contextmanager
def _on_terminal(request: PlanRequest, strategy: str, stopped: list[int]) -> Iterator[PlanRequest]:
    """The request with its progress on the terminal, and Ctrl-C as its end."""
    with plan_progress(strategy) as progress:
        yield replace(request, progress=progress, stopped=lambda: bool(stopped))
    if stopped:
        print("interrupted: this is the best plan so far", file=sys.stderr)


@dataclass
class Gains:
    """Records how much the search still improved towards its end."""

    show: PlanProgress
    _early_s: float | None = None
    _last_s: float | None = None

    def __call__(self, what: str, share: float, best_s: float | None) -> None:
        if best_s is not None:
            self._early_s = best_s if share < LATE or self._early_s is None else self._early_s
            self._last_s = best_s
        self.show(what, share, best_s)

    @property
    def late(self) -> float:
        return 1 - self._last_s / self._early_s if self._last_s and self._early_s else 0.0


def summary(plan: Plan, took_s: float) -> dict[str, Any]:
    from skippipe.cost_model import seconds
    from skippipe.planner.whatif.advisor import left_out
    from skippipe.report.summary import codecs_text
    from skippipe.simulator import simulate
    from skippipe.timeline import Timing

    expected = plan.promise
    plain = expected if expected.timing is Timing.CONTENTION_ONLY else simulate(plan, Timing.CONTENTION_ONLY)
    return {
        "strategy": plan.strategy,
        "timing": str(expected.timing),
        "skipped": plan.skipped,
        "microbatches": plan.microbatches,
        "iteration_s": expected.iteration_s,
        "samples_per_s": plan.samples_per_s,
        "last_backward_s": seconds(expected.last_backward_ns),
        "contention_only_s": plain.iteration_s,
        "collision_s": expected.collision_s,
        "bytes_moved": expected.bytes_moved,
        "codecs": codecs_text(plan),
        "nodes_used": len(plan.stage_of),
        "left_out": {plan.cluster.nodes[node].name: why for why, nodes in left_out(plan).items() for node in nodes},
        "lower_bound_s": None if plan.lower_bound_ns is None else seconds(plan.lower_bound_ns),
        "planning_s": took_s,
    }


def _spread(plan: Plan, jitter: float) -> Spread:
    from skippipe.jitter import Jitter, spread_of

    return spread_of(plan, plan.promise.timing, Jitter(jitter))


def _table(rows: list[dict[str, Any]]) -> Table:
    from skippipe.report.summary import Table

    headings = ("strategy", "skipped", "micro-\nbatches", "last\nbackward", "iteration",
                f"against\n{rows[0]['strategy']}", "moved\nGB", "collisions", "nodes", "planned\nin")  # fmt: skip
    cells = [
        [
            *(row["strategy"], f"{row['skipped']:.0%}", str(row["microbatches"]), f"{row['last_backward_s']:.2f} s"),
            *(f"{row['iteration_s']:.2f} s", f"{row['ratio']:.2f}", f"{row['bytes_moved'] / 1e9:.2f}"),
            *(f"{row['collision_s']:.1f} s", str(row["nodes_used"]), f"{row['planning_s']:.1f} s"),
        ]
        for row in rows
    ]
    return Table("", "", headings, cells)


def show_table(table: Table) -> None:
    """Print a table on the terminal: a name, then figures."""
    from rich.box import SIMPLE_HEAD

    rows = table.rows
    print_table(table.headings, rows, (0,), file_width=110, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
