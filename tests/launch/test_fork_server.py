"""Processes that fork nodes: they say which node ended how, and no node outlives its owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from skippipe.launch.fork_server import (
    Channel,
    ProcessPool,
    _end_if_meant,
    _fork_node,
    _note_group_signal,
    _ready,
    _Server,
)
from tests.helpers.processes import RUN_END_S, alive, owner, wait_for


def misbehave(told: dict[str, Any]) -> int:
    what = told["what"]
    print(f"told to {what}", flush=True)
    if what == "crash":
        raise ValueError("as I was told")
    if what == "stay":
        print("staying", flush=True)
        while True:
            signal.pause()
    if what == "start others":
        ended = set()
        for _ in range(10):
            forked = os.fork()
            if forked == 0:
                time.sleep(1)
                os._exit(0)
            os.kill(forked, signal.SIGTERM)  # it has hardly begun
            ended.add(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
        asks = "from signal import *; print(pthread_sigmask(SIG_BLOCK, []), getsignal(SIGTERM).name)"
        print(subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout, end="")
        with subprocess.Popen(["sleep", "60"]) as started:
            os.kill(started.pid, signal.SIGTERM)
            print("ended:", started.wait(RUN_END_S), *ended, flush=True)
        return misbehave({"what": "stay"})
    return int(what)


def tend(folder: Path) -> None:
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
    print("not for the nodes", end="")  # stands in the buffer when the nursery forks
    pool = ProcessPool(misbehave, folder / "logs")
    for what in ("0", "7", "crash", "stay"):
        pool.start(f"a-{what}", {"what": what})
    deadline = time.monotonic() + RUN_END_S
    log = folder / "logs" / "a-stay.log"
    while (len(pool.ended) < 3 or not log.exists() or "staying" not in log.read_text()) and time.monotonic() < deadline:
        pool.poll()
        time.sleep(0.01)
    pool.close()
    found = {"ended": pool.ended, "pids": pool.pids}
    (folder / "found").write_text(json.dumps(found))


def test_a_pool_says_who_ended_how_and_ends_the_rest(tmp_path: Path) -> None:
    with owner(tend, tmp_path) as process:
        process.join(RUN_END_S)
        assert process.exitcode == 0
    found = json.loads((tmp_path / "found").read_text())
    assert found["ended"] == {"a-0": 0, "a-7": 7, "a-crash": 1}
    assert not any(alive(pid) for pid in found["pids"].values())
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs["a-7.log"] == "told to 7\n"
    assert "ValueError: as I was told" in logs["a-crash.log"]


def look_until(pool: ProcessPool, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + RUN_END_S
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        pool.poll()
        time.sleep(0.01)


def start_and_lose_its_parent(pool: ProcessPool, name: str) -> None:
    pool.start(name, {"what": "stay"})
    look_until(pool, lambda: name in pool.pids and len(pool.servers) == 2)
    lost = pool.servers[0]
    os.kill(lost, signal.SIGKILL)
    look_until(pool, lambda: lost not in pool.servers)


def start_where_nothing_can_be_forked(folder: Path) -> None:
    """Until there is a file: as where processes or memory are short for a while."""
    fork, refused = os.fork, [0]

    def fork_if_allowed() -> int:
        if refused[0] and not (folder / "allowed").exists():
            (folder / "asked").touch()
            raise BlockingIOError("no more processes")
        refused[0] += 1
        return fork()

    os.fork = fork_if_allowed
    pool = ProcessPool(misbehave, folder / "logs")
    pool.start("a", {"what": "stay"})
    look_until(pool, (folder / "asked").exists)
    assert not pool.pids and not pool.ended
    (folder / "allowed").touch()
    look_until(pool, lambda: "a" in pool.pids and len(pool.servers) == 2)
    pool.close()


def test_what_cannot_be_forked_now_is_forked_later(tmp_path: Path) -> None:
    with owner(start_where_nothing_can_be_forked, tmp_path) as process:
        process.join(RUN_END_S)
        assert process.exitcode == 0


def lose_fork_servers(folder: Path) -> None:
    """Whoever forks is killed, twice; then a node of each of them; what is left ends with the owner."""
    pool = ProcessPool(misbehave, folder / "logs")
    for name in ("a0", "a1", "a2"):
        start_and_lose_its_parent(pool, name)
    assert not pool.ended, "they live on"
    os.kill(pool.pids["a1"], signal.SIGKILL)
    look_until(pool, lambda: "a1" in pool.ended)
    assert pool.ended == {"a1": None}
    before = pool.pids["a1"]
    pool.start("a1", {"what": "stay"})
    look_until(pool, lambda: pool.pids["a1"] != before and len(pool.servers) == 2)
    (folder / "found").write_text(json.dumps([list(pool.pids.values()), pool.servers]))
    if (folder / "close").exists():
        pool.close()
        return
    while True:
        time.sleep(RUN_END_S)


def start_others(folder: Path) -> None:
    pool, log = ProcessPool(misbehave, folder / "logs"), folder / "logs" / "a.log"
    pool.start("a", {"what": "start others"})
    look_until(pool, lambda: log.exists() and "staying" in log.read_text())
    os.kill(pool.pids["a"], signal.SIGTERM)
    look_until(pool, lambda: pool.ended)
    assert pool.ended == {"a": 143}, "its own signal still ends it"
    pool.close()
    (folder / "found").write_text(log.read_text())


def test_processes_that_a_node_starts_get_signals_as_any_other_process(tmp_path: Path) -> None:
    with owner(start_others, tmp_path) as process:
        process.join(RUN_END_S)
        assert process.exitcode == 0
    lines = (tmp_path / "found").read_text().splitlines()
    assert lines[1:3] == ["set() SIG_DFL", "ended: -15 -15"]
    assert lines.count("this node got SIGTERM, and ends") == 1


def terminate_at_once(folder: Path) -> None:
    _, theirs = socket.socketpair()
    lifeline, group_signal, wakeup = os.pipe(), os.pipe(), os.pipe()
    server = _Server(Channel(theirs), misbehave, folder, lifeline[0], group_signal, wakeup=wakeup)
    signal.signal(signal.SIGTERM, lambda _number, _frame: _note_group_signal(server))
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    _fork_node(server, "a", {"what": "stay"})
    (node,) = server.nodes
    status = os.waitstatus_to_exitcode(os.waitpid(node, 0)[1])
    (folder / "found").write_text(f"{status} {_ready([group_signal[0]], 0.0)}")


def test_sigterm_for_a_node_that_has_just_been_forked_ends_it(tmp_path: Path) -> None:
    """And its fork server does not take it for a signal to all."""
    with owner(terminate_at_once, tmp_path) as process:
        process.join(RUN_END_S)
        assert process.exitcode == 0
    assert (tmp_path / "found").read_text() == "143 []"


def test_signals_that_other_code_handles_do_not_end_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's loaders of data handle SIGCHLD."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("skippipe.launch.fork_server.GROUP_S", 0.0)
    (arrived, written), group_signal = os.pipe(), os.pipe()
    os.write(written, bytes([signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM]))
    with pytest.raises(SystemExit, match="143"):
        _end_if_meant(arrived, group_signal[0])
    assert not _ready([arrived], 0.0), "ended by the last of them"
    for handle in (arrived, written, *group_signal):
        os.close(handle)


def get_sigterm(folder: Path) -> None:
    """One node, then the whole process group."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pool = ProcessPool(misbehave, folder / "logs")
    for name in ("a0", "a1", "a2"):
        pool.start(name, {"what": "stay"})

    def said(what: str, *names: str) -> bool:
        logs = [folder / "logs" / f"{name}.log" for name in names]
        return all(log.exists() and what in log.read_text() for log in logs)

    look_until(pool, lambda: len(pool.servers) == 2 and said("staying", "a0", "a1", "a2"))
    os.kill(pool.pids["a1"], signal.SIGTERM)
    look_until(pool, lambda: pool.ended)
    assert pool.ended == {"a1": 143}
    os.killpg(0, signal.SIGTERM)
    look_until(pool, lambda: said("its owner decides", "a0", "a2"))
    pool.poll()
    assert pool.ended == {"a1": 143}
    assert all(alive(pid) for pid in (pool.pids["a0"], pool.pids["a2"], *pool.servers))
    pool.close()
    (folder / "found").write_text("all of it")


def test_sigterm_ends_a_node_unless_it_is_for_all(tmp_path: Path) -> None:
    with owner(get_sigterm, tmp_path) as process:
        process.join(RUN_END_S)
        assert process.exitcode == 0
    assert (tmp_path / "found").read_text() == "all of it"


@pytest.mark.parametrize("closed", [True, False])
def test_nodes_outlive_those_who_forked_them_but_not_their_owner(tmp_path: Path, closed: bool) -> None:
    if closed:
        (tmp_path / "close").touch()
    with owner(lose_fork_servers, tmp_path) as process:
        found = tmp_path / "found"
        wait_for(lambda: found.exists() and found.read_text().endswith("]]"))
        if closed:
            process.join(RUN_END_S)
            assert process.exitcode == 0
        else:
            process.kill()
        nodes, servers = json.loads(found.read_text())
        wait_for(lambda: not any(alive(pid) for pid in (*nodes, *servers)), 10)
