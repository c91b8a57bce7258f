"""The page over HTTP: `/`, its panels as JSON (`/state`), and a stream of those that change (`/stream`).

Only GET, only the files that are named here, no cookies, nothing that could be changed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.resources import files

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skippipe import __version__
from skippipe.dashboard.run_state import Panels
from skippipe.web import APIError, ApiSettings, BearerAuth

POLL_S = 0.5  # between two polls of the files: no system reports changes on all kinds of disks
KEEPALIVE_S = 10.0  # or a proxy takes the stream for dead
MOST_STREAMS = 64
SCRIPTS = ("dashboard.js", "dashboard-map.js", "dashboard-words.js", "dashboard-charts.js")
ASSETS = {
    "": ("dashboard.html", "text/html; charset=utf-8"),
    "dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    **{name: (name, "text/javascript; charset=utf-8") for name in SCRIPTS},
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def application(page: Panels, settings: ApiSettings, stopping: Callable[[], bool] = lambda: False) -> FastAPI:
    """The dashboard as an ASGI application; streams end when `stopping` is true."""
    shared = PanelStream(page, stopping)
    return FastAPI(
        title="SkipPipe",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
        routes=[
            *(Route(f"/{path}", partial(asset, *named)) for path, named in ASSETS.items()),
            Route("/state", shared.state),
            Route("/stream", shared.stream),
        ],
        middleware=[Middleware(AuthMiddleware, settings=settings)],
    )


async def asset(name: str, kind: str, _request: Request) -> Response:
    return Response(files("skippipe.dashboard").joinpath("static", name).read_bytes(), media_type=kind)


class PanelStream:
    """Polls the run while a browser is connected, once for all of them, and streams panels that change."""

    def __init__(self, page: Panels, stopping: Callable[[], bool]) -> None:
        self._page = page
        self._stopping = stopping
        self._polling = asyncio.Lock()
        self._polled_s = -POLL_S
        self._streams = 0

    async def state(self, _request: Request) -> Response:
        await self._poll()
        body = ", ".join(f'"{name}": {text}' for name, text in self._page.texts.items())
        return Response(f"{{{body}}}", media_type="application/json")

    async def stream(self, _request: Request) -> Response:
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse(f"{MOST_STREAMS} pages are open already\n", 503, {"Retry-After": "30"})
        return StreamingResponse(self._changes(), headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        """Every panel, and then those that are no longer what was sent."""
        sent: dict[str, str] = {}
        sent_s = time.monotonic()
        self._streams += 1
        try:
            yield b"retry: 1000\n\n"
            while not self._stopping():
                more = await self._poll()
                for name, text in list(self._page.texts.items()):
                    if sent.get(name) is not text:
                        sent[name], sent_s = text, time.monotonic()
                        yield f"event: {name}\ndata: {text}\n\n".encode()
                if time.monotonic() - sent_s > KEEPALIVE_S:
                    sent_s = time.monotonic()
                    yield b": here\n\n"
                await asyncio.sleep(0 if more else POLL_S)
        finally:
            self._streams -= 1

    async def _poll(self) -> bool:
        """Poll on another thread, so that a large plan does not delay other requests."""
        async with self._polling:
            if time.monotonic() - self._polled_s < POLL_S / 2:
                return False
            more = await asyncio.to_thread(self._page.poll)
            self._polled_s = -POLL_S if more else time.monotonic()
            return more


class AuthMiddleware:
    """Checks the token, and forbids browsers all but showing the page itself."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._auth = BearerAuth(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        try:
            self._auth.admit(bearer(headers.get("authorization")), headers.get("host"))
        except APIError as error:
            login = {"WWW-Authenticate": 'Basic realm="SkipPipe: any name, the token as password"'}
            return PlainTextResponse(f"{error.message}\n", error.status, login if error.status == 401 else None)
        if method != "GET":
            return PlainTextResponse("this page is read-only\n", 405, {"Allow": "GET"})
        return None


def bearer(authorization: str | None) -> str | None:
    """Browsers ask for a name and a password: the password is the token."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        token = base64.b64decode(given.strip(), validate=True).decode("latin-1").partition(":")[2]
    except (binascii.Error, ValueError):
        return None
    return f"Bearer {token}"
