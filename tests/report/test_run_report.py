"""`skippipe show RUN`: what a run has left behind, added up; what it has not is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest

from skippipe.report.run.html import write_run_html
from skippipe.report.run.png import PRINT_DPI, WIDTH_IN
from skippipe.report.run.summary import MARK_KINDS, MEANINGS, amount, recorded_in_words, run_json
from skippipe.runs.history import MOST_RECORDED, RunHistory, read_history
from skippipe.runs.records import CHECKPOINTED, MetricsRow, downsample
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import EventKind, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.simulation.fault_injection import kill
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.simulator import simulate
from skippipe.training.metrics import CallbackList, ClusterFile, EventsFile, IterationMetrics, MetricsFile, TraceFiles
from tests.helpers.dashboards import HOSTILE, RunFolder, plan_line, plan_of
from tests.helpers.exact_training import FULL, LEARNING, tensors_of
from tests.helpers.exact_training import plan_of as exact_plan
from tests.helpers.html_pages import Page, figures_of
from tests.helpers.processes import Command

ITERATIONS, LOST_IN, RECORDED, LOST_NODE = 10, 3, (1, 5, 9), 4
TRACE = "traces/000010.json"
SECTIONS = (
    "Loss", "Seconds, promised and measured", "Iteration 10, planned and measured", "Who computes, who waits",
    "How busy every node was", "How much every link carried", "Nodes that were lost", "Everything out of the ordinary",
    "The plan that it began with", "What every node does", "Which way every lane goes",
)  # fmt: skip


class FinishedRun:
    """A virtual cluster on real tensors that loses a node; tasks take a quarter longer than planned."""

    def __init__(self, folder: Path) -> None:
        plan, spec = exact_plan(FULL)
        plan = plan.promising(simulate(plan))
        plan.save(folder / "plan.json")
        cluster = VirtualCluster(
            plan,
            CoordinatorSettings(
                LEARNING, ITERATIONS, recorded=frozenset(RECORDED), recovery=RecoverySettings(planning=timedelta(0))
            ),
            tensors_of(plan, spec),
            disturb=lambda duration_ns: duration_ns * 5 // 4,
            builder=lambda node, plan: tensors_of(plan, spec)[node],
            faults=[kill(node=LOST_NODE).at(iteration=LOST_IN, during="backward").back_after(0.5)],
            callback=CallbackList(
                [
                    MetricsFile(folder / "metrics.jsonl", IterationMetrics(plan), ITERATIONS),
                    EventsFile(folder / "events.jsonl"),
                    TraceFiles(folder / "traces"),
                    ClusterFile(folder / "cluster.json"),
                ]
            ),
        )
        cluster.run()
        wal = WriteAheadLog(folder / "journal")
        for record in cluster.wal:
            wal.write(record)
        wal.close()
        self.folder = folder
        self.name = plan.cluster.nodes[LOST_NODE].name
        self.names = [node.name for node in plan.cluster.nodes]
        self.reports: dict[int, IterationReport] = {report.iteration: report for report in cluster.reports}
        self.events = [event for _, event in cluster.events]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return FinishedRun(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(ran: FinishedRun, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(ran.folder, tmp_path / "run"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Figures


def test_bytes_add_up(ran: FinishedRun) -> None:
    history = read_history(ran.folder)
    wanted: Counter[tuple[str, str]] = Counter()
    for report in ran.reports.values():
        wanted.update({(ran.names[a], ran.names[b]): count for (a, b), count in report.sent_bytes.items()})
    assert history.links == dict(wanted)
    assert sum(history.links.values()) == history.sent_bytes > 0
    utilization = history.utilization
    assert (
        sum(use.sent_bytes for use in utilization)
        == sum(use.received_bytes for use in utilization)
        == history.sent_bytes
    )


def test_busy_and_idle_are_the_recorded_iterations(ran: FinishedRun) -> None:
    history = read_history(ran.folder)
    assert [chart.iteration for chart in history.recorded] == list(RECORDED)
    reports = [ran.reports[number] for number in RECORDED]
    for use in history.utilization:
        node = ran.names.index(use.name)
        there = [report for report in reports if report.plan and node in report.plan.stage_of]
        assert there
        busy_s = [sum(end - start for *_, start, end in report.tasks.get(node, [])) / 1e9 for report in there]
        waited = [sum(start - ready for *_, ready, start, _ in report.tasks.get(node, [])) / 1e9 for report in there]
        assert use.measured is not None
        assert use.measured.busy_s == pytest.approx(fmean(busy_s), abs=1e-8)
        assert use.measured.collision_s == pytest.approx(fmean(waited), abs=1e-8)
        assert use.measured.busy_s + use.measured.idle_s == pytest.approx(fmean(report.seconds for report in there))
        assert use.planned is not None
        assert use.measured.busy_s == pytest.approx(1.25 * use.planned.busy_s, rel=1e-3)
        assert use.slowdown == pytest.approx(1.25, rel=1e-3)


def test_planned_idle_and_busy_are_the_promise(folder: Path) -> None:
    """Also where nothing was recorded: then they are the plan's own."""
    shutil.rmtree(folder / "traces")
    history = read_history(folder)
    assert history.plan is not None
    expected = history.plan.promise
    for use in history.utilization:
        assert use.measured is None
        assert use.planned is not None
        assert use.planned.busy_s + use.planned.idle_s == pytest.approx(expected.iteration_s)
    assert sum(use.planned.collision_s for use in history.utilization if use.planned) == pytest.approx(
        expected.collision_s
    )
    assert any("no iteration was recorded" in each for each in history.missing)


