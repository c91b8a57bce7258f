"""The process of a node: it joins a run, builds its executor, and runs its state machine over real sockets.

One thread handles messages and runs the state machine, another builds the executor and computes, and ZeroMQ's own
threads send and receive: the three overlap, so a node sends heartbeats whatever it computes.

Links to the peers that this node exchanges messages with are watched (`peer_links`). If one is silent, the coordinator
is told within a heartbeat; unless the coordinator is silent as well, for then it is this node that is
cut off.

When the coordinator is gone, the node finishes what it can and waits for it to come back, here or at another address
of its list. A node that it has declared dead by mistake announces itself again and starts over.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.heartbeat import HEARTBEATS, RESEND
from skippipe.runtime.fencing import NO_STAMP, Incarnation, stamp_of
from skippipe.runtime.message_json import control_of, stamped
from skippipe.runtime.messages import (
    COORDINATOR,
    CallBack,
    CallFailed,
    ControlMessage,
    Failed,
    Heartbeat,
    Hello,
    LinkDown,
    PeerUpdate,
    RequestCallback,
    Reroute,
    Stop,
    TasksDone,
    Welcome,
)
from skippipe.runtime.node.copies import Outbox
from skippipe.runtime.node.interfaces import TRAINING, JoinConfig, Role, Roles, StateMachine
from skippipe.runtime.node.ops import OpThreads
from skippipe.runtime.node.peer_links import PeerLinks
from skippipe.transport.keys import THE_COORDINATOR, KeyPair
from skippipe.transport.link_emulation import DelayQueue, LinkEmulator, UploadPacer
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Message, MessageKind, Received
from skippipe.transport.token_gate import HEX_TOKEN, TOKEN_BYTES

log = logging.getLogger(__name__)
CLOSE_LINGER_S = 2.0
LAST_OP_S = 10.0  # for a pass that is being computed when the node ends
FIRST_HEARTBEAT_S = 1.0  # the heartbeat until the coordinator sends its own: a node with no stage must not seem silent
CALLBACK_S = 5.0  # for the coordinator to reach a node at the address that it announces
WRONG_KEY = 3  # handshakes that the program at the coordinator's address ends in a row: once, it may have ended itself
LARGEST_BYTES = 2**33  # of a message: half of a stage's gradient, which two nodes of a ring send each other


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
        self._links = PeerLinks(self._mailbox, join_config.name)
        self._secret = b""
        """Secret of the streams to the coordinator; another one with every hello."""
        self._failed = 0
        """Handshakes with the coordinator that failed in a row."""
        self._calls_out = False
        """The coordinator has not reached this node at its address before."""
        self._coordinator = join_config.coordinator
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {COORDINATOR: THE_COORDINATOR}
        self._uplink: LinkEmulator | UploadPacer | None = None
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._thread: OpThreads | None = None
        self._former_thread: OpThreads | None = None
        """The thread of the stage before; it may still be busy."""
        self.invalid: Counter[str] = Counter()
        """Peer → number of control messages that could not be read."""
        self._reset()

    def _reset(self) -> None:
        self._stop_thread()
        self._links.close()
        self._links = PeerLinks(self._mailbox, self._join_config.name)
        self._incarnation = Incarnation(secrets.randbits(62) + 1)
        self._delayed = DelayQueue()
        self._outbox = Outbox(self._send_tensor, self._mailbox.wake)
        self._machine: StateMachine | None = None
        self._welcome: Welcome | None = None
        """The assignment to the stage that is being built."""
        self._running = 0
        self._busy_since: float | None = None
        self._cut_off_since: float | None = None
        self._dialled_at = self._heartbeat_at = 0.0
        self._callable_from: float | None = None
        """When this node begins to keep streams ready for the coordinator; none: it does, or need not."""

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
        self._say_hello()
        self._take_role(self._wait_for_welcome())
        while True:
            self._run_once()

    def _say_hello(self) -> None:
        """Announce this node. If the coordinator has not reached it in time, this node only calls out."""
        address = self._join_config.address or self._mailbox.address
        hello = self._machine.hello(address, __version__) if self._machine else Hello(address, __version__)
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._callable_from = time.monotonic() + (0.0 if self._calls_out or address == OUT_ONLY else CALLBACK_S)
        self.send_control(msgspec.structs.replace(hello, callback=self._secret.hex()))

    def _handle_callbacks(self) -> None:
        if self._callable_from is not None and time.monotonic() >= self._callable_from:
            self._callable_from, self._calls_out = None, True
            self._mailbox.be_callable(self._coordinator, self._secret)
        for request in self._mailbox.call_requests():
            self.send_control(RequestCallback(request.peer, request.token, request.port))
        for peer in self._mailbox.failed_calls():
            self.send_control(CallFailed(peer))

    def _call_back(self, control: CallBack) -> None:
        if control.peer not in self._numbers or not HEX_TOKEN.fullmatch(control.token or control.relay):
            return
        if HEX_TOKEN.fullmatch(control.relay):
            self._mailbox.meet(control.address.split(","), control.relay, control.token)
        elif not control.relay:
            self._mailbox.answer(control.peer, control.address.split(","), control.token)

    # NodeEnv

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def send(self, receiver: int, message: Message) -> None:
        self._outbox.send(receiver, message)

    def _send_tensor(self, receiver: int, message: Message) -> None:
        if self._uplink is None or message.body is None or receiver == COORDINATOR:
            self._send(self._names[receiver], message)
        else:
            self._uplink.send(self._names[receiver], message)

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        stamp = self._incarnation.stamp() if to == COORDINATOR else NO_STAMP
        due_ns = self._uplink.notice_ns(self._names[to]) if self._uplink and isinstance(control, TasksDone) else 0
        self._send(self._names[to], stamped(control, stamp), due_ns)

    def start(self, op: Any) -> None:
        assert self._thread is not None
        self._running += 1
        self._busy_since = self._busy_since or time.monotonic()
        self._thread.start(op)

    def fits(self, message: Message, expected: Any) -> bool:
        assert self._thread is not None
        return self._thread.fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        assert self._thread is not None
        return self._thread.prefetch(given, device)

    def _send(self, name: str, message: Message, due_ns: int = 0) -> None:
        """What cannot be sent counts as lost on the way: it is requested again, or the coordinator reroutes."""
        try:
            self._links.connect(name)
            self._mailbox.send(name, message, due_ns)
        except (NotConnected, QueueFull) as error:
            log.warning("'%s' does not take messages: %s", name, type(error).__name__)
            if name != THE_COORDINATOR:
                self._links.refused(name)

    def _fail(self, reason: str) -> str:
        self.send_control(Failed(reason))
        return reason

    # Joining

    def _connect_to_coordinator(self) -> None:
        """All its addresses are tried side by side; each time another one has a head start."""
        first, *others = self._coordinator.split(",")
        self._coordinator = ",".join([*others, first])
        self._mailbox.connect(THE_COORDINATOR, self._coordinator, self._join_config.coordinator_public)
        self._dialled_at = time.monotonic()

    def _answers_late(self) -> bool:
        return self._mailbox.attempt_is_over(THE_COORDINATOR, self._dialled_at)

    def _wait_for_welcome(self) -> Welcome:
        timeout_s, where = self._join_config.coordinator_timeout.total_seconds(), self._join_config.coordinator
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if THE_COORDINATOR in self._mailbox.connected:  # a spare node may be needed later
                deadline = time.monotonic() + timeout_s
            elif "," in where and self._cut_off_since is None and self._answers_late():  # not met yet
                self._connect_to_coordinator()
                self._say_hello()
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
                    self._say_hello()
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
        self._thread = OpThreads(role.build, self._mailbox.wake, role.pace, self._former_thread, role.devices)
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
        self._links.update(peers, self._numbers)

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
        self._outbox.flush()  # encrypts: the next operation runs meanwhile
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
                active = {self._names[other] for other in self._machine.active_peers()}
                self._links.watch(active, THE_COORDINATOR, self._heartbeat_s)

    def _coordinator_silent_since(self) -> float | None:
        """Since when the coordinator does not answer; None if it does, or never has: it may be busy planning."""
        return self._mailbox.silent.get(THE_COORDINATOR) if THE_COORDINATOR in self._mailbox.watched else None

    def _deliver(self, received: Received) -> None:
        assert self._machine is not None
        message = received.message
        if received.peer == THE_COORDINATOR and message.kind is MessageKind.STATE_PIECE:
            self._machine.receive(COORDINATOR, message)
        elif message.kind is not MessageKind.CONTROL:
            if received.peer in self._numbers and self._thread is not None:
                self._machine.receive(self._numbers[received.peer], message)
        elif (control := self._control(received)) is None:
            return
        elif received.peer != THE_COORDINATOR:
            self._machine.handle_peer_control(self._numbers[received.peer], control)
        elif isinstance(control, Welcome):  # for another stage
            self._take_role(control)
        elif isinstance(control, PeerUpdate):
            self._update_peers(control.peers)
        elif isinstance(control, CallBack):
            self._call_back(control)
        else:
            self._machine.handle_control(control)
            if isinstance(control, Reroute):
                for gone in control.gone:
                    self._links.forget(self._names[gone])
            for other in self._machine.active_peers():
                self._links.connect(self._names[other])

    def _control(self, received: Received) -> ControlMessage | None:
        """The control message; None if it cannot be read, which is counted, or if it is of the coordinator's past."""
        try:
            control = control_of(received.message)
        except UserError as error:
            self.invalid[received.peer] += 1
            if self.invalid[received.peer] == 1:
                log.warning("invalid message from '%s' (later ones are only counted): %s", received.peer, error)
            return None
        if received.peer == THE_COORDINATOR and not self._incarnation.accepts(stamp_of(received.message)):
            log.debug("dropped a %s of the coordinator that is of the past", type(control).__name__)
            return None
        if received.peer == THE_COORDINATOR and not self._calls_out:
            self._callable_from = None  # it has reached this node
        return control

    def _check_peers(self) -> None:
        """Report connections that stay broken or do not come about, and links that are silent."""
        machine = self._machine
        assert machine is not None
        self._links.check(
            self._heartbeat_s,
            cut_off=self._cut_off_since is not None or self._coordinator_silent_since() is not None,
            reconnected=lambda name: machine.reconnected(self._numbers[name]),
            report=self._report_link,
        )

    def _report_link(self, name: str) -> None:
        assert self._machine is not None
        if self._numbers[name] in self._machine.active_peers():
            self.send_control(LinkDown(self._numbers[name], self._machine.epoch))

    def _check_coordinator(self) -> None:
        self._handle_callbacks()
        for lost in self._mailbox.lost():
            if lost.peer != THE_COORDINATOR:
                self._links.lost(lost)
            elif lost.reason is LossReason.DISCONNECTED:
                self._await_stop()
                self._cut_off_since = self._cut_off_since or time.monotonic()
                log.warning("the coordinator is gone; waiting for it to come back")
                self._connect_to_coordinator()
            elif lost.reason is LossReason.UNFINISHED:
                log.warning("the coordinator has not answered yet; waiting for it")
            elif self._cut_off_since is None or lost.reason is LossReason.REFUSED:  # by who holds the coordinator's key
                self._failed += 1
                again = self._cut_off_since is not None or lost.reason is LossReason.HANDSHAKE
                if not again or self._failed >= WRONG_KEY:
                    raise Stopped(self._explain_loss(lost.reason))
        if THE_COORDINATOR in self._mailbox.connected:
            self._failed = 0
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
            self._say_hello()
        elif waited_s > self._join_config.coordinator_timeout.total_seconds():
            raise Stopped(f"{self._explain_loss(LossReason.DISCONNECTED)}, for {waited_s:.0f} s now")
        elif self._answers_late():
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
            f"'{name}', or its cluster has no '{name}' (any more)",
            LossReason.HANDSHAKE: f"{where}: the program there does not hold the key that this node knows as the "
            "coordinator's; is the address right, and were all keys made together?",
            LossReason.UNFINISHED: f"{where}: the program there does not answer",
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
