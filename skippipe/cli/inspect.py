"""Commands that inspect clusters and plans: cluster, check, simulate, why."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.cli.options import ClusterName, ContentionOnly, Json, Overwrite, Trace, option, print_doubts, timing_of
from skippipe.errors import UserError
from skippipe.json_fields import check_output
from skippipe.terminal import interruptible, plan_progress, print_table
from skippipe.value_ranges import DEVICES, DRAWS, MICROBATCHES, SEED, Range

if TYPE_CHECKING:
    from skippipe.bottlenecks import Bottleneck
    from skippipe.cluster import Cluster
    from skippipe.critical_path import Cause
    from skippipe.plan import Plan
    from skippipe.planner.whatif.advisor import Advice, EvaluatedEdit
    from skippipe.timeline import Timeline, Timing

JITTER = "Jitter"
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as 'skippipe plan -o' writes it.")]
SHOWN = 6  # causes, the largest


def cluster(
    name: ClusterName,
    devices: Annotated[
        int | None, DEVICES, typer.Option(help="Give every node so many devices, each as fast and large as it is.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it as a cluster file.")] = None,
    relay: Annotated[
        float | None,
        Range(1e-6, 10**9),
        typer.Option(
            metavar="MB/S",
            help="Nodes reach each other through a relay ('skippipe relay') that carries so many megabytes a second: "
            "each counts on an equal share.",
        ),
    ] = None,
    relayed: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="The nodes that do, with commas; others are reached directly."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Make a cluster file from a preset, or check one and show what is in it.

    With a relay between the nodes: skippipe cluster cluster.json --relay 100 -o relayed.json

    Example: skippipe cluster regions:24 -o cluster.json
    """
    from skippipe.planner.problem_spec import cluster_named

    if output:
        check_output(output, Path(name), overwrite=overwrite)
    if relayed is not None and relay is None:
        raise UserError("--relayed: goes with --relay, which says how much the relay carries")
    found, _ = cluster_named(name)
    print_doubts(found)
    if relay is not None:
        found = _relayed(found, 1e6 * relay, relayed)
    if devices is not None:
        found = replace(found, nodes=tuple(replace(node, devices=devices) for node in found.nodes))
    if output:
        found.save(output)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    _show_cluster(found)
    if output:
        print(f"written to {output}")


def _relayed(found: Cluster, bytes_per_s: float, names: str | None) -> Cluster:
    from skippipe.cluster import with_relay

    wanted = list(found.number) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in found.number]:
        raise UserError(f"--relayed: '{unknown[0]}' is no node of '{found.name}'; there are {', '.join(found.number)}")
    pairs = {frozenset(pair) for pair in combinations(sorted({found.number[name] for name in wanted}), 2)}
    return with_relay(found, pairs, bytes_per_s)


def _show_cluster(found: Cluster) -> None:
    import numpy as np

    print(f"{found.name}: {len(found)} nodes, {found.hop_overhead_s:g} s of overhead a hop, id {found.fingerprint}")
    rows = []
    for index, node in enumerate(found.nodes):
        others = np.arange(len(found)) != index
        latency = f"{np.median(found.latency_s[index, others]) * 1e3:.1f}" if others.any() else "–"
        speed = f"{np.median(found.bandwidth_bytes_per_s[index, others]) / 1e6:.1f}" if others.any() else "–"
        several = f"{node.devices} × " if node.devices > 1 else ""
        tera, gib = f"{several}{node.flops_per_s / 1e12:.2f}", f"{several}{node.memory_bytes / 2**30:.1f}"
        rates = [f"{each / 1e6:.1f}" if each else "–" for each in (node.upload_bytes_per_s, node.download_bytes_per_s)]
        rows.append([node.name, node.location, tera, gib, latency, speed, *rates])
    headings = ["node", "location", "TFLOP/s", "memory GiB", "median ms to others", "median MB/s to others"]
    headings += ["up MB/s", "down MB/s"]
    shown = len(headings)
    if not any(node.upload_bytes_per_s or node.download_bytes_per_s for node in found.nodes):
        shown -= 2
    print_table(headings[:shown], [row[:shown] for row in rows], left=(0, 1))


