"""A uvicorn server for an ASGI application, with settings for clients that are not trusted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from skippipe.errors import require

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI


EXTRA = "serve"
PURPOSE = "the HTTP interface"
DRAIN_S = 5  # for answers to be completed when the server is stopped, before they are cancelled
CLOSE_S = 10  # before connections are closed


def check_installed(*more: str) -> None:
    """UserError that says what to install."""
    for package in ("fastapi", "uvicorn", *more):
        require(package, EXTRA, PURPOSE)


def server(application: FastAPI, host: str, port: int, cancel: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server for the application's event loop: `await server(…).serve()` runs it, `should_exit = True` stops it.

    Answers that are not complete then get `DRAIN_S`; after that `cancel` is called, which has to end them.
    """
    check_installed()
    import uvicorn

    class Server(uvicorn.Server):
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
