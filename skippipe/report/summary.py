"""A plan in words: key figures, in the same words on every page and terminal; tables; the grid for a terminal.

The grid has the stages of nodes, the paths of lanes, and the promise.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skippipe import constraints
from skippipe.codecs import gradient_codec
from skippipe.cost_model import seconds
from skippipe.plan import Plan
from skippipe.planner.codec_prices import message_shares, stage_shares
from skippipe.timeline import Timeline, Timing, ranges_text

NOTHING = "–"  # in a cell without a figure
TIMING_IN_WORDS = {
    Timing.FULL: "full: queues on links, gradient averaging and the optimizer step are counted",
    Timing.CONTENTION_ONLY: "contention-only: the iteration ends with the last backward pass, averaging is not counted",
}
WIDTH = 110  # characters of a terminal that the matrix of visits may fill
SKIPPED = "·"
ONWARD, SWAPPED = " → ", " ⇄ "
MANY_NODES = 100  # with more, a plan just made is shown by stage


def plan_figures(plan: Plan) -> list[tuple[str, str]]:
    """Key figures of a plan."""
    return [
        ("cluster", plan.cluster.name),
        ("model", plan.workload.model.name),
        ("strategy", plan.strategy),
        ("nodes", f"{len(plan.stage_of)}"),
        ("stages", f"{len(plan.stages)}"),
        ("lanes", f"{len(plan.lanes)}"),
        ("microbatches", f"{plan.microbatches}"),
        ("skipped", f"{plan.skipped:.0%} of the stages, on average"),
        ("dispatch", str(plan.dispatch)),
        ("backward", "split: weight gradients fill idle time" if plan.split_backward else "whole"),
        ("codecs", codecs_text(plan)),
        ("memory", _memory_text(plan)),
    ]


def _memory_text(plan: Plan) -> str:
    work = plan.workload
    offload = [] if work.offload == "none" else [f"offload {work.offload}"]
    checkpointing = ["activation checkpointing"] * work.activation_checkpointing
    return ", ".join([f"optimizer {work.optimizer}", *checkpointing, *offload])


def codecs_text(plan: Plan) -> str:
    """Which codecs activations and their gradients have on hops, by their share of the values where these differ, and
    which each stage averages with."""
    work = plan.workload
    usual = work.wire_dtype, gradient_codec(work.wire_dtype)
    passes: list[dict[str, float]] = [{}, {}]
    for (kind, a, b), share in message_shares(plan).items():
        codec = plan.hop_dtype(a, b, backward=bool(kind))
        passes[kind][codec] = passes[kind].get(codec, 0.0) + share
    if all({codec} >= each.keys() for codec, each in zip(usual, passes, strict=True)):
        hops = f"hops {work.wire_dtype}"
    else:
        hops = f"activations {_shares_text(passes[0])}; their gradients {_shares_text(passes[1])}"
    stages: dict[str, list[int]] = {}
    for stage in stage_shares(plan):
        stages.setdefault(work.stage_gradient_dtype(stage), []).append(stage)
    averaged = (f"{codec} on {stages_text(numbers)}" for codec, numbers in stages.items())
    gradients = ", ".join(averaged) if len(stages) > 1 else next(iter(stages), work.gradient_dtype)
    return f"{hops}; weight gradients {gradients}"


def _shares_text(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{codec} {share:.0%}" for codec, share in sorted(shares.items(), key=lambda part: -part[1]))


def stages_text(numbers: Sequence[int]) -> str:
    return f"stage{'s' * (len(numbers) > 1)} {ranges_text(numbers)}"


def timeline_figures(timeline: Timeline) -> list[tuple[str, str]]:
    """Key figures of an iteration."""
    busy_ns = sum(use.worker_busy_ns for use in timeline.nodes)
    share = busy_ns / max(1, len(timeline.nodes) * timeline.iteration_ns)
    averaging = []
    if timeline.averaging_ns:
        stage, (start, end) = max(enumerate(timeline.averaging_ns), key=lambda each: each[1][1] - each[1][0])
        took = f"{seconds(end - start):.2f} s in the slowest stage, {stage}; done at {seconds(end):.2f} s"
        averaging = [("averaging", took)]
    return [
        ("timing", TIMING_IN_WORDS[timeline.timing]),
        ("iteration", f"{timeline.iteration_s:.2f} s"),
        ("last backward ends", f"at {seconds(timeline.last_backward_ns):.2f} s"),
        *averaging,
        ("nodes at work", f"{share:.0%} of the iteration, on average"),
        ("collisions", f"{timeline.collision_s:.2f} s of waiting for a busy node or a free slot, over all tasks"),
        ("moved", f"{timeline.bytes_moved / 1e9:.2f} GB"),
    ]


def scaled(count: float, units: Sequence[str]) -> tuple[float, str]:
    """A number in the unit that makes it short; each unit is a thousand times the one before."""
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return count, units[power]


def lanes_named(numbers: list[int]) -> str:
    return f"lane {numbers[0]}" if len(numbers) == 1 else f"lanes {ranges_text(numbers)}"


def equal_lanes(plan: Plan) -> list[list[int]]:
    """Groups of lanes with the same path and microbatches, which are shown as one."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, lane in enumerate(plan.lanes):
        groups.setdefault((lane.path, lane.microbatches), []).append(number)
    return list(groups.values())