def check_plan(plan: PlanFile, as_json: Json = False) -> None:
    """Verify a plan: every rule, every cost, and the arithmetic of the promised time.

    Prints each violation with its lane and hop. Exit code 0: the plan holds; 1: it does not; 2: not a plan.

    Example: skippipe check plan.json
    """
    from skippipe.constraints import RULES
    from skippipe.plan import Plan
    from skippipe.validate import validate

    found = Plan.load(plan)
    violations = validate(found)
    if as_json:
        rows = [
            {"rule": each.rule, "means": RULES.get(each.rule, ""), "where": each.where, "message": each.message}
            for each in violations
        ]
        print(json.dumps({"ok": not rows, "violations": rows}))
    elif violations:
        print("\n".join(map(str, violations)))
    else:
        promise = (
            "no promise to verify" if found.expected is None else f"{found.expected.iteration_s:.3f} s as promised"
        )
        print(f"{plan}: holds every rule:")
        for rule, meaning in {**RULES, "deadlock": "none can happen", "links": "there is one for every hop"}.items():
            print(f"  {rule}: {meaning}")
        print(f"  promise: {promise}")
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
            "--microbatches",
            "-m",
            help="Of the published paths, dealt out over their lanes.",
            show_default="as published",
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
    draws: Annotated[int | None, DRAWS, option(JITTER, "Iterations to draw.", "200")] = None,
    seed: Annotated[int | None, SEED, option(JITTER, "Same seed, same draws.", "0")] = None,
    trace: Trace = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run one iteration under virtual time: how long it takes, and what waits for what.

    Example: skippipe simulate published20 --paths skippipe --contention-only
    """
    from skippipe.simulator import simulate

    for given, value in (("--draws", draws), ("--seed", seed)):
        if jitter is None and value is not None:
            raise UserError(f"{given}: goes with --jitter, which says how much nodes and links vary")
    if trace:
        check_output(trace, Path(source), overwrite=overwrite)
    found, default_timing = _plan_or_example(source, paths, microbatches)
    timeline = simulate(found, timing_of(contention_only, default_timing))
    spread = None
    if jitter is not None:
        from skippipe.jitter import Jitter, spread_of

        spread = spread_of(found, timeline.timing, Jitter(jitter, draws or 200, seed or 0))
    if trace:
        from skippipe.report.gantt import write_trace

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
    if trace:
        print(f"written to {trace}")


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
    from skippipe.cost_model import seconds

    print(
        f"iteration {timeline.iteration_s:.3f} s ({timeline.timing}), last backward "
        f"{seconds(timeline.last_backward_ns):.3f} s, {plan.microbatches} microbatches, "
        f"{timeline.bytes_moved / 1e9:.2f} GB moved, {timeline.collision_s:.1f} s of collisions"
    )
    rows = []
    for use in sorted(timeline.nodes, key=lambda each: (each.stage, each.node)):
        lanes = sum(use.node in lane.path for lane in plan.lanes)
        times = (use.worker_busy_ns, timeline.idle_ns(use), use.collision_ns)
        name = plan.cluster.nodes[use.node].name
        rows.append([str(use.stage), name, str(lanes), str(use.slots), *(f"{seconds(each):.2f}" for each in times)])
    print_table(("stage", "node", "lanes", "slots", "busy s", "idle s", "collisions s"), rows, left=(1,))
    for index, (start, end) in enumerate(timeline.averaging_ns):
        held = f"gradients averaged from {seconds(start):.2f} to {seconds(end):.2f} s"
        print(f"stage {index}: {held if plan.stages[index].nodes else 'no node holds it'}")


def why(
    plan: PlanFile,
    suggestions: Annotated[
        int, Range(0, 10**6), typer.Option(help="List so many changes that help at most; 0: try none.")
    ] = 5,
    replanning: Annotated[
        bool,
        typer.Option(
            "--replanning/--no-replanning",
            help="Try changes that call for other paths too (a node or a slot more, a node less), each with a short "
            "search; or only those that leave paths as they are.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what limits a plan, and which one change would help most.

    The first part is the critical path of the simulated iteration: going back from its end, what determined each moment
    (a node that computes, a link, a collision, a full memory, averaging), added up. The second part tries changes for
    which the path gives reason, one at a time, and lists those that help with what the iteration then takes in the
    simulation. Ctrl-C ends the trying and keeps what was found.

    Example: skippipe why plan.json
    """
    from skippipe.bottlenecks import time_by_cause
    from skippipe.cost_model import seconds
    from skippipe.critical_path import critical_path
    from skippipe.planner.whatif.advisor import advise
    from skippipe.simulator import simulate

    if not suggestions and not replanning:
        raise UserError("--no-replanning: with --suggestions 0 none is tried: leave one out")
    found, timeline = simulated(plan)
    if found.workload.teacher:
        text = f"note: without the teacher's passes; with them an iteration takes {timeline.iteration_s:.3f} s"
        print(text, file=sys.stderr)
        found = found.edited(workload=replace(found.workload, teacher=""))
        timeline = simulate(found, timeline.timing)
    path = critical_path(found, timeline)
    answer = None
    if suggestions:
        with interruptible() as stopped, plan_progress("why") as progress:
            answer = advise(found, timeline, replanning, progress, lambda: bool(stopped))
        if stopped:
            print("interrupted: not all changes were tried", file=sys.stderr)
    if as_json:
        names = [node.name for node in found.cluster.nodes]
        pieces = [
            {**_cause(each.cause, names), "start_s": seconds(each.start_ns), "end_s": seconds(each.end_ns)}
            for each in path
        ]
        print(json.dumps({**_figures(found, timeline, time_by_cause(path), answer, suggestions), "path": pieces}))
        return
    print("\n".join(_words(found, timeline, time_by_cause(path))))
    if answer:
        print("\n".join(["", *_advice_in_words(answer, suggestions)]))


