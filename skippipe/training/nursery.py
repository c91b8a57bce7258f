"""Nodes on this machine, all forked from one parent that has imported everything: twenty start in seconds.

The nursery is a process of its own with a single thread, because a process with threads cannot be forked safely. It
takes one JSON line for each node to start over a socket, and says when one has ended. When its owner is gone, however
that came about, the socket closes, and the nursery ends its nodes and itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skippipe.errors import UserError

SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
STOP_S = 4.0  # from a polite request to end until force

Birth = Callable[[dict[str, Any]], int]
"""What a node does with what it was told; gives its exit status."""


class Nursery:
    """The owner's side."""

    def __init__(self, birth: Birth, log_folder: Path) -> None:
        """Forks at once: call it before threads are started. `birth` runs in each node."""
        log_folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        sys.stdout.flush()  # or every node would write what stands in the buffer once more
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                ours.close()
                _tend(theirs, birth, log_folder)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # whatever happens, it must not go on as a second owner; its nodes die with it
        theirs.close()
        self._socket = ours
        self._socket.setblocking(False)
        self._lines = b""
        self.pids: dict[str, int] = {}
        self.started: Counter[str] = Counter()
        self.ended: dict[str, int] = {}
        """Nodes that are no more, and their exit status; −N: ended by signal N."""

    def start(self, name: str, told: dict[str, Any]) -> None:
        self.started[name] += 1
        self._socket.setblocking(True)
        self._socket.sendall(json.dumps({"name": name, "told": told}).encode() + b"\n")
        self._socket.setblocking(False)

    def look(self) -> None:
        """Take in what has happened."""
        while True:
            try:
                block = self._socket.recv(65536)
            except BlockingIOError:
                break
            except ConnectionError:
                block = b""
            if not block:
                raise UserError(
                    "the process that starts nodes is gone, and all nodes with it; resume from a checkpoint"
                )
            self._lines += block
        *whole, self._lines = self._lines.split(b"\n")
        for line in whole:
            news = json.loads(line)
            if "pid" in news:
                self.pids[news["name"]] = news["pid"]
                self.ended.pop(news["name"], None)
            else:
                self.ended[news["name"]] = news["status"]

    def close(self) -> None:
        """End every node; returns when all are gone."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def log_file(log_folder: Path, name: str) -> Path:
    return log_folder / f"{name.replace(os.sep, '_')}.log"


def _tend(owner: socket.socket, birth: Birth, log_folder: Path) -> None:
    """The nursery's side; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides what it means
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    nodes: dict[int, str] = {}
    lines = b""
    while True:
        readable, _, _ = select.select([owner.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        for pid, status in _reaped():
            _tell(owner, {"name": nodes.pop(pid, "?"), "status": os.waitstatus_to_exitcode(status)})
        if owner.fileno() in readable:
            try:
                block = owner.recv(65536)
            except ConnectionError:
                block = b""
            if not block:
                break
            *whole, lines = (lines + block).split(b"\n")
            for line in whole:
                order = json.loads(line)
                parent, pid = os.getpid(), os.fork()
                if pid == 0:
                    _live(order["name"], order["told"], birth, log_folder, parent, (owner.fileno(), woken, wakes))
                nodes[pid] = order["name"]
                _tell(owner, {"name": order["name"], "pid": pid})
    _end(set(nodes), woken)
    os._exit(0)


def _tell(owner: socket.socket, news: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the owner is gone; the next read says so
        owner.sendall(json.dumps(news).encode() + b"\n")


def _reaped() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def _end(nodes: set[int], woken: int) -> None:
    """Ask, then force."""
    for kind, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        for pid in nodes:
            os.kill(pid, kind)  # it is there, at least as a zombie, until we have reaped it
        deadline = time.monotonic() + patience_s
        while nodes and time.monotonic() < deadline:
            nodes -= {pid for pid, _ in _reaped()}
            if nodes and select.select([woken], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.read(woken, 4096)
        if not nodes:
            return


def _live(
    name: str, told: dict[str, Any], birth: Birth, log_folder: Path, parent: int, theirs: tuple[int, ...]
) -> None:
    """A node's whole life; never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in theirs:
            os.close(number)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # died before we could ask to be told
            os._exit(1)
        log = os.open(log_file(log_folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        status = birth(told)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
