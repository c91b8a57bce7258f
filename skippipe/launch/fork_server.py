"""Nodes on this machine, all forked from one parent that has imported everything: twenty start in seconds.

The process that forks them is one of its own with a single thread, because a process with threads cannot be forked
safely. It takes one JSON line for each node to start over a socket, and says when one has ended. There are two of it,
and the second only waits: if one is killed, the other takes its place and forks itself, so there are two again. Nodes
of one that was killed live on, and the owner looks after them itself; how they end is then not known, but that they do.

When the owner is gone, however that came about, the sockets close: both end their nodes and themselves. A node that
has outlived the process that forked it ends by itself: it holds the reading end of a pipe that only the owner could
write to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

STOP_S = 4.0  # from a polite request to end until force
LOOK_S = 0.05  # from one look at a process to the next, where nothing tells that it has ended
TWIN: dict[str, Any] = {"twin": True}
"""The order to fork another that forks."""

ProcessMain = Callable[[dict[str, Any]], int]
"""What a node does with what it was told; gives its exit status."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ForkServer:
    """A process that forks nodes, as its owner sees it."""

    pid: int
    socket: socket.socket
    lines: bytes = b""
    passed: list[int] = field(default_factory=list)
    """File descriptors that came with what it said."""

    def order(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the next look finds
            self.socket.setblocking(True)
            self.socket.sendall(json.dumps(what).encode() + b"\n")
        self.socket.setblocking(False)

    def news(self) -> tuple[list[dict[str, Any]], bool]:
        """What it has said since, and whether it is gone."""
        block = b"first"
        while block:
            try:
                block, passed, _, _ = socket.recv_fds(self.socket, 65536, 1)
            except BlockingIOError:
                break
            except ConnectionError:
                block, passed = b"", []
            self.passed += passed
            self.lines += block
        *whole, self.lines = self.lines.split(b"\n")
        return [json.loads(line) for line in whole], not block


@dataclass
class NodeProcess:
    """A node's, as far as it can be known without being its parent."""

    pid: int
    handle: int | None
    """A pidfd, where there is such a thing: the number of a process may mean another one day."""

    @classmethod
    def of(cls, pid: int) -> NodeProcess:
        handle = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
        return cls(pid, handle)

    @property
    def ended(self) -> bool:
        if self.handle is not None:
            return bool(_ready([self.handle], 0.0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.handle is not None and sys.platform == "linux":
                signal.pidfd_send_signal(self.handle, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class ProcessPool:
    """The owner's side."""

    def __init__(self, birth: ProcessMain, log_folder: Path) -> None:
        """Forks at once: call it before threads are started. `birth` runs in each node."""
        log_folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        sys.stdout.flush()  # or every node would write what stands in the buffer once more
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            ours.close()
            os.close(self._lifeline)
            _tend(theirs, birth, log_folder, lifeline)
        theirs.close()
        os.close(lifeline)
        ours.setblocking(False)
        self._servers = [ForkServer(self._child, ours)]
        """That which starts nodes, and the one that waits to take its place."""
        self._servers[0].order(TWIN)
        self._orders: dict[str, dict[str, Any]] = {}
        """Nodes that are to be started, and what they are told."""
        self._processes: dict[str, NodeProcess] = {}
        self._parents: dict[str, ForkServer | None] = {}
        """Whoever forked a node that lives; none: it is gone."""
        self._closing = False
        self.pids: dict[str, int] = {}
        self.started: Counter[str] = Counter()
        self.ended: dict[str, int | None] = {}
        """Nodes that are no more, and their exit status; −N: ended by signal N; none: it is not known."""

    @property
    def servers(self) -> list[int]:
        """The processes that fork nodes: the one that does, and those that wait to take its place."""
        return [server.pid for server in self._servers]

    def start(self, name: str, told: dict[str, Any]) -> None:
        self.started[name] += 1
        self._orders[name] = told
        self._order(name)

    def poll(self) -> None:
        """Take in what has happened."""
        for server in list(self._servers):
            news, gone = server.news()
            for each in news:
                self._hear(server, each)
            if gone:
                self._lose(server)
        for name in [name for name, parent in self._parents.items() if parent is None]:
            if self._processes[name].ended:
                self._end(name, None)

    def close(self) -> None:
        """End every node; returns when all are gone."""
        self._closing = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_WR)
        for kind in (signal.SIGTERM, signal.SIGKILL):
            for name, parent in self._parents.items():
                if parent is None:
                    self._processes[name].signal(kind)
            self._wait(time.monotonic() + STOP_S + LOOK_S)
        for server in list(self._servers):  # it was stopped, perhaps
            for name in [name for name, parent in self._parents.items() if parent is server]:
                self._processes[name].signal(signal.SIGKILL)
            os.kill(server.pid, signal.SIGKILL)
        self._wait(time.monotonic() + STOP_S)
        os.close(self._lifeline)

    def _wait(self, deadline: float) -> None:
        """For all to be gone."""
        while self._servers or None in self._parents.values():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            handles = [self._processes[name].handle for name, parent in self._parents.items() if parent is None]
            known = [handle for handle in handles if handle is not None]
            _ready(
                [*(server.socket.fileno() for server in self._servers), *known],
                left_s if len(known) == len(handles) else min(left_s, LOOK_S),
            )
            self.poll()

    def _hear(self, server: ForkServer, news: dict[str, Any]) -> None:
        if "twin" in news:
            twin = socket.socket(fileno=server.passed.pop(0))
            twin.setblocking(False)
            twin.set_inheritable(False)
            self._servers.append(ForkServer(news["twin"], twin))
        elif "pid" in news:
            name = news["name"]
            self.pids[name] = news["pid"]
            self._processes[name] = NodeProcess.of(news["pid"])
            self._parents[name] = server
            self._orders.pop(name, None)
            self.ended.pop(name, None)
        else:
            self._end(news["name"], news["status"])

    def _end(self, name: str, status: int | None) -> None:
        if not self._closing:
            self.ended[name] = status
        self._processes.pop(name).close()
        del self._parents[name]

    def _lose(self, server: ForkServer) -> None:
        """Another takes its place. A node that it was forking has not begun to live."""
        self._servers.remove(server)
        server.socket.close()
        if server.pid == self._child:
            os.waitpid(self._child, 0)
        for name in [name for name, parent in self._parents.items() if parent is server]:
            self._parents[name] = None
        if self._closing:
            return
        if not self._servers:
            log.warning("the processes that start nodes are gone; nodes that are lost from now on do not come back")
            return
        log.warning("a process that starts nodes is gone (%d); its nodes live on, and it is replaced", server.pid)
        self._servers[0].order(TWIN)
        for name in self._orders:
            self._order(name)

    def _order(self, name: str) -> None:
        if self._servers:
            self._servers[0].order({"name": name, "told": self._orders[name]})


def how_ended(status: int | None) -> str:
    """For people."""
    if status is None:
        return "ended, and whoever started it is gone"
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def log_file(log_folder: Path, name: str) -> Path:
    return log_folder / f"{name.replace(os.sep, '_')}.log"


def last_log_line(log_folder: Path, name: str) -> str:
    try:
        lines = log_file(log_folder, name).read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _ready(handles: list[int], within_s: float) -> list[tuple[int, int]]:
    """Those that have something to say; `select` could not take numbers above 1023."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return poll.poll(within_s * 1000)


def _tend(owner: socket.socket, birth: ProcessMain, log_folder: Path, lifeline: int) -> NoReturn:
    """The whole life of a process that forks nodes."""
    try:
        _fork_as_told(owner, birth, log_folder, lifeline)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, it must not go on as a second owner


def _fork_as_told(owner: socket.socket, birth: ProcessMain, log_folder: Path, lifeline: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides what it means
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    nodes: dict[int, str] = {}
    lines = b""
    while True:
        readable = [handle for handle, _ in _ready([owner.fileno(), woken], STOP_S)]
        if woken in readable:
            os.read(woken, 4096)
        for pid, status in _reaped():
            if pid in nodes:
                _tell(owner, {"name": nodes.pop(pid), "status": os.waitstatus_to_exitcode(status)})
        if owner.fileno() not in readable:
            continue
        try:
            block = owner.recv(65536)
        except ConnectionError:
            block = b""
        if not block:
            break
        *whole, lines = (lines + block).split(b"\n")
        for order in map(json.loads, whole):
            ours = (owner.fileno(), woken, wakes)
            if order == TWIN:
                _fork_twin(owner, ours, birth, log_folder, lifeline)
            else:
                _fork_node(owner, ours, order, nodes, birth, log_folder, lifeline)
    _end(set(nodes), woken)
    os._exit(0)


def _fork_twin(
    owner: socket.socket, ours: tuple[int, ...], birth: ProcessMain, log_folder: Path, lifeline: int
) -> None:
    """Another like this one, with a socket of its own to the owner."""
    near, far = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        near.close()
        for number in ours:
            os.close(number)
        _tend(far, birth, log_folder, lifeline)
    with contextlib.suppress(OSError), near, far:
        socket.send_fds(owner, [json.dumps({"twin": pid}).encode() + b"\n"], [near.fileno()])


def _fork_node(
    owner: socket.socket,
    ours: tuple[int, ...],
    order: dict[str, Any],
    nodes: dict[int, str],
    birth: ProcessMain,
    log_folder: Path,
    lifeline: int,
) -> None:
    """A node begins to live when the owner knows of it, or there could be two of one name."""
    may, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(begin)
        _live(order["name"], order["told"], birth, log_folder, (may, lifeline), ours)
    os.close(may)
    nodes[pid] = order["name"]
    _tell(owner, {"name": order["name"], "pid": pid})
    with contextlib.suppress(OSError):
        os.write(begin, b"!")
    os.close(begin)


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
            if nodes and _ready([woken], max(0.0, deadline - time.monotonic())):
                os.read(woken, 4096)
        if not nodes:
            return


def _live(
    name: str, told: dict[str, Any], birth: ProcessMain, log_folder: Path, own: tuple[int, int], theirs: tuple[int, ...]
) -> NoReturn:
    """A node's whole life."""
    status = 1
    may, lifeline = own
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in theirs:
            os.close(number)
        if not os.read(may, 1):  # whoever forked it is gone, and the owner may not know of it
            os._exit(1)
        os.close(may)
        log = os.open(log_file(log_folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        threading.Thread(target=_end_with_owner, args=(lifeline,), name="lifeline", daemon=True).start()
        status = birth(told)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with_owner(lifeline: int) -> None:
    """Nothing is ever written there: it ends with the owner."""
    os.read(lifeline, 1)
    os._exit(1)
