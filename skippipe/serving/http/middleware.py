"""Around every request: it gets a number and is counted, and whatever goes wrong becomes an answer.

Requests as they come in: read up to a limit, and answered only while somebody is there to hear it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skippipe.serving.http.metrics import Metrics
from skippipe.serving.http.response_schema import event, json_bytes
from skippipe.web.auth import ApiSettings
from skippipe.web.errors import APIError, our_fault, too_large

log = logging.getLogger(__name__)
CLIENT_GONE = 499  # what nginx writes down for it; nobody is told
CLOSE_S = 5.0  # for a client that does not read to hear why its stream ends
ENDPOINTS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")
MODEL = "/v1/models/"


class RequestMetrics:
    def __init__(self, app: ASGIApp, tally: Metrics) -> None:
        self._app = app
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        kept = _Kept(f"req_{uuid4().hex}", send)
        self._tally.in_flight += 1
        try:
            await self._app(scope, receive, kept.send)
        except ClientDisconnected:
            kept.status = CLIENT_GONE
        except APIError as complaint:
            await kept.complain(complaint, scope, receive)
        except Exception:
            log.exception("%s: %a %a failed", kept.request, scope["method"], scope["path"])
            await kept.complain(our_fault(kept.request), scope, receive)
        finally:
            self._tally.in_flight -= 1
            self._tally.answered(_endpoint(scope["path"]), kept.status or CLIENT_GONE, time.monotonic() - began_s)


class _Kept:
    """What is known of a request while it is answered."""

    def __init__(self, request: str, send: Send) -> None:
        self.request = request
        self.status = 0
        """0: there is no answer yet."""
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request
        await self._send(message)

    async def complain(self, complaint: APIError, scope: Scope, receive: Receive) -> None:
        if not self.status:
            respond = Response(json_bytes(complaint.body), complaint.status, complaint.headers, "application/json")
            await respond(scope, receive, self.send)
            return
        self.status = complaint.status  # for the books: the client was told 200 and has heard a part of the answer
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._send({"type": "http.response.body", "body": event(complaint.body), "more_body": False})


def _endpoint(path: str) -> str:
    """A few names, whatever paths are tried."""
    if path in ENDPOINTS:
        return path
    return f"{MODEL}{{model}}" if path.startswith(MODEL) else "other"


CLOSE = {"Connection": "close"}  # the rest of the request is not wanted
SWALLOWED = 8  # times the limit, up to which it is taken nevertheless: a client that still sends hears no answer


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


async def body(headers: Headers, receive: Receive, settings: ApiSettings) -> bytes:
    _check_kind(headers)
    length = headers.get("content-length", "")
    declared = int(length[:20]) if length.isdecimal() else 0
    if declared > SWALLOWED * settings.body_bytes:
        raise too_large(settings.body_bytes)
    late = APIError(
        408, f"the request was not here after {settings.body.total_seconds():g} s", "request_timeout", headers=CLOSE
    )
    async with within(settings.body, late):
        if declared > settings.body_bytes:
            await _swallow(receive)
            raise too_large(settings.body_bytes)
        return await _all(receive, settings.body_bytes)


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work; if the client is gone before it is done, the work is cancelled, and Gone."""
    doing, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnected
        doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


@asynccontextmanager
async def within(most: timedelta, late: APIError) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(most.total_seconds()) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise late from None


def _check_kind(headers: Headers) -> None:
    """A web page cannot send JSON to us from a visitor's browser without our leave, but it can send other types."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "requests have to be JSON: send the header 'Content-Type: application/json'"
        raise APIError(415, message, "unsupported_media_type", headers=CLOSE)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed requests are not read: send them without 'Content-Encoding'"
        raise APIError(415, message, "unsupported_media_type", headers=CLOSE)


async def _all(receive: Receive, most_bytes: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts += message.get("body", b"")
        if len(parts) > most_bytes:
            raise too_large(most_bytes)
        if not message.get("more_body", False):
            return bytes(parts)


async def _swallow(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