def test_what_became_of_the_lost_node(ran: FinishedRun) -> None:
    (loss,) = read_history(ran.folder).outages
    able = next(event for event in ran.events if event.kind == "recovered" and event.node == ran.name)
    assert (loss.node, loss.iteration) == (ran.name, LOST_IN)
    assert loss.answer.startswith("rerouted: ")
    assert loss.end == f"back at work from iteration {able.iteration + 2} on"
    assert LOST_NODE in ran.reports[ITERATIONS - 1].tasks


def test_every_event_is_there_and_has_a_meaning(ran: FinishedRun) -> None:
    history = read_history(ran.folder)
    told = [(event.kind, event.iteration, event.text, event.node) for event in history.events]
    wanted = [(event.kind, event.iteration, event.text, event.node) for event in ran.events]
    assert told == wanted
    assert set(MEANINGS) == {*get_args(EventKind), CHECKPOINTED}
    assert all(kind in MEANINGS for sort in MARK_KINDS for kind in sort.kinds)


def test_the_summary_and_json_say_the_same(ran: FinishedRun, skippipe: Command) -> None:
    found = skippipe("show", ran.folder, "--json").json
    assert found == json.loads(json.dumps(run_json(read_history(ran.folder))))
    rows = lines_of(ran.folder / "metrics.jsonl")
    assert found["bytes_sent"] == sum(row["bytes_sent"] for row in rows)
    assert (found["loss"]["first"], found["loss"]["last"]) == (rows[0]["loss"], rows[-1]["loss"])
    assert found["ended"] is True
    assert found["over_promise"] > 1
    shown = skippipe("show", ran.folder)
    assert shown.code == 0
    assert f"lost: '{ran.name}'" in shown.out
    assert amount(found["bytes_sent"]) in shown.out
    assert all(name in shown.out for name in ran.names)


# Broken runs


def test_a_torn_line_is_said_and_left_out(folder: Path) -> None:
    whole = read_history(folder)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": 10, "loss": 1')
    with (folder / "journal").open("ab") as file:
        file.write(b"00000000 9 {torn")
    history = read_history(folder)
    assert history.rows == whole.rows
    assert history.last_plan == whole.last_plan
    assert set(history.missing) - set(whole.missing) == {
        "metrics.jsonl: its last line was cut short",
        "journal: its last line was cut short",
    }


