"""Which of this machine's addresses others see. Asks the routing table; nothing is sent."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress

from skippipe.errors import UserError
from skippipe.transport.sockets import split

SERVER_PORTS = range(10_000, 32_768)  # Linux gives 32768 and up to outgoing connections, others 49152 and up
FREE_PORT_TRIES = 20
ANY_PORT = 9  # connecting a datagram socket sends nothing, but wants a port


def own_address(towards: str) -> str:
    """The address from which this machine would speak to that host."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET  # names are looked up as the transport does: IPv4
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"'{towards}': no way there: {error.strerror or error}; check the name or address") from None


def place_to_listen(asked: str, coordinator: str, address: str | None) -> str:
    """host:port for a node that was given one, or only a port."""
    if asked.isascii() and asked.isdigit():
        return joined(own_address(split(coordinator)[0]), int(asked))
    host, _ = split(asked)
    if address is None and host in ("0.0.0.0", "::", "*"):
        raise UserError(f"--listen {asked}: others cannot reach {host}; say with --address where they reach this node")
    return asked


def free_port(host: str) -> int:
    """A port to listen on later. It lies below those that systems give to outgoing connections, so that none of these
    takes it in between; another server could, and then whoever wanted it says so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*random.Random(os.urandom(8)).sample(SERVER_PORTS, FREE_PORT_TRIES), 0):
        with suppress(OSError), socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    raise UserError(f"'{host}': no port is free there; check the address")


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
