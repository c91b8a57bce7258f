"""Admission to a mailbox: the list of peers, and the answers to libzmq's requests to authenticate a connection.

libzmq asks over ZAP (rfc.zeromq.org/spec/27) once per connection, after the other side has proved that it holds the
secret half of its key. The answer names the public key as the connection's user, and the name that goes with it is
looked up again for every message: messages of a peer that is forbidden are refused at once, although its connection
still stands.

A fast path admits one connection with the name and password that were given to one peer under CURVE. An eavesdropper
who has read them off the wire comes too late, or keeps the peer out of that path; what it sends is not sealed and not
read.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence

from zmq.utils import z85

from skippipe.errors import UserError
from skippipe.transport.fast_path import PATH_DOMAIN
from skippipe.transport.keys import check_key

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"skippipe"  # with a domain set, libzmq admits no connection when there is no answer
ZAP_FRAMES = 6  # and then the credentials of the mechanism: a key, or a name and a password
KEY_BYTES = 32
SHOWN = 8  # characters of a stranger's key in a log

log = logging.getLogger(__name__)


class ZapAuth:
    """The list of peers: names and public keys; with security none, names alone."""

    def __init__(self) -> None:
        self._key_of: dict[str, str | None] = {}
        self._name_of: dict[str, str] = {}
        self._token_of: dict[bytes, bytes] = {}
        self.refused = 0
        """Connections and messages of senders that are not on the list, and forged frames."""
        self.last_refused = ""
        """First characters of the key, or the name, of the last one; or the peer whose fast path it was."""

    def allow(self, peer: str, public: str | None) -> None:
        if public is not None:
            check_key(public, f"key of '{peer}'")
            if self._name_of.get(public, peer) != peer:
                raise UserError(f"key of '{peer}': this is already the key of '{self._name_of[public]}'")
        self.forbid(peer)
        self._key_of[peer] = public
        if public is not None:
            self._name_of[public] = peer

    def forbid(self, peer: str) -> None:
        public = self._key_of.pop(peer, None)
        if public is not None:
            del self._name_of[public]

    def key_of(self, peer: str) -> str | None:
        return self._key_of.get(peer)

    def expect(self, path_id: bytes, token: bytes) -> None:
        """Admit one connection that knows both."""
        self._token_of[path_id] = token

    def expect_no_more(self, path_id: bytes) -> None:
        self._token_of.pop(path_id, None)

    def by_key(self, public: str) -> str | None:
        """Name of the peer with this key; None, and counted, where there is none."""
        peer = self._name_of.get(public)
        if peer is None:
            self.refuse(f"key {public[:SHOWN]}…")
        return peer

    def by_name(self, peer: str) -> str | None:
        if peer in self._key_of:
            return peer
        self.refuse(f"name {peer[:32]!a}")
        return None

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """The reply to a ZAP request: version, request id, status, text, user, metadata."""
        whole = [*request, *[b""] * (ZAP_FRAMES - len(request))]  # a request that is cut short gets an answer, too
        version, request_id, domain, _, _, mechanism, *credentials = whole  # without: address, routing id
        user = ""
        given = [len(credential) for credential in credentials]
        if version == b"1.0" and domain == ZAP_DOMAIN and mechanism == b"CURVE" and given == [KEY_BYTES]:
            public = z85.encode(credentials[0]).decode()
            user = public if self.by_key(public) is not None else ""
        elif version == b"1.0" and domain == PATH_DOMAIN and mechanism == b"PLAIN" and len(given) == 2:
            user = self._by_token(*credentials)
        else:
            self.refuse(f"mechanism {mechanism[:SHOWN]!a}")
        if user:
            return [b"1.0", request_id, b"200", b"OK", user.encode(), b""]
        return [b"1.0", request_id, b"400", b"not on the list", b"", b""]

    def _by_token(self, user: bytes, password: bytes) -> str:
        for path_id, token in self._token_of.items():
            if user == path_id.hex().encode() and hmac.compare_digest(password, token.hex().encode()):
                del self._token_of[path_id]
                return path_id.hex()
        self.refuse(f"fast path {user[:SHOWN].decode(errors='replace')!a}")
        return ""

    def refuse(self, who: str, why: str = "is not on the list") -> None:
        self.refused += 1
        self.last_refused = who
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th, …: a flood does not fill the log
            log.warning("refused: %s %s (%d so far)", who, why, self.refused)