def test_iterations_that_were_done_again_count_once(folder: Path) -> None:
    """After a coordinator was killed while it rewrote its metrics, say."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    again = [json.dumps({**json.loads(line), "loss": 9.0}).encode() + b"\n" for line in lines[6:8]]
    metrics.write_bytes(b"".join([*lines, b"junk\n", *again]))
    history = read_history(folder)
    assert [row.iteration for row in history.rows] == list(range(8))
    assert [row.loss for row in history.rows[6:]] == [9.0, 9.0]
    assert sum(history.links.values()) == history.sent_bytes
    assert [chart.iteration for chart in history.recorded] == [1, 5]
    assert "metrics.jsonl: 1 line cannot be read" in history.missing


def test_gaps_are_said(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines[:2], *lines[4:]]))
    assert "iterations 3–4: metrics.jsonl has no line of them" in read_history(folder).missing


def test_broken_off(folder: Path) -> None:
    wal = folder / "journal"
    lines = wal.read_bytes().splitlines(keepends=True)
    wal.write_bytes(b"".join(lines[:-1]))
    assert read_history(folder).ended is False
    wal.unlink()
    assert read_history(folder).ended is True, "all iterations are done"


def test_ended_early(folder: Path, skippipe: Command) -> None:
    assert f" {ITERATIONS} of {ITERATIONS}\n" in skippipe("show", folder).out
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-2]))
    shown = skippipe("show", folder).out
    assert f"{ITERATIONS - 2} of {ITERATIONS}" in shown
    assert "early, on request" in shown
    (folder / "journal").unlink()
    assert read_history(folder).ended is None
    assert "whether the run ended" in " ".join(read_history(folder).missing)


@pytest.mark.parametrize("name", ["plan.json", "cluster.json", "events.jsonl", "journal", "traces/000010.json"])
def test_any_other_file_may_be_missing_or_junk(folder: Path, name: str, skippipe: Command) -> None:
    before = read_history(folder).missing
    (folder / name).write_text("junk\n")
    assert len(read_history(folder).missing) > len(before)
    assert skippipe("show", folder).code == 0
    (folder / name).unlink()
    assert name == TRACE or len(read_history(folder).missing) > len(before)
    assert skippipe("show", folder).code == 0


def test_metrics_alone_make_a_report(folder: Path, tmp_path: Path, skippipe: Command) -> None:
    for path in folder.iterdir():
        if path.name != "metrics.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert skippipe("show", folder, "--html", tmp_path / "report.html", "--png", tmp_path / "report.png").code == 0
    assert "Seconds, promised and measured" in (tmp_path / "report.html").read_text()


def test_what_an_earlier_run_has_left_does_not_count(folder: Path) -> None:
    past = (read_history(folder).rows[0].time or 0.0) - 60
    shutil.copy(folder / "traces" / "000006.json", folder / "traces" / "000008.json")
    for name in ("traces/000008.json", "journal", "cluster.json"):
        os.utime(folder / name, (past, past))
    history = read_history(folder)
    assert [chart.iteration for chart in history.recorded] == list(RECORDED)
    assert (history.measured, history.last_plan) == (None, None)


def test_a_node_that_is_back_without_a_word(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint has all its nodes again."""
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0)
    run.event("lost", "signal 9", "node-2", iteration=0)
    assert read_history(tmp_path).outages[0].end == "did not come back"
    run.checkpoint(1)
    RunFolder(tmp_path, plan_of(), resumed=True).iteration(1)
    history = read_history(tmp_path)
    assert history.outages[0].end.startswith("at work again, as late as iteration 2;")
    assert [event.kind for event in history.events] == ["lost", CHECKPOINTED]


