"""Frames sealed with AES-256-GCM, one after the other.

Both ends count the frames. The count is the nonce and does not travel, so a frame that was altered, repeated, left
out or moved does not open, and no nonce is used twice: the sender makes the key, with its `Sealer`, and no other
seals with it. After RENEWED_AFTER frames both ends replace the key by its hash: GCM's bounds hold for as long as a run
may last, and a key that leaks does not open what came before.

The sealing is done by the `cryptography` package, which lets other threads run meanwhile; without it, AVAILABLE is
False and nothing else here may be used.
"""

from __future__ import annotations

import hashlib
import secrets

from skippipe.codecs import Buffer

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = hasattr(AESGCM, "decrypt_into")  # older releases lack it

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
RENEWED_AFTER = 2**18  # frames; 64 GiB where all of them are full


class Forged(Exception):
    """A frame that is not the next one its sender sealed."""


class _Counted:
    """The key and the nonce of the next frame."""

    def __init__(self, key: bytes, between: bytes) -> None:
        """`between` names sender and receiver; every frame is bound to it."""
        self._key = key
        self._between = between
        self._cipher = AESGCM(key)
        self._count = 0

    def _next_nonce(self) -> bytes:
        if self._count and self._count % RENEWED_AFTER == 0:
            self._key = hashlib.sha256(b"skippipe, the next key of a lane" + self._key).digest()
            self._cipher = AESGCM(self._key)
        nonce = self._count.to_bytes(NONCE_BYTES, "little")
        self._count += 1
        return nonce


class Sealer(_Counted):
    """The sender's end: encrypts frames."""

    def __init__(self, between: bytes) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        """The first key, for the other end."""
        super().__init__(self.key, between)

    def seal(self, plain: Buffer, bound: bytes = b"") -> bytes:
        """The frame, TAG_BYTES longer than `plain`; it opens only together with the same `bound`."""
        nonce = self._next_nonce()
        return self._cipher.encrypt(nonce, plain, self._between + bound)


class Opener(_Counted):
    """The receiver's end: decrypts frames, each of which must be the next one."""

    def open_into(self, sealed: Buffer, into: bytearray | memoryview, bound: bytes = b"") -> None:
        """Decrypt into `into`, which has the size of what was sealed. After the first Forged no other frame opens."""
        nonce = self._next_nonce()
        if len(sealed) != len(into) + TAG_BYTES:
            raise Forged(f"a frame of {len(sealed)} bytes instead of {len(into) + TAG_BYTES}")
        try:
            self._cipher.decrypt_into(nonce, sealed, self._between + bound, into)
        except InvalidTag:
            raise Forged("a frame that its sender did not seal, or not as the next one") from None
