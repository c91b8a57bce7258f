"""The process of a node: it joins a run, builds its executor, and runs its state machine over real sockets.

One thread handles messages and runs the state machine, another builds the executor and computes, and ZeroMQ's own
threads send and receive: the three overlap, so a node sends heartbeats whatever it computes.

Links to the peers that this node exchanges messages with are watched (`transport.link_keepalive`). If one is silent,
the coordinator is told within a heartbeat; unless the coordinator is silent as well, for then it is this node that is
cut off.

When the coordinator is gone, the node finishes what it can and waits for it to come back, here or at another address
of its list. A node that it has declared dead by mistake announces itself again and starts over.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from itertools import cycle
from pathlib import Path
from typing import Any

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.heartbeat import HEARTBEATS, HELD_UP, LINK_DOWN, LINK_WATCHED, RESEND
from skippipe.runtime.fencing import NO_STAMP, Incarnation, stamp_of, stamped
from skippipe.runtime.messages import (
    COORDINATOR,
    ControlMessage,
    Failed,
    Heartbeat,
    Hello,
    LinkDown,
    PeerUpdate,
    Reroute,
    Stop,
    TasksDone,
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.node.interfaces import TRAINING, JoinConfig, Role, Roles, StateMachine
from skippipe.runtime.node.ops import OpThread
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_emulation import DelayQueue, LinkEmulator, UploadPacer
from skippipe.transport.mailbox import LossReason, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Message, MessageKind, Received

log = logging.getLogger(__name__)
THE_COORDINATOR = "coordinator"
CLOSE_LINGER_S = 2.0
LAST_OP_S = 10.0  # for a pass that is being computed when the node ends
FIRST_HEARTBEAT_S = 1.0  # the heartbeat until the coordinator sends its own: a node with no stage must not seem silent
RETRY_S = 2.0  # from one attempt to reach the coordinator to the next
LARGEST_BYTES = 2**33  # a ring of two passes on half the gradient of a stage at a time


class Stopped(Exception):
    """The node ends; the argument is the reason, empty if all is well."""


class DeclaredDead(Exception):
    """The coordinator declared this node dead by mistake; the node starts over."""


class NodeAgent:
    """The world as a node's state machine sees it (`NodeEnv`), and the loop that runs the state machine."""

    def __init__(self, join_config: JoinConfig, roles: Roles) -> None:
        self._join_config = join_config
        self._roles = roles
        self._mailbox = Mailbox(
            join_config.name,
            join_config.keys,
            listen=join_config.listen,
            security=join_config.security,
            largest_bytes=LARGEST_BYTES,
            depth=1024,
            trusted=THE_COORDINATOR,
        )
        self._addresses = cycle(join_config.coordinator.split(","))
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {COORDINATOR: THE_COORDINATOR}
        self._uplink: LinkEmulator | UploadPacer | None = None
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._thread: OpThread | None = None
        self._former_thread: OpThread | None = None
        """The thread of the stage before; it may still be busy."""
        self.invalid: Counter[str] = Counter()
        """Peer → number of control messages that could not be read."""
        self._reset()

    def _reset(self) -> None:
        self._stop_thread()
        for name in self._names.values():
            if name != THE_COORDINATOR:
                self._mailbox.disconnect(name)
        self._incarnation = Incarnation(secrets.randbits(62) + 1)
        self._delayed = DelayQueue()
        self._machine: StateMachine | None = None
        self._welcome: Welcome | None = None
        """The assignment to the stage that is being built."""
        self._peers: dict[str, tuple[str, str | None]] = {}
        self._linked: dict[str, str] = {}
        """Peer → the address that this node connects to."""
        self._linked_at: dict[str, float] = {}
        self._broken_since: dict[str, float] = {}
        self._used_at: dict[str, float] = {}
        """Peer → when this node last exchanged messages with it; only those that are watched."""
        self._reported_at: dict[str, float] = {}
        """Peer → when the coordinator was last told that the link is silent."""
        self._blame_from = 0.0
        """Until then this node was cut off or held up: silence of its peers counts from here."""
        self._last_turn = time.monotonic()
        self._running = 0
        self._busy_since: float | None = None
        self._cut_off_since: float | None = None
        self._retry_at = 0.0
        self._heartbeat_at = 0.0

    def run(self) -> str:
        """Run until the coordinator stops the node; gives its reason, empty if all is well."""
        import torch  # noqa: F401  blocks all threads for up to a second: before the coordinator counts on this node

        self._mailbox.allow(THE_COORDINATOR, self._join_config.coordinator_public)
        self._connect_to_coordinator()
        try:
            while True:
                try:
                    self._join_and_run()
                except DeclaredDead as again:
                    log.warning("starting over: %s", again)
                    self._reset()
        except Stopped as stop:
            return str(stop)
        except UserError as error:
            return self._fail(str(error))
        except Exception as error:
            log.exception("node '%s' failed", self._join_config.name)
            return self._fail(f"{type(error).__name__}: {error}")
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._mailbox.close(CLOSE_LINGER_S)
            if self._thread is not None:
                self._thread.join(LAST_OP_S)

    def _join_and_run(self) -> None:
        self.send_control(self._hello())
        self._take_role(self._wait_for_welcome())
        while True:
            self._run_once()

    def _hello(self) -> Hello:
        address = self._join_config.address or self._mailbox.address
        return self._machine.hello(address, __version__) if self._machine else Hello(address, __version__)

    # NodeEnv

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def send(self, receiver: int, message: Message) -> None:
        if self._uplink is None or message.body is None or receiver == COORDINATOR:
            self._send(self._names[receiver], message)
        else:
            self._uplink.send(self._names[receiver], message)

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        stamp = self._incarnation.stamp() if to == COORDINATOR else NO_STAMP
        due_ns = self._uplink.notice_ns(self._names[to]) if self._uplink and isinstance(control, TasksDone) else 0
        self._send(self._names[to], stamped(to_json(control), stamp), due_ns)

    def start(self, op: Any) -> None:
        assert self._thread is not None
        self._running += 1
        self._busy_since = self._busy_since or time.monotonic()
        self._thread.start(op)

    def fits(self, message: Message, expected: Any) -> bool:
        assert self._thread is not None
        return self._thread.fits(message, expected)

    def _send(self, name: str, message: Message, due_ns: int = 0) -> None:
        """What cannot be sent counts as lost on the way: it is requested again, or the coordinator reroutes."""
        try:
            self._connect(name)
            self._mailbox.send(name, message, due_ns)
        except (NotConnected, QueueFull) as error:
            log.warning("'%s' does not take messages: %s", name, type(error).__name__)
            if name != THE_COORDINATOR:
                self._broken_since.setdefault(name, time.monotonic())

    def _fail(self, reason: str) -> str:
        self.send_control(Failed(reason))
        return reason

    # Joining

    def _connect_to_coordinator(self) -> None:
        self._coordinator = next(self._addresses)
        self._mailbox.connect(THE_COORDINATOR, self._coordinator, self._join_config.coordinator_public)
        self._retry_at = time.monotonic() + RETRY_S

    def _wait_for_welcome(self) -> Welcome:
        timeout_s, where = self._join_config.coordinator_timeout.total_seconds(), self._join_config.coordinator
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if THE_COORDINATOR in self._mailbox.connected:  # a spare node may be needed later
                deadline = time.monotonic() + timeout_s
            elif "," in where and self._cut_off_since is None and time.monotonic() > self._retry_at:  # not met yet
                self._connect_to_coordinator()
                self.send_control(self._hello())
            self._send_heartbeat("waiting for a stage")
            wait_s = min(self._heartbeat_s / HEARTBEATS, deadline - time.monotonic())
            arrived = deque(self._mailbox.receive(wait_s))
            while arrived:
                received = arrived.popleft()
                control = self._control(received)
                if received.peer != THE_COORDINATOR:
                    continue
                if isinstance(control, Welcome):
                    for later in arrived:  # news of peers, perhaps
                        self._delayed.put(later)
                    return control
                if isinstance(control, Stop):
                    if not control.again:
                        raise Stopped(control.reason)
                    self.send_control(self._hello())
            self._check_coordinator()
        raise Stopped(
            f"waited {timeout_s:g} s for the coordinator: no answer from {where}; is it started, and does a firewall "
            "let this node through?"
        )

    def _take_role(self, welcome: Welcome) -> None:
        import torch

        role = self._build_role(welcome.node_config)
        self._numbers = role.numbers
        self._names |= {each: name for name, each in self._numbers.items()}
        self._heartbeat_s = role.heartbeat_s
        torch.set_num_threads(role.threads)
        self._update_peers(welcome.peers)
        self._stop_thread()
        self._machine = role.machine
        if role.links:
            self._uplink = LinkEmulator(role.links, self._send, time.monotonic_ns, role.upload_bytes_per_s)
            self._delayed = DelayQueue(role.links_here, role.download_bytes_per_s, self._delayed)
        elif role.upload_bytes_per_s:
            self._uplink = UploadPacer(role.upload_bytes_per_s, self._send, time.monotonic_ns)
        self._thread = OpThread(role.build, self._mailbox.wake, role.pace, self._former_thread)
        self._welcome = welcome

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._former_thread, self._thread = self._thread, None
        self._running, self._busy_since = 0, None

    def _build_role(self, node_config: dict[str, Any]) -> Role:
        kind = str(node_config.get("kind", TRAINING))
        if kind not in self._roles:
            raise UserError(
                f"the coordinator needs a node for '{kind}', and this one was started for {', '.join(self._roles)}"
            )
        return self._roles[kind](node_config, self._join_config, self)

    def _update_peers(self, peers: dict[str, Any]) -> None:
        for name, found in peers.items():
            address, public = found if isinstance(found, list) and len(found) == 2 else ("", None)
            if name not in self._numbers or name == self._join_config.name or not isinstance(address, str):
                continue
            if self._peers.get(name, ("", None))[0] != address:
                self._broken_since.pop(name, None)
            self._peers[name] = address, public
            admitted = public is not None or self._join_config.security == "none"  # else its key was revoked
            self._mailbox.allow(name, public) if admitted else self._mailbox.forbid(name)
            if self._linked.get(name, address) != address:  # it has moved
                self._mailbox.disconnect(name)
                del self._linked[name]

    def _connect(self, name: str) -> None:
        """Connect to a peer whose address is known, unless there is a connection."""
        address, public = self._peers.get(name, ("", None))
        if address and name not in self._linked:
            self._mailbox.connect(name, address, public)
            self._linked[name] = address
            self._linked_at[name] = time.monotonic()

    def _forget_peer(self, name: str) -> None:
        """A peer is lost; if it comes back, the coordinator sends its address."""
        self._mailbox.disconnect(name)
        self._linked.pop(name, None)
        self._broken_since.pop(name, None)
        _, public = self._peers.get(name, ("", None))
        self._peers[name] = "", public

    # The loop

    def _run_once(self) -> None:
        """Hand over all messages and results to the state machine, then let it decide."""
        assert self._machine is not None
        assert self._thread is not None
        waits_ns = self._delayed.next_due_ns(), self._uplink.flush() if self._uplink else None
        due_ns = min((each for each in waits_ns if each is not None), default=None)
        timeout_s = max(0.0, min(1.0, self._heartbeat_at - time.monotonic()))
        if self._mailbox.silent:
            timeout_s = min(timeout_s, self._heartbeat_s / 20)
        if due_ns is not None:
            left_ns = max(0, due_ns - time.monotonic_ns())
            timeout_s = min(timeout_s, left_ns // 10**6 / 1e3)  # a mailbox rounds up to milliseconds, which is late
            if left_ns < 10**6:
                time.sleep(left_ns / 1e9)
        for received in self._delayed.ready(time.monotonic_ns()):  # what came with a welcome came first
            self._deliver(received)
        for received in self._mailbox.receive(timeout_s):
            if self._uplink is not None and received.due_ns > time.monotonic_ns():
                self._delayed.put(received)
            else:
                self._deliver(received)
        for received in self._delayed.ready(time.monotonic_ns()):
            self._deliver(received)
        if self._welcome is not None and self._thread.built:
            welcome, self._welcome = self._welcome, None
            self._machine.executor_ready(welcome.origin, welcome.assignment)
        while self._thread.done:
            self._running -= 1
            self._machine.finished(*self._thread.done.popleft())
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._machine.stopped is not None:
            if self._machine.stopped.again:
                raise DeclaredDead(self._machine.stopped.reason)
            raise Stopped(self._machine.stopped.reason)
        self._machine.decide()
        if not self._running:
            self._busy_since = None
        self._check_coordinator()
        self._check_peers()
        self._send_heartbeat(self._machine.doing if self._welcome is None else "building its stage")

    def _send_heartbeat(self, doing: str) -> None:
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + self._heartbeat_s / HEARTBEATS
            if self._cut_off_since is None:
                self.send_control(Heartbeat(doing, time.monotonic() - self._busy_since if self._busy_since else 0.0))
            if self._machine is not None:
                self._machine.retry_requests(int(1e9 * RESEND * self._heartbeat_s))
                self._watch_links()

    def _watch_links(self) -> None:
        """Watch the links to the coordinator and to the peers that this node exchanges messages with."""
        assert self._machine is not None
        now = time.monotonic()
        recent = {name: at for name, at in self._used_at.items() if now < at + LINK_WATCHED * self._heartbeat_s}
        self._used_at = recent | {self._names[other]: now for other in self._machine.active_peers()}
        self._mailbox.watch({*self._used_at, THE_COORDINATOR}, self._heartbeat_s)

    def _coordinator_silent_since(self) -> float | None:
        """Since when the coordinator does not answer; None if it does, or never has: it may be busy planning."""
        return self._mailbox.silent.get(THE_COORDINATOR) if THE_COORDINATOR in self._mailbox.watched else None

    def _deliver(self, received: Received) -> None:
        assert self._machine is not None
        message = received.message
        if received.peer == THE_COORDINATOR and message.kind is MessageKind.STATE_PIECE:
            self._machine.receive(COORDINATOR, message)
        elif message.kind is not MessageKind.CONTROL:
            if received.peer in self._numbers:
                self._machine.receive(self._numbers[received.peer], message)
        elif (control := self._control(received)) is None:
            return
        elif received.peer != THE_COORDINATOR:
            self._machine.handle_peer_control(self._numbers[received.peer], control)
        elif isinstance(control, Welcome):  # for another stage
            self._take_role(control)
        elif isinstance(control, PeerUpdate):
            self._update_peers(control.peers)
        else:
            self._machine.handle_control(control)
            if isinstance(control, Reroute):
                for gone in control.gone:
                    self._forget_peer(self._names[gone])
            for other in self._machine.active_peers():
                self._connect(self._names[other])

    def _control(self, received: Received) -> ControlMessage | None:
        """The control message; None if it cannot be read, which is counted, or if it is of the coordinator's past."""
        try:
            if received.message.kind is not MessageKind.CONTROL:
                raise UserError("a tensor where there should be none")
            control = from_json(received.message.body)
        except UserError as error:
            self.invalid[received.peer] += 1
            if self.invalid[received.peer] == 1:
                log.warning("invalid message from '%s' (later ones are only counted): %s", received.peer, error)
            return None
        if received.peer == THE_COORDINATOR and not self._incarnation.accepts(stamp_of(received.message)):
            log.debug("dropped a %s of the coordinator that is of the past", type(control).__name__)
            return None
        return control

    def _check_peers(self) -> None:
        """Report connections that stay broken or do not come about, and links that are silent."""
        assert self._machine is not None
        now, silent = time.monotonic(), self._mailbox.silent
        held_up, self._last_turn = now > self._last_turn + HELD_UP * self._heartbeat_s, now
        if held_up or self._cut_off_since is not None or self._coordinator_silent_since() is not None:
            self._blame_from = now
        waited_for = {name: self._linked_at[name] for name in self._linked.keys() - self._mailbox.connected}
        for name, since in (waited_for | self._broken_since).items():
            if name in self._mailbox.connected:
                del self._broken_since[name]
                self._machine.reconnected(self._numbers[name])
            elif now > max(since, self._blame_from) + self._heartbeat_s:
                if name in self._broken_since:
                    self._broken_since[name] = now  # to report it again, if nothing was done about it
                self._linked_at[name] = now
                self._report_link(name)
        for name in silent.keys() & self._linked.keys() & self._mailbox.connected:
            since = max(silent[name], self._reported_at.get(name, 0.0), self._blame_from)
            if now > since + (LINK_DOWN if name in self._mailbox.watched else 1.0) * self._heartbeat_s:
                self._reported_at[name] = now
                self._report_link(name)

    def _report_link(self, name: str) -> None:
        assert self._machine is not None
        if self._numbers[name] in self._machine.active_peers():
            self.send_control(LinkDown(self._numbers[name], self._machine.epoch))

    def _check_coordinator(self) -> None:
        for lost in self._mailbox.lost():
            if lost.peer != THE_COORDINATOR:
                log.info("connection to '%s': %s", lost.peer, lost.reason)
                if lost.reason in (LossReason.REFUSED, LossReason.FOREIGN):
                    self._linked.pop(lost.peer, None)
                self._broken_since.setdefault(lost.peer, time.monotonic())
            elif lost.reason is LossReason.DISCONNECTED:
                self._await_stop()
                self._cut_off_since = self._cut_off_since or time.monotonic()
                log.warning("the coordinator is gone; waiting for it to come back")
                self._connect_to_coordinator()
            elif self._cut_off_since is None:
                raise Stopped(self._explain_loss(lost.reason))
        silent_since = self._coordinator_silent_since()
        if silent_since is not None and time.monotonic() > silent_since + self._heartbeat_s:
            self._cut_off_since = self._cut_off_since or time.monotonic()
            log.warning("the coordinator does not answer; waiting for it to come back")
            self._connect_to_coordinator()
        if self._cut_off_since is not None:
            self._find_coordinator()

    def _find_coordinator(self) -> None:
        assert self._cut_off_since is not None
        waited_s = time.monotonic() - self._cut_off_since
        if THE_COORDINATOR in self._mailbox.connected:
            self._cut_off_since = None
            self.send_control(self._hello())
        elif waited_s > self._join_config.coordinator_timeout.total_seconds():
            raise Stopped(f"{self._explain_loss(LossReason.DISCONNECTED)}, for {waited_s:.0f} s now")
        elif time.monotonic() > self._retry_at:
            self._connect_to_coordinator()

    def _await_stop(self) -> None:
        """The coordinator's messages come over another connection than the one that broke: one may be a `Stop`."""
        deadline = time.monotonic() + CLOSE_LINGER_S
        while (left_s := deadline - time.monotonic()) > 0:
            for received in self._mailbox.receive(left_s):
                if received.peer != THE_COORDINATOR:
                    self._delayed.put(received)  # for later
                elif isinstance(stop := self._control(received), Stop) and not stop.again:
                    raise Stopped(stop.reason)

    def _explain_loss(self, reason: LossReason) -> str:
        name, where = self._join_config.name, self._coordinator
        return {
            LossReason.REFUSED: f"the coordinator at {where} refuses this node: its list of peers has another key for "
            f"'{name}', or its cluster has no '{name}'",
            LossReason.HANDSHAKE: f"{where}: the program there does not hold the key that this node knows as the "
            "coordinator's; is the address right, and were all keys made together?",
            LossReason.FOREIGN: f"{where}: the program there is no coordinator; check the address",
            LossReason.DISCONNECTED: f"the coordinator at {where} is gone",
        }[reason]


def node_process(roles: Roles, join_config: dict[str, Any]) -> int:
    """Run a node in a process of its own; gives its exit status. `join_config` is a `JoinConfig` as JSON."""
    if reason := node_main(roles, join_config):
        print(reason)
    return 1 if reason else 0


def node_main(roles: Roles, join_config: dict[str, Any]) -> str:
    """Run a node until its end; gives the reason, empty if all is well. `join_config` is a `JoinConfig` as JSON."""
    keys = join_config["keys"]
    folders = {each: Path(join_config[each]) for each in ("data_folder", "checkpoint") if join_config.get(each)}
    return NodeAgent(JoinConfig(**{**join_config, **folders, "keys": KeyPair(*keys) if keys else None}), roles).run()