@pytest.mark.parametrize(
    ("then", "end"),
    [
        (["joined"], "came back in iteration 1; no event says that it got microbatches"),
        (["joined", "recovering", "recovered"], "back at work from iteration 2 on"),
        (["lost"], "came back, and was lost again in iteration 1"),
        (["coordinator-restarted"], "membership began anew when the coordinator was restarted"),
    ],
)
def test_ends_of_a_loss(tmp_path: Path, then: list[EventKind], end: str) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0)
    for kind in ("lost", *then):
        run.event(kind, "", "" if kind == "coordinator-restarted" else "node-2")
    assert read_history(tmp_path).outages[0].end == end


def test_no_more_traces_are_read_than_anybody_looks_at(folder: Path) -> None:
    row = lines_of(folder / "metrics.jsonl")[-1]
    trace = (folder / TRACE).read_bytes()
    with (folder / "metrics.jsonl").open("a") as file:
        for number in range(ITERATIONS, ITERATIONS + MOST_RECORDED):
            file.write(json.dumps({**row, "iteration": number + 1}) + "\n")
            (folder / "traces" / f"{number + 1:06d}.json").write_bytes(trace)
    history = read_history(folder)
    assert len(history.recorded) == MOST_RECORDED
    assert any(f"the last {MOST_RECORDED} are counted" in each for each in history.missing)


def test_thinned_curves_keep_means_and_ends() -> None:
    rows = [MetricsRow(number, float(number), None, 2.0, 1.0, 1.0, number, 10.0 * number) for number in range(10)]
    size, found = downsample(rows, 4)
    assert size == 3
    assert [row.iteration for row in found] == [2, 5, 8, 9]
    assert [row.loss for row in found] == [1.0, 4.0, 7.0, 9.0]
    assert found[0].seconds is None
    assert found[0].tokens == 20.0


# No run


def no_folder(folder: Path) -> None:
    (folder / "notes.txt").write_text("nothing")


def only_plan(folder: Path) -> None:
    plan_of().save(folder / "plan.json")


def no_iteration(folder: Path) -> None:
    run = RunFolder(folder, plan_of())
    run.wal(plan_line(run.plan))


