"""Nodes that join over a mailbox, and are declared dead when they are silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from threading import Thread

import pytest

from skippipe import __version__
from skippipe.runtime import rendezvous as rendezvous_module
from skippipe.runtime.fencing import Incarnation
from skippipe.runtime.message_json import from_json, stamped
from skippipe.runtime.messages import (
    CallBack,
    CallFailed,
    ControlMessage,
    Heartbeat,
    Hello,
    PeerUpdate,
    RequestCallback,
)
from skippipe.runtime.node import agent
from skippipe.runtime.node.agent import node_main
from skippipe.runtime.rendezvous import Rendezvous
from skippipe.transport.addresses import free_port, join_address, split_address
from skippipe.transport.keys import THE_COORDINATOR
from skippipe.transport.mailbox import OUT_ONLY, Mailbox

DEADLINE_S = 60.0


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
        node.send(THE_COORDINATOR, stamped(Hello(node.address, __version__), Incarnation(1).stamp()))
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


@pytest.mark.parametrize("listens", [True, False])
def test_a_node_that_cannot_be_called_gets_all_that_was_sent_to_it(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """It announces an address where nobody answers, or says itself that it only calls out."""
    monkeypatch.setattr(rendezvous_module, "REACHED_S", 0.3)
    monkeypatch.setattr(agent, "CALLBACK_S", 0.3)
    nowhere = f"127.0.0.1:{free_port('127.0.0.1')}"
    recorder, ended = Recorder(), list[str]()
    found: list[tuple[str, str, str]] = []
    with closing(Mailbox(THE_COORDINATOR, None, security="none")) as coordinator:
        rendezvous = Rendezvous(
            coordinator,
            ["n0"],
            {"n0": None},
            host=recorder,
            on_out_only=lambda *each: found.append(each),
            node_config={"kind": "none of its roles"},
            timeout_s=60,
        )
        join = {"name": "n0", "coordinator": coordinator.address, "keys": None, "security": "none"}
        more = {"address": nowhere} if listens else {"listen": OUT_ONLY}
        node = Thread(target=lambda: ended.append(node_main({}, {**join, **more})))
        node.start()
        deadline = time.monotonic() + DEADLINE_S
        while not any("Failed" in event for event in recorder.events):
            assert time.monotonic() < deadline, recorder.events
            rendezvous.poll()
        node.join(DEADLINE_S)
    assert [event for event in recorder.events if "joined" in event or "refused" in event] == ["n0 joined"]
    assert found == [("n0", nowhere if listens else OUT_ONLY, "")]
    assert "needs a node for 'none of its roles'" in ended[0]


def test_a_request_to_be_called_reaches_the_peer_and_only_from_one_that_can_be_called() -> None:
    recorder, names = Recorder(), ("n0", "n1")
    with (
        closing(Mailbox(THE_COORDINATOR, None, security="none")) as coordinator,
        closing(Mailbox("n0", None, security="none")) as n0,
        closing(Mailbox("n1", None, security="none", listen=OUT_ONLY)) as n1,
    ):
        rendezvous = Rendezvous(
            coordinator, names, dict.fromkeys(names), host=recorder, node_config={"kind": "test"}, timeout_s=60
        )
        heard: list[ControlMessage] = []
        lives = {box: Incarnation(number) for number, box in enumerate((n0, n1), 1)}

        def say(box: Mailbox, control: ControlMessage) -> None:
            box.send(THE_COORDINATOR, stamped(control, lives[box].stamp()))

        for box in (n0, n1):
            box.allow(THE_COORDINATOR, None)
            box.connect(THE_COORDINATOR, coordinator.address, None)
            say(box, Hello(box.address, __version__, callback="ab" * 32))
        n1.be_callable(coordinator.address, bytes.fromhex("ab" * 32))
        deadline = time.monotonic() + DEADLINE_S
        asked = False
        while not any(isinstance(each, CallBack) for each in heard):
            assert time.monotonic() < deadline, heard
            rendezvous.poll()
            heard += [from_json(each.message.body) for box in (n0, n1) for each in box.receive(0.01)]
            if not asked and len(recorder.events) == 2:
                asked = True
                say(n1, RequestCallback("n0", "12" * 32, 5))  # n0 cannot call it
                say(n0, RequestCallback("n0", "34" * 32, 5))
                say(n0, RequestCallback("n1", "56" * 32, 4711))
        assert rendezvous.unreachable_from("n1") == []
    calls = [each for each in heard if isinstance(each, CallBack)]
    assert calls == [CallBack("n0", f"{split_address(n0.address)[0]}:4711", "56" * 32)]


def test_two_nodes_of_one_site_are_told_where_they_listen_though_the_coordinator_cannot_call_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """n0 and n1 announce addresses at which the coordinator reaches nobody; n2 listens nowhere."""
    monkeypatch.setattr(rendezvous_module, "REACHED_S", 0.1)
    monkeypatch.setattr(rendezvous_module, "site_of", lambda host: host)  # also of loopback
    nowhere = {name: f"127.0.0.1:{free_port('127.0.0.1')}" for name in ("n0", "n1")}
    names, sites = ("n0", "n1", "n2"), dict[str, str]()
    with ExitStack() as stack:
        coordinator = stack.enter_context(closing(Mailbox(THE_COORDINATOR, None, security="none")))
        boxes = {
            name: stack.enter_context(closing(Mailbox(name, None, security="none", listen=OUT_ONLY))) for name in names
        }
        lives = {name: Incarnation(number) for number, name in enumerate(names, 1)}
        rendezvous = Rendezvous(
            coordinator,
            names,
            dict.fromkeys(names),
            host=Recorder(),
            on_out_only=lambda name, _, site: sites.update({name: site}),
            node_config={"kind": "test"},
            timeout_s=60,
        )
        told: dict[str, dict[str, str]] = {name: {} for name in names}

        def say(name: str, control: ControlMessage) -> None:
            boxes[name].send(THE_COORDINATOR, stamped(control, lives[name].stamp()))

        def until(done: Callable[[], bool]) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not done():
                assert time.monotonic() < deadline, told
                rendezvous.poll()
                for name, box in boxes.items():
                    for each in (from_json(received.message.body) for received in box.receive(0.01)):
                        if isinstance(each, PeerUpdate):
                            told[name] |= {peer: found[0] for peer, found in each.peers.items()}
                        if isinstance(each, CallBack):
                            told[name][f"call {each.peer}"] = each.address

        for (name, box), secret in zip(boxes.items(), ("ab", "cd", "ef"), strict=True):
            box.allow(THE_COORDINATOR, None)
            box.connect(THE_COORDINATOR, coordinator.address, None)
            say(name, Hello(nowhere.get(name, OUT_ONLY), __version__, callback=secret * 32))
            box.be_callable(coordinator.address, bytes.fromhex(secret * 32))
        until(lambda: len(sites) == 3 and told["n0"].get("n1") == nowhere["n1"] and "n0" in told["n2"])
        until(lambda: told["n1"].get("n0") == nowhere["n0"] and told["n2"]["n0"] == OUT_ONLY)
        assert sites == {"n0": "127.0.0.1", "n1": "127.0.0.1", "n2": ""}
        assert rendezvous.pairs_without_link() == [frozenset({"n0", "n2"}), frozenset({"n1", "n2"})]
        say("n1", RequestCallback("n0", "12" * 32, 4711))
        until(lambda: told["n0"].get("call n1") == "127.0.0.1:4711")
        say("n0", CallFailed("n1"))  # they have the address of one router, and are not behind one
        until(lambda: len(rendezvous.pairs_without_link()) == 3)


class Busy:
    """A machine that takes connections and says nothing, for as long as the test goes on."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.address = join_address(*self._server.getsockname())
        self.taken: list[socket.socket] = []

    def take(self) -> None:
        with suppress(BlockingIOError):
            self.taken.append(self._server.accept()[0])

    def close(self) -> None:
        for each in (self._server, *self.taken):
            each.close()


