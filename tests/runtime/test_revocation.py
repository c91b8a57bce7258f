"""Members that are admitted and revoked while a coordinator runs: keys are let in and shut out over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from skippipe.runtime.admission import REVOKED, Admission
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import Heartbeat, PeerUpdate, Stop
from skippipe.runtime.node.agent import NodeAgent
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.runtime.rendezvous import Listener
from skippipe.transport.keys import THE_COORDINATOR, KeyPair, PeerList
from skippipe.transport.mailbox import Mailbox
from skippipe.transport.members import MemberStore, cluster_keys
from skippipe.transport.message import Message, Stamp

WITHIN_S = 60.0
HEARTBEAT = Message(Stamp(1, 2, 3), to_json(Heartbeat("works")))


class Cluster:
    """A coordinator and its nodes, as mailboxes that take turns."""

    def __init__(self, folder: Path, stack: ExitStack, *names: str) -> None:
        own = cluster_keys(folder)
        self.keys = {name: KeyPair.new() for name in names}
        PeerList({name: pair.public for name, pair in self.keys.items()}).save(folder / "peers.json")
        self.store = MemberStore.of_folder(folder)
        self.admission = Admission(self.store, own)
        self.own, self._stack = own, stack
        self.coordinator = stack.enter_context(closing(Mailbox(THE_COORDINATOR, own)))
        self.listener = Listener(self.coordinator, ["a", "b", "c"], self.admission.publics)
        self.nodes = {name: self.node(name) for name in names}
        self.heard: dict[str, list[object]] = {}

    def node(self, name: str) -> Mailbox:
        box = self._stack.enter_context(closing(Mailbox(name, self.keys[name])))
        box.allow(THE_COORDINATOR, self.own.public)
        box.connect(THE_COORDINATOR, self.coordinator.address, self.own.public)
        self.listener.connect(name, box.address)
        return box

    def until(self, done: Callable[[], object]) -> dict[str, list[object]]:
        """What the coordinator and nodes hear until then."""
        heard = self.heard = {name: [] for name in (THE_COORDINATOR, *self.nodes)}
        deadline = time.monotonic() + WITHIN_S
        while not done():
            assert time.monotonic() < deadline, heard
            for name, box in {THE_COORDINATOR: self.coordinator, **self.nodes}.items():
                for each in box.receive(0.01):
                    said = from_json(each.message.body)
                    heard[name].append((each.peer, said) if name == THE_COORDINATOR else said)
        return heard


def test_a_member_that_is_revoked_is_shut_out_by_all(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "a", "b")
        cluster.nodes["a"].send(THE_COORDINATOR, HEARTBEAT)
        heard = cluster.until(lambda: cluster.coordinator.received_bytes["a"])
        assert cluster.admission.poll(cluster.listener) == [], "nothing has changed"
        cluster.store.revoke("a")
        assert cluster.admission.poll(cluster.listener) == [("a", REVOKED)]
        cluster.listener.disconnect("a", 1.0)  # as with any node that is lost
        assert cluster.admission.poll(cluster.listener) == [], "said once"
        refused = cluster.coordinator.refused
        cluster.nodes["a"].send(THE_COORDINATOR, HEARTBEAT)
        gone = PeerUpdate({"a": ["", None]})
        heard = cluster.until(lambda: cluster.coordinator.refused > refused and gone in cluster.heard["b"])
        assert heard[THE_COORDINATOR] == [], "nothing that it says is heard any more"
        stops = [each for each in heard["a"] if isinstance(each, Stop)]
        assert [each.again for each in stops] == [False]
        assert REVOKED in stops[0].reason


def test_who_was_away_hears_of_it_and_who_is_admitted_gets_in(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "a", "b")
        cluster.listener.disconnect("b")
        cluster.store.revoke("a")
        assert cluster.admission.poll(cluster.listener) == [("a", REVOKED)]
        cluster.listener.connect("b", cluster.nodes["b"].address)
        invitation = cluster.store.invite("c", cluster.own.public, 60, ("127.0.0.1:5555",))
        cluster.keys["c"] = KeyPair.new()
        cluster.store.admit(invitation.keys.public, cluster.keys["c"].public)
        assert cluster.admission.poll(cluster.listener) == []
        cluster.nodes["c"] = cluster.node("c")
        cluster.nodes["c"].send(THE_COORDINATOR, HEARTBEAT)
        gone = PeerUpdate({"a": ["", None]})
        cluster.until(lambda: gone in cluster.heard["b"] and cluster.coordinator.received_bytes["c"])


def test_who_connects_is_judged_by_the_list_as_it_is_then(tmp_path: Path) -> None:
    """A node connects as soon as it is told that it is admitted: the coordinator may not have polled since."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "a")
        cluster.nodes["a"].send(THE_COORDINATOR, HEARTBEAT)
        cluster.until(lambda: cluster.coordinator.received_bytes["a"])
        cluster.admission.follow(cluster.listener)
        invitation = cluster.store.invite("c", cluster.own.public, 60, ("127.0.0.1:5555",))
        cluster.keys["c"] = KeyPair.new()
        cluster.store.admit(invitation.keys.public, cluster.keys["c"].public)
        cluster.store.revoke("a")
        box = stack.enter_context(closing(Mailbox("c", cluster.keys["c"])))
        cluster.nodes["c"] = box
        box.connect(THE_COORDINATOR, cluster.coordinator.address, cluster.own.public)
        box.send(THE_COORDINATOR, HEARTBEAT)
        cluster.until(lambda: cluster.coordinator.received_bytes["c"] or cluster.coordinator.refused)
        assert not cluster.coordinator.refused
        assert cluster.admission.poll(cluster.listener) == [("a", REVOKED)], "not forgotten"
        assert cluster.admission.poll(cluster.listener) == []


def test_a_key_may_become_that_of_a_relay(tmp_path: Path) -> None:
    """In a list that was changed by hand."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "a")
        cluster.admission.follow(cluster.listener)
        PeerList({"r": cluster.keys["a"].public}, relays=("r",)).save(cluster.store.path)
        assert cluster.admission.poll(cluster.listener) == [("a", REVOKED)]
        assert cluster.listener.relay_names == {"r"} and cluster.admission.publics.keys() == {"r"}


def test_a_list_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "a")
        cluster.store.path.write_text("{")
        assert cluster.admission.poll(cluster.listener) == []
        cluster.nodes["a"].send(THE_COORDINATOR, HEARTBEAT)
        assert cluster.until(lambda: cluster.coordinator.received_bytes["a"])


def test_a_node_refuses_the_key_of_a_peer_that_was_revoked() -> None:
    keys = {name: KeyPair.new() for name in ("a", "b", THE_COORDINATOR)}
    agent = NodeAgent(JoinConfig("b", "127.0.0.1:1", keys["b"], keys[THE_COORDINATOR].public), {})
    with closing(agent._mailbox) as own, closing(Mailbox("a", keys["a"])) as peer:
        agent._numbers = {"a": 0, "b": 1}
        agent._update_peers({"a": [peer.address, keys["a"].public]})
        peer.connect("b", own.address, keys["b"].public)
        peer.send("b", HEARTBEAT)
        deadline = time.monotonic() + WITHIN_S
        while not own.received_bytes["a"]:
            assert time.monotonic() < deadline
            own.receive(0.01)
        agent._update_peers({"a": ["", None]})
        peer.send("b", HEARTBEAT)
        while not own.refused:
            assert time.monotonic() < deadline
            assert own.receive(0.01) == []
