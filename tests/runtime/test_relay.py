"""A relay joins a run, is given grants, and two nodes that only call out meet there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime import relay as relay_module
from skippipe.runtime import rendezvous as rendezvous_module
from skippipe.runtime.fencing import Incarnation
from skippipe.runtime.message_json import from_json, stamped
from skippipe.runtime.messages import CallBack, CallFailed, ControlMessage, Hello, PeerUpdate, RequestCallback
from skippipe.runtime.relay import RelayAgent, load_line
from skippipe.runtime.relay_pool import RELAY_SILENT_S, SAME_ATTEMPT_S, RelayInfo, RelayPool
from skippipe.runtime.rendezvous import Rendezvous
from skippipe.transport import mailbox as mailbox_module
from skippipe.transport.addresses import free_port
from skippipe.transport.admission import AdmissionServer
from skippipe.transport.keys import THE_COORDINATOR, KeyPair, PeerList
from skippipe.transport.mailbox import OUT_ONLY, Mailbox
from skippipe.transport.members import MemberStore, cluster_keys
from skippipe.transport.message import MessageKind, Received
from skippipe.transport.relay import Relay, RelayLimits, RelayLoad
from tests.helpers.mailboxes import number_of, numbered
from tests.helpers.relay import Wire

DEADLINE_S = 60.0
NODES = ("n0", "n1")
KEYS = {name: KeyPair.new() for name in (THE_COORDINATOR, *NODES, "hub")}


class Silent:
    """Nothing that happens to nodes matters here."""

    def joined(self, name: str) -> None: ...

    def received(self, name: str, control: ControlMessage) -> None: ...

    def lost(self, name: str, how: str) -> None: ...

    def refused(self, name: str, why: str) -> None: ...


class Run:
    """A coordinator, two nodes that only call out, and a relay in a thread of its own."""

    def __init__(self, stack: ExitStack, listen: str = OUT_ONLY) -> None:
        self.coordinator = self._box(stack, THE_COORDINATOR, "127.0.0.1:0")
        self.nodes = [self._box(stack, name, listen) for name in NODES]
        self.relays: list[tuple[str, RelayInfo | None]] = []
        self.apart: list[tuple[str, str, bool]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        """Node, and what it was told of its peers."""
        self.rendezvous = Rendezvous(
            self.coordinator,
            NODES,
            {name: pair.public for name, pair in KEYS.items()},
            host=Silent(),
            node_config={"kind": "test"},
            timeout_s=60,
            on_relay=lambda *each: self.relays.append(each),
            on_relay_only=lambda *each: self.apart.append(each),
        )
        self._lives = {box.name: Incarnation(number) for number, box in enumerate(self.nodes, 1)}
        self.received: dict[str, list[Received]] = {name: [] for name in NODES}
        self._over = Event()
        stack.callback(self._over.set)
        self.ended: list[str] = []

    def _box(self, stack: ExitStack, name: str, listen: str) -> Mailbox:
        return stack.enter_context(closing(Mailbox(name, KEYS[name], listen=listen)))

    def let_in(self, name: str, *, relay: bool = True) -> None:
        self.coordinator.allow(name, KEYS[name].public)
        self.rendezvous.relay_names = frozenset([name] if relay else [])

    def start_relay(self, name: str = "hub", where: str = "") -> Relay:
        """`where`: the coordinator's address, if it is another for the relay."""
        relay, public = Relay("127.0.0.1:0", RelayLimits(bytes_per_s=1e9)), KEYS[THE_COORDINATOR].public
        agent = RelayAgent(name, KEYS[name], where or self.coordinator.address, public, relay, relay.address)

        def run() -> None:
            try:
                agent.run(self._over.is_set)
            except UserError as error:
                self.ended.append(str(error))

        Thread(target=run, daemon=True).start()
        return relay

    def join(self) -> None:
        for box in self.nodes:
            secret = secrets.token_bytes(32)
            box.allow(THE_COORDINATOR, KEYS[THE_COORDINATOR].public)
            box.connect(THE_COORDINATOR, self.coordinator.address, KEYS[THE_COORDINATOR].public)
            self._say(box, Hello(box.address, __version__, callback=secret.hex()))
            if box.address == OUT_ONLY:
                box.be_callable(self.coordinator.address, secret)

    def meet(self) -> None:
        for box, peer in zip(self.nodes, reversed(self.nodes), strict=True):
            box.allow(peer.name, KEYS[peer.name].public)
            box.connect(peer.name, OUT_ONLY, KEYS[peer.name].public)

    def _say(self, box: Mailbox, control: ControlMessage) -> None:
        box.send(THE_COORDINATOR, stamped(control, self._lives[box.name].stamp()))

    def turn(self) -> bool:
        """All do what has come; nodes as `NodeAgent` does. Calls of one node to the other are refused on the way."""
        self.rendezvous.poll()
        for box in self.nodes:
            for request in box.call_requests():
                self._say(box, RequestCallback(request.peer, request.token, request.port))
            for peer in box.failed_calls():
                self._say(box, CallFailed(peer))
            for received in box.receive(0.002):
                if received.message.kind is not MessageKind.CONTROL:
                    self.received[box.name].append(received)
                elif isinstance(call := from_json(received.message.body), CallBack):
                    if call.relay:
                        box.meet([call.address], call.relay, call.token)
                    else:
                        box.answer(call.peer, [f"127.0.0.1:{free_port('127.0.0.1')}"], call.token)
                elif isinstance(call, PeerUpdate):
                    self.told.append((box.name, call.peers))
        return True

    def was_told(self, name: str, news: list[dict[str, Any]]) -> bool:
        """Has a node been told all of this, one after the other?"""
        heard = [peers for told, peers in self.told if told == name]
        return any(heard[at : at + len(news)] == news for at in range(len(heard)))

    def until(self, done: object) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.turn() and done()):  # type: ignore[operator]
            assert time.monotonic() < deadline, (self.relays, self.ended)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def test_two_nodes_meet_at_the_relay_that_has_joined(run: Run) -> None:
    run.let_in("hub")
    relay = run.start_relay()
    run.join()
    run.until(lambda: run.rendezvous.relays and len(run.rendezvous.addresses) == 2)
    assert run.relays == [("hub", RelayInfo(relay.address, 1e9, float("inf"), 0))]
    assert run.rendezvous.unreachable_from("n0") == []
    run.meet()
    for box, peer in zip(run.nodes, reversed(NODES), strict=True):
        for number in range(5):
            box.send(peer, numbered(number, 300_000))
    run.until(lambda: all(len(found) == 5 for found in run.received.values()))
    assert [[number_of(each) for each in found] for found in run.received.values()] == [[*range(5)]] * 2
    run.until(lambda: all(box.on_fast_path for box in run.nodes))
    assert relay.load.nodes == 2 and relay.load.forwarded_bytes > 3_000_000
    run.rendezvous.lose_relay("hub", "a test")
    assert run.relays[1:] == [("hub", None)] and run.rendezvous.unreachable_from("n0") == ["n1"]
    run.until(lambda: run.rendezvous.relays)  # its next hello


