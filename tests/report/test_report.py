"""What people are shown is what the plan says: nothing left out, nothing drawn twice, nothing fetched from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from skippipe.cluster import Cluster
from skippipe.collectives.rings import ring_order
from skippipe.cost_model import cost_model_of
from skippipe.errors import UserError
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20
from skippipe.report import summary
from skippipe.report.gantt import Gantt, GanttBar, shade, trace_events, write_trace
from skippipe.report.html import write_html
from skippipe.report.path_map import HALF_WIDTH, HEIGHT, path_map
from skippipe.report.png import write_png
from skippipe.report.summary import plan_grid
from skippipe.simulator import simulate
from skippipe.timeline import HUES, TASK_KINDS, BarKind, Timeline, Timing, ranges_text
from tests.helpers.html_pages import Page, figures_of, library_of

LARGEST_PAGE_BYTES = 2_000_000


def published(paths: str, timing: Timing, split: bool = False, devices: int = 1) -> tuple[Plan, Timeline]:
    example = published20()
    assert example.placement is not None
    nodes = tuple(replace(node, devices=1 + at % devices) for at, node in enumerate(example.cluster.nodes))
    cluster = replace(example.cluster, nodes=nodes)
    costs = cost_model_of(example.cluster, example.workload, (4,) * 6)
    stages = tuple(Stage(4, nodes, ring_order(costs, index, nodes)) for index, nodes in enumerate(example.placement))
    lanes = example.paths[paths]
    plan = Plan(cluster, example.workload, stages, lanes, split_backward=split)
    timeline = simulate(plan, timing)
    return plan.promising(timeline), timeline


def small(names: tuple[str, ...] = ("a", "b", "c", "spare")) -> tuple[Plan, Timeline]:
    """Two stages on three nodes, one of them alone on its stage; the fourth node is left out."""
    example = published20()
    number = len(names)
    cluster = Cluster(
        "small",
        tuple(replace(node, name=name) for node, name in zip(example.cluster.nodes, names, strict=False)),
        example.cluster.latency_s[:number, :number].copy(),
        example.cluster.bandwidth_bytes_per_s[:number, :number].copy(),
    )
    stages = (Stage(12, (0, 1), (0, 1)), Stage(12, (2,), (2,)))
    plan = Plan(cluster, example.workload, stages, (Lane((0, 2), 2), Lane((1, 2), 3)))
    timeline = simulate(plan, Timing.FULL)
    return plan.promising(timeline), timeline


@pytest.fixture(params=[(Timing.CONTENTION_ONLY, False), (Timing.FULL, True), (Timing.FULL, True, 3)])
def shown(request: pytest.FixtureRequest) -> tuple[Plan, Timeline]:
    return published("skippipe", *request.param)


def closing_bars(plan: Plan, timeline: Timeline) -> int:
    """Averaging where there is somebody to average with, and an optimizer step on every device."""
    if timeline.timing is not Timing.FULL:
        return 0
    averaging = sum(len(stage.nodes) for stage in plan.stages if len(stage.nodes) > 1)
    return averaging + sum(use.workers for use in timeline.nodes)


# the grid


def test_grid_shows_every_node_with_its_stage_slots_and_lanes() -> None:
    plan, _ = published("skippipe", Timing.FULL)
    lines = plan_grid(plan).splitlines()
    for node in plan.stage_of:
        at = plan.cluster.nodes[node]
        lanes = [number for number, lane in enumerate(plan.lanes) if node in lane.path]
        row = next(line.split() for line in lines if at.name in line.split())
        assert row[-4:] == [at.location, str(plan.slots[node]), f"{len(lanes)}:", ranges_text(lanes)]


def test_grid_folds_equal_lanes_and_marks_swaps() -> None:
    text = plan_grid(published("skippipe", Timing.FULL)[0])
    assert "lanes 6–8   ×2  japan-0[0] → oregon-0[4] ⇄ canada-1[3] → oregon-1[5]" in text.splitlines()
    assert "33% skipped" in text


def test_grid_shows_the_order_of_visits_of_every_lane_even_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "WIDTH", 50)
    plan, _ = published("dtfm_skip", Timing.CONTENTION_ONLY)
    blocks = plan_grid(plan).split("order of visits")[1].split("promise")[0].split("\n\n")
    found: dict[int, tuple[int, ...]] = {}
    for block in filter(None, blocks):
        header, *rows = block.splitlines()[-1 - len(plan.stages) :]
        cells = [row.split()[2:] for row in rows]
        for column, lane in enumerate(map(int, header.split())):
            orders = {int(row[column]): stage for stage, row in enumerate(cells) if row[column] != summary.SKIPPED}
            found[lane] = tuple(orders[hop] for hop in sorted(orders))
    assert found == {number: plan.visits(lane) for number, lane in enumerate(plan.lanes)}


def test_grid_names_the_nodes_left_out_and_the_promise_only_if_there_is_one() -> None:
    plan, timeline = small()
    assert "left out, they hold no stage: spare" in plan_grid(plan)
    assert f"{timeline.iteration_s:.2f} s" in plan_grid(plan)
    assert "promise" not in plan_grid(replace(plan, expected=None))


def test_a_digest_shows_the_stages_of_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = small()
    assert summary.plan_digest(plan) == plan_grid(plan)
    monkeypatch.setattr(summary, "MANY_NODES", len(plan.stage_of) - 1)
    head, stages, promise = summary.plan_digest(plan).split("\n\n")
    assert head in plan_grid(plan) and promise in plan_grid(plan)
    rows = [line.split() for line in stages.splitlines()[1 : 1 + len(plan.stages)]]
    visits = [plan.visits(lane) for lane in plan.lanes]
    for index, (stage, row) in enumerate(zip(plan.stages, rows, strict=True)):
        slots = sum(plan.slots[node] for node in stage.nodes)
        through = [lane for lane, way in zip(plan.lanes, visits, strict=True) if index in way]
        microbatches = sum(lane.microbatches for lane in through)
        assert list(map(int, row)) == [index, stage.layers, len(stage.nodes), slots, len(through), microbatches]
    assert "nodes that hold no stage: 1" in stages


def test_a_stage_that_nobody_holds_is_shown(tmp_path: Path) -> None:
    plan, _ = small()
    plan = replace(plan, stages=(*plan.stages[:1], Stage(4, (), ()), Stage(8, (2,), (2,))), expected=None)
    (line,) = [line for line in plan_grid(plan).splitlines() if "no node" in line]
    assert line.split() == ["1", "4", "no", "node"]
    timeline = simulate(plan, Timing.FULL)
    assert {station.stage for station in path_map(Gantt(plan, timeline)).stations} == {0, 2}
    write_png(plan, timeline, tmp_path / "plan.png")
    write_html(plan, timeline, tmp_path / "plan.html")
    write_trace(plan, timeline, tmp_path / "plan.trace")


def test_grid_says_which_node_is_overfull() -> None:
    plan, _ = small()
    crowded = replace(plan, lanes=(Lane((0, 2), 1),) * (plan.slots[2] + 1))
    (line,) = [line for line in plan_grid(crowded).splitlines() if " c " in line]
    assert line.endswith("overfull")


# the bars and the map


def by_row(bars: tuple[GanttBar, ...], *kinds: BarKind) -> dict[int, list[GanttBar]]:
    rows = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: bar.start_ns):
        if bar.kind in kinds:
            rows[bar.row].append(bar)
    return rows


def test_bars_tell_every_task_once_and_never_overlap_on_a_row(shown: tuple[Plan, Timeline]) -> None:
    plan, timeline = shown
    picture = Gantt(plan, timeline)
    told = Counter(
        (bar.lane, bar.microbatch, bar.step, picture.rows[bar.row].node, bar.start_ns, bar.end_ns)
        for bar in picture.bars
        if bar.kind in TASK_KINDS
    )
    expected = [(t.lane, t.microbatch, t.step, t.node, t.start_ns, t.end_ns) for t in timeline.tasks]
    assert told == Counter(expected)
    for bars in by_row(picture.bars, *TASK_KINDS, BarKind.AVERAGING, BarKind.OPTIMIZER).values():
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(bars))


def test_bars_add_up_to_what_the_timeline_says_of_every_node(shown: tuple[Plan, Timeline]) -> None:
    plan, timeline = shown
    picture = Gantt(plan, timeline)
    for use in timeline.nodes:
        rows = [index for index, row in enumerate(picture.rows) if row.node == use.node]
        assert len(rows) == use.workers
        lasting: Counter[BarKind] = Counter()
        for bar in picture.bars:
            if bar.row in rows:
                lasting[bar.kind] += bar.end_ns - bar.start_ns
        assert sum(lasting[kind] for kind in TASK_KINDS) == use.busy_ns
        assert lasting[BarKind.WAITING] == use.collision_ns
    assert max(bar.end_ns for bar in picture.bars) == timeline.iteration_ns
    steps = {bar.start_ns for bar in picture.bars if bar.kind is BarKind.OPTIMIZER}
    assert steps == {max(end for _, end in timeline.averaging_ns)} if timeline.averaging_ns else not steps


def test_long_averaging_does_not_squeeze_the_passes() -> None:
    plan, timeline = published("skippipe", Timing.FULL)
    assert timeline.iteration_ns > 5 * timeline.last_backward_ns
    picture = Gantt(plan, timeline)
    assert 1 < picture.shown_until_s / (timeline.last_backward_ns / 1e9) < 1.2
    assert f"{timeline.iteration_s:.2f} s" in picture.beyond
    whole = Gantt(*published("skippipe", Timing.CONTENTION_ONLY))
    assert whole.shown_until_s == whole.timeline.iteration_s
    assert whole.beyond == ""


def test_lanes_of_a_data_node_share_its_hue_and_backward_is_darker() -> None:
    plan, timeline = published("skippipe", Timing.CONTENTION_ONLY)
    picture = Gantt(plan, timeline)
    colours: dict[int, set[str]] = {}
    for bar in picture.bars:
        if bar.kind is BarKind.FORWARD and bar.lane is not None:
            colours.setdefault(plan.lanes[bar.lane].path[0], set()).add(bar.colour)
    assert [len(each) for each in colours.values()] == [1] * 5
    assert len(set.union(*colours.values())) == 5
    for hue in HUES:
        kinds = (BarKind.FORWARD, BarKind.BACKWARD, BarKind.WEIGHTS)
        light, dark, darkest = (sum(bytes.fromhex(shade(hue, kind)[1:])) for kind in kinds)
        assert light > sum(bytes.fromhex(hue[1:])) > dark > darkest


def test_weight_gradients_are_shown_where_the_backward_is_split(shown: tuple[Plan, Timeline]) -> None:
    plan, timeline = shown
    picture = Gantt(plan, timeline)
    lasting = Counter({row.node: 0 for row in picture.rows})
    for bar in picture.bars:
        if bar.kind is BarKind.WEIGHTS:
            lasting[picture.rows[bar.row].node] += bar.end_ns - bar.start_ns
    visits = Counter(dict.fromkeys(plan.stage_of, 0))
    for lane in plan.lanes:
        visits.update(dict.fromkeys(lane.path, lane.microbatches))
    assert lasting == {use.node: visits[use.node] * use.weight_ns for use in timeline.nodes}
    assert (sum(lasting.values()) > 0) == plan.split_backward == ("split backward" in plan_grid(plan))


@pytest.mark.parametrize("paths", ["skippipe", "dtfm_skip", "full_pipeline"])
def test_lines_call_at_their_nodes_in_order_and_pass_all_others(paths: str) -> None:
    plan, timeline = published(paths, Timing.CONTENTION_ONLY)
    drawn = path_map(Gantt(plan, timeline))
    assert sorted(lane for line in drawn.lines for lane in line.lanes) == list(range(len(plan.lanes)))
    assert all(0 <= y <= drawn.height for line in drawn.lines for hop in line.hops for _, y in hop.points)
    for line in drawn.lines:
        path = plan.lanes[line.lanes[0]].path
        visits = [*plan.visits(plan.lanes[line.lanes[0]]), len(plan.stages)]
        for hop, stops, (before, after) in zip(line.hops, pairwise([*path, path[0]]), pairwise(visits), strict=True):
            assert hop.swapped == (after < before)
            for point, node, column in zip((hop.points[0], hop.points[-1]), stops, (before, after), strict=True):
                (station,) = [each for each in drawn.stations if (each.node, each.x) == (node, column)]
                assert abs(point[0] - station.x) == pytest.approx(HALF_WIDTH)
                assert abs(point[1] - station.y) < HEIGHT / 2
            for x, y in hop.points[1:-1]:
                assert not any(
                    abs(x - each.x) < HALF_WIDTH + 1e-9 and abs(y - each.y) < HEIGHT / 2 for each in drawn.stations
                )


# the page and the image


def test_page_fetches_nothing_and_names_every_node(shown: tuple[Plan, Timeline], tmp_path: Path) -> None:
    plan, timeline = shown
    write_html(plan, timeline, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert "<script src=" not in text
    assert [set(figure) for figure in figures_of(text)] == [{"data", "layout"}] * 3
    assert library_of(text) == get_plotlyjs()
    assert len(text) < LARGEST_PAGE_BYTES
    for node in plan.stage_of:
        assert f" · {plan.cluster.nodes[node].name}" in page.read
    assert f"{timeline.iteration_s:.2f} s" in page.read


def test_page_shows_odd_names_as_they_are(tmp_path: Path) -> None:
    plan, timeline = small(("<img src=x>", "b&b", "<script>", "spare"))
    write_html(plan, timeline, tmp_path / "plan.html")
    page = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert page.fetched == []
    assert all(f" · {name}" in page.read for name in ("<img src=x>", "b&b", "<script>"))


@pytest.mark.slow
def test_image_is_a_png_whose_height_grows_with_the_plan(tmp_path: Path) -> None:
    heights = []
    for name, (plan, timeline) in {"small": small(), "large": published("skippipe", Timing.FULL, split=True)}.items():
        path = tmp_path / "new folder" / f"{name}.png"
        write_png(plan, timeline, path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 20_000
        heights.append(int.from_bytes(content[20:24], "big"))
    assert heights[0] < heights[1] < 4000
    assert [path.name for path in (tmp_path / "new folder").iterdir() if path.suffix != ".png"] == []


def test_image_takes_dollars_in_names_for_dollars(tmp_path: Path) -> None:
    plan, timeline = small((r"$\frac$", r"$\frac$ too", "$_$", "spare"))
    write_png(replace(plan, strategy=r"$\frac$"), timeline, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").exists()


def test_image_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        write_png(*small(), tmp_path / "file" / "plan.png")


def test_text_and_trace_do_not_load_the_drawing_libraries() -> None:
    code = (
        "import sys, skippipe.report, skippipe.report.summary, skippipe.report.path_map, skippipe.report.gantt\n"
        "sys.exit(bool({'plotly', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# the trace


def events_of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def whole_ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def test_trace_has_one_slice_a_task_and_none_overlap_on_a_node(shown: tuple[Plan, Timeline], tmp_path: Path) -> None:
    plan, timeline = shown
    write_trace(plan, timeline, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    slices = events_of(trace, "X")
    tasks = [event for event in slices if event["cat"] in TASK_KINDS]
    assert len(slices) == len(timeline.tasks) + closing_bars(plan, timeline)
    assert Counter(map(whole_ns, tasks)) == Counter((task.start_ns, task.end_ns) for task in timeline.tasks)
    waited_s = sum(event["args"]["waited_s"] for event in tasks)
    assert waited_s == pytest.approx(timeline.collision_s)
    threads = defaultdict(list)
    for event in slices:
        threads[event["tid"]].append(whole_ns(event))
    for spans in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))
    names = {event["tid"]: event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "thread_name"}
    assert Counter(name.partition(" #")[0] for name in names.values()) == {
        f"stage {use.stage} · {plan.cluster.nodes[use.node].name}": use.workers for use in timeline.nodes
    }
    assert {"name": "plan"} in [event["args"] for event in events_of(trace, "M")]


def test_trace_ties_the_hops_of_every_microbatch_together(shown: tuple[Plan, Timeline]) -> None:
    plan, timeline = shown
    trace = trace_events(plan, timeline)
    leaving, arriving = ({event["id"]: event for event in events_of(trace, phase)} for phase in "sf")
    assert leaving.keys() == arriving.keys()
    assert len(leaving) == len(events_of(trace, "s")) == sum(2 * len(x.path) * x.microbatches for x in plan.lanes)
    tasks = [(event, *whole_ns(event)) for event in events_of(trace, "X") if event["cat"] in TASK_KINDS]

    def open_at(event: dict[str, Any]) -> tuple[int, int, int]:
        at = round(event["ts"] * 1000)
        (args,) = [x["args"] for x, start, end in tasks if x["tid"] == event["tid"] and start <= at < end]
        return args["lane"], args["microbatch"], args["step"]

    for number, event in leaving.items():
        lane, microbatch, step = open_at(event)
        assert open_at(arriving[number]) == (lane, microbatch, step + 1)