def _s(ns: int) -> str:
    """Seconds in four digits: iterations last milliseconds or days."""
    return f"{ns / 1e9:.4g} s" if ns < 10**13 else f"{ns / 1e9:.0f} s"


def _words(plan: Plan, timeline: Timeline, causes: dict[Cause, int]) -> list[str]:
    from skippipe.bottlenecks import bottlenecks, busiest_link, busiest_node, slowest_lane, time_by_group

    whole_ns = timeline.iteration_ns
    found = bottlenecks(causes)
    lines = [
        f"iteration {timeline.iteration_s:.3f} s ({timeline.timing})",
        "critical path: " + ", ".join(f"{what} {ns / whole_ns:.0%}" for what, ns in time_by_group(causes).items()),
        "",
        "what limits it, in the simulation:",
        *(
            f"{_s(bottleneck.ns):>11} {bottleneck.ns / whole_ns:6.1%}  {_named(bottleneck, plan)}"
            for bottleneck in found[:SHOWN]
        ),
    ]
    rest_ns = sum(bottleneck.ns for bottleneck in found[SHOWN:])
    if rest_ns:
        lines.append(f"{_s(rest_ns):>11} {rest_ns / whole_ns:6.1%}  {len(found) - SHOWN} others, each less")
    slowest = slowest_lane(plan, timeline)
    lane = plan.lanes[slowest.lane]
    node, busy_ns = busiest_node(timeline)
    (sender, receiver), sending_ns = busiest_link(plan, timeline)
    lines += [
        "",
        f"slowest lane: {slowest.lane} ({' → '.join(plan.cluster.nodes[each].name for each in lane.path)}, "
        f"{lane.microbatches} microbatches), back at {_s(slowest.back_ns)}; without the others "
        f"at {_s(slowest.alone_ns)}",
        f"busiest node: {_name(plan, node)}, at work for {busy_ns / whole_ns:.0%} of the iteration",
        f"busiest link: {_name(plan, sender)} → {_name(plan, receiver)}, sends for {sending_ns / whole_ns:.0%} of it",
    ]
    if plan.gap is not None and plan.lower_bound_ns is not None:
        bound = _s(plan.lower_bound_ns)
        lines.append(f"no plan can take less than {bound} (proven); this one is {plan.gap:.1%} above that")
    return lines


def _named(bottleneck: Bottleneck, plan: Plan) -> str:
    """A bottleneck in words: the node or link, and of a link what takes the time."""
    from skippipe.bottlenecks import UPLOADS, CauseGroup
    from skippipe.critical_path import CauseKind

    def through(cause: Cause) -> str:
        if cause.to is not None:
            return f"over {_name(plan, cause.node)} → {_name(plan, cause.to)}"
        return f"through the {'upload' if cause.kind in UPLOADS else 'download'} of {_name(plan, cause.node)}"

    at = "" if bottleneck.node is None else _name(plan, bottleneck.node)
    stage = "" if bottleneck.node is None else f" (stage {plan.stage_of[bottleneck.node]})"
    match bottleneck.group:
        case CauseGroup.COMPUTING:
            return f"computing on {at}{stage}"
        case CauseGroup.COLLISIONS:
            return f"waiting for {at}{stage}, busy with other microbatches"
        case CauseGroup.MEMORY:
            return f"waiting for a memory slot on {at}{stage}"
        case CauseGroup.OPTIMIZER:
            return f"optimizer step of {at}{stage}, the slowest"
        case CauseGroup.AVERAGING:
            by_place: Counter[str] = Counter()
            for cause, ns in bottleneck.causes.items():
                by_place[through(cause)] += ns
            ((place, over_ns),) = by_place.most_common(1)
            return f"averaging gradients of stage {bottleneck.stage}, {over_ns / bottleneck.ns:.0%} of it {place}"
    if not bottleneck.links:
        line = "upload" if bottleneck.of(*UPLOADS) else "download"
        return f"transfers through the {line} of {at}{stage}"
    parts = {
        "sending": bottleneck.of(CauseKind.BANDWIDTH),
        "queue": bottleneck.of(CauseKind.QUEUE),
        "latency": bottleneck.of(CauseKind.LATENCY),
    }
    split = ", ".join(f"{word} {_s(ns)}" for word, ns in parts.items() if ns)
    (a, b), *others = bottleneck.links
    if bottleneck.node is not None:
        return f"transfers over the links of {at} ({split})"
    between = f"between {_name(plan, a)} and {_name(plan, b)}" if others else f"{_name(plan, a)} → {_name(plan, b)}"
    return f"transfers {between} ({split})"


