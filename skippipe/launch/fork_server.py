"""A fork server: nodes of this machine, forked from one process that has imported everything. Twenty start in seconds.

The fork server has a single thread, because a process with threads cannot be forked safely. Over a socket it gets one
JSON line for each node to start, and reports those that have ended. There are two of them, and the second is a standby:
if the first is killed, the standby takes its place and forks another standby. Nodes of a fork server that was killed
live on, and the owner watches them itself; it then learns that they end, but not how.

When the owner is gone, however that came about, the sockets close: both fork servers end their nodes and themselves. A
node that has outlived its fork server ends by itself: it holds the reading end of a pipe of which only the owner has
the other end.

SIGINT and SIGTERM may reach the whole process group, by Ctrl-C or a scheduler: then the owner decides what they mean.
SIGTERM to one node alone ends that node. A node cannot see whom else a signal was sent to, so fork servers that get
SIGTERM write into a pipe, and a node that gets it ends unless that has happened or soon happens. It has a handler for
that and blocks nothing, because processes that a node starts, as compilers do, would inherit a mask of signals.
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

from skippipe.errors import TERMINATED

STOP_S = 4.0  # for processes that were killed to be gone
FORK_RETRY_S = 1.0
GROUP_S = 2.0  # between SIGTERM at a node and at a fork server, if both are meant; else the node ends
POLL_S = 0.05  # between two polls of a process whose end cannot be waited for
STANDBY: dict[str, Any] = {"standby": True}
"""The request to fork another fork server."""

ProcessMain = Callable[[dict[str, Any]], int]
"""What a node runs with its configuration; gives its exit status."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Channel:
    """Lines of JSON between the owner and a fork server."""

    socket: socket.socket
    pid: int = 0
    """Process id of the fork server at the other end, as its owner knows it."""
    lines: bytes = b""
    descriptors: list[int] = field(default_factory=list)
    """File descriptors that came with messages."""

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, which the next read finds
            self.socket.setblocking(True)
            line = json.dumps(message).encode() + b"\n"
            sent = socket.send_fds(self.socket, [line], descriptors) if descriptors else 0
            self.socket.sendall(line[sent:])
        self.socket.setblocking(False)

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages since the last call, and whether the other end is gone."""
        block = b"first"
        while block:
            try:
                block, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 1)
            except BlockingIOError:
                break
            except ConnectionError:
                block, descriptors = b"", []
            self.descriptors += descriptors
            self.lines += block
        *whole, self.lines = self.lines.split(b"\n")
        return [json.loads(line) for line in whole], not block


@dataclass
class NodeProcess:
    """A node's process, as far as it can be known without being its parent."""

    pid: int
    handle: int | None
    """A pidfd, where there is such a thing: a process id may be given to another process one day."""

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
    """Nodes as processes, from the owner's side."""

    def __init__(self, process_main: ProcessMain, log_folder: Path) -> None:
        """Forks at once: make it before threads are started. `process_main` runs in each node."""
        log_folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        group_signal = os.pipe()
        sys.stdout.flush()  # or every node would write the buffer's content once more
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            ours.close()
            os.close(self._lifeline)
            _run_and_exit(lambda: _serve(_Server(Channel(theirs), process_main, log_folder, lifeline, group_signal)))
        theirs.close()
        for handle in (lifeline, *group_signal):
            os.close(handle)
        ours.setblocking(False)
        self._servers = [Channel(ours, self._child)]
        """The one that forks nodes, and its standby."""
        self._servers[0].send(STANDBY)
        self._pending: dict[str, dict[str, Any]] = {}
        """Nodes that are to be started → their configuration."""
        self._processes: dict[str, NodeProcess] = {}
        self._parents: dict[str, Channel | None] = {}
        """Running node → its fork server; None: that is gone."""
        self._closing = False
        self.pids: dict[str, int] = {}
        """Node → its newest process."""
        self.started: Counter[str] = Counter()
        """Node → how often it was started."""
        self.ended: dict[str, int | None] = {}
        """Nodes that have ended → exit status; −N: ended by signal N; None: it is not known."""

    @property
    def servers(self) -> list[int]:
        """Process ids of the fork server and its standby."""
        return [server.pid for server in self._servers]

    def start(self, name: str, config: dict[str, Any]) -> None:
        self.started[name] += 1
        self._pending[name] = config
        self._request(name)

    def poll(self) -> None:
        """Take in what has happened since the last call."""
        for server in list(self._servers):
            messages, gone = server.receive()
            for each in messages:
                self._handle(server, each)
            if gone:
                self._replace_server(server)
        for name in [name for name, parent in self._parents.items() if parent is None]:
            if self._processes[name].ended:
                self._end(name, None)

    def close(self) -> None:
        """End every node; returns when all are gone."""
        self._closing = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_WR)
        for name, parent in self._parents.items():
            if parent is None:
                self._processes[name].signal(signal.SIGKILL)
        self._wait(time.monotonic() + STOP_S + POLL_S)
        for server in list(self._servers):  # frozen, perhaps
            for name in [name for name, parent in self._parents.items() if parent is server]:
                self._processes[name].signal(signal.SIGKILL)
            os.kill(server.pid, signal.SIGKILL)
        self._wait(time.monotonic() + STOP_S)
        os.close(self._lifeline)

    def _wait(self, deadline: float) -> None:
        """Wait until all processes have ended, or until the deadline."""
        while self._servers or None in self._parents.values():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            handles = [self._processes[name].handle for name, parent in self._parents.items() if parent is None]
            known = [handle for handle in handles if handle is not None]
            _ready(
                [*(server.socket.fileno() for server in self._servers), *known],
                left_s if len(known) == len(handles) else min(left_s, POLL_S),
            )
            self.poll()

    def _handle(self, server: Channel, message: dict[str, Any]) -> None:
        if "standby" in message:
            standby = socket.socket(fileno=server.descriptors.pop(0))
            standby.setblocking(False)
            standby.set_inheritable(False)
            self._servers.append(Channel(standby, message["standby"]))
        elif "pid" in message:
            name = message["name"]
            self.pids[name] = message["pid"]
            self._processes[name] = NodeProcess.of(message["pid"])
            self._parents[name] = server
            self._pending.pop(name, None)
            self.ended.pop(name, None)
        elif "delayed" in message:
            log.warning("%s could not be started: %s; it is tried again", message["delayed"], message["error"])
        else:
            self._end(message["name"], message["status"])

    def _end(self, name: str, status: int | None) -> None:
        if not self._closing:
            self.ended[name] = status
        self._processes.pop(name).close()
        del self._parents[name]

    def _replace_server(self, server: Channel) -> None:
        """The standby takes the place of one that is gone. A node that it was forking has not started to run."""
        self._servers.remove(server)
        server.socket.close()
        if server.pid == self._child:
            os.waitpid(self._child, 0)
        for name in [name for name, parent in self._parents.items() if parent is server]:
            self._parents[name] = None
        if self._closing:
            return
        if not self._servers:
            log.warning("both fork servers are gone; nodes that are lost from now on are not restarted")
            return
        log.warning("fork server %d is gone; its nodes live on, and its standby takes over", server.pid)
        self._servers[0].send(STANDBY)
        for name in self._pending:
            self._request(name)

    def _request(self, name: str) -> None:
        if self._servers:
            self._servers[0].send({"name": name, "config": self._pending[name]})


