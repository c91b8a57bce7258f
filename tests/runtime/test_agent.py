"""A node that looks for its coordinator: one that is busy or has just ended is waited for, a wrong key is named."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest

from skippipe.runtime.fencing import stamp_of
from skippipe.runtime.message_json import stamped
from skippipe.runtime.messages import Stop
from skippipe.runtime.node.agent import NodeAgent
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.transport import addresses, sender
from skippipe.transport import mailbox as mailbox_module
from skippipe.transport.addresses import free_port, join_address
from skippipe.transport.keys import THE_COORDINATOR, KeyPair
from skippipe.transport.mailbox import Mailbox
from skippipe.transport.message import Stamp
from tests.helpers.quick import others_slow
from tests.helpers.relay import Wire

WITHIN_S = 20.0
SLOW_TIMES = 30.0  # as slow as that, a link takes half a second for a handshake
COORDINATOR, NODE = KeyPair.new(), KeyPair.new()


class Joining:
    """A node in a thread of its own that looks for its coordinator at these addresses."""

    def __init__(self, where: str, key: KeyPair = COORDINATOR) -> None:
        config = JoinConfig("n", where, NODE, key.public, coordinator_timeout=timedelta(seconds=WITHIN_S))
        self._agent = NodeAgent(config, {})
        self.address = self._agent._mailbox.address
        self._ended: list[str] = []
        self._thread = threading.Thread(target=lambda: self._ended.append(self._agent.run()), daemon=True)
        self._thread.start()

    def ended(self, meanwhile: Callable[[], object] = lambda: None) -> str:
        """Why the node has ended."""
        deadline = time.monotonic() + WITHIN_S
        while self._thread.is_alive():
            assert time.monotonic() < deadline, "the node still waits"
            meanwhile()
            self._thread.join(0.01)
        return self._ended[0]


def coordinator(listen: str) -> Mailbox:
    box = Mailbox(THE_COORDINATOR, COORDINATOR, listen=listen)
    box.allow("n", NODE.public)
    return box


def stopped_by(box: Mailbox, node: Joining) -> str:
    """Serve a mailbox as a coordinator that tells the node to stop as soon as it has said hello."""

    def serve() -> None:
        for received in box.receive(0.01):
            if not box.connects_to("n"):
                box.connect("n", node.address, NODE.public)
                stamp = Stamp(stamp_of(received.message).incarnation, 0, 1)
                box.send("n", stamped(Stop("that was all"), stamp))

    return node.ended(serve)


@pytest.mark.parametrize("where", ["127.0.0.1:{port}", "127.0.0.1:{port},127.0.0.1:1"])
def test_a_coordinator_that_is_held_up_is_waited_for(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It has opened its port and answers no handshake until the time for one is over, twice."""
    monkeypatch.setattr(addresses, "HANDSHAKE_BEGUN_S", 0.2)
    monkeypatch.setattr(sender, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(sender, "DIAL_AGAIN_S", 0.1)
    monkeypatch.setattr(mailbox_module, "ATTEMPT_S", 5.0)
    seen: list[sender.LossReason] = []
    poll = sender.Sender.poll

    def noted(self: sender.Sender) -> sender.LossReason | None:
        reason = poll(self)
        seen.extend([reason] if reason else [])
        return reason

    monkeypatch.setattr(sender.Sender, "poll", noted)
    with closing(coordinator("127.0.0.1:0")) as box:
        node = Joining(where.format(port=box.address.rpartition(":")[2]))
        deadline = time.monotonic() + WITHIN_S
        while len(seen) < 2:
            assert time.monotonic() < deadline
            assert node._thread.is_alive(), node.ended()
            time.sleep(0.01)
        assert stopped_by(box, node) == "that was all"
    assert set(seen[:2]) == {sender.LossReason.UNFINISHED}


@pytest.mark.parametrize("others", others_slow([",127.0.0.1:1"], [""]))
def test_a_handshake_over_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    """At first, and when the node was cut off: each attempt ends the one before it."""
    monkeypatch.setattr(mailbox_module, "ATTEMPT_S", 0.1)
    with closing(coordinator("127.0.0.1:0")) as box:
        wire = Wire(lambda: box.address)
        wire.times = SLOW_TIMES
        node = Joining(wire.address + others)
        deadline = time.monotonic() + WITHIN_S
        while not box.receive(0.01):
            assert time.monotonic() < deadline
        wire.cut()
        wire.mend()
        assert stopped_by(box, node) == "that was all"


def test_a_coordinator_that_ends_in_a_handshake_is_waited_for() -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)) as first:
        first.settimeout(WITHIN_S)
        node = Joining(join_address("127.0.0.1", port))
        stream, _ = first.accept()
    stream.close()
    with closing(coordinator(f"127.0.0.1:{port}")) as box:
        assert stopped_by(box, node) == "that was all"


def test_a_coordinator_that_comes_back_and_refuses_the_node_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node was revoked while the coordinator was away."""
    monkeypatch.setattr(mailbox_module, "ATTEMPT_S", 0.1)
    with closing(coordinator("127.0.0.1:0")) as box:
        node, where = Joining(box.address), box.address
        deadline = time.monotonic() + WITHIN_S
        while not box.receive(0.01):
            assert time.monotonic() < deadline
    with closing(Mailbox(THE_COORDINATOR, COORDINATOR, listen=where)) as box:
        said = node.ended(lambda: box.receive(0.01))
    assert f"the coordinator at {where} refuses this node" in said


@pytest.mark.parametrize("others", others_slow([",127.0.0.1:1"], [""]))
def test_a_wrong_key_is_named(others: str) -> None:
    with closing(coordinator("127.0.0.1:0")) as box:
        node = Joining(box.address + others, KeyPair.new())
        said = node.ended(lambda: box.receive(0.01))
    assert "does not hold the key" in said and "were all keys made together?" in said and "\n" not in said
