"""An invitation: one string that admits one new node to a cluster.

It has the coordinator's addresses and public key, the name of the new node, an expiry and a one-time token. From the
token follows a key pair that is good for enrolment only: the new node proves with it that it was invited, and the
token itself never travels. The coordinator stores the public half, from which nobody can tell the token.

The bytes, all numbers big-endian: version (1), expiry (Unix, 4 bytes), public key (32), token (16), name (length and
UTF-8), number of addresses, each a kind (4, 6 or 0 for a host name), the address (4 bytes, 16, or length and ASCII) and
a port (2); last the first 4 bytes of the SHA-256 of all that. The string is `skippipe:` and these bytes in base64url
without padding.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from ipaddress import ip_address

import zmq
from zmq.utils import z85

from skippipe.errors import UserError
from skippipe.node_names import check_name
from skippipe.transport.addresses import MOST_ADDRESSES, join_address, split_address
from skippipe.transport.keys import KeyPair

PREFIX = "skippipe:"
VERSION = 1
TOKEN_BYTES, KEY_BYTES, CHECKSUM_BYTES = 16, 32, 4
MOST_CHARACTERS = 1024
LATEST_S = 2**32 - 1
HOST_NAME = re.compile(r"[0-9A-Za-z]([0-9A-Za-z._-]{0,251}[0-9A-Za-z])?")
AGAIN = "copy the whole string again, or ask for a new one"


@dataclass(frozen=True)
class Invitation:
    name: str
    """Name of the node that is invited."""
    coordinator: str
    """The coordinator's public key."""
    addresses: tuple[str, ...]
    """host:port of the coordinator, of one kind or of both (IPv4, IPv6)."""
    expires_s: int
    """Unix seconds, by the coordinator's clock."""
    token: bytes = field(repr=False, default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        if not 0 < len(self.addresses) <= MOST_ADDRESSES:
            raise UserError(f"an invitation has 1 to {MOST_ADDRESSES} addresses of the coordinator")
        if not 0 <= self.expires_s <= LATEST_S:
            raise UserError("an invitation cannot hold for so long; give a shorter time")
        for address in self.addresses:
            _pack_address(address)

    @property
    def keys(self) -> KeyPair:
        """The key pair that follows from the token: it is good for enrolment, and for nothing else."""
        secret = hashlib.sha256(b"skippipe invitation" + z85.decode(self.coordinator.encode()) + self.token).digest()
        text = z85.encode(secret)
        return KeyPair(zmq.curve_public(text).decode(), text.decode())

    def to_text(self) -> str:
        name = self.name.encode()
        whole = b"".join(
            (
                bytes([VERSION]),
                self.expires_s.to_bytes(4),
                z85.decode(self.coordinator.encode()),
                self.token,
                bytes([len(name)]) + name,
                bytes([len(self.addresses)]),
                *map(_pack_address, self.addresses),
            )
        )
        return PREFIX + urlsafe_b64encode(whole + _checksum(whole)).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Invitation:
        """UserError for anything but a whole invitation; white space, as mail programs add it, does not matter."""
        words = "".join(text[: 2 * MOST_CHARACTERS].split())
        if not words.startswith(PREFIX):
            raise UserError(f"an invitation begins with '{PREFIX}'; {AGAIN}")
        if len(words) > MOST_CHARACTERS:
            raise UserError(f"the invitation has more than {MOST_CHARACTERS} characters; {AGAIN}")
        encoded = words.removeprefix(PREFIX)
        try:
            whole = urlsafe_b64decode(encoded.encode("ascii") + b"=" * (-len(encoded) % 4))
        except ValueError:  # of base64, and of characters that are not ASCII
            raise UserError(f"the invitation is damaged; {AGAIN}") from None
        content, checksum = whole[:-CHECKSUM_BYTES], whole[-CHECKSUM_BYTES:]
        if not content or checksum != _checksum(content):
            raise UserError(f"the invitation is damaged or cut off; {AGAIN}")
        if content[0] != VERSION:
            raise UserError(
                f"the invitation has version {content[0]}, and this release reads {VERSION}; update skippipe"
            )
        found = _read(content)
        if found.to_text() != words:
            raise UserError(f"the invitation is not as 'skippipe invite' writes it; {AGAIN}")
        return found


def is_invitation(text: str) -> bool:
    return text.lstrip().startswith(PREFIX)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:CHECKSUM_BYTES]


class _Bytes:
    """Bytes that are taken from the front; UserError when there are too few."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def take(self, count: int) -> bytes:
        if len(self._content) < count:
            raise UserError(f"the invitation ends too early; {AGAIN}")
        found, self._content = self._content[:count], self._content[count:]
        return found

    def number(self, count: int = 1) -> int:
        return int.from_bytes(self.take(count))

    def text(self) -> str:
        try:
            return self.take(self.number()).decode()
        except UnicodeDecodeError:
            raise UserError(f"the invitation has a name that is no text; {AGAIN}") from None

    @property
    def is_empty(self) -> bool:
        return not self._content


def _read(content: bytes) -> Invitation:
    parts = _Bytes(content[1:])
    expires_s, public, token = parts.number(4), parts.take(KEY_BYTES), parts.take(TOKEN_BYTES)
    name = parts.text()
    addresses = [_read_address(parts) for _ in range(parts.number())]
    if not parts.is_empty:
        raise UserError(f"the invitation has bytes that mean nothing; {AGAIN}")
    return Invitation(name, z85.encode(public).decode(), tuple(addresses), expires_s, token)


def _pack_address(address: str) -> bytes:
    host, port = split_address(address)
    if not port:
        raise UserError(f"{address}: name the port at which the coordinator listens")
    try:
        packed: bytes = ip_address(host).packed
        return bytes([4 if len(packed) == 4 else 6]) + packed + port.to_bytes(2)
    except ValueError:
        if not HOST_NAME.fullmatch(host):
            raise UserError(f"{address!a}: neither an address nor the name of a machine") from None
        return bytes([0, len(host)]) + host.encode() + port.to_bytes(2)


def _read_address(parts: _Bytes) -> str:
    kind = parts.number()
    if kind in (4, 6):
        host = str(ip_address(parts.take(4 if kind == 4 else 16)))
    elif kind == 0:
        host = parts.text()
    else:
        raise UserError(f"the invitation has an address of a kind that is not known ({kind}); update skippipe")
    return join_address(host, parts.number(2))


def split_addresses(text: str, place: str) -> tuple[str, ...]:
    """Addresses with commas between them, as an invitation can carry them, none twice."""
    try:
        found = [_read_address(_Bytes(_pack_address(each.strip()))) for each in text.split(",")]
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return tuple(dict.fromkeys(found))