def how_ended(status: int | None) -> str:
    """How a process ended, in words, for events."""
    if status is None:
        return "ended, how is not known: its fork server is gone"
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def log_file(log_folder: Path, name: str) -> Path:
    return log_folder / f"{name}.log"


def last_log_line(log_folder: Path, name: str) -> str:
    try:
        lines = log_file(log_folder, name).read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _ready(handles: list[int], timeout_s: float) -> list[tuple[int, int]]:
    """Handles that can be read; `select` could not take numbers above 1023."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return poll.poll(timeout_s * 1000)


@dataclass
class _Server:
    """What a fork server holds in its own process."""

    owner: Channel
    process_main: ProcessMain
    log_folder: Path
    lifeline: int
    """The reading end of a pipe that closes with the owner."""
    group_signal: tuple[int, int]
    """A pipe that can be read by all, and is never read, from the moment that a fork server has got SIGTERM."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Process → its node."""
    wakeup: tuple[int, int] = (-1, -1)
    """A pipe that can be read when a child has ended."""

    def close_in_child(self) -> None:
        """A forked process must not hold the fork server's handles."""
        signal.set_wakeup_fd(-1)
        for handle in (self.owner.socket.fileno(), *self.wakeup):
            os.close(handle)


def _run_and_exit(work: Callable[[], int]) -> NoReturn:
    """All that a forked process does. Whatever happens, it must not go on as a second owner."""
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _serve(server: _Server) -> int:
    """What the process of a fork server does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_blocking(server.group_signal[1], False)
    signal.signal(signal.SIGTERM, lambda _number, _frame: _note_group_signal(server))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    server.wakeup = os.pipe()
    wakeup_read, wakeup_write = server.wakeup
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    server.owner.socket.setblocking(False)
    closed = False
    delayed: list[Any] = []  # requests for which there was no process or no memory; they are tried again
    while not closed:
        wait_s = FORK_RETRY_S if delayed else STOP_S
        readable = [handle for handle, _ in _ready([server.owner.socket.fileno(), wakeup_read], wait_s)]
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
        for pid, status in _reaped():
            if pid in server.nodes:
                server.owner.send({"name": server.nodes.pop(pid), "status": os.waitstatus_to_exitcode(status)})
        requests, closed = server.owner.receive()
        again, delayed = delayed, []
        for request in again + requests:
            try:
                if request == STANDBY:
                    _fork_standby(server)
                else:
                    _fork_node(server, request["name"], request["config"])
            except OSError as error:
                delayed.append(request)
                if request not in again:
                    server.owner.send({"delayed": request.get("name", "a fork server"), "error": str(error)})
    _end(set(server.nodes), wakeup_read)
    return 0


def _note_group_signal(server: _Server) -> None:
    with contextlib.suppress(BlockingIOError):  # it was noted thousands of times
        os.write(server.group_signal[1], b"!")


def _fork_standby(server: _Server) -> None:
    """Fork another fork server, with a socket of its own to the owner."""
    owner_end, standby_end = socket.socketpair()
    with owner_end, standby_end:
        pid = os.fork()
        if pid == 0:
            owner_end.close()
            server.close_in_child()
            standby = _Server(
                Channel(standby_end), server.process_main, server.log_folder, server.lifeline, server.group_signal
            )
            _run_and_exit(lambda: _serve(standby))
        server.owner.send({"standby": pid}, owner_end.fileno())


def _fork_node(server: _Server, name: str, config: dict[str, Any]) -> None:
    """A node runs once the owner knows of it, or there could be two of one name."""
    go_read, go_write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # in the node until it has a handler of its own
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.close(go_read)
        os.close(go_write)
        raise
    if pid == 0:
        os.close(go_write)
        _run_and_exit(lambda: _run_node(server, name, config, go_read))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(go_read)
    server.nodes[pid] = name
    server.owner.send({"name": name, "pid": pid})
    with contextlib.suppress(OSError):
        os.write(go_write, b"!")
    os.close(go_write)


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


def _end(nodes: set[int], wakeup_read: int) -> None:
    """Kill nodes, and wait until they are gone. They hold nothing that a handler of their own would have to save."""
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)  # it is there, at least as a zombie, until we have reaped it
    deadline = time.monotonic() + STOP_S
    while nodes and time.monotonic() < deadline:
        nodes -= {pid for pid, _ in _reaped()}
        if nodes and _ready([wakeup_read], max(0.0, deadline - time.monotonic())):
            os.read(wakeup_read, 4096)


def _run_node(server: _Server, name: str, config: dict[str, Any], go_read: int) -> int:
    """What the process of a node does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.close_in_child()
    os.close(server.group_signal[1])
    arrived = _handle_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if not os.read(go_read, 1):  # the fork server is gone, and the owner may not know of this node
        return 1
    os.close(go_read)
    log = os.open(log_file(server.log_folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    threading.Thread(target=_end_with_owner, args=(server.lifeline,), name="lifeline", daemon=True).start()
    waits = threading.Thread(target=_end_if_meant, args=(arrived, server.group_signal[0]), name="sigterm", daemon=True)
    waits.start()
    return server.process_main(config)


def _end_with_owner(lifeline: int) -> None:
    """Nothing is ever written to the lifeline: it closes with the owner."""
    os.read(lifeline, 1)
    os._exit(1)


def _handle_sigterm() -> int:
    """The reading end of a pipe that has the number of every signal that this process gets and handles, SIGTERM or one
    that other code has a handler for, at once, though its main thread may compute for long. A program that it executes
    starts without handlers; a fork of it has none either."""
    arrived, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # calls to the system that wait go on
    mask = threading.local()
    """Of the thread that forks, before it does."""

    def hold() -> None:  # or a child that gets SIGTERM before it has forgotten the handler would tell this process
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=forget)
    return arrived


def _end_if_meant(arrived: int, group_signal: int) -> None:
    """Ends this node when it gets SIGTERM, unless its fork servers get it too: then the owner decides."""
    while True:
        if os.read(arrived, 1) != bytes([signal.SIGTERM]):
            continue
        if not _ready([group_signal], GROUP_S):
            print("this node got SIGTERM, and ends", file=sys.stderr, flush=True)
            os._exit(TERMINATED)
        print("SIGTERM is for all processes of the run: its owner decides", file=sys.stderr, flush=True)
