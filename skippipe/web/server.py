"""The HTTP interface that OpenAI's clients know, in front of whoever answers (see docs/serving-api.md).

complaints    answers that are errors
limits        who may ask, how much at once and how often
fields        the JSON object that a request is
asking        what it asks for
wording       what clients are told
tally         what is counted
receiving     requests are read up to a limit, and answered while somebody is there
bookkeeping   every request is counted, and whatever goes wrong becomes an answer
endpoints     all of it, at its addresses
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from skippipe.optional_deps import require

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI


EXTRA = "serve"
PURPOSE = "the HTTP interface"
DRAIN_S = 5  # that answers get to be completed when the server is stopped, before they are given up
CLOSE_S = 10  # and before connections are cut


def check_installed() -> None:
    """UserError that says what to install."""
    for package in ("fastapi", "uvicorn"):
        require(package, EXTRA, PURPOSE)


def server(application: FastAPI, host: str, port: int, give_up: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """To be run in the event loop of whoever answers: `await server(…).serve()`; `should_exit = True` stops it.

    Answers that are not complete by then get a while; then `give_up` is called, which has to end them.
    """
    check_installed()
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            giving_up = asyncio.get_running_loop().call_later(DRAIN_S, give_up)
            await super().shutdown(sockets)
            giving_up.cancel()

    return Server(
        uvicorn.Config(
            application,
            host=host,
            port=port,
            http="h11",  # strict about what a request is, and there wherever uvicorn is
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what strangers send is their affair
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