@dataclass(frozen=True)
class Table:
    """A table of text and figures, shown by pages, terminals and documents."""

    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n" + "\n".join(cells) + (f"\n\n{self.note}" if self.note else "") + "\n"


def _slots_text(plan: Plan, node: int) -> str:
    """Its slots, and how several devices share in them: each has so many, or all together."""
    slots, workers, devices = plan.slots[node], plan.workers[node], plan.cluster.nodes[node].devices
    if devices == 1:
        return str(slots)
    return f"{workers} × {slots // workers}" if workers > 1 else f"{slots} on {devices}"


def plan_grid(plan: Plan) -> str:
    """Everything a person needs to follow the plan by hand; ends without a line break."""
    return _with_figures(plan, [_nodes(plan), _lanes(plan), *_visits(plan)])


def plan_digest(plan: Plan) -> str:
    """What a person wants to see of a plan that was just made: of one with many nodes, its stages."""
    if len(plan.stage_of) <= MANY_NODES:
        return plan_grid(plan)
    through = constraints.lanes_through(lane.path for lane in plan.lanes)
    rows = [["stage", "layers", "nodes", "slots", "lanes through them", "microbatches"]]
    for index, (stage, microbatches) in enumerate(zip(plan.stages, plan.exposure, strict=True)):
        slots = sum(plan.slots[node] for node in stage.nodes)
        lanes = sum(len(through.get(node, [])) for node in stage.nodes)
        rows.append([str(each) for each in (index, stage.layers, len(stage.nodes), slots, lanes, microbatches)])
    lines = _table(rows, to_the_right=range(len(rows[0])))
    if left_out := len(plan.cluster) - len(plan.stage_of):
        lines.append(f"nodes that hold no stage: {left_out}")
    return _with_figures(plan, [[*lines, "'skippipe show' shows the nodes and lanes of a plan that was kept"]])


def _with_figures(plan: Plan, parts: Sequence[Sequence[str]]) -> str:
    header = (
        f"{plan.strategy}: {len(plan.stage_of)} nodes, {len(plan.stages)} stages, {plan.microbatches} microbatches, "
        f"{plan.skipped:.0%} skipped, dispatch {plan.dispatch}" + ", split backward" * plan.split_backward
    )
    blocks = [[header, f"codecs: {codecs_text(plan)}", f"memory: {_memory_text(plan)}"], *map(list, parts)]
    if plan.expected is not None:
        tokens = plan.samples_per_s * plan.workload.sequence_tokens
        blocks[0].insert(0, f"{plan.expected.iteration_s:.2f} s an iteration, {tokens:,.0f} tokens a second")
        figures = timeline_figures(plan.expected)
        blocks.append(["promise", *_table([[f"  {name}", value] for name, value in figures])])
    return "\n\n".join("\n".join(block) for block in blocks)