@pytest.mark.parametrize(
    ("filled", "told"),
    [
        (lambda folder: None, "no run wrote this folder"),
        (no_folder, "no run wrote this folder"),
        (only_plan, "has a plan, but no run"),
        (no_iteration, "no iteration is on record"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, filled: Callable[[Path], None], told: str, skippipe: Command
) -> None:
    filled(tmp_path)
    shown = skippipe("show", tmp_path, "--html", tmp_path / "report.html")
    assert (shown.code, shown.out) == (2, "")
    assert told in shown.err
    assert not (tmp_path / "report.html").exists()
    assert skippipe("show", tmp_path / "missing").code == 2


def test_options_that_make_no_sense(ran: FinishedRun, folder: Path, tmp_path: Path, skippipe: Command) -> None:
    refused = skippipe("show", ran.folder, "--trace", tmp_path / "t.json")
    assert refused.code == 2
    assert re.search(r"open .*traces/000010\.json", refused.err)
    shutil.rmtree(folder / "traces")
    assert "no iteration of" in skippipe("show", folder, "--trace", tmp_path / "t.json").err
    assert skippipe("show", folder, "--png", folder / "plan.json").code == 2
    assert skippipe("show", folder, "--html", folder).code == 2


# Pages and pictures


def page_of(history: RunHistory, path: Path) -> Page:
    write_run_html(history, path)
    return Page(path.read_text())


def test_the_page_has_everything_and_needs_nothing(ran: FinishedRun, tmp_path: Path) -> None:
    page = page_of(read_history(ran.folder), tmp_path / "report.html")
    assert [heading for heading in SECTIONS if heading not in page.headings] == []
    assert page.fetched == []
    assert page.images == 0
    assert {event.text for event in ran.events} <= {unescape(cell) for cell in page.cells}


def test_the_page_of_a_run_in_one_process_says_what_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    plan = plan_of()
    plan.save(run / "plan.json")
    metrics = MetricsFile(run / "metrics.jsonl", IterationMetrics(plan), 5)
    for number in range(3):
        metrics.iteration_done(IterationReport(number, float("nan"), 1.0, 1e-3, 0.5, {}, {}))
    history = read_history(run)
    assert (history.promised_s, history.links, history.losses) == (None, {}, [])
    page = page_of(history, tmp_path / "report.html")
    assert "What is not on record" in page.headings
    assert "How much every link carried" not in page.headings


def test_a_plan_for_other_machines_promises_nothing(folder: Path, skippipe: Command, tmp_path: Path) -> None:
    rows = lines_of(folder / "metrics.jsonl")
    assert all(row.pop("promised_s") for row in rows)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, _, listed = skippipe("show", folder, "-o", tmp_path / "report.html").out.partition("not on record:")
    assert "seconds of an iteration, as measured" in said.lower()
    assert not re.search("promise|planned|times", said.replace("as planned", ""))
    assert "promised seconds: none, as in one process, or on other machines than the plan is for" in listed
    assert listed.endswith(f"written to {tmp_path / 'report.html'}\n")
    page = Page((tmp_path / "report.html").read_text())
    assert "Seconds" in page.headings
    assert "Seconds, promised and measured" not in page.headings
    found = run_json(read_history(folder))
    assert found["promised_s"] is found["over_promise"] is None
    assert all(node["planned"] is node["slowdown"] is None for node in found["nodes"])


def test_lines_and_traces_of_earlier_versions_count_from_0(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0)
    run.iteration(1, recorded=True)
    run.event("lost", "signal 9", "node-2", iteration=1)
    new = run_json(read_history(tmp_path))
    assert (new["last_iteration"], new["recorded"], new["losses"][0]["iteration"]) == (2, [2], 2)
    assert [row["iteration"] for row in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]
    for name in ("metrics.jsonl", "events.jsonl"):
        rows = [{**row, "iteration": row["iteration"] - 1} for row in lines_of(tmp_path / name)]
        assert all(row.pop("version") == 2 for row in rows)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "traces" / "000002.json").rename(tmp_path / "traces" / "iteration-000001.json")
    assert run_json(read_history(tmp_path)) == new


def test_iterations_of_a_smaller_model_do_not_count_for_its_nodes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0, recorded=True)
    assert [each.iteration for each in read_history(tmp_path).compared] == [0]
    run.event("grown", "2 layers become 3", iteration=1)
    assert [each.iteration for each in read_history(tmp_path).compared] == [0], "none since"
    run.iteration(1, recorded=True)
    history = read_history(tmp_path)
    assert [each.iteration for each in history.compared] == [1]
    assert "recorded iterations (2)" in recorded_in_words(history)


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of(names=[HOSTILE]))
    run.iteration(0, recorded=True)
    run.event("lost", HOSTILE, HOSTILE)
    page = page_of(read_history(tmp_path), tmp_path / "report.html")
    assert page.images == 0
    figures = json.dumps(figures_of((tmp_path / "report.html").read_text()))
    assert "&lt;img" in figures  # plotly takes some markup
    assert "<img" not in figures


@pytest.mark.slow
def test_pictures_for_papers(ran: FinishedRun, tmp_path: Path, skippipe: Command) -> None:
    def size(path: Path) -> tuple[int, int]:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", content[16:24])
        return width, height

    assert skippipe("show", ran.folder, "--png", tmp_path / "report.png").code == 0
    width, height = size(tmp_path / "report.png")
    assert width == round(WIDTH_IN * PRINT_DPI)
    assert height > width / 2
    shown = skippipe("show", ran.folder, "--png", tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.png" for name in ("loss", "seconds", "nodes", "links", "recorded", "plan")}
    assert all(name in shown.out for name in names)
    assert all(size(path)[0] > 1500 for path in (tmp_path / "figures").iterdir())