def _name(plan: Plan, node: int) -> str:
    return f"'{plan.cluster.nodes[node].name}'"


def _advice_in_words(answer: Advice, most: int) -> list[str]:
    lines = []
    if answer.changes:
        lines.append(f"what would help, one change at a time, in the simulation ({answer.tried} tried):")
        lines += [_line(change) for change in answer.changes[:most]]
    else:
        lines.append(
            f"no single change helps ({answer.tried} tried, in the simulation): whatever gets faster, something else "
            "takes as long; it takes several changes at once"
        )
    if answer.searched_ns is not None:
        lines.append(
            f"(gains of changes with other paths are counted from {_s(answer.searched_ns)}, which other paths "
            "take without any change)"
        )
    if answer.not_replanned:
        lines.append(f"(no other paths were searched: {answer.not_replanned})")
    return lines


def _line(change: EvaluatedEdit) -> str:
    """An edit with what the iteration takes after it."""
    paths = "other paths" if change.replanned else "same paths"
    notes = f"{paths}; {change.because}" if change.because else paths
    return f"{_s(change.after_ns):>11} {-change.gain:7.1%}  {change.what} ({notes})"


def _figures(
    plan: Plan, timeline: Timeline, causes: dict[Cause, int], answer: Advice | None, most: int
) -> dict[str, Any]:
    from skippipe.bottlenecks import bottlenecks, busiest_link, busiest_node, slowest_lane, time_by_group
    from skippipe.cost_model import seconds

    names = [node.name for node in plan.cluster.nodes]
    slowest = slowest_lane(plan, timeline)
    node, busy_ns = busiest_node(timeline)
    (sender, receiver), sending_ns = busiest_link(plan, timeline)
    return {
        "timing": str(timeline.timing),
        "iteration_s": timeline.iteration_s,
        "shares_s": {str(what): seconds(ns) for what, ns in time_by_group(causes).items()},
        "limits": [
            {
                "what": str(bottleneck.group),
                "text": _named(bottleneck, plan),
                "seconds": seconds(bottleneck.ns),
                "causes": [{**_cause(cause, names), "seconds": seconds(ns)} for cause, ns in bottleneck.causes.items()],
            }
            for bottleneck in bottlenecks(causes)
        ],
        "slowest_lane": {
            "lane": slowest.lane,
            "back_s": seconds(slowest.back_ns),
            "alone_s": seconds(slowest.alone_ns),
        },
        "busiest_node": {"node": names[node], "busy_s": seconds(busy_ns)},
        "busiest_link": {"from": names[sender], "to": names[receiver], "sending_s": seconds(sending_ns)},
        "lower_bound_s": None if plan.lower_bound_ns is None else seconds(plan.lower_bound_ns),
        "searched_s": seconds(answer.searched_ns) if answer and answer.searched_ns is not None else None,
        "tried": answer.tried if answer else 0,
        "not_replanned": answer.not_replanned if answer else "",
        "changes": [
            {
                "sort": str(change.kind),
                "change": change.what,
                "because": change.because,
                "replanned": change.replanned,
                "iteration_s": seconds(change.after_ns),
                "gain": change.gain,
            }
            for change in (answer.changes[:most] if answer else [])
        ],
    }


def _cause(cause: Cause, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": str(cause.kind), "node": names[cause.node]}
    if cause.to is not None:
        found["to"] = names[cause.to]
    if cause.stage is not None:
        found["stage"] = cause.stage
    return found
