"""Which of this machine's addresses others see. Asks the routing table; nothing is sent."""

from __future__ import annotations

import socket

from skippipe.errors import UserError
from skippipe.transport.sockets import split

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
    """Another process could take it in between; then whoever wanted it says so."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
