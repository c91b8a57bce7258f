"""How soon a fault is noticed: nine nodes and a coordinator, each with an address of its own in network namespaces.

A link is cut by telling one machine a wrong hardware address of the other: what it sends is dropped, nobody is told,
and the way back is as it was. Cut both ways, that is what a broken cable or a firewall that drops does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from skippipe.runtime.node.agent import NodeAgent
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.runtime.train_role import ROLES
from skippipe.training.backends import BACKENDS
from skippipe.training.train_job import run_job
from skippipe.transport.keys import KeyFile
from tests.helpers.chaos import NODES, RunSetup
from tests.helpers.namespaces import Machine, neighbours

PORT = 5555
SETTLED = 3  # iterations before the fault
PATIENCE_S = 60.0  # for the first iterations, and for a fault to be noticed
NOBODY = "02:00:00:00:00:99"  # a hardware address that no machine has
CLONE_NEWNET = 0x40000000
LOOK_S = 0.02
Found = TypeVar("Found")
LEADS = NODES  # the coordinator's place among the machines


@dataclass
class Running:
    """A run in which something is about to happen."""

    folder: Path
    machines: Sequence[Machine]
    pids: list[int]

    def lines(self, name: str) -> list[dict[str, object]]:
        path = self.folder / "run" / name
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def noticed(self, since: float) -> list[float]:
        """Seconds until the coordinator has said so."""
        events = [each for each in self.lines("events.jsonl") if each["kind"] in ("lost", "link-down")]
        return [float(str(each["time"])) - since for each in events][:1]

    def nodes_noticed(self, since: float) -> list[float]:
        """Seconds until the last node has said that the coordinator is gone."""
        logs = [(self.folder / f"n{node}.log").read_text().splitlines() for node in range(NODES)]
        told = [[float(line.split()[0]) for line in log if "waiting for it to come back" in line] for log in logs]
        return [max(each[0] for each in told) - since] if all(told) else []

    def cut(self, sender: int, *receivers: int) -> None:
        """One way; a machine has the number of its node."""
        lines = [f"ip neigh replace {address(each)} lladdr {NOBODY} nud permanent dev eth0" for each in receivers]
        _inside(self.machines[sender], " && ".join(lines))

    def cut_off(self, one: int) -> None:
        others = [each for each in range(NODES + 1) if each != one]
        self.cut(one, *others)
        for each in others:
            self.cut(each, one)


def address(machine: int) -> str:
    return f"10.0.0.{machine + 1}"


def _inside(machine: Machine, line: str) -> None:
    subprocess.run([*machine._within, "sh", "-c", line], check=True)


def kill(running: Running) -> None:
    os.kill(running.pids[3], signal.SIGKILL)


def freeze(running: Running) -> None:
    os.kill(running.pids[3], signal.SIGSTOP)


def cut(running: Running) -> None:
    running.cut(0, 3)
    running.cut(3, 0)


def cut_one_way(running: Running) -> None:
    running.cut(0, 3)


def cut_a_ring(running: Running) -> None:
    running.cut(6, 7)
    running.cut(7, 6)


def cut_a_node_off(running: Running) -> None:
    running.cut_off(3)


def kill_the_coordinator(running: Running) -> None:
    os.kill(running.pids[LEADS], signal.SIGKILL)


def cut_the_coordinator_off(running: Running) -> None:
    running.cut_off(LEADS)


Noticed = Callable[[Running, float], list[float]]
CASES: list[tuple[str, Callable[[Running], None], Noticed]] = [
    ("a process is killed", kill, Running.noticed),
    ("a process is frozen (SIGSTOP)", freeze, Running.noticed),
    ("a link of a path drops everything", cut, Running.noticed),
    ("the same, one way only", cut_one_way, Running.noticed),
    ("a link of a ring drops everything", cut_a_ring, Running.noticed),
    ("a node reaches nobody", cut_a_node_off, Running.noticed),
    ("the coordinator is killed (by all nodes)", kill_the_coordinator, Running.nodes_noticed),
    ("the coordinator reaches nobody (by all nodes)", cut_the_coordinator_off, Running.nodes_noticed),
]


def detection(asked: argparse.Namespace) -> int:
    print(f"{'what happens':<48} {'heartbeat':>9} {'noticed after':>24} {'called slow':>12}")
    late = 0
    with tempfile.TemporaryDirectory(prefix="detection") as name:
        run_setup = RunSetup.made(Path(name))
        for what, strike, noticed in CASES:
            took, slow = [], 0
            for repetition in range(asked.repetitions):
                folder = Path(name) / f"{strike.__name__}-{repetition}"
                with run_of(run_setup, folder, asked.heartbeat) as running:
                    strike(running)
                    since = time.time()
                    took += waited(lambda: noticed(running, since), f"{what}: not noticed")  # noqa: B023
                    slow += sum(each["kind"] == "slow" for each in running.lines("events.jsonl"))
                shutil.rmtree(folder)
            late += max(took) > asked.heartbeat + 1
            each = ", ".join(f"{seconds:.2f}" for seconds in took)
            print(f"{what:<48} {asked.heartbeat:>7g} s {each + ' s':>24} {slow:>12}", flush=True)
    return bool(late)


@contextmanager
def run_of(run_setup: RunSetup, folder: Path, heartbeat_s: float) -> Iterator[Running]:
    """As far as its first iterations."""
    folder.mkdir()
    with ExitStack() as stack:
        names = [*(f"n{node}" for node in range(NODES)), "lead"]
        machines = stack.enter_context(neighbours(folder, names, os.environ))
        running = Running(folder, machines, [])
        stack.callback(_end, running.pids)
        running.pids += [_forked(machines[node], folder, _node(run_setup, node)) for node in range(NODES)]
        running.pids.append(_forked(machines[LEADS], folder, _coordinator(run_setup, folder, heartbeat_s)))
        waited(lambda: len(running.lines("metrics.jsonl")) >= SETTLED, "training does not begin")
        yield running


def _node(run_setup: RunSetup, node: int) -> Callable[[], None]:
    def run() -> None:
        file = KeyFile.load(run_setup.keys / f"n{node}.key")
        where, lead = f"{address(node)}:{PORT}", f"{address(LEADS)}:{PORT}"
        NodeAgent(JoinConfig(file.node, lead, file.keys, file.coordinator, listen=where), ROLES).run()

    return run


def _coordinator(run_setup: RunSetup, folder: Path, heartbeat_s: float) -> Callable[[], None]:
    job = run_setup.job(folder / "run", 10**6, heartbeat_s=heartbeat_s, listen=f"{address(LEADS)}:{PORT}")
    return lambda: run_job(job, BACKENDS["processes"])


def _forked(machine: Machine, folder: Path, run: Callable[[], None]) -> int:
    """As a process of that machine; everything is imported already."""
    pid = os.fork()
    if pid:
        return pid
    try:
        holder = next(word.partition("=")[2] for word in machine._within if word.startswith("--target="))
        if ctypes.CDLL(None, use_errno=True).setns(os.open(f"/proc/{holder}/ns/net", os.O_RDONLY), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        log = os.open(folder / f"{machine.home.name}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(format="%(created).3f %(message)s", level=logging.INFO, force=True)
        run()
    finally:
        os._exit(0)


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def waited(what: Callable[[], Found], why: str) -> Found:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{why} within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)
    return found
