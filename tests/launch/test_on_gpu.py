"""Parts of the benchmarks on a card: whatever becomes of one, it keeps to its limit and leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import TIMED_OUT, Part, run_all, run_part

LEAVES_A_CHILD = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep, start_new_session=sys.argv[1] == "apart")
print("child", child.pid, flush=True)
"""
ENDED_S = 20.0  # for a process that was killed to be gone


def python(code: str, *words: str) -> Part:
    return Part("it", 50, ([sys.executable, "-c", code, *words],))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("where", ["beside", "apart"])
def test_a_part_is_over_when_its_process_is(where: str) -> None:
    """A process that it leaves behind holds its output open, even one in a session of its own."""
    found = run_part(python(LEAVES_A_CHILD, where), os.environ, 50)
    child = int(str(found["output"]).split()[1])
    assert found["status"] == 0
    if where == "apart":
        os.kill(child, 9)
    deadline = time.monotonic() + ENDED_S
    while is_alive(child):
        assert time.monotonic() < deadline, "the process that was left behind goes on"


def test_a_part_past_its_limit_is_interrupted_and_says_what_it_has_found() -> None:
    code = """
import time
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("found so far", flush=True)
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # or it may be ignored, as in the background
    try:
        found = run_part(python(code), os.environ, 5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found["status"] == TIMED_OUT
    assert "begun" not in str(found["output"]) or "found so far" in str(found["output"])


def test_what_fails_keeps_no_other_part_from_running_and_what_has_no_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        python("raise SystemExit(3)")._replace(name="bad"),
        python("print('fine')")._replace(name="good"),
        python("print('never')")._replace(name="long", limit_s=1000),
    ]
    monkeypatch.setattr(on_gpu, "parts_of", lambda *_: parts)
    asked = argparse.Namespace(output=tmp_path / "found.jsonl", within=200, only=None, mps=True, device="cpu")
    assert run_all(asked) == 1
    lines = [json.loads(line) for line in asked.output.read_text(encoding="utf-8").splitlines()]
    assert [(line["part"], line["status"], line["mps"]) for line in lines] == [("bad", 3, False), ("good", 0, False)]
    assert capsys.readouterr().out.endswith("not begun, to be over after 200 s: long\n")
    asked.only = ["good", "goood"]
    with pytest.raises(SystemExit, match="there is no goood, but bad, good, long"):
        run_all(asked)
