"""HTTP servers for clients that are not trusted: uvicorn's settings, bearer tokens, rate limits for each token, and
errors in the shape of OpenAI's."""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from skippipe.errors import UserError, require
from skippipe.transport.addresses import is_loopback

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI


RATE_LIMITED, SERVER_ERROR = 429, 500  # statuses
LARGE = 10**15  # larger numbers are not repeated in an error
MOST_SHOWN = 40  # characters of a text
EXTRA = "serve"
PURPOSE = "the HTTP interface"
DRAIN_S = 5  # for answers to be completed when the server is stopped, before they are cancelled
CLOSE_S = 10  # before connections are closed
MIN_TOKEN_CHARACTERS = 16  # failed attempts are not counted, so that guessing must be hopeless
MINUTE_S = 60.0


@dataclass(eq=False)
class APIError(Exception):
    """An error that the client is answered with."""

    status: int
    message: str
    """What is wrong and what to do, for people."""
    code: str
    """The kind of error, for programs."""
    param: str | None = None
    """The field of the request that is wrong."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        if self.status == RATE_LIMITED:
            return "requests"
        return "server_error" if self.status >= SERVER_ERROR else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """A request that is invalid because of one field, or as a whole."""
    return APIError(400, f"{param}: {message}" if param else message, code, param)


def no_such_model(requested: str, served: str) -> APIError:
    return APIError(
        404, f"model: '{short(requested)}' is not served here; ask for '{served}'", "model_not_found", "model"
    )


def too_long(param: str, context: int, prompt: int, answer: int) -> APIError:
    """A prompt beyond the context. The first words are OpenAI's: there are clients that look for them."""
    return wrong(
        param,
        f"This model's maximum context length is {context} tokens; this asks for {prompt + answer} "
        f"({prompt} in the prompt, {answer} for the answer): shorten the prompt or ask for a shorter answer",
        "context_length_exceeded",
    )


def unauthorized(message: str) -> APIError:
    return APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def too_large(max_bytes: int) -> APIError:
    """A body beyond the limit; the connection ends, as the rest of the body is not read."""
    message = f"the request has more than the {max_bytes:,} bytes that are taken here: send less at once"
    return APIError(413, message, "request_too_large", headers={"Connection": "close"})


def rate_limited(message: str, wait_s: float) -> APIError:
    return APIError(RATE_LIMITED, message, "rate_limit_exceeded", headers=_retry_after(wait_s))


def unavailable(reason: str, retry_after: timedelta) -> APIError:
    message = f"no answer can be given now: {reason}; try again later"
    return APIError(503, message, "unavailable", headers=_retry_after(retry_after.total_seconds()))


def timed_out(timeout: timedelta) -> APIError:
    """An answer beyond its deadline. OpenAI's clients would retry, which would take as long: the header forbids it."""
    message = f"the answer was not complete after {timeout.total_seconds():g} s: ask for a shorter one"
    return APIError(504, message, "timeout", headers={"x-should-retry": "false"})


def internal_error(request_id: str) -> APIError:
    message = f"the server failed; its operator finds the reason in its log under {request_id}"
    return APIError(500, message, "internal_error")