def test_a_node_that_is_too_busy_for_a_handshake_is_neither_out_only_nor_called_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was declared dead while it was held up, and sends again. It is told to rejoin over one connection: another
    attempt every second would never come to an end."""
    monkeypatch.setattr(rendezvous_module, "REACHED_S", 0.05)
    monkeypatch.setattr(rendezvous_module, "REJOIN_REQUEST_S", 0.01)
    recorder, out_only = Recorder(), list[str]()
    with (
        closing(Mailbox(THE_COORDINATOR, None, security="none")) as coordinator,
        closing(Mailbox("n0", None, security="none")) as node,
        closing(Busy()) as busy,
    ):
        rendezvous = Rendezvous(
            coordinator,
            ["n0"],
            {"n0": None},
            host=recorder,
            on_out_only=lambda name, *_: out_only.append(name),
            node_config={"kind": "test"},
            timeout_s=0.3,
        )
        node.allow(THE_COORDINATOR, None)
        node.connect(THE_COORDINATOR, coordinator.address, None)
        life = Incarnation(1)
        node.send(THE_COORDINATOR, stamped(Hello(busy.address, __version__, callback="ab" * 32), life.stamp()))
        deadline = time.monotonic() + DEADLINE_S
        while len(recorder.events) < 2:
            assert time.monotonic() < deadline, recorder.events
            rendezvous.poll()
            busy.take()
        assert recorder.events == ["n0 joined", "n0 lost: no heartbeat for 0.3 s"]
        assert out_only == []
        for _ in range(20):
            node.send(THE_COORDINATOR, stamped(Heartbeat("", 0.0), life.stamp()))
            rendezvous.poll()
            busy.take()
        busy.take()
        assert len(busy.taken) == 2, "one when it joined, and one to tell it"
