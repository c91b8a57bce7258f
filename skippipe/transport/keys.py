"""Identities: CURVE key pairs, the file with a node's own, and the list of peers that may connect to it.

A public key is a node's identity; names are for people. Keys are written as 40 characters of Z85, as ZeroMQ does.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.json_fields import Fields, exists, json_text, read_as, write_bytes, write_text

KEY_FORMAT = "skippipe-key"
PEERS_FORMAT = "skippipe-peers"
VERSION = 1
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

    def to_json(self) -> dict[str, Any]:
        return {
            "format": KEY_FORMAT,
            "version": VERSION,
            "node": self.node,
            "public": self.keys.public,
            "secret": self.keys.secret,
            "coordinator": self.coordinator,
        }

    @classmethod
    def from_json(cls, value: Any) -> KeyFile:
        import zmq

        fields = Fields(value, "")
        fields.header(KEY_FORMAT, VERSION)
        node = fields.text("node")
        keys = KeyPair(check_key(fields.text("public"), "public"), check_key(fields.text("secret"), "secret"))
        if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
            raise UserError("public: this is not the public half of the secret key; make a new pair")
        known = fields.has("coordinator")
        coordinator = check_key(fields.text("coordinator"), "coordinator") if known else fields.take("coordinator")
        fields.close()
        return cls(node, keys, coordinator)

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


@dataclass(frozen=True)
class PeerList:
    """Peers that may connect to a node: name → public key."""

    peers: Mapping[str, str]

    def __post_init__(self) -> None:
        first: dict[str, str] = {}
        for name, public in self.peers.items():
            if not name or not name.isprintable() or name != name.strip():
                raise UserError(f"peers: {name!a} has odd white space or control characters; use a plain name")
            check_key(public, f"peers.{name}")
            if first.setdefault(public, name) != name:
                raise UserError(f"peers.{name}: the key is already that of '{first[public]}'; every node needs its own")

    def to_json(self) -> dict[str, Any]:
        return {"format": PEERS_FORMAT, "version": VERSION, "peers": dict(self.peers)}

    @classmethod
    def from_json(cls, value: Any) -> PeerList:
        fields = Fields(value, "")
        fields.header(PEERS_FORMAT, VERSION)
        entries = fields.take("peers")
        peers = Fields(entries, "peers")
        found = {name: peers.text(name) for name in entries}
        fields.close()
        return cls(found)

    @classmethod
    def load(cls, path: Path) -> PeerList:
        return read_as(cls.from_json, path)

    def save(self, path: Path) -> None:
        write_text(path, json_text(self.to_json()) + "\n")
