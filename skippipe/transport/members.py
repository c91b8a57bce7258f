"""The members of a cluster: who was invited, admitted, revoked, and when each was last seen.

All of it is in one file, `peers.json` in the cluster's folder, beside `coordinator.key`. It is changed under a lock and
replaced whole, and is on disk before anybody is told: a coordinator that is killed and restarted has admitted a node or
has not. `seen.json` beside it, which nothing depends on, has when each node was last heard of.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.json_fields import Fields, exists, fsync_path, json_text, read_as, write_text
from skippipe.node_names import check_name, check_names
from skippipe.transport.invitation import Invitation
from skippipe.transport.keys import (
    THE_COORDINATOR,
    IssuedInvitation,
    KeyFile,
    KeyPair,
    PeerList,
    RevokedKey,
)

KEY_FILE, PEERS_FILE, SEEN_FILE = "coordinator.key", "peers.json", "seen.json"
SEEN_FORMAT = "skippipe-seen"
LOCK_S = 10.0  # to wait for another process that changes the list
LOCK_RETRY_S = 0.05
MOST_ENDED = 1000  # invitations that are over and still remembered, to tell a second use from a stranger
SHOWN = 12  # characters of a key that people compare

Clock = Callable[[], float]


class NotAdmitted(UserError):
    """The reason why nobody is let in with this invitation."""


def fingerprint(public: str) -> str:
    """The first characters of a key: enough to tell keys apart, not a secret."""
    return public[:SHOWN]


@dataclass(frozen=True)
class MemberRow:
    """A line of `skippipe members`."""

    name: str
    state: str
    """member, invited, expired or revoked."""
    public: str = ""
    since_s: int = 0
    """When it was admitted, invited or revoked; 0: not known."""
    seen_s: int = 0
    """When the coordinator last heard of it; 0: never."""
    expires_s: int = 0
    """When the invitation expires; 0: it is none."""
    relay: bool = False
    """It is a relay, no node."""


class MemberStore:
    """A list of peers on disk, which several processes read and change."""

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        self.path = path
        self._clock = clock
        self._loaded: tuple[object, PeerList] | None = None

    @classmethod
    def of_folder(cls, folder: Path, clock: Clock = time.time) -> MemberStore:
        return cls(folder / PEERS_FILE, clock)

    def load(self) -> PeerList:
        return PeerList.load(self.path)

    def current(self) -> PeerList:
        """The list, read again if the file has changed since the last call."""
        stat = self.path.stat() if exists(self.path) else None
        version = (stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat else None
        loaded = self._loaded  # another thread may replace it meanwhile, by what it has read before
        if loaded is None or loaded[0] != version:
            loaded = self._loaded = version, self.load() if stat else PeerList({})
        return loaded[1]

    def change(self, work: Callable[[PeerList], PeerList]) -> PeerList:
        """Replace the list by what `work` makes of it, unless it raises; on disk when this returns."""
        with self._locked():
            before = self.load() if exists(self.path) else PeerList({})
            after = work(before)
            if after != before:
                after.save(self.path)
                for each in (self.path, self.path.parent):
                    fsync_path(each)
        return after

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{lock}: cannot be written: {error.strerror or error}") from None
        try:
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise UserError(f"{lock}: another process has held it for {LOCK_S:g} s; end that one") from None
                    time.sleep(LOCK_RETRY_S)  # flock has no deadline of its own
            yield
        finally:
            os.close(descriptor)

    # What changes the list

    def invite(
        self, name: str, coordinator: str, lasting_s: float, addresses: tuple[str, ...] = (), *, relay: bool = False
    ) -> Invitation:
        """A new invitation, of a node or of a relay; one that was open for the same name holds no more."""
        check_name(name, "--name")
        now_s = int(self._clock())
        made: list[Invitation] = []

        def work(known: PeerList) -> PeerList:
            if name == THE_COORDINATOR:
                raise UserError(f"--name {name}: is the coordinator's own; choose another")
            if name in known.peers:
                raise UserError(
                    f"--name {name}: is a member already, with the key {fingerprint(known.peers[name])}…; "
                    "choose another name, or revoke that one first"
                )
            others = [each for each in (*known.expected(now_s), *known.relays) if each != name]
            check_names({f"member '{each}'": each for each in others} | {"--name": name})
            where = addresses or known.addresses
            made[:] = [Invitation(name, coordinator, where, now_s + round(lasting_s))]
            issued = IssuedInvitation(name, made[0].keys.public, now_s, made[0].expires_s)
            ended = _ended(known.invitations, now_s, lambda each: each.name == name)
            relays = (*(each for each in known.relays if each != name), *([name] if relay else []))
            return replace(known, addresses=where, invitations=(*ended, issued), relays=relays)

        self.change(work)
        return made[0]

    def admit(self, invitation: str, public: str) -> str:
        """Admit a new key with the public half of an invitation's key pair; gives the name. NotAdmitted if it is not
        open, or was used by another key."""
        now_s, names = int(self._clock()), []

        def work(known: PeerList) -> PeerList:
            found = next((each for each in known.invitations if each.public == invitation), None)
            if found is None:
                raise NotAdmitted("this invitation is not known here; ask for a new one")
            names.append(found.name)
            if found.ended == "used" and found.used_by == public and known.peers.get(found.name) == public:
                return known  # it asks again, because it has not heard the answer
            if why := why_closed(found, now_s):
                raise NotAdmitted(why)
            if public in known.peers.values() or any(each.public == public for each in known.revoked):
                raise NotAdmitted("this key is known here already; a new node makes a new one")
            used = replace(found, ended="used", ended_s=now_s, used_by=public)
            return replace(
                known,
                peers={**known.peers, found.name: public},
                since_s={**known.since_s, found.name: now_s},
                invitations=tuple(used if each is found else each for each in known.invitations),
            )

        self.change(work)
        return names[0]

    def revoke(self, name: str) -> PeerList:
        """Shut out a member for good, and end its open invitations."""
        now_s = int(self._clock())

        def work(known: PeerList) -> PeerList:
            invited = any(each.name == name and each.is_open(now_s) for each in known.invitations)
            if name not in known.peers and not invited:
                names = ", ".join([*known.expected(now_s), *known.relays]) or "nobody"
                raise UserError(f"'{name}': is neither a member nor invited; there are: {names}")
            gone = known.peers.get(name)
            since_s = known.since_s.get(name, 0)
            return replace(
                known,
                peers={each: public for each, public in known.peers.items() if each != name},
                since_s={each: when for each, when in known.since_s.items() if each != name},
                invitations=tuple(_ended(known.invitations, now_s, lambda each: each.name == name)),
                revoked=(*known.revoked, *([RevokedKey(name, gone, since_s, now_s)] if gone else [])),
                relays=tuple(each for each in known.relays if each != name),
            )

        return self.change(work)

    # When nodes were seen

    def write_seen(self, seen_s: Mapping[str, float]) -> None:
        """Add to what is known; where the folder cannot be written, it is not known."""
        known = {**self.read_seen(), **{name: int(when) for name, when in seen_s.items()}}
        with suppress(UserError):
            value = {"format": SEEN_FORMAT, "version": 1, "seen_s": known}
            write_text(self.path.with_name(SEEN_FILE), json_text(value) + "\n")

    def read_seen(self) -> dict[str, int]:
        def parse(value: Any) -> dict[str, int]:
            fields = Fields(value, "")
            fields.header(SEEN_FORMAT, 1)
            entries = fields.take("seen_s")
            times = Fields(entries, "seen_s")
            return {name: times.integer(name) for name in entries}

        path = self.path.with_name(SEEN_FILE)
        try:
            return read_as(parse, path) if exists(path) else {}
        except UserError:
            return {}

    def rows(self) -> list[MemberRow]:
        """Everybody, members first; of invitations those that are not used, of each name the last."""
        known, seen, now_s = self.load(), self.read_seen(), self._clock()
        rows = [
            MemberRow(name, "member", public, known.since_s.get(name, 0), seen.get(name, 0), relay=name in known.relays)
            for name, public in known.peers.items()
        ]
        unused = {each.name: each for each in known.invitations if not each.ended and each.name not in known.peers}
        rows += [
            MemberRow(
                each.name,
                "invited" if each.is_open(now_s) else "expired",
                since_s=each.made_s,
                expires_s=each.expires_s,
                relay=each.name in known.relays,
            )
            for each in unused.values()
        ]
        return [*rows, *(MemberRow(each.name, "revoked", each.public, each.revoked_s) for each in known.revoked)]


def why_closed(invitation: IssuedInvitation, now_s: float) -> str:
    """Why nobody is admitted with it any more; empty if it is open."""
    name = invitation.name
    if invitation.ended == "used":
        return (
            f"the invitation of '{name}' was used at {when(invitation.ended_s)}; each admits one node, ask for another"
        )
    if invitation.ended:
        return f"the invitation of '{name}' was withdrawn at {when(invitation.ended_s)}; ask for a new one"
    if now_s >= invitation.expires_s:
        return f"the invitation of '{name}' has expired at {when(invitation.expires_s)}; ask for a new one"
    return ""


def when(seconds: float) -> str:
    """A moment for people, the same in every time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def parse_span(text: str, place: str) -> float:
    """Seconds: 90s, 30m, 24h, 7d."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if found is None or not int(found[1]):
        raise UserError(f"{place} {text}: expected a time such as 30m, 24h or 7d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def cluster_keys(folder: Path) -> KeyPair:
    """The coordinator's keys in a cluster's folder; made at the first time."""
    path = folder / KEY_FILE
    if not exists(path):
        if exists(folder / PEERS_FILE):
            raise UserError(f"{path}: no such file; the folder has {PEERS_FILE}, but not the coordinator's key")
        KeyFile(THE_COORDINATOR, KeyPair.new()).save(path)
    own = KeyFile.load(path)
    if own.coordinator is not None:
        raise UserError(f"{path}: this is the key of node '{own.node}', not of a coordinator")
    return own.keys


def _ended(
    known: tuple[IssuedInvitation, ...], now_s: int, which: Callable[[IssuedInvitation], bool]
) -> list[IssuedInvitation]:
    """The invitations, those among them that are not used withdrawn; of those that are over, only the newest stay."""
    found = [
        replace(each, ended="revoked", ended_s=now_s) if which(each) and not each.ended else each for each in known
    ]
    over = [each for each in found if not each.is_open(now_s)]
    forgotten = set(map(id, over[: max(0, len(over) - MOST_ENDED)]))
    return [each for each in found if id(each) not in forgotten]
