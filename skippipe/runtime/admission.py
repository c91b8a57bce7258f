"""Who may take part while a coordinator runs: nodes are admitted and revoked, and the connections follow.

The list of members is a file, which the admission thread and the commands `invite` and `revoke` change. The thread that
runs the coordinator looks at it whenever it waits for messages, and before each connection that it lets in or refuses:
a node that was told that it is admitted may connect at once. A new key is let in. A key that was revoked is refused
from the next message on: the node is told why, the other nodes are told to refuse it as well, fast paths included, and
then it is lost like any other.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from skippipe.errors import UserError
from skippipe.runtime.messages import PeerUpdate, Stop
from skippipe.runtime.rendezvous import Listener
from skippipe.transport.admission import AdmissionEvent, AdmissionServer, NodeNeeds
from skippipe.transport.keys import KeyPair
from skippipe.transport.members import MemberStore, fingerprint

SEEN_EVERY_S = 5.0  # from one note of who was seen to the next
REVOKED = "was revoked by the owner of the cluster"

log = logging.getLogger(__name__)


class Admission:
    """The members of a cluster, for the coordinator of a run, a gateway or a profile."""

    def __init__(self, store: MemberStore, keys: KeyPair) -> None:
        self._store = store
        self._keys = keys
        self.publics: dict[str, str | None] = dict(store.current().peers)
        """Member → public key; changes while the coordinator runs."""
        self.needs: Callable[[str], NodeNeeds] = lambda name: NodeNeeds()
        """What a node is to bring."""
        self._connected: dict[str, str] = {}
        self._shut_out: set[str] = set()
        """Names whose keys were revoked, and that have no new one."""
        self._informed: set[str] = set()
        """Connected nodes that know whose keys were revoked."""
        self._lost: list[tuple[str, str]] = []
        """Nodes that were shut out since the last `poll`, and why."""
        self._seen_at = 0.0
        self._complaint = ""
        self._server: AdmissionServer | None = None

    def start(self, address: str) -> None:
        """Admit those who were invited, below the port at which the coordinator listens."""
        try:
            self._server = AdmissionServer(
                self._store,
                self._keys,
                address,
                needs=lambda name: self.needs(name),
                at_work=lambda: self._connected,
            )
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
        else:
            self._server.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._connected:
            self._store.write_seen(dict.fromkeys(self._connected, time.time()))

    def events(self) -> list[AdmissionEvent]:
        return self._server.events() if self._server is not None else []

    def follow(self, listener: Listener) -> None:
        """From now on who connects is let in or refused by the list of members as it is then."""
        listener.mailbox.on_handshake(lambda: self._update(listener))
        self._update(listener)  # relays that dial before the first `poll` are let in, too

    def poll(self, listener: Listener) -> list[tuple[str, str]]:
        """Let in who was admitted and shut out who was revoked; gives those who are lost by it, and why."""
        self._update(listener)
        lost, self._lost = self._lost, []
        self._inform(listener)
        self._connected = {**dict.fromkeys(listener.relays, ""), **listener.addresses}
        if time.monotonic() > self._seen_at + SEEN_EVERY_S and self._connected:
            self._seen_at = time.monotonic()
            self._store.write_seen(dict.fromkeys(self._connected, time.time()))
        return lost

    def _update(self, listener: Listener) -> None:
        try:
            known = self._store.current()
        except (UserError, OSError) as error:  # what was known holds until it can be read again
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("the list of members cannot be read, so nobody is let in or shut out: %s", error)
            return
        peers = known.peers
        self._shut_out = {each.name for each in known.revoked} - peers.keys()
        relays = frozenset(known.relays) & peers.keys() - set(listener.names)
        gone = [name for name, public in self.publics.items() if peers.get(name) != public]
        for name in gone:
            log.info("'%s' %s", name, REVOKED)
            listener.send(name, Stop(f"this node {REVOKED}: its key {fingerprint(self.publics[name] or '')}… is void"))
            listener.mailbox.forbid(name)
            listener.lose_relay(name, REVOKED)
            del self.publics[name]
        for name in relays - listener.relay_names:  # after those who are gone: one of them may have had this key
            listener.mailbox.allow(name, peers[name])
        listener.relay_names = relays
        for name, public in peers.items():
            if name not in self.publics:
                self.publics[name] = public
                if name in listener.names or name in relays:
                    listener.mailbox.allow(name, public)
        self._informed -= set(listener.addresses) if gone else set()
        self._lost += [(name, REVOKED) for name in gone if name in listener.names]

    def _inform(self, listener: Listener) -> None:
        """Nodes refuse the keys of those that were revoked; one that was away meanwhile hears it when it is back."""
        self._informed &= listener.addresses.keys()
        for name in [each for each in listener.addresses if each not in self._informed]:
            self._informed.add(name)
            if self._shut_out:
                listener.send(name, PeerUpdate({each: ["", None] for each in self._shut_out}))
