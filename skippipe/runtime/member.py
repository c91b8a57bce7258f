"""A node as a process: it joins, builds its stage, and runs the state machine over real sockets.

One thread handles messages and decides, another computes, ZeroMQ's own send and receive: the three overlap.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.control import (
    COORDINATOR,
    Begin,
    Control,
    Failed,
    Hello,
    Stop,
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.durations import planned_ns
from skippipe.runtime.node import Node, ProtocolBroken
from skippipe.runtime.work import Work
from skippipe.runtime.worker import Worker
from skippipe.training.brief import Brief
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, NotConnected, QueueFull, Reason, Security
from skippipe.transport.message import Kind, Message, Received
from skippipe.transport.shaping import Held, Link, Shaper

log = logging.getLogger(__name__)
THE_COORDINATOR = "coordinator"
LAST_WORDS_S = 2.0
LARGEST_BYTES = 2**33  # a ring of two passes on half the gradient of a stage at a time


@dataclass(frozen=True)
class Invitation:
    """How a node finds its way in."""

    name: str
    coordinator: str
    """host:port"""
    keys: KeyPair | None = None
    coordinator_public: str | None = None
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    address: str | None = None
    """Where others reach this node; none: where it listens."""
    data_folder: Path | None = None
    """Where this machine keeps the text; none: where the coordinator does."""
    device: str | None = None
    """What this machine computes on; none: what the job says."""
    patience: timedelta = timedelta(minutes=15)
    """How long to wait for the coordinator before training starts."""


class Dismissed(Exception):
    """The coordinator said stop; the argument is its reason, empty if all is well."""


class Member:
    """What a node's state machine sees of the world, and the loop around it."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._mailbox = Mailbox(
            invitation.name,
            invitation.keys,
            listen=invitation.listen,
            security=invitation.security,
            largest_bytes=LARGEST_BYTES,
            depth=1024,
        )
        self._held = Held()
        self._shaper: Shaper | None = None
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {COORDINATOR: THE_COORDINATOR}
        self._peers: dict[str, tuple[str, str | None]] = {}
        self._node: Node | None = None
        self._worker: Worker | None = None

    def run(self) -> str:
        """Until the coordinator says stop; its reason, empty if all is well."""
        asked = self._invitation
        self._mailbox.allow(THE_COORDINATOR, asked.coordinator_public)
        self._mailbox.connect(THE_COORDINATOR, asked.coordinator, asked.coordinator_public)
        try:
            self.say(Hello(asked.address or self._mailbox.address, __version__))
            welcome = self._welcomed()
            self._prepare(Brief.from_json(welcome.brief), welcome.peers)
            assert self._node is not None
            self._node.welcomed(welcome.resumed)
            while True:
                self._turn()
        except Dismissed as stop:
            return str(stop)
        except UserError as error:
            return self._give_up(str(error))
        except (ProtocolBroken, QueueFull, NotConnected) as error:
            return self._give_up(f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("node '%s' failed", asked.name)
            return self._give_up(f"{type(error).__name__}: {error}")
        finally:
            if self._worker is not None:
                self._worker.stop()
            self._mailbox.close(LAST_WORDS_S)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def send(self, receiver: int, message: Message) -> None:
        name = self._names[receiver]
        due_ns = 0
        if self._shaper is not None and message.body is not None:
            due_ns = self._shaper.due_ns(name, getattr(message.body, "nbytes", 0))
        self._mailbox.send(name, message, due_ns)

    def say(self, control: Control) -> None:
        try:
            self._mailbox.send(THE_COORDINATOR, Message(Kind.CONTROL, 0, 0, 0, 0, to_json(control)))
        except NotConnected:
            raise Dismissed(self._without_coordinator(Reason.REFUSED)) from None

    def _give_up(self, reason: str) -> str:
        with contextlib.suppress(Dismissed, QueueFull):  # nobody to tell
            self.say(Failed(reason))
        return reason

    def start(self, work: Work) -> None:
        assert self._worker is not None
        self._worker.start(work)

    def _welcomed(self) -> Welcome:
        deadline = time.monotonic() + self._invitation.patience.total_seconds()
        while time.monotonic() < deadline:
            for received in self._mailbox.receive(min(1.0, deadline - time.monotonic())):
                control = self._control(received)
                if isinstance(control, Welcome):
                    return control
                if isinstance(control, Stop):
                    raise Dismissed(control.reason)
            self._check_coordinator()
        waited = f"waited {self._invitation.patience.total_seconds():g} s for the coordinator"
        where = self._invitation.coordinator
        if THE_COORDINATOR in self._mailbox.connected:
            raise Dismissed(f"{waited}: it answers at {where}, but other nodes of the plan are still missing")
        raise Dismissed(f"{waited}: nobody answers at {where}; is it started, and does a firewall let us through?")

    def _prepare(self, brief: Brief, peers: dict[str, Any]) -> None:
        import torch

        from skippipe.runtime.building import build_computer

        plan = brief.plan
        self._numbers = dict(plan.cluster.number)
        number = self._numbers[self._invitation.name]
        self._names |= {each: name for name, each in self._numbers.items()}
        torch.set_num_threads(brief.threads)
        self._node = Node(number, plan, self, own_ring=brief.averaging == "ring")
        self._peers = {self._names[other]: peers[self._names[other]] for other in self._node.talks_to()}
        for name, (_, public) in self._peers.items():
            self._mailbox.allow(name, public)
        if brief.emulated:
            self._shaper = Shaper(
                {self._names[other]: _link(brief, number, other) for other in self._node.talks_to()}, time.monotonic_ns
            )
        computer = build_computer(number, brief, self._invitation)
        pace = (lambda work: planned_ns(plan, number, work)) if brief.emulated else None
        self._worker = Worker(computer, self._mailbox.wake, pace)

    def _turn(self) -> None:
        """Take in all there is, then decide."""
        assert self._node is not None
        assert self._worker is not None
        due_ns = self._held.next_due_ns()
        timeout_s = 1.0 if due_ns is None else min(1.0, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        for received in self._mailbox.receive(timeout_s):
            if received.due_ns > time.monotonic_ns():
                self._held.put(received)
            else:
                self._deliver(received)
        for received in self._held.ready(time.monotonic_ns()):
            self._deliver(received)
        while self._worker.done:
            self._node.finished(*self._worker.done.popleft())
        if self._worker.failure is not None:
            raise self._worker.failure
        if self._node.stopped is not None:
            raise Dismissed(self._node.stopped.reason)
        self._node.decide()
        self._check_coordinator()

    def _deliver(self, received: Received) -> None:
        assert self._node is not None
        if received.peer == THE_COORDINATOR and received.message.kind is Kind.CHUNK:
            self._node.restore(received.message)
        elif received.peer == THE_COORDINATOR:
            control = self._control(received)
            if isinstance(control, Begin):  # everybody is ready, so nobody takes us for a stranger
                for name, (address, public) in self._peers.items():
                    self._mailbox.connect(name, address, public)
            self._node.hear(control)
        elif received.peer in self._peers and received.message.kind is not Kind.CONTROL:
            self._node.receive(self._numbers[received.peer], received.message)

    def _control(self, received: Received) -> Control:
        if received.message.kind is not Kind.CONTROL:
            raise ProtocolBroken("the coordinator sends tensors")
        return from_json(received.message.body)

    def _check_coordinator(self) -> None:
        for lost in self._mailbox.lost():
            if lost.peer == THE_COORDINATOR:
                if lost.reason is Reason.DISCONNECTED:
                    self._hear_it_out()
                raise Dismissed(self._without_coordinator(lost.reason))
            log.info("connection to '%s': %s", lost.peer, lost.reason)

    def _hear_it_out(self) -> None:
        """What the coordinator says travels on another connection than the one that broke: it may have said stop."""
        deadline = time.monotonic() + LAST_WORDS_S
        while (left_s := deadline - time.monotonic()) > 0:
            for received in self._mailbox.receive(left_s):
                if received.peer == THE_COORDINATOR and isinstance(stop := self._control(received), Stop):
                    raise Dismissed(stop.reason)

    def _without_coordinator(self, reason: Reason) -> str:
        name, where = self._invitation.name, self._invitation.coordinator
        return {
            Reason.REFUSED: f"the coordinator at {where} refuses this node: its list of peers has another key for "
            f"'{name}', or its plan does without '{name}'",
            Reason.HANDSHAKE: f"{where}: who answers there does not hold the key that this node knows as the "
            "coordinator's; is the address right, and were all keys made together?",
            Reason.FOREIGN: f"{where}: who answers there is no coordinator; check the address",
            Reason.DISCONNECTED: f"the coordinator at {where} is gone",
        }[reason]


def _link(brief: Brief, sender: int, receiver: int) -> Link:
    cluster = brief.plan.cluster
    return Link(
        float(cluster.latency_s[sender, receiver]) + cluster.hop_overhead_s,
        float(cluster.bandwidth_bytes_per_s[sender, receiver]),
    )
