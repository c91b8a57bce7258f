"""Commands that inspect files: cluster, check, simulate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.cli.options import ClusterName, ContentionOnly, Json, TraceOption, option, timing_of
from skippipe.errors import UserError
from skippipe.value_ranges import DRAWS, MICROBATCHES, SEED, Range

if TYPE_CHECKING:
    from skippipe.cluster import Cluster
    from skippipe.plan import Plan
    from skippipe.timeline import Timeline, Timing

JITTER = "Jitter"
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as 'skippipe plan -o' writes it.")]


def cluster(
    name: ClusterName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it as a cluster file.")] = None,
    as_json: Json = False,
) -> None:
    """Make a cluster file from a preset, or check one and show what is in it.

    Example: skippipe cluster regions:24 -o cluster.json
    """
    from skippipe.planner.problem_spec import cluster_named

    found, _ = cluster_named(name)
    if output:
        found.save(output)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    _show_cluster(found)
    if output:
        print(f"written to {output}")


def _show_cluster(found: Cluster) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    print(f"{found.name}: {len(found)} nodes, {found.hop_overhead_s:g} s of overhead a hop, id {found.fingerprint}")
    table = Table()
    for heading in ("node", "location", "TFLOP/s", "memory GiB", "median ms to others", "median MB/s to others"):
        table.add_column(heading, justify="left" if heading in ("node", "location") else "right")
    for index, node in enumerate(found.nodes):
        others = np.arange(len(found)) != index
        latency = f"{np.median(found.latency_s[index, others]) * 1e3:.1f}" if others.any() else "–"
        speed = f"{np.median(found.bandwidth_bytes_per_s[index, others]) / 1e6:.1f}" if others.any() else "–"
        tera, gib = f"{node.flops_per_s / 1e12:.2f}", f"{node.memory_bytes / 2**30:.1f}"
        table.add_row(node.name, node.location, tera, gib, latency, speed)
    Console(markup=False).print(table)


def check_plan(
    plan: PlanFile,
    as_json: Json = False,
) -> None:
    """Verify a plan: every rule, every cost, and the arithmetic of the promised time.

    Prints each violation with its lane and hop. Exit code 0: the plan holds; 1: it does not; 2: not a plan.

    Example: skippipe check plan.json
    """
    from skippipe.plan import Plan
    from skippipe.validate import validate

    found = Plan.load(plan)
    violations = validate(found)
    if as_json:
        rows = [{"rule": each.rule, "where": each.where, "message": each.message} for each in violations]
        print(json.dumps({"ok": not rows, "violations": rows}))
    elif violations:
        print("\n".join(map(str, violations)))
    else:
        promise = (
            "no promise to verify" if found.expected is None else f"{found.expected.iteration_s:.3f} s as promised"
        )
        print(f"{plan}: holds (CC1, CC2, CC3, TC1, no deadlock, links, {promise})")
    if violations:
        raise typer.Exit(1)


def simulated(path: Path) -> tuple[Plan, Timeline]:
    """A plan file with its simulated timeline; a warning if the file promises another one."""
    from skippipe.plan import Plan
    from skippipe.simulator import simulate
    from skippipe.timeline import Timing

    plan = Plan.load(path)
    timeline = simulate(plan, plan.expected.timing if plan.expected else Timing.FULL)
    if plan.expected not in (None, timeline):
        print(f"warning: {path} promises another timeline than it has; see 'skippipe check'", file=sys.stderr)
    return plan.promising(timeline), timeline


def simulate_plan(
    source: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file, or a built-in example together with --paths.")
    ],
    paths: Annotated[
        str | None,
        typer.Option(help="Published paths of the example: skippipe, skippipe_no_tc2, dtfm_skip or full_pipeline."),
    ] = None,
    microbatches: Annotated[
        int | None,
        MICROBATCHES,
        typer.Option(
            "--microbatches", "-m", help="Of the published paths, dealt out over their lanes. [default: as published]"
        ),
    ] = None,
    contention_only: ContentionOnly = None,
    jitter: Annotated[
        float | None,
        Range(0, 2),
        option(
            JITTER,
            "Also: how iterations vary if nodes and links do. 0.2: what a node computes, the latency and the "
            "bandwidth of a link each take a random number of times as long, with a standard deviation of 20%.",
            "none",
        ),
    ] = None,
    draws: Annotated[int, DRAWS, option(JITTER, "Iterations to draw.")] = 200,
    seed: Annotated[int, SEED, option(JITTER, "Same seed, same draws.")] = 0,
    trace: TraceOption = None,
    as_json: Json = False,
) -> None:
    """Run one iteration under virtual time: how long it takes, and what waits for what.

    Example: skippipe simulate published20 --paths skippipe --contention-only
    """
    from skippipe.simulator import simulate

    found, default_timing = _plan_or_example(source, paths, microbatches)
    timeline = simulate(found, timing_of(contention_only, default_timing))
    spread = None
    if jitter is not None:
        from skippipe.jitter import Jitter, spread_of

        spread = spread_of(found, timeline.timing, Jitter(jitter, draws, seed))
    if trace:
        from skippipe.report.chrome_trace import write_trace

        write_trace(found, timeline, trace)
    if as_json:
        names = [node.name for node in found.cluster.nodes]
        figures = {
            "microbatches": found.microbatches,
            "collision_s": timeline.collision_s,
            "bytes_moved": timeline.bytes_moved,
            **({"jitter": spread.to_json()} if spread else {}),
        }
        print(json.dumps({**figures, **timeline.to_json(names)}))
        return
    _show_timeline(found, timeline)
    if spread:
        print(f"with a jitter of {jitter:.0%}: {spread}")


def _plan_or_example(source: str, paths: str | None, microbatches: int | None) -> tuple[Plan, Timing]:
    """A plan, and the timing that its figures are for."""
    from skippipe.plan import Plan
    from skippipe.planner.published import EXAMPLES, published_plan
    from skippipe.timeline import Timing

    if source in EXAMPLES:
        example = EXAMPLES[source]()
        if paths is None:
            raise UserError(f"--paths: say which of the published paths ({', '.join(example.paths) or 'none here'})")
        return published_plan(example, paths, microbatches), example.timing
    if paths is not None or microbatches is not None:
        raise UserError("--paths and --microbatches go with a built-in example; a plan file has its own")
    plan = Plan.load(Path(source))
    return plan, plan.expected.timing if plan.expected else Timing.FULL


def _show_timeline(plan: Plan, timeline: Timeline) -> None:
    from rich.console import Console
    from rich.table import Table

    from skippipe.cost_model import seconds

    print(
        f"iteration {timeline.iteration_s:.3f} s ({timeline.timing}), last backward "
        f"{seconds(timeline.last_backward_ns):.3f} s, {plan.microbatches} microbatches, "
        f"{timeline.bytes_moved / 1e9:.2f} GB moved, {timeline.collision_s:.1f} s of collisions"
    )
    table = Table()
    for heading in ("stage", "node", "lanes", "slots", "busy s", "idle s", "collisions s"):
        table.add_column(heading, justify="left" if heading == "node" else "right")
    for use in sorted(timeline.nodes, key=lambda each: (each.stage, each.node)):
        lanes = sum(use.node in lane.path for lane in plan.lanes)
        times = (use.busy_ns, timeline.idle_ns(use), use.collision_ns)
        name = plan.cluster.nodes[use.node].name
        table.add_row(str(use.stage), name, str(lanes), str(use.slots), *(f"{seconds(each):.2f}" for each in times))
    Console(markup=False).print(table)
    for index, (start, end) in enumerate(timeline.averaging_ns):
        held = f"gradients averaged from {seconds(start):.2f} to {seconds(end):.2f} s"
        print(f"stage {index}: {held if plan.stages[index].nodes else 'no node holds it'}")
