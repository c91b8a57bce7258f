"""Where the dashboard listens, who has access, and how it starts and stops; alone or beside `skippipe train`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe.errors import UserError, require

if TYPE_CHECKING:
    from skippipe.web import ApiSettings

TOKEN = "SKIPPIPE_DASHBOARD_TOKEN"
DEFAULT_HOST = "127.0.0.1"
BACKLOG = 128
OPTION = "--dashboard"  # of `skippipe train`
PRIORITY = 10  # nice: the side process gets what training leaves
END_TIMEOUT_S = 5.0  # within which the side process ends by itself


def check_installed() -> None:
    """UserError that says what to install."""
    for package, extra in (("fastapi", "serve"), ("uvicorn", "serve"), ("zmq", "train")):
        require(package, extra, "the dashboard")


def access_settings(host: str) -> ApiSettings:
    """Without a token, only this machine has access; with one, every client that sends it."""
    from skippipe.transport.addresses import is_loopback
    from skippipe.web import ApiSettings

    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(host):
        raise UserError(
            f"{host}: others can reach that address: put a token of 16 characters or more into {TOKEN}, which browsers "
            "ask for as a password, or listen on 127.0.0.1"
        )
    return ApiSettings(tokens=(token,) if token else (), loopback=is_loopback(host))


def listen(host: str, port: int, option: str) -> socket.socket:
    from skippipe.transport.addresses import listening_socket

    try:
        return listening_socket(host, port, BACKLOG)
    except UserError as error:
        raise UserError(f"{option} {error}") from None


def url_of(listener: socket.socket) -> str:
    from skippipe.transport.addresses import join_address

    host, port = listener.getsockname()[:2]
    return f"http://{join_address(host, port)}/"


def run(
    folder: Path, listener: socket.socket, settings: ApiSettings, since: float = 0.0, *, owned: bool = False
) -> None:
    """Serve until the process gets a signal to stop; if it is `owned`, until standard input ends."""
    from skippipe import web
    from skippipe.dashboard.routes import application
    from skippipe.dashboard.run_state import Panels, RunFollower

    def stop() -> None:
        server.should_exit = True

    async def serve() -> None:
        if owned:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop)
        await server.serve([listener])

    app = application(Panels(RunFollower(folder, since)), settings, stopping=lambda: server.should_exit)
    host, port = listener.getsockname()[:2]
    server = web.server(app, host, port)
    asyncio.run(serve())


@contextmanager
def dashboard_process(folder: Path, address: str, *, resumed: bool) -> Iterator[None]:
    """Show the run at `[HOST:]PORT`, from a process with a lower priority than training that ends with this one.

    It follows the same files as `skippipe dashboard`; if it fails, training goes on. It notices its owner's end by the
    pipe to it closing. Of a run that begins anew, it shows nothing older.
    """
    check_installed()
    from skippipe.transport.addresses import split_address

    try:
        host, port = split_address(address if ":" in address else f"{DEFAULT_HOST}:{address}")
    except UserError:
        raise UserError(f"{OPTION} {address}: expected a port, or host:port, such as 127.0.0.1:8090") from None
    access_settings(host)
    listener = listen(host, port, OPTION)
    print(f"the dashboard is at {url_of(listener)}", file=sys.stderr, flush=True)
    with listener:
        command = [sys.executable, "-m", __name__, str(folder), str(listener.fileno()), host]
        since = 0.0 if resumed else time.time()
        process = subprocess.Popen(
            [*command, repr(since)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the owner, which may have minutes to go
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(folder: str, descriptor: str, host: str, since: str) -> None:
    os.nice(PRIORITY)
    with socket.socket(fileno=int(descriptor)) as listener:
        run(Path(folder), listener, access_settings(host), float(since), owned=True)


if __name__ == "__main__":
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # before anything with kernels is imported
    main(*sys.argv[1:])
