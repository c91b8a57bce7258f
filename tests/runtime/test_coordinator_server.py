"""The coordinator as a process: nodes get the addresses of others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.runtime.coordinator.server import CoordinatorServer
from skippipe.runtime.message_json import from_json
from skippipe.runtime.messages import ControlMessage, PeerUpdate, Stop
from skippipe.transport.keys import THE_COORDINATOR
from skippipe.transport.mailbox import Mailbox
from tests.helpers.exact_training import brief_of
from tests.helpers.single_node import small_plan

WITHIN_S = 10.0


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    node_config = brief_of(small_plan(), ModelSpec(config_named("llama-tiny", 300), 0))
    publics = {node.name: None for node in node_config.plan.cluster.nodes}
    with closing(CoordinatorServer(node_config, None, publics, security="none", store=lambda *_: None)) as found:
        yield found


def heard(mailbox: Mailbox, within_s: float) -> Iterator[ControlMessage]:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        for received in mailbox.receive(0.1):
            yield from_json(received.message.body)


def introduced(mailbox: Mailbox, name: str) -> str:
    """Where this node is, as the coordinator says."""
    for control in heard(mailbox, WITHIN_S):
        if isinstance(control, PeerUpdate) and name in control.peers:
            return str(control.peers[name][0])
    raise AssertionError(f"no message says where '{name}' is")


def test_nodes_get_each_others_addresses(server: CoordinatorServer) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Mailbox(name, None, security="none"))) for name in ("n0", "n1"))
        for number, mailbox in enumerate((first, second)):
            mailbox.allow(THE_COORDINATOR, None)
            assert server.connect(number, mailbox.address)
        assert introduced(first, "n1") == second.address
        assert introduced(second, "n0") == first.address  # it may have moved while there was no coordinator


def test_a_node_that_was_declared_dead_is_told_to_rejoin_now_and_then(server: CoordinatorServer) -> None:
    stop = Stop("declared dead", again=True)
    with closing(Mailbox("n0", None, security="none")) as mailbox:
        mailbox.allow(THE_COORDINATOR, None)
        server.send(0, stop)  # its address is not known
        assert server.connect(0, mailbox.address)
        server.disconnect(0)
        for _ in range(3):  # as often as it sends; a new connection each time would cut off the message before
            server.send(0, stop)
        assert next(each for each in heard(mailbox, WITHIN_S) if not isinstance(each, PeerUpdate)) == stop
        assert not any(isinstance(each, Stop) for each in heard(mailbox, 0.5))
