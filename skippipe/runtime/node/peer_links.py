"""A node's connections to its peers: where each is, who dials, and which of them do not work.

A node dials its peers. One whose address says that it only calls out, or whose machine does not answer, is asked to
call back: the coordinator passes the request on, and messages go over the stream that the peer then opens
(`transport.callbacks`). Who can call whom is so found out by those who need it, and only for pairs that are in use.

Links to peers that this node exchanges messages with are watched (`transport.sender.LinkHeartbeat`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from skippipe.heartbeat import DIAL, HELD_UP, LINK_DOWN, LINK_WATCHED
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Lost, Mailbox

log = logging.getLogger(__name__)


class PeerLinks:
    """The peers of one incarnation of a node."""

    def __init__(self, mailbox: Mailbox, name: str) -> None:
        self._mailbox = mailbox
        self._name = name
        self._peers: dict[str, tuple[str, str | None]] = {}
        """Peer → its address, empty if it is not there, and its public key."""
        self._linked: dict[str, str] = {}
        """Peer → the address that this node connects to; OUT_ONLY: the peer calls back."""
        self._linked_at: dict[str, float] = {}
        self._dialled_at: dict[str, float] = {}
        """Peer → when this node began to connect to it the way it does."""
        self._broken_since: dict[str, float] = {}
        self._used_at: dict[str, float] = {}
        """Peer → when this node last exchanged messages with it; only those that are watched."""
        self._reported_at: dict[str, float] = {}
        """Peer → when the coordinator was last told that the link is silent."""
        self._blame_from = 0.0
        """Until then this node was cut off or held up: silence of its peers counts from here."""
        self._last_turn = time.monotonic()

    def update(self, peers: Mapping[str, Any], known: Collection[str]) -> None:
        """Where peers are now; only those that are known count."""
        for name, found in peers.items():
            address, public = found if isinstance(found, list) and len(found) == 2 else ("", None)
            if name not in known or name == self._name or not isinstance(address, str):
                continue
            before, _ = self._peers.get(name, ("", None))
            back = address == OUT_ONLY and name not in self._mailbox.connected  # it has no address that would differ
            if address != before:
                self._broken_since.pop(name, None)
            unlinked = (address != before or back) and name in self._linked
            if unlinked:
                self._unlink(name)
            self._peers[name] = address, public
            if public is None and self._mailbox.security != "none":  # its key was revoked
                self._mailbox.forbid(name)
                continue
            self._mailbox.allow(name, public)
            if unlinked and address and OUT_ONLY in (address, before):
                self.connect(name)  # another way to the same peer, which may have less than it was sent
                self._broken_since.setdefault(name, time.monotonic())

    def connect(self, name: str) -> None:
        """Connect to a peer whose address is known, unless there is a connection."""
        address, _ = self._peers.get(name, ("", None))
        if address and name not in self._linked:
            self._link(name, address)
            self._linked_at[name] = time.monotonic()

    def forget(self, name: str) -> None:
        """A peer is lost; if it comes back, the coordinator sends its address."""
        self._unlink(name)
        self._broken_since.pop(name, None)
        _, public = self._peers.get(name, ("", None))
        self._peers[name] = "", public

    def close(self) -> None:
        for name in list(self._linked):
            self._unlink(name)

    def refused(self, name: str) -> None:
        """A peer does not take messages."""
        self._broken_since.setdefault(name, time.monotonic())

    def lost(self, lost: Lost) -> None:
        """A connection broke or was refused."""
        log.info("connection to '%s': %s", lost.peer, lost.reason)
        if lost.reason in (LossReason.REFUSED, LossReason.FOREIGN):
            self._linked.pop(lost.peer, None)
        elif lost.reason in (LossReason.HANDSHAKE, LossReason.UNFINISHED) and lost.peer in self._linked:
            self._try_other_way(lost.peer)  # another machine has that address here
        self._broken_since.setdefault(lost.peer, time.monotonic())

    def watch(self, active: Collection[str], always: str, heartbeat_s: float) -> None:
        """Watch the links to one peer, and to those that this node exchanges messages with."""
        now = time.monotonic()
        recent = {name: at for name, at in self._used_at.items() if now < at + LINK_WATCHED * heartbeat_s}
        self._used_at = recent | dict.fromkeys(active, now)
        self._mailbox.watch({*self._used_at, always}, heartbeat_s)

    def check(
        self, heartbeat_s: float, *, cut_off: bool, reconnected: Callable[[str], None], report: Callable[[str], None]
    ) -> None:
        """Report connections that stay broken or do not come about, and links that are silent; not while this node is
        itself cut off from the coordinator."""
        now, silent, connected = time.monotonic(), self._mailbox.silent, self._mailbox.connected
        held_up, self._last_turn = now > self._last_turn + HELD_UP * heartbeat_s, now
        if held_up or cut_off:
            self._blame_from = now
        waited_for = {name: self._linked_at[name] for name in self._linked.keys() - connected}
        for name, since in (waited_for | self._broken_since).items():
            if name in connected:
                del self._broken_since[name]
                reconnected(name)
            elif now > max(since, self._blame_from) + heartbeat_s:
                if name in self._broken_since:
                    self._broken_since[name] = now  # to report it again, if nothing was done about it
                self._linked_at[name] = now
                report(name)
        for name in waited_for.keys() - self._mailbox.answered:
            if now > max(self._dialled_at[name], self._blame_from) + DIAL * heartbeat_s:
                self._try_other_way(name)
        for name in silent.keys() & self._linked.keys() & connected:
            since = max(silent[name], self._reported_at.get(name, 0.0), self._blame_from)
            if now > since + (LINK_DOWN if name in self._mailbox.watched else 1.0) * heartbeat_s:
                self._reported_at[name] = now
                report(name)

    def _try_other_way(self, name: str) -> None:
        """The peer does not answer: have it call back, or dial it again if it was to call back and has not."""
        address, _ = self._peers.get(name, ("", None))
        if address in ("", OUT_ONLY):
            return  # it is not there, or there is no other way
        other = address if self._linked[name] == OUT_ONLY else OUT_ONLY
        log.info("'%s' does not answer%s", name, "; it is asked to call back" if other == OUT_ONLY else "")
        self._link(name, other)
        self._broken_since.setdefault(name, time.monotonic())  # what was queued is gone

    def _link(self, name: str, address: str) -> None:
        self._mailbox.connect(name, address, self._peers[name][1])
        self._linked[name] = address
        self._dialled_at[name] = time.monotonic()

    def _unlink(self, name: str) -> None:
        self._mailbox.disconnect(name)
        self._linked.pop(name, None)