def found(value: Any) -> str:
    """A value of a request in few words, for an error."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the text '{short(value)}'"
        case int() | float():
            return f"the number {value}" if abs(value) < LARGE else "a number that is too large"
        case list():
            return "a list"
    return "an object"


def short(text: str) -> str:
    """A text of a request, shortened; characters that could play tricks on a terminal become spaces."""
    shown = "".join(each if each.isprintable() else " " for each in text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}…"


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}


def check_installed(*more: str) -> None:
    """UserError that says what to install."""
    for package in ("fastapi", "uvicorn", *more):
        require(package, EXTRA, PURPOSE)


def server(application: FastAPI, host: str, port: int, cancel: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server for the application's event loop: `await server(…).serve()` runs it, `should_exit = True` stops it.
    Ctrl-C and SIGTERM stop it, too, and then raise KeyboardInterrupt.

    Answers that are not complete then get `DRAIN_S`; after that `cancel` is called, which has to end them.
    """
    check_installed()
    import uvicorn

    class Server(uvicorn.Server):
        interrupted = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.interrupted = True
            super().handle_exit(sig, frame)

        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            await super().serve(sockets)
            # uvicorn raises the signal again; in the background of a script, a shell has SIGINT ignored from the start
            if self.interrupted:
                raise KeyboardInterrupt

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            deadline = asyncio.get_running_loop().call_later(DRAIN_S, cancel)
            await super().shutdown(sockets)
            deadline.cancel()

    return Server(
        uvicorn.Config(
            application,
            host=host,
            port=port,
            http="h11",  # strict about what a request is, and installed with uvicorn
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # malformed requests of strangers are not logged
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )


@dataclass(frozen=True)
class ApiSettings:
    """Access to an HTTP server and the limits of its requests."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Bearer tokens, any of which admits a request; without one every request is admitted, on loopback only."""
    loopback: bool = False
    """Is the server on a loopback address, out of reach for other machines?"""
    max_body_bytes: int = 2**20
    body_timeout: timedelta = timedelta(seconds=30)
    """Time for a request to arrive in full."""
    answer_timeout: timedelta = timedelta(minutes=10)
    """Time for all choices of a request to be complete."""
    max_tokens: int = 4096
    """Tokens of one choice at most; the model's context may allow less."""
    max_choices: int = 16
    """Choices of one request at most: prompts × n."""
    requests_per_minute: int = 600
    """Requests with one bearer token; unused ones add up to a minute's worth."""
    max_concurrent: int = 64
    """Requests with one bearer token that are answered at the same time."""
    retry_after: timedelta = timedelta(seconds=5)
    """Value of the Retry-After header where the queue is full or too few stages are left."""

    def __post_init__(self) -> None:
        if not self.tokens and not self.loopback:
            raise UserError("tokens: none, and others can reach the server: give one, or listen on 127.0.0.1")
        for token in self.tokens:  # which are secret: messages do not repeat them
            if not (token.isascii() and token.isprintable()) or " " in token:
                raise UserError(
                    "tokens: one has a space or a character that no header can carry; use letters and digits"
                )
            if len(token) < MIN_TOKEN_CHARACTERS:
                raise UserError(
                    f"tokens: one has {len(token)} characters; {MIN_TOKEN_CHARACTERS} or more are hard to guess"
                )
        for name in ("max_body_bytes", "max_tokens", "max_choices", "requests_per_minute", "max_concurrent"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} would let nothing through; 1 or more")
        for name in ("body_timeout", "answer_timeout", "retry_after"):
            if getattr(self, name) <= timedelta(0):
                raise UserError(f"{name}: {getattr(self, name).total_seconds():g} s; a time above 0")


class BearerAuth:
    """Checks the bearer token of a request."""

    def __init__(self, settings: ApiSettings) -> None:
        self._tokens = [_digest(token.encode()) for token in settings.tokens]

    def admit(self, authorization: str | None, host: str | None) -> int:
        """The number of the token that the headers of a request carry; APIError if there is none that is known."""
        if not self._tokens:
            _check_host(host)
            return 0
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise unauthorized("no token was given: send the header 'Authorization: Bearer TOKEN'")
        digest = _digest(given.strip().encode("latin-1"))  # the way in which headers are decoded
        same = [hmac.compare_digest(digest, token) for token in self._tokens]  # all of them, whichever it is
        if not any(same):
            raise unauthorized("this token is not known here: ask the server's operator for one")
        return same.index(True)


class RateLimiter:
    """Limits requests a minute and concurrent requests, for every bearer token by itself."""

    def __init__(self, settings: ApiSettings, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self._now_s = now_s
        self._buckets: dict[int, tuple[float, float]] = {}
        """Token → how full its leaky bucket is, in requests, and when that was so."""
        self._in_flight: Counter[int] = Counter()

    @contextmanager
    def admit(self, token: int) -> Iterator[None]:
        self._fill_bucket(token)
        if self._in_flight[token] >= self._settings.max_concurrent:
            raise rate_limited(
                f"{self._settings.max_concurrent} requests with this token are being answered, no more are taken at "
                "once: wait until one is done",
                1.0,
            )
        self._in_flight[token] += 1
        try:
            yield
        finally:
            self._in_flight[token] -= 1

    def _fill_bucket(self, token: int) -> None:
        most, now_s = self._settings.requests_per_minute, self._now_s()
        level, before_s = self._buckets.get(token, (0.0, now_s))
        level = max(0.0, level - (now_s - before_s) * most / MINUTE_S)
        over = level + 1 - most
        if over > 0:
            raise rate_limited(
                f"more than {most} requests a minute with this token: send fewer", over * MINUTE_S / most
            )
        self._buckets[token] = level + 1, now_s


def _check_host(host: str | None) -> None:
    """Against DNS rebinding: a web page can give its own name our address and then ask from a visitor's browser."""
    name = host or "localhost"
    if not name.endswith("]"):
        name = name.rpartition(":")[0] or name
    if not is_loopback(name.lower()):
        raise APIError(
            403,
            "without tokens only requests to localhost are answered: give the server a token to use another name",
            "host_not_allowed",
        )


def _digest(token: bytes) -> bytes:
    """A digest has one length, so that every comparison takes the same time."""
    return sha256(token).digest()
