"""A node as a process: it joins, builds its stage, and runs the state machine over real sockets.

One thread handles messages and decides, another builds the stage and computes, ZeroMQ's own send and receive: the three
overlap, so a node gives signs of life whatever it is busy with.

A link to a peer that this node talks to is watched (`transport.heartbeat`). If it is silent, the coordinator is told
before a heartbeat is over; unless the coordinator is silent as well, for then it is this node that is cut off.

When the coordinator is gone, the node finishes what it can and waits for it to come back, at the same address or at
another that it was given. When the coordinator took it for dead, it says hello again and starts over.
"""

from __future__ import annotations

import contextlib
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
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.node.interfaces import TRAINING, JoinConfig, Role, Roles, StateMachine
from skippipe.runtime.node.ops import OpThread
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_emulation import DelayQueue, LinkEmulator
from skippipe.transport.mailbox import LossReason, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Message, MessageKind, Received

log = logging.getLogger(__name__)
THE_COORDINATOR = "coordinator"
CLOSE_LINGER_S = 2.0
LAST_OP_S = 10.0  # for a pass that is being computed
UNTOLD_S = 1.0  # taken for the heartbeat until somebody says what it is: one with no stage must not seem silent
RETRY_S = 2.0  # from one try to reach the coordinator to the next
LARGEST_BYTES = 2**33  # a ring of two passes on half the gradient of a stage at a time


class StoppedByCoordinator(Exception):
    """The coordinator said stop; the argument is its reason, empty if all is well."""


class DeclaredDead(Exception):
    """The coordinator took this node for dead; it may start over."""