def _nodes(plan: Plan) -> list[str]:
    through = constraints.lanes_through(lane.path for lane in plan.lanes)
    rows = [["stage", "layers", "node", "location", "slots", "lanes through it"]]
    for index, stage in enumerate(plan.stages):
        if not stage.nodes:
            rows.append([str(index), str(stage.layers), "no node", "", "", ""])
        for position, number in enumerate(stage.nodes):
            node = plan.cluster.nodes[number]
            lanes = through.get(number, [])
            held = f"{len(lanes):2}: {ranges_text(lanes)}" if lanes else " 0"
            overfull = "  overfull" if len(lanes) > plan.slots[number] else ""
            of_stage = [str(index), str(stage.layers)] if position == 0 else ["", ""]
            rows.append([*of_stage, node.name, node.location, _slots_text(plan, number), held + overfull])
    lines = _table(rows, to_the_right={0, 1, 4})
    left_out = [node.name for number, node in enumerate(plan.cluster.nodes) if number not in plan.stage_of]
    if left_out:
        lines.append(f"left out, they hold no stage: {', '.join(left_out)}")
    return lines


def _lanes(plan: Plan) -> list[str]:
    groups = equal_lanes(plan)
    digits = len(str(len(plan.lanes) - 1))
    names = _even([f"lane {group[0]:{digits}}" if len(group) == 1 else lanes_named(group) for group in groups])
    counts = _even([f"×{plan.lanes[group[0]].microbatches}" for group in groups])
    lines = [
        f"{name} {count}  {_path(plan, plan.lanes[group[0]].path)}"
        for name, count, group in zip(names, counts, groups, strict=True)
    ]
    if any(SWAPPED in line for line in lines):
        lines.append(f"{SWAPPED.strip()} marks a swap: the later stage is visited before the earlier one")
    return lines


def _path(plan: Plan, path: tuple[int, ...]) -> str:
    shown = [f"{plan.cluster.nodes[node].name}[{plan.stage_of[node]}]" for node in path]
    arrows = [ONWARD if plan.stage_of[b] > plan.stage_of[a] else SWAPPED for a, b in pairwise(path)]
    return shown[0] + "".join(arrow + stop for arrow, stop in zip(arrows, shown[1:], strict=True))


def _visits(plan: Plan) -> list[list[str]]:
    """Stages down, lanes across: at which hop a lane visits a stage. Wide plans take several blocks."""
    groups = equal_lanes(plan)
    visits = [plan.visits(lane) for lane in plan.lanes]
    counts = plan.exposure
    columns = [[ranges_text(group), *_orders(visits[group[0]], len(plan.stages))] for group in groups]
    cell = 1 + max(len(column[0]) for column in columns)
    fits = max(1, (WIDTH - len("stage  microbatches  ")) // cell)
    blocks = []
    for first in range(0, len(columns), fits):
        shown = columns[first : first + fits]
        lines = [f"stage  microbatches  order of visits by lane ({SKIPPED} skipped)"] if first == 0 else []
        lines.append(" " * 21 + "".join(f"{column[0]:>{cell}}" for column in shown))
        for stage, count in enumerate(counts):
            cells = "".join(f"{column[1 + stage]:>{cell}}" for column in shown)
            lines.append(f"{stage:5}  {count:12}  {cells}")
        blocks.append(lines)
    return blocks


def _orders(visits: tuple[int, ...], stages: int) -> list[str]:
    return [str(visits.index(stage) + 1) if stage in visits else SKIPPED for stage in range(stages)]


def _table(rows: list[list[str]], to_the_right: Container[int] = ()) -> list[str]:
    columns = [_even(list(column), right=index in to_the_right) for index, column in enumerate(zip(*rows, strict=True))]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _even(texts: list[str], right: bool = False) -> list[str]:
    width = max(map(len, texts))
    return [text.rjust(width) if right else text.ljust(width) for text in texts]
