"""The live page follows whatever a run writes, also while it is written."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.dashboard.run_state import MOST_POINTS, Panels, RunFollower
from skippipe.runs.history import read_history
from skippipe.runs.tail import MOST_BYTES, FileTail
from tests.helpers.dashboards import RunFolder, committed, panels, parsed, plan_line, plan_of

# Lines


def test_a_line_counts_once_its_end_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    lines = FileTail(path)
    assert lines.poll().lines == ()
    path.write_bytes(b"one\ntw")
    assert lines.poll().lines == (b"one",)
    assert lines.poll().lines == ()
    with path.open("ab") as file:
        file.write(b"o\n\nfour")
    assert lines.poll().lines == (b"two", b"")


@given(st.lists(st.binary(max_size=9), max_size=20))
def test_however_it_is_written_the_lines_are_those_of_the_file(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        lines = FileTail(path)
        found: list[bytes] = []
        for piece in pieces:
            with path.open("ab") as file:
                file.write(piece)
            poll = lines.poll()
            assert not poll.reset
            found += poll.lines
        assert found == b"".join(pieces).split(b"\n")[:-1]


@pytest.mark.parametrize("after", [b"1 a\n", b"1 a\n2 x\n", b"1 a\n2 x\n3 y\n", b"9 z\n2 b\n3 c\n4 d\n", b""])
def test_what_was_rewritten_is_read_anew(tmp_path: Path, after: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1 a\n2 b\n")
    lines = FileTail(path)
    assert len(lines.poll().lines) == 2
    path.write_bytes(after)
    poll = lines.poll()
    assert poll.reset
    assert poll.lines == tuple(after.split(b"\n")[:-1])


def test_another_file_in_its_place_and_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n")
    lines = FileTail(path)
    lines.poll()
    (tmp_path / "next").write_bytes(b"1\n2\n")
    (tmp_path / "next").replace(path)
    assert lines.poll().reset
    path.unlink()
    assert lines.poll().reset
    assert not lines.poll().reset


def test_long_files_come_in_pieces_and_no_line_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "file"
    wanted = [b"x" * 100_000] * 60 + [b"y" * (MOST_BYTES + 1)] + [b"z"]
    path.write_bytes(b"".join(line + b"\n" for line in wanted))
    lines = FileTail(path)
    found: list[bytes] = []
    looks = 0
    more = True
    while more:
        poll = lines.poll()
        found += poll.lines
        looks += 1
        more = poll.more
    assert found == wanted
    assert looks > 1


# Following


def test_an_empty_folder_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    found = panels(tmp_path)
    assert found["run"]["iterations"] == 0
    assert found["map"]["nodes"] == []
    assert found["chart"]["iteration"] is None
    assert panels(tmp_path / "missing") == {**found, "run": {**found["run"], "folder": "missing"}}


def test_a_run_from_its_plan_to_its_end(tmp_path: Path) -> None:
    plan = plan_of()
    run = RunFolder(tmp_path, plan)
    page = Panels(RunFollower(tmp_path))
    page.poll()
    found = parsed(page)
    assert [node["status"] for node in found["map"]["nodes"]] == ["works"] * 8
    assert [stage["nodes"] for stage in found["map"]["stages"]] == [list(stage.nodes) for stage in plan.stages]
    assert found["map"]["lanes"][0]["path"] == list(plan.lanes[0].path)

    run.iteration(0, 4.0)
    run.iteration(1, 3.5, recorded=True)
    run.checkpoint(2)
    page.poll()
    found = parsed(page)
    assert (found["run"]["iterations"], found["run"]["loss"], found["run"]["done"]) == (2, 3.5, False)
    assert found["curves"]["loss"] == [4.0, 3.5]
    assert found["chart"]["iteration"] == 1
    assert [event["kind"] for event in found["events"]["events"]] == ["checkpointed"]
    assert sum(there + back for _, _, there, back in found["load"]["links"]) == plan.promise.bytes_moved
    assert all(a < b for a, b, _, _ in found["load"]["links"])

    run.wal(plan_line(plan), committed(plan, 0), committed(plan, 1), {"done": 1})
    page.poll()
    assert parsed(page)["run"]["done"]


@pytest.mark.parametrize("how", ["done", "stopped"])
def test_a_run_that_was_stopped_on_request(tmp_path: Path, how: str) -> None:
    """By Ctrl-C, or by SIGTERM, after which nodes wait for another coordinator: it is not broken off."""
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0)
    page = Panels(RunFollower(tmp_path))

    def over() -> tuple[bool, bool, bool]:
        page.poll()
        found = parsed(page)["run"]
        return found["done"], found["stopped"], found["resumable"]

    assert over() == (False, False, False)
    run.wal(plan_line(run.plan), committed(run.plan, 0), {how: 0})
    assert over() == (True, True, False)
    assert read_history(tmp_path).ended is True
    run.checkpoint(1)
    assert over() == (True, True, True)
    run.wal({"term": 1})
    assert over() == (False, False, True), "another coordinator has taken over"


def test_planned_over_measured(tmp_path: Path) -> None:
    plan = plan_of()
    RunFolder(tmp_path, plan).iteration(0, recorded=True)
    gantt = panels(tmp_path)["chart"]
    assert [(row["stage"], row["name"]) for row in gantt["rows"]] == [
        (stage, plan.cluster.nodes[node].name) for stage, held in enumerate(plan.stages) for node in held.nodes
    ]
    planned = {tuple(bar[4:]): bar for bar in gantt["planned"] if bar[4] >= 0}
    measured = {tuple(bar[4:]): bar for bar in gantt["measured"] if bar[4] >= 0}
    assert len(measured) == len(plan.promise.tasks)
    assert planned.keys() == measured.keys()
    for which, bar in measured.items():
        assert bar[:2] == planned[which][:2]
        assert bar[3] == pytest.approx(1.1 * planned[which][3], abs=2e-6)
    closing = {gantt["kinds"][bar[1]] for bar in gantt["measured"] if bar[4] < 0}
    assert closing == {"averaging", "optimizer"}
    assert set(gantt["hues"]) == {str(lane) for lane in range(len(plan.lanes))}


def test_a_repaired_plan_is_in_the_journal(tmp_path: Path) -> None:
    plan, repaired = plan_of(), plan_of(stages=2)
    run = RunFolder(tmp_path, plan)
    run.wal(plan_line(plan), committed(plan, 0), plan_line(repaired, recovering=[3]))
    page = Panels(RunFollower(tmp_path))
    page.poll()
    assert len(parsed(page)["map"]["stages"]) == 2
    assert parsed(page)["map"]["nodes"][3]["status"] == "recovering"
    run.wal({"turn": plan.visited})
    page.poll()
    assert len(parsed(page)["map"]["stages"]) == 4
    with (tmp_path / "journal").open("ab") as torn:
        torn.write(b"00000000 9 {torn")
    page.poll()
    assert parsed(page)["run"]["unread"] == {}


def test_what_happened_to_nodes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    page = Panels(RunFollower(tmp_path))

    def status() -> str:
        page.poll()
        return str(parsed(page)["map"]["nodes"][2]["status"])

    for kind, wanted in (
        ("slow", "slow"),
        ("lost", "lost"),
        ("joined", "here"),
        ("recovering", "recovering"),
        ("recovered", "works"),
        ("lost", "lost"),
    ):
        run.event(kind, "so it is", "node-2")  # type: ignore[arg-type]
        assert status() == wanted
    run.event("coordinator-restarted", "8 nodes are where they were")
    assert status() == "works"
    kinds = [event["kind"] for event in parsed(page)["events"]["events"]]
    assert kinds == ["coordinator-restarted", "lost", "recovered", "recovering", "joined", "lost", "slow"]


def test_whoever_sends_is_there(tmp_path: Path) -> None:
    """No event says so when a run goes on from a checkpoint with all of its nodes."""
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0)
    run.event("lost", "signal 9", "node-2")
    assert panels(tmp_path)["map"]["nodes"][2]["status"] == "lost"
    run = RunFolder(tmp_path, plan_of(), resumed=True)
    assert panels(tmp_path)["map"]["nodes"][2]["status"] == "lost"
    run.iteration(1)
    assert panels(tmp_path)["map"]["nodes"][2]["status"] == "works"


def test_slow_is_not_forever(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.event("slow", "is slow, but there", "node-1", iteration=3)
    page = Panels(RunFollower(tmp_path))
    for number, wanted in ((3, "slow"), (4, "slow"), (5, "works")):
        run.iteration(number)
        page.poll()
        assert parsed(page)["map"]["nodes"][1]["status"] == wanted


def test_a_coordinator_that_is_started_again(tmp_path: Path) -> None:
    """It writes its metrics anew, and does some iterations a second time."""
    run = RunFolder(tmp_path, plan_of())
    page = Panels(RunFollower(tmp_path))
    for number in range(5):
        run.iteration(number, 5.0 - number)
    run.event("lost", "its connection: disconnected", "node-1")
    page.poll()
    run = RunFolder(tmp_path, plan_of(), resumed=True)
    page.poll()
    assert parsed(page)["curves"]["loss"] == [5.0, 4.0, 3.0, 2.0, 1.0]
    run.iteration(3, 2.5)
    run.iteration(4, 1.5)
    page.poll()
    assert parsed(page)["curves"]["loss"] == [5.0, 4.0, 3.0, 2.5, 1.5]
    assert parsed(page)["events"]["in_all"] == 1


def test_a_new_run_in_the_same_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    for number in range(5):
        run.iteration(number, recorded=number == 4)
    run.event("lost", "signal 9", "node-1")
    page = Panels(RunFollower(tmp_path))
    page.poll()
    assert parsed(page)["chart"]["iteration"] == 4
    run = RunFolder(tmp_path, plan_of(nodes=12))
    run.iteration(0, 7.0)
    page.poll()
    found = parsed(page)
    assert found["curves"]["loss"] == [7.0]
    assert found["events"]["events"] == []
    assert len(found["map"]["nodes"]) == 12
    assert found["chart"]["iteration"] == 4  # until the folder has another


def test_what_an_earlier_run_has_left_is_not_shown(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0, recorded=True)
    run.wal(plan_line(run.plan), {"done": 0})
    past = time.time() - 60
    for path in tmp_path.rglob("*"):
        os.utime(path, (past, past))
    page = Panels(RunFollower(tmp_path, since=time.time() - 30))
    page.poll()
    assert parsed(page)["run"]["iterations"] == 0
    assert parsed(page)["map"]["nodes"] == []
    assert not parsed(page)["run"]["done"]
    RunFolder(tmp_path, plan_of()).iteration(0)
    page.poll()
    assert parsed(page)["run"]["iterations"] == 1
    assert len(parsed(page)["map"]["nodes"]) == 8


JUNK = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"iteration": "one"}', b'{"iteration": -1}', b'{"iteration": true}',
    b'{"iteration": 1e400}', b"[" * 10_000, b'{"kind": 5}', b'{"plan": 1}',
)  # fmt: skip


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "journal"])
def test_junk_is_counted_and_passed_over(tmp_path: Path, file: str) -> None:
    run = RunFolder(tmp_path, plan_of())
    for number in range(2):
        run.iteration(number)
    run.event("joined", "is here", "node-1")
    run.event("lost", "signal 9", "node-1")
    run.wal(plan_line(run.plan), committed(run.plan, 0))
    *before, last = (tmp_path / file).read_bytes().splitlines(keepends=True)
    (tmp_path / file).write_bytes(b"".join([*before, *(line + b"\n" for line in JUNK), last]))
    found = panels(tmp_path)
    assert found["run"]["unread"] == {file: len(JUNK)}
    assert found["run"]["iterations"] == 2
    assert found["events"]["in_all"] == 2
    assert len(found["map"]["nodes"]) == 8


def test_fields_of_other_types_are_left_out(tmp_path: Path) -> None:
    odd = {"iteration": 0, "loss": "low", "links": [[1, 2], ["a", "b", "c"], "x"], "visits": {}, "seconds": [1]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(odd) + "\n" + '{"iteration": 1, "loss": NaN}\n')
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "lost", "node": 7, "text": None, "time": "now"}) + "\n")
    found = panels(tmp_path)
    assert found["curves"]["loss"] == [None, None]
    assert found["events"]["events"] == [{"kind": "lost", "iteration": 0, "text": "", "node": "", "time": 0.0}]


def test_a_loss_that_is_not_finite_is_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0, math.nan)
    run.iteration(1, 2.0)
    assert panels(tmp_path)["curves"]["loss"] == [None, 2.0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": [{"ph": "X"}]}', b'{"traceEvents": 5}'])
def test_a_trace_that_is_being_written(tmp_path: Path, content: bytes) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0, recorded=True)
    run.iteration(1)
    (tmp_path / "traces" / "000002.json").write_bytes(content)
    page = Panels(RunFollower(tmp_path))
    page.poll()
    run.iteration(1, recorded=True)
    page.poll()
    assert parsed(page)["chart"]["iteration"] == 1


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "skippipe-plan"', b"[1]"])
def test_a_plan_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    assert panels(tmp_path)["run"]["unread"] == {"plan.json": 1}


# Panels


def test_long_runs_have_short_curves(tmp_path: Path) -> None:
    rows = 7 * MOST_POINTS + 3
    lines = (json.dumps({"iteration": number, "loss": number}) + "\n" for number in range(rows))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curves = panels(tmp_path)["curves"]
    assert len(curves["loss"]) <= MOST_POINTS
    assert curves["iteration"][-1] == rows - 1
    assert curves["loss"][0] == (curves["mean_of"] - 1) / 2


def test_only_what_has_changed_is_made_anew(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of())
    run.iteration(0, recorded=True)
    page = Panels(RunFollower(tmp_path))
    page.poll()
    before = page.texts
    run.iteration(1)
    page.poll()
    assert {name for name, text in page.texts.items() if text is not before[name]} == {"run", "load", "curves"}