def test_two_that_can_be_called_and_cannot_call_each_other_meet_at_the_relay() -> None:
    with ExitStack() as stack:
        run = Run(stack, "127.0.0.1:0")
        run.join()
        run.until(lambda: len(run.rendezvous.addresses) == 2)
        run.meet()
        run.until(lambda: run.apart)
        assert run.rendezvous.unreachable_from("n0") == ["n1"] and not run.told[2:], "their addresses, when they joined"
        run.let_in("hub")
        relay = run.start_relay()
        run.until(lambda: run.relays)
        public = {name: KEYS[name].public for name in NODES}
        run.until(lambda: ("n0", {"n1": [OUT_ONLY, public["n1"]]}) in run.told)
        assert run.rendezvous.unreachable_from("n0") == []
        for box, peer in zip(run.nodes, reversed(NODES), strict=True):
            box.send(peer, numbered(1, 300_000))
        run.until(lambda: all(run.received.values()))
        assert relay.load.forwarded_bytes > 600_000 and len(run.apart) == 1
        known = len(run.told)
        run.rendezvous.lose_relay("hub", "a test")
        again = [
            ("n0", {"n1": [run.nodes[1].address, public["n1"]]}),
            ("n1", {"n0": [run.nodes[0].address, public["n0"]]}),
        ]
        run.until(lambda: all(each in run.told[known:] for each in again))  # before its next hello


