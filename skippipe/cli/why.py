"""The command why: what limits a plan, and which edit would help."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.cli import inspect as inspect_command
from skippipe.cli import options as cli_options
from skippipe.terminal import interruptible, plan_progress
from skippipe.value_ranges import Range

if TYPE_CHECKING:
    from skippipe.bottlenecks import Bottleneck, CauseGroup
    from skippipe.critical_path import Cause
    from skippipe.plan import Plan
    from skippipe.planner.whatif.advisor import Advice, EvaluatedEdit
    from skippipe.timeline import Timeline

SHOWN = 6  # causes, the largest


def why(
    plan: inspect_command.PlanFile,
    changes: Annotated[
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
    as_json: cli_options.Json = False,
) -> None:
    """Say what limits a plan, and which one change would help most.

    The first part is the critical path of the simulated iteration: going back from its end, what determined each moment
    (a node that computes, a link, a collision, a full memory, averaging), added up. The second part tries changes for
    which the path gives reason, one at a time, and lists those that help with what the iteration then takes in the
    simulation. Ctrl-C ends the trying and keeps what was found.

    Example: skippipe why plan.json
    """
    from skippipe.bottlenecks import time_by_cause
    from skippipe.critical_path import critical_path
    from skippipe.planner.whatif.advisor import advise

    found, timeline = inspect_command.simulated(plan)
    path = critical_path(found, timeline)
    answer = None
    if changes:
        with interruptible() as stopped, plan_progress("why") as progress:
            answer = advise(found, timeline, replanning, progress, lambda: bool(stopped))
        if stopped:
            print("interrupted: not all changes were tried", file=sys.stderr)
    if as_json:
        names = [node.name for node in found.cluster.nodes]
        pieces = [{**_cause(each.cause, names), **_span(each.start_ns, each.end_ns)} for each in path]
        print(json.dumps({**_figures(found, timeline, time_by_cause(path), answer, changes), "path": pieces}))
        return
    print("\n".join(_words(found, timeline, time_by_cause(path))))
    if answer:
        print("\n".join(["", *_advice_in_words(answer, changes)]))


# in words


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
    paths = "other paths" if change.replanned else "same paths"
    notes = f"{paths}; {change.because}" if change.because else paths
    return f"{_s(change.after_ns):>11} {-change.gain:7.1%}  {change.what} ({notes})"


# as data


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
        "shares_s": _seconds(time_by_group(causes)),
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


def _seconds(found: dict[CauseGroup, int]) -> dict[str, float]:
    from skippipe.cost_model import seconds

    return {str(what): seconds(ns) for what, ns in found.items()}


def _cause(cause: Cause, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": str(cause.kind), "node": names[cause.node]}
    if cause.to is not None:
        found["to"] = names[cause.to]
    if cause.stage is not None:
        found["stage"] = cause.stage
    return found


def _span(start_ns: int, end_ns: int) -> dict[str, float]:
    from skippipe.cost_model import seconds

    return {"start_s": seconds(start_ns), "end_s": seconds(end_ns)}
