"""Where the page listens, who may look, and how it begins and ends."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe.errors import UserError
from skippipe.optional_deps import require

if TYPE_CHECKING:
    from skippipe.web.auth import ApiSettings

TOKEN = "SKIPPIPE_DASHBOARD_TOKEN"
USUAL_HOST = "127.0.0.1"
BACKLOG = 128


def check_installed() -> None:
    """UserError that says what to install."""
    for package, extra in (("fastapi", "serve"), ("uvicorn", "serve"), ("zmq", "train")):
        require(package, extra, "the dashboard")


def place(asked: str, option: str) -> tuple[str, int]:
    """Host and port from `[HOST:]PORT`."""
    from skippipe.transport.addresses import split_address

    try:
        return split_address(asked if ":" in asked else f"{USUAL_HOST}:{asked}")
    except UserError:
        raise UserError(f"{option} {asked}: expected a port, or host:port, such as 127.0.0.1:8090") from None


def who_may_look(host: str) -> ApiSettings:
    """Everybody on this machine; whoever knows the token, if there is one. Others only with a token."""
    from skippipe.transport.addresses import is_loopback
    from skippipe.web.auth import ApiSettings

    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(host):
        raise UserError(
            f"{host}: others can reach that address: put a token of 16 characters or more into {TOKEN}, which browsers "
            "ask for as a password, or listen on 127.0.0.1"
        )
    return ApiSettings(tokens=(token,) if token else (), loopback=is_loopback(host))


def listening(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"{option} {host}:{port}: cannot listen there: {error.strerror or error}; choose another port, or 0 for any"
        ) from None


def address(listens: socket.socket) -> str:
    from skippipe.transport.addresses import join_address

    host, port = listens.getsockname()[:2]
    return f"http://{join_address(host, port)}/"


def run(
    folder: Path, listens: socket.socket, settings: ApiSettings, since: float = 0.0, *, owned: bool = False
) -> None:
    """Until somebody stops it; if it is `owned`, until standard input ends."""
    from skippipe.dashboard.panels import Panels
    from skippipe.dashboard.routes import application
    from skippipe.dashboard.run_state import RunFollower
    from skippipe.web import server as web_server

    def stop() -> None:
        server.should_exit = True

    async def serve() -> None:
        if owned:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop)
        await server.serve([listens])

    app = application(Panels(RunFollower(folder, since)), settings, over=lambda: server.should_exit)
    host, port = listens.getsockname()[:2]
    server = web_server.server(app, host, port)
    asyncio.run(serve())