def test_two_that_could_not_call_each_other_try_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been for a moment. It was not: they meet at the relay again, for twice as long."""
    monkeypatch.setattr(rendezvous_module, "RELAY_ONLY_S", (1.0, 3600.0))
    with ExitStack() as stack:
        run = Run(stack, "127.0.0.1:0")
        run.let_in("hub")
        run.start_relay()
        run.join()
        run.until(lambda: len(run.rendezvous.addresses) == 2 and run.relays)
        run.meet()
        run.until(lambda: len(run.apart) == 2)
        assert [apart for *_, apart in run.apart] == [True, False]
        for name, peer in zip(NODES, reversed(run.nodes), strict=True):  # told to meet, then where to call the other
            public = KEYS[peer.name].public
            news = [{peer.name: [address, public]} for address in (OUT_ONLY, peer.address)]
            run.until(partial(run.was_told, name, news))
        run.meet()
        run.until(lambda: len(run.apart) >= 3)
        assert run.apart[2][-1] and set(run.rendezvous._relay_only_s.values()) == {2.0}


def test_who_is_no_relay_is_told_so(run: Run) -> None:
    run.let_in("hub", relay=False)
    run.start_relay()
    run.until(lambda: run.ended)
    assert run.ended == ["'hub' was invited as a node: start it with 'skippipe node', or invite a relay"]
    assert not run.rendezvous.relays and not run.relays


def test_a_relay_that_cannot_be_reached_is_told_so(tmp_path: Path) -> None:
    """The coordinator calls it back, at each of its addresses."""
    keys, store = cluster_keys(tmp_path), MemberStore.of_folder(tmp_path)
    PeerList({"hub": KEYS["hub"].public}, relays=("hub",)).save(store.path)
    port, nowhere = free_port("127.0.0.1"), f"127.0.0.1:{free_port('127.0.0.1')}"
    admission = AdmissionServer(store, keys, f"127.0.0.1:{port}")
    admission.start()
    said: list[str] = []
    with (
        closing(admission),
        closing(Mailbox(THE_COORDINATOR, keys, listen=f"127.0.0.1:{port}")) as coordinator,
        closing(Relay("127.0.0.1:0")) as relay,
    ):
        coordinator.allow("hub", KEYS["hub"].public)
        where = f"127.0.0.1:{port}"
        agent = RelayAgent("hub", KEYS["hub"], where, keys.public, relay, f"{relay.address},{nowhere}")
        deadline = time.monotonic() + DEADLINE_S

        def stopped() -> bool:
            coordinator.receive(0.01)
            return bool(said) or time.monotonic() > deadline

        agent.run(stopped, said.append)
    assert [line.split(": ")[1] for line in said] == [f"the coordinator cannot reach this relay at {nowhere}"]


def test_a_relay_waits_for_a_handshake_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt ends the one before it."""
    monkeypatch.setattr(mailbox_module, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(relay_module, "POLL_S", 0.05)
    with ExitStack() as stack:
        run = Run(stack)
        wire = Wire(lambda: run.coordinator.address)
        wire.times = 30.0  # half a second for a handshake
        run.let_in("hub")
        run.start_relay(where=wire.address)
        run.until(lambda: run.rendezvous.relays)


def test_a_relay_whose_key_is_refused_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: a coordinator that has just started may not have read the list of members."""
    monkeypatch.setattr(relay_module, "REFUSED_S", 0.3)
    monkeypatch.setattr(mailbox_module, "ATTEMPT_S", 0.1)
    run.start_relay()
    run.until(lambda: run.ended)
    assert "refuses this relay: its key is not on the list of members" in run.ended[0]


def test_pairs_go_to_the_relay_with_fewest_streams_and_to_the_next_if_they_ask_again() -> None:
    pool = RelayPool()
    busy, idle = RelayInfo("a:1", 1.0, 1.0, 8), RelayInfo("b:1", 1.0, 1.0, 2)
    assert pool.choose("x", "y", 0.0) == ""
    assert pool.heard("busy", busy, 0.0) and pool.heard("idle", idle, 0.0) and not pool.heard("idle", idle, 1.0)
    later = 100.0
    pairs = [("x", "y"), ("x", "y"), ("y", "x"), ("x", "z")]
    assert [pool.choose(a, b, later) for a, b in pairs] == ["idle", "busy", "idle", "idle"]
    assert pool.choose("x", "y", later + SAME_ATTEMPT_S) == "idle"
    assert pool.silent(1.0 + RELAY_SILENT_S) == ["busy"]
    assert pool.remove("busy") and not pool.remove("busy")
    assert pool.choose("x", "z", later + 1) == "idle"


@pytest.mark.parametrize(
    ("address", "relay", "complaint"),
    [
        ("10.0.0.1:5560", [], "start it with 'skippipe relay'"),
        ("10.0.0.1:5560", [1.0, 0.0, 2.0], "start it with 'skippipe relay'"),
        ("10.0.0.1:5560", [1.0, 1.0, float("nan")], "start it with 'skippipe relay'"),
        (OUT_ONLY, [1.0, 1.0, 0.0], "expected host:port"),
        ("a" * 3000 + ":1", [1.0, 1.0, 0.0], "its addresses have 3002 characters"),
    ],
)
def test_a_hello_that_is_none_of_a_relay(address: str, relay: list[float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        RelayInfo.of(Hello(address, __version__, relay=relay))


def test_load_in_a_line() -> None:
    line = load_line(RelayLoad(12, 5, 4_000_000, 3), RelayLoad(1, 1, 1_000_000, 0), 10.0)
    assert line == "relay: 12 streams of 5 nodes, 0.3 MB/s, 4.0 MB so far, 3 refused"
