"""Around every request: it gets a number and is counted, and whatever goes wrong becomes an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skippipe.serving.complaints import Complaint, our_fault
from skippipe.serving.receiving import Gone
from skippipe.serving.tally import Tally
from skippipe.serving.wording import event, json_bytes

log = logging.getLogger(__name__)
CLIENT_GONE = 499  # what nginx writes down for it; nobody is told
LAST_WORDS_S = 5.0  # for a client that does not read to hear why its stream ends
ENDPOINTS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")
MODEL = "/v1/models/"


class Bookkeeping:
    def __init__(self, app: ASGIApp, tally: Tally) -> None:
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
        except Gone:
            kept.status = CLIENT_GONE
        except Complaint as complaint:
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

    async def complain(self, complaint: Complaint, scope: Scope, receive: Receive) -> None:
        if not self.status:
            respond = Response(json_bytes(complaint.body), complaint.status, complaint.headers, "application/json")
            await respond(scope, receive, self.send)
            return
        self.status = complaint.status  # for the books: the client was told 200 and has heard a part of the answer
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._send({"type": "http.response.body", "body": event(complaint.body), "more_body": False})


def _endpoint(path: str) -> str:
    """A few names, whatever paths are tried."""
    if path in ENDPOINTS:
        return path
    return f"{MODEL}{{model}}" if path.startswith(MODEL) else "other"
