"""Who may ask, how much at once and how often."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256

from skippipe.errors import UserError
from skippipe.transport.addresses import is_loopback
from skippipe.web.errors import APIError, not_let_in, too_often

SHORTEST_TOKEN = 16  # characters; wrong ones are not counted, so that they must be too many to try
MINUTE_S = 60.0


@dataclass(frozen=True)
class ApiSettings:
    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Any of them lets a request in (`Authorization: Bearer …`); none: everybody may ask, on loopback only."""
    loopback: bool = False
    """Is the server on a loopback address? Nobody else can reach it then."""
    body_bytes: int = 2**20
    """Of a request, at most."""
    body: timedelta = timedelta(seconds=30)
    """In which the request has to be here."""
    answer: timedelta = timedelta(minutes=10)
    """In which all of its answers have to be complete."""
    answer_tokens: int = 4096
    """Of one answer, at most; the model's context may allow less."""
    answers: int = 16
    """To one request, at most: prompts × n."""
    requests_a_minute: int = 600
    """With one token; unused ones add up to a minute's worth."""
    at_once: int = 64
    """Requests with one token that are being answered."""
    retry: timedelta = timedelta(seconds=5)
    """When to come back, for those who are told that too many wait or too few stages are left."""

    def __post_init__(self) -> None:
        if not self.tokens and not self.loopback:
            raise UserError("tokens: none, and others can reach the server: give one, or listen on 127.0.0.1")
        for token in self.tokens:  # which are secret: messages do not repeat them
            if not (token.isascii() and token.isprintable()) or " " in token:
                raise UserError(
                    "tokens: one has a space or a character that no header can carry; use letters and digits"
                )
            if len(token) < SHORTEST_TOKEN:
                raise UserError(f"tokens: one has {len(token)} characters; {SHORTEST_TOKEN} or more are hard to guess")
        for name in ("body_bytes", "answer_tokens", "answers", "requests_a_minute", "at_once"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} would let nothing through; 1 or more")
        for name in ("body", "answer", "retry"):
            if getattr(self, name) <= timedelta(0):
                raise UserError(f"{name}: {getattr(self, name).total_seconds():g} s; a time above 0")


class BearerAuth:
    """Tells whose request it is."""

    def __init__(self, settings: ApiSettings) -> None:
        self._tokens = [_hashed(token.encode()) for token in settings.tokens]

    def admit(self, authorization: str | None, host: str | None) -> int:
        """The number of its token, from the headers of a request."""
        if not self._tokens:
            _check_host(host)
            return 0
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise not_let_in("no token was given: send the header 'Authorization: Bearer TOKEN'")
        hashed = _hashed(given.strip().encode("latin-1"))  # the way in which headers are decoded
        same = [hmac.compare_digest(hashed, token) for token in self._tokens]  # all of them, whichever it is
        if not any(same):
            raise not_let_in("this token is not known here: ask whoever runs the server for one")
        return same.index(True)


class RateLimiter:
    """Lets requests pass, so many a minute and so many at once for every token."""

    def __init__(self, settings: ApiSettings, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self._now_s = now_s
        self._spent: dict[int, tuple[float, float]] = {}
        """Token → how many requests it would have to wait for to be as good as new, and at what time."""
        self._inside: Counter[int] = Counter()

    @contextmanager
    def passing(self, token: int) -> Iterator[None]:
        self._spend(token)
        if self._inside[token] >= self._settings.at_once:
            raise too_often(
                f"{self._settings.at_once} requests with this token are being answered, no more are taken at once: "
                "wait until one is done",
                1.0,
            )
        self._inside[token] += 1
        try:
            yield
        finally:
            self._inside[token] -= 1

    def _spend(self, token: int) -> None:
        most, now_s = self._settings.requests_a_minute, self._now_s()
        spent, before_s = self._spent.get(token, (0.0, now_s))
        spent = max(0.0, spent - (now_s - before_s) * most / MINUTE_S)
        over = spent + 1 - most
        if over > 0:
            raise too_often(f"more than {most} requests a minute with this token: send fewer", over * MINUTE_S / most)
        self._spent[token] = spent + 1, now_s


def _check_host(host: str | None) -> None:
    """A web page can give its own name our address and then ask from a visitor's browser (DNS rebinding)."""
    name = host or "localhost"
    if not name.endswith("]"):
        name = name.rpartition(":")[0] or name
    if not is_loopback(name.lower()):
        raise APIError(
            403,
            "without tokens only requests to localhost are answered: give the server a token to use another name",
            "host_not_allowed",
        )


def _hashed(token: bytes) -> bytes:
    """All of one length, so that comparing takes the same time for all."""
    return sha256(token).digest()
