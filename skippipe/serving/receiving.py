"""Requests as they come in: read up to a limit, and answered only while somebody is there to hear it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from skippipe.serving.complaints import Complaint, too_large
from skippipe.serving.limits import ApiSettings

CLOSE = {"Connection": "close"}  # the rest of the request is not wanted
SWALLOWED = 8  # times the limit, up to which it is taken nevertheless: a client that still sends hears no answer


class Gone(Exception):
    """Nobody waits for the answer any more."""


async def body(headers: Headers, receive: Receive, settings: ApiSettings) -> bytes:
    _check_kind(headers)
    length = headers.get("content-length", "")
    declared = int(length[:20]) if length.isdecimal() else 0
    if declared > SWALLOWED * settings.body_bytes:
        raise too_large(settings.body_bytes)
    late = Complaint(
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
            raise Gone
        doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


@asynccontextmanager
async def within(most: timedelta, late: Complaint) -> AsyncIterator[None]:
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
        raise Complaint(415, message, "unsupported_media_type", headers=CLOSE)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed requests are not read: send them without 'Content-Encoding'"
        raise Complaint(415, message, "unsupported_media_type", headers=CLOSE)


async def _all(receive: Receive, most_bytes: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
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