class NodeAgent:
    """What a node's state machine sees of the world, and the loop around it."""

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
        self._shaper: LinkEmulator | None = None
        self._heartbeat_s = UNTOLD_S
        self._worker: OpThread | None = None
        self._former: OpThread | None = None
        """Of another stage; it may still be busy."""
        self.nonsense: Counter[str] = Counter()
        """Peer → control messages that were none."""
        self._start_over()

    def _start_over(self) -> None:
        self._dismiss_worker()
        for name in self._names.values():
            if name != THE_COORDINATOR:
                self._mailbox.disconnect(name)
        self._incarnation = Incarnation(secrets.randbits(62) + 1)
        self._held = DelayQueue()
        self._node: StateMachine | None = None
        self._welcome: Welcome | None = None
        """Of the stage that is being built."""
        self._peers: dict[str, tuple[str, str | None]] = {}
        self._linked: dict[str, str] = {}
        """Peer → the address it was last looked for at."""
        self._linked_at: dict[str, float] = {}
        self._broken_since: dict[str, float] = {}
        self._needed_at: dict[str, float] = {}
        """Peers that this node has to talk to, or had to not long ago."""
        self._complained_at: dict[str, float] = {}
        """Of links that are silent."""
        self._patient_from = 0.0
        """Until then this node was cut off or held up: others cannot be blamed for that time."""
        self._turned_at = time.monotonic()
        self._running = 0
        self._busy_since: float | None = None
        self._alone_since: float | None = None
        self._retry_at = 0.0
        self._sign_at = 0.0

    def run(self) -> str:
        """Until the coordinator says stop; its reason, empty if all is well."""
        import torch  # noqa: F401  keeps all threads waiting for up to a second: before anybody counts on this node

        asked = self._join_config
        self._mailbox.allow(THE_COORDINATOR, asked.coordinator_public)
        self._call_coordinator()
        try:
            while True:
                try:
                    self._live()
                except DeclaredDead as again:
                    log.warning("starting over: %s", again)
                    self._start_over()
        except StoppedByCoordinator as stop:
            return str(stop)
        except UserError as error:
            return self._give_up(str(error))
        except Exception as error:
            log.exception("node '%s' failed", asked.name)
            return self._give_up(f"{type(error).__name__}: {error}")
        finally:
            if self._worker is not None:
                self._worker.stop()
            self._mailbox.close(CLOSE_LINGER_S)
            if self._worker is not None:
                self._worker.join(LAST_OP_S)

    def _live(self) -> None:
        asked = self._join_config
        self.say(Hello(asked.address or self._mailbox.address, __version__))
        welcome = self._welcomed()
        self._prepare(welcome)
        while True:
            self._turn()

    # What the state machine sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def send(self, receiver: int, message: Message) -> None:
        name = self._names[receiver]
        due_ns = 0
        if self._shaper is not None and message.body is not None:
            due_ns = self._shaper.due_ns(name, getattr(message.body, "nbytes", 0))
        self._post(name, message, due_ns)

    def say(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        stamp = self._incarnation.stamp() if to == COORDINATOR else NO_STAMP
        self._post(self._names[to], stamped(to_json(control), stamp))

    def start(self, work: Any) -> None:
        assert self._worker is not None
        self._running += 1
        self._busy_since = self._busy_since or time.monotonic()
        self._worker.start(work)

    def fits(self, message: Message, at: int, size: int) -> bool:
        """Is a tensor what it should be? Of a ring, this node has a place among so many."""
        assert self._worker is not None
        return self._worker.fits(message, at, size)

    def _post(self, name: str, message: Message, due_ns: int = 0) -> None:
        """What cannot be sent is as good as lost on the way: who needs it asks again, or is told by the coordinator."""
        try:
            self._link(name)
            self._mailbox.send(name, message, due_ns)
        except (NotConnected, QueueFull) as error:
            log.warning("'%s' does not take messages: %s", name, type(error).__name__)
            if name != THE_COORDINATOR:
                self._broken_since.setdefault(name, time.monotonic())

    def _give_up(self, reason: str) -> str:
        with contextlib.suppress(StoppedByCoordinator):  # nobody to tell
            self.say(Failed(reason))
        return reason

    # Joining

    def _call_coordinator(self) -> None:
        self._coordinator = next(self._addresses)
        self._mailbox.connect(THE_COORDINATOR, self._coordinator, self._join_config.coordinator_public)
        self._retry_at = time.monotonic() + RETRY_S

    def _welcomed(self) -> Welcome:
        patience_s = self._join_config.patience.total_seconds()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if THE_COORDINATOR in self._mailbox.connected:  # a spare may be needed later
                deadline = time.monotonic() + patience_s
            self._give_sign("waiting for a stage")
            came = deque(self._mailbox.receive(min(self._heartbeat_s / HEARTBEATS, deadline - time.monotonic())))
            while came:
                received = came.popleft()
                control = self._control(received)
                if received.peer != THE_COORDINATOR:
                    continue
                if isinstance(control, Welcome):
                    for later in came:  # who else has come, perhaps
                        self._held.put(later)
                    return control
                if isinstance(control, Stop):
                    if not control.again:
                        raise StoppedByCoordinator(control.reason)
                    self.say(Hello(self._join_config.address or self._mailbox.address, __version__))
            self._check_coordinator()
        waited, where = f"waited {patience_s:g} s for the coordinator", self._join_config.coordinator
        raise StoppedByCoordinator(
            f"{waited}: nobody answers at {where}; is it started, and does a firewall let us through?"
        )

    def _prepare(self, welcome: Welcome) -> None:
        import torch

        role = self._build_role(welcome.node_config)
        self._numbers = role.numbers
        self._names |= {each: name for name, each in self._numbers.items()}
        self._heartbeat_s = role.heartbeat_s
        torch.set_num_threads(role.threads)
        self._meet(welcome.peers)
        self._dismiss_worker()
        self._node = role.machine
        if role.links:
            self._shaper = LinkEmulator(dict(role.links), time.monotonic_ns)
        self._worker = OpThread(role.build, self._mailbox.wake, role.pace, self._former)
        self._welcome = welcome

    def _dismiss_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._former, self._worker = self._worker, None
        self._running, self._busy_since = 0, None

    def _build_role(self, node_config: dict[str, Any]) -> Role:
        kind = str(node_config.get("kind", TRAINING))
        if kind not in self._roles:
            raise UserError(
                f"the coordinator asks for '{kind}', and this node was started for {', '.join(self._roles)}"
            )
        return self._roles[kind](node_config, self._join_config, self)

    def _meet(self, peers: dict[str, Any]) -> None:
        for name, found in peers.items():
            address, public = found if isinstance(found, list) and len(found) == 2 else ("", None)
            if name not in self._numbers or name == self._join_config.name or not isinstance(address, str):
                continue
            if self._peers.get(name, ("", None))[0] != address:
                self._broken_since.pop(name, None)
            self._peers[name] = address, public
            if public is not None or self._join_config.security == "none":
                self._mailbox.allow(name, public)
            if self._linked.get(name, address) != address:  # it is somewhere else now
                self._mailbox.disconnect(name)
                del self._linked[name]

    def _link(self, name: str) -> None:
        """Connect, if we are not and know where to."""
        address, public = self._peers.get(name, ("", None))
        if address and name not in self._linked:
            self._mailbox.connect(name, address, public)
            self._linked[name] = address
            self._linked_at[name] = time.monotonic()

    def _forget(self, name: str) -> None:
        """It is gone; if it comes back, somebody says where it is."""
        self._mailbox.disconnect(name)
        self._linked.pop(name, None)
        self._broken_since.pop(name, None)
        _, public = self._peers.get(name, ("", None))
        self._peers[name] = "", public

    # The loop

    def _turn(self) -> None:
        """Take in all there is, then decide."""
        assert self._node is not None
        assert self._worker is not None
        due_ns = self._held.next_due_ns()
        timeout_s = max(0.0, min(1.0, self._sign_at - time.monotonic()))
        if self._mailbox.silent:
            timeout_s = min(timeout_s, self._heartbeat_s / 20)
        if due_ns is not None:
            left_ns = max(0, due_ns - time.monotonic_ns())
            timeout_s = min(timeout_s, left_ns // 10**6 / 1e3)  # a mailbox rounds up to milliseconds: it would be late
            if left_ns < 10**6:
                time.sleep(left_ns / 1e9)
        for received in self._held.ready(time.monotonic_ns()):  # what came with a welcome was said first
            self._deliver(received)
        for received in self._mailbox.receive(timeout_s):
            if self._shaper is not None and received.due_ns > time.monotonic_ns():
                self._held.put(received)
            else:
                self._deliver(received)
        for received in self._held.ready(time.monotonic_ns()):
            self._deliver(received)
        if self._welcome is not None and self._worker.built:
            welcome, self._welcome = self._welcome, None
            self._node.welcomed(welcome.origin, welcome.assignment)
        while self._worker.done:
            self._running -= 1
            self._node.finished(*self._worker.done.popleft())
        if self._worker.failure is not None:
            raise self._worker.failure
        if self._node.stopped is not None:
            if self._node.stopped.again:
                raise DeclaredDead(self._node.stopped.reason)
            raise StoppedByCoordinator(self._node.stopped.reason)
        self._node.decide()
        if not self._running:
            self._busy_since = None
        self._check_coordinator()
        self._check_peers()
        self._give_sign(self._node.doing if self._welcome is None else "building its stage")

    def _give_sign(self, doing: str) -> None:
        if time.monotonic() >= self._sign_at:
            self._sign_at = time.monotonic() + self._heartbeat_s / HEARTBEATS
            if self._alone_since is None:
                self.say(Heartbeat(doing, time.monotonic() - self._busy_since if self._busy_since else 0.0))
            if self._node is not None:
                self._node.remind(int(1e9 * RESEND * self._heartbeat_s))
                self._watch()

    def _watch(self) -> None:
        """Links to the coordinator and to those whom this node talks to."""
        assert self._node is not None
        now = time.monotonic()
        recent = {name: at for name, at in self._needed_at.items() if now < at + LINK_WATCHED * self._heartbeat_s}
        self._needed_at = recent | {self._names[other]: now for other in self._node.talks_to()}
        self._mailbox.watch({*self._needed_at, THE_COORDINATOR}, self._heartbeat_s)

    def _coordinator_silent_since(self) -> float | None:
        """None: it answers; or it never has, which may be because it is busy planning."""
        if THE_COORDINATOR not in self._mailbox.watched:
            return None
        return self._mailbox.silent.get(THE_COORDINATOR)

    def _deliver(self, received: Received) -> None:
        assert self._node is not None
        message = received.message
        if received.peer == THE_COORDINATOR and message.kind is MessageKind.CHUNK:
            self._node.restore(message)
        elif message.kind is not MessageKind.CONTROL:
            if received.peer in self._numbers:
                self._node.receive(self._numbers[received.peer], message)
        elif (control := self._control(received)) is None:
            return
        elif received.peer != THE_COORDINATOR:
            self._node.asked(self._numbers[received.peer], control)
        elif isinstance(control, Welcome):  # for another stage
            self._prepare(control)
        elif isinstance(control, PeerUpdate):
            self._meet(control.peers)
        else:
            self._node.hear(control)
            if isinstance(control, Reroute):
                for gone in control.gone:
                    self._forget(self._names[gone])
            for other in self._node.talks_to():
                self._link(self._names[other])

    def _control(self, received: Received) -> ControlMessage | None:
        """What cannot be understood is counted; what the coordinator said in the past is dropped."""
        try:
            if received.message.kind is not MessageKind.CONTROL:
                raise UserError("a tensor where there should be none")
            control = from_json(received.message.body)
        except UserError as error:
            self.nonsense[received.peer] += 1
            if self.nonsense[received.peer] == 1:
                log.warning("nonsense from '%s' (later ones are only counted): %s", received.peer, error)
            return None
        if received.peer == THE_COORDINATOR and not self._incarnation.accepts(stamp_of(received.message)):
            log.debug("dropped a %s of the coordinator that is of the past", type(control).__name__)
            return None
        return control

    def _check_peers(self) -> None:
        """Say which connections stay broken, or do not come about, and which links are silent."""
        assert self._node is not None
        now, silent = time.monotonic(), self._mailbox.silent
        held_up, self._turned_at = now > self._turned_at + HELD_UP * self._heartbeat_s, now
        if held_up or self._alone_since is not None or self._coordinator_silent_since() is not None:
            self._patient_from = now
        waited_for = {name: self._linked_at[name] for name in self._linked.keys() - self._mailbox.connected}
        for name, since in (waited_for | self._broken_since).items():
            if name in self._mailbox.connected:
                del self._broken_since[name]
                self._node.lost(self._numbers[name])
            elif now > max(since, self._patient_from) + self._heartbeat_s:
                if name in self._broken_since:
                    self._broken_since[name] = now  # to say it again, if nothing was done about it
                self._linked_at[name] = now
                self._complain(name)
        for name in silent.keys() & self._linked.keys() & self._mailbox.connected:
            since = max(silent[name], self._complained_at.get(name, 0.0), self._patient_from)
            if now > since + (LINK_DOWN if name in self._mailbox.watched else 1.0) * self._heartbeat_s:
                self._complained_at[name] = now
                self._complain(name)

    def _complain(self, name: str) -> None:
        assert self._node is not None
        if self._numbers[name] in self._node.talks_to():
            self.say(LinkDown(self._numbers[name], self._node.epoch))

    def _check_coordinator(self) -> None:
        for lost in self._mailbox.lost():
            if lost.peer != THE_COORDINATOR:
                log.info("connection to '%s': %s", lost.peer, lost.reason)
                if lost.reason in (LossReason.REFUSED, LossReason.FOREIGN):
                    self._linked.pop(lost.peer, None)
                self._broken_since.setdefault(lost.peer, time.monotonic())
            elif lost.reason is LossReason.DISCONNECTED:
                self._hear_it_out()
                self._alone_since = self._alone_since or time.monotonic()
                log.warning("the coordinator is gone; waiting for it to come back")
                self._call_coordinator()
            elif self._alone_since is None:
                raise StoppedByCoordinator(self._without_coordinator(lost.reason))
        silent_since = self._coordinator_silent_since()
        if silent_since is not None and time.monotonic() > silent_since + self._heartbeat_s:
            self._alone_since = self._alone_since or time.monotonic()
            log.warning("the coordinator does not answer; waiting for it to come back")
            self._call_coordinator()
        if self._alone_since is not None:
            self._look_for_coordinator()

    def _look_for_coordinator(self) -> None:
        assert self._alone_since is not None
        waited_s = time.monotonic() - self._alone_since
        if THE_COORDINATOR in self._mailbox.connected:
            self._alone_since = None
            address = self._join_config.address or self._mailbox.address
            self.say(self._node.hello(address, __version__) if self._node else Hello(address, __version__))
        elif waited_s > self._join_config.patience.total_seconds():
            raise StoppedByCoordinator(
                f"{self._without_coordinator(LossReason.DISCONNECTED)}, for {waited_s:.0f} s now"
            )
        elif time.monotonic() > self._retry_at:
            self._call_coordinator()

    def _hear_it_out(self) -> None:
        """What the coordinator says travels on another connection than the one that broke: it may have said stop."""
        deadline = time.monotonic() + CLOSE_LINGER_S
        while (left_s := deadline - time.monotonic()) > 0:
            for received in self._mailbox.receive(left_s):
                if received.peer != THE_COORDINATOR:
                    self._held.put(received)  # for later
                elif isinstance(stop := self._control(received), Stop) and not stop.again:
                    raise StoppedByCoordinator(stop.reason)

    def _without_coordinator(self, reason: LossReason) -> str:
        name, where = self._join_config.name, self._coordinator
        return {
            LossReason.REFUSED: f"the coordinator at {where} refuses this node: its list of peers has another key for "
            f"'{name}', or its cluster has no '{name}'",
            LossReason.HANDSHAKE: f"{where}: who answers there does not hold the key that this node knows as the "
            "coordinator's; is the address right, and were all keys made together?",
            LossReason.FOREIGN: f"{where}: who answers there is no coordinator; check the address",
            LossReason.DISCONNECTED: f"the coordinator at {where} is gone",
        }[reason]


def node_process(roles: Roles, told: dict[str, Any]) -> int:
    """A node in a process of its own; gives its exit status. `told` is a `JoinConfig` as JSON."""
    reason = node_main(roles, told)
    if reason:
        print(reason)
    return 1 if reason else 0


def node_main(roles: Roles, told: dict[str, Any]) -> str:
    """Run a node until its end; gives the reason, empty if all is well. `told` is a `JoinConfig` as JSON."""
    keys = told["keys"]
    folders = {each: Path(told[each]) for each in ("data_folder", "checkpoint") if told.get(each)}
    return NodeAgent(JoinConfig(**{**told, **folders, "keys": KeyPair(*keys) if keys else None}), roles).run()
