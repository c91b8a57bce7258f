"""Identities: CURVE key pairs, the file with a node's own, and the list of peers that may connect to it.

A public key is a node's identity; names are for people. Keys are written as 40 characters of Z85, as ZeroMQ does.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from skippipe.errors import UserError
from skippipe.json_fields import Fields, exists, json_text, read_as, write_bytes, write_text
from skippipe.node_names import check_name, check_names

KEY_FORMAT = "skippipe-key"
PEERS_FORMAT = "skippipe-peers"
THE_COORDINATOR = "coordinator"  # what the coordinator is called among peers; no node has this name
Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def check_key(text: str, place: str) -> str:
    if not Z85_KEY.fullmatch(text):
        raise UserError(f"{place}: a key has 40 characters of Z85, found {len(text)} characters; copy it again")
    return text


@dataclass(frozen=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True)
class KeyFile:
    """A node's own key pair, which is secret, and the coordinator that it trusts from the start."""

    node: str
    keys: KeyPair
    coordinator: str | None = None
    """Public key of the coordinator; none in the coordinator's own file."""
    addresses: tuple[str, ...] = ()
    """host:port of the coordinator, if the node was invited; else it has to be told."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of `skippipe node` or `relay` that were given with the invitation, for the next time."""

    def to_json(self) -> dict[str, Any]:
        known: dict[str, Any] = {"addresses": list(self.addresses)} if self.addresses else {}
        if self.options:
            known = {"addresses": list(self.addresses), "options": dict(self.options)}
        return {
            "format": KEY_FORMAT,
            "version": 1 + len(known),
            "node": self.node,
            "public": self.keys.public,
            "secret": self.keys.secret,
            "coordinator": self.coordinator,
            **known,
        }

    @classmethod
    def from_json(cls, value: Any) -> KeyFile:
        import zmq

        fields = Fields(value, "")
        version = fields.header(KEY_FORMAT, 1, 2, 3)
        node = fields.text("node")
        keys = KeyPair(check_key(fields.text("public"), "public"), check_key(fields.text("secret"), "secret"))
        if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
            raise UserError("public: this is not the public half of the secret key; make a new pair")
        known = fields.has("coordinator")
        coordinator = check_key(fields.text("coordinator"), "coordinator") if known else fields.take("coordinator")
        addresses = texts(fields, "addresses") if version > 1 else ()
        options = Fields(fields.take("options"), "options").rest() if version > 2 else {}
        if not all(isinstance(each, str) for each in options.values()):
            raise UserError("options: expected texts only")
        fields.close()
        return cls(node, keys, coordinator, addresses, options)

    @classmethod
    def load(cls, path: Path) -> KeyFile:
        """Read the file, unless other users can as well: then the key is no secret any more."""
        if exists(path) and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            raise UserError(
                f"{path}: mode {mode:o} lets others at the secret key; run: chmod 600 {shlex.quote(str(path))}"
            )
        return read_as(cls.from_json, path)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all, readable by its owner only from the first byte on."""
        write_bytes(path, (json_text(self.to_json()) + "\n").encode(), private=True)


def texts(fields: Fields, name: str) -> tuple[str, ...]:
    found = fields.items(name)
    if not all(isinstance(each, str) for each in found):
        raise UserError(f"{fields.at(name)}: expected texts only")
    return tuple(found)


@dataclass(frozen=True)
class IssuedInvitation:
    """An invitation as the coordinator knows it: without its token."""

    name: str
    public: str
    """Public half of the key pair that follows from the token."""
    made_s: int
    expires_s: int
    ended: Literal["", "used", "revoked"] = ""
    ended_s: int = 0
    used_by: str = ""
    """Public key that was admitted with it."""

    def is_open(self, now_s: float) -> bool:
        return not self.ended and now_s < self.expires_s

    @classmethod
    def from_fields(cls, fields: Fields) -> IssuedInvitation:
        name = check_name(fields.text("name"), fields.at("name"))
        public = check_key(fields.text("public"), fields.at("public"))
        made_s, expires_s = fields.integer("made_s"), fields.integer("expires_s")
        ended = cast(Literal["", "used", "revoked"], fields.take("ended"))
        if ended not in ("", "used", "revoked"):
            raise UserError(f"{fields.at('ended')}: '{ended}' is none of used, revoked and nothing")
        ended_s, used_by = fields.integer("ended_s"), str(fields.take("used_by"))
        fields.close()
        return cls(name, public, made_s, expires_s, ended, ended_s, used_by)


@dataclass(frozen=True)
class RevokedKey:
    """A key that was shut out, for good."""

    name: str
    public: str
    since_s: int
    revoked_s: int

    @classmethod
    def from_fields(cls, fields: Fields) -> RevokedKey:
        name, public = fields.text("name"), check_key(fields.text("public"), fields.at("public"))
        found = cls(name, public, fields.integer("since_s"), fields.integer("revoked_s"))
        fields.close()
        return found


@dataclass(frozen=True)
class PeerList:
    """Peers that may connect to a node: name → public key. And, of a cluster to which nodes are invited: who was
    invited, who was admitted when, and whose key was revoked."""

    peers: Mapping[str, str]
    since_s: Mapping[str, int] = field(default_factory=dict)
    """Peers that were admitted by an invitation → when."""
    addresses: tuple[str, ...] = ()
    """host:port of the coordinator, for invitations."""
    invitations: tuple[IssuedInvitation, ...] = ()
    revoked: tuple[RevokedKey, ...] = ()
    relays: tuple[str, ...] = ()
    """Names, of those who were invited or admitted, that are relays and no nodes."""

    def __post_init__(self) -> None:
        check_names({f"peers.{check_name(name, 'peers')}": name for name in self.peers})
        first: dict[str, str] = {}
        shut_out = {each.public for each in self.revoked}
        for name, public in self.peers.items():
            check_key(public, f"peers.{name}")
            if first.setdefault(public, name) != name:
                raise UserError(f"peers.{name}: the key is already that of '{first[public]}'; every node needs its own")
            if public in shut_out:
                raise UserError(f"peers.{name}: this key was revoked, and cannot come back; invite the node anew")

    def expected(self, now_s: float) -> list[str]:
        """Names of nodes that have a key or an open invitation."""
        found = dict.fromkeys([*self.peers, *(each.name for each in self.invitations if each.is_open(now_s))])
        return [name for name in found if name not in self.relays]

    def to_json(self) -> dict[str, Any]:
        more = {
            "since_s": dict(self.since_s),
            "addresses": list(self.addresses),
            "invitations": [asdict(each) for each in self.invitations],
            "revoked": [asdict(each) for each in self.revoked],
            **({"relays": list(self.relays)} if self.relays else {}),
        }
        used = any(more.values())
        return {
            "format": PEERS_FORMAT,
            "version": 2 if used else 1,
            "peers": dict(self.peers),
            **(more if used else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> PeerList:
        fields = Fields(value, "")
        version = fields.header(PEERS_FORMAT, 1, 2)
        entries = fields.take("peers")
        peers = Fields(entries, "peers")
        found = {name: peers.text(name) for name in entries}
        if version == 1:
            fields.close()
            return cls(found)
        since = fields.take("since_s")
        times = Fields(since, "since_s")
        known = cls(
            found,
            {name: times.integer(name) for name in since},
            texts(fields, "addresses"),
            tuple(map(IssuedInvitation.from_fields, fields.objects("invitations"))),
            tuple(map(RevokedKey.from_fields, fields.objects("revoked"))),
            texts(fields, "relays") if fields.mentions("relays") else (),
        )
        fields.close()
        return known

    @classmethod
    def load(cls, path: Path) -> PeerList:
        return read_as(cls.from_json, path)

    def save(self, path: Path) -> None:
        write_text(path, json_text(self.to_json()) + "\n")
