"""Nodes that join over a mailbox, and are declared dead when they are silent."""

from __future__ import annotations

import time
from contextlib import closing

from skippipe import __version__
from skippipe.runtime.fencing import Incarnation, stamped
from skippipe.runtime.messages import ControlMessage, Hello, to_json
from skippipe.runtime.node.agent import THE_COORDINATOR
from skippipe.runtime.rendezvous import Rendezvous
from skippipe.transport.mailbox import Mailbox

DEADLINE_S = 20.0


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []

    def joined(self, name: str) -> None:
        self.events.append(f"{name} joined")

    def received(self, name: str, control: ControlMessage) -> None:
        self.events.append(f"{name} sent {control}")

    def lost(self, name: str, how: str) -> None:
        self.events.append(f"{name} lost: {how}")

    def refused(self, name: str, why: str) -> None:
        self.events.append(f"{name} refused: {why}")


def test_a_silent_node_is_declared_dead_however_short_the_timeout() -> None:
    recorder = Recorder()
    with (
        closing(Mailbox(THE_COORDINATOR, None, security="none")) as coordinator,
        closing(Mailbox("n0", None, security="none")) as node,
    ):
        rendezvous = Rendezvous(
            coordinator, ["n0"], {"n0": None}, host=recorder, node_config={"kind": "test"}, timeout_s=0.3
        )
        node.allow(THE_COORDINATOR, None)
        node.connect(THE_COORDINATOR, coordinator.address, None)
        node.send(THE_COORDINATOR, stamped(to_json(Hello(node.address, __version__)), Incarnation(1).stamp()))
        deadline = time.monotonic() + DEADLINE_S
        while len(recorder.events) < 2:
            assert time.monotonic() < deadline, recorder.events
            rendezvous.poll()
    assert recorder.events == ["n0 joined", "n0 lost: no heartbeat for 0.3 s"]
