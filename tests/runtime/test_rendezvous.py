"""Nodes that join over a mailbox, and are declared dead when they are silent."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Thread

from skippipe import __version__
from skippipe.runtime.fencing import Incarnation, stamped
from skippipe.runtime.messages import ControlMessage, Hello, to_json
from skippipe.runtime.node.agent import THE_COORDINATOR, node_main
from skippipe.runtime.rendezvous import Rendezvous
from skippipe.transport.addresses import free_port
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


def test_a_node_that_starts_late_finds_the_coordinator_at_the_second_address() -> None:
    """It was killed while the coordinator was gone, which then came back elsewhere."""
    recorder = Recorder()
    ended: list[str] = []
    with closing(Mailbox(THE_COORDINATOR, None, security="none")) as coordinator:
        rendezvous = Rendezvous(
            coordinator, ["n0"], {"n0": None}, host=recorder, node_config={"kind": "none of its roles"}, timeout_s=60
        )
        nowhere = f"127.0.0.1:{free_port('127.0.0.1')}"
        join = {"name": "n0", "coordinator": f"{nowhere},{coordinator.address}", "keys": None, "security": "none"}
        node = Thread(target=lambda: ended.append(node_main({}, join)))
        node.start()
        deadline = time.monotonic() + DEADLINE_S
        while len(recorder.events) < 2:
            assert time.monotonic() < deadline, recorder.events
            rendezvous.poll()
        node.join(DEADLINE_S)
    assert recorder.events[0] == "n0 joined"
    assert "needs a node for 'none of its roles'" in ended[0]
