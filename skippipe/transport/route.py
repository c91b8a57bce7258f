"""Which of this machine's addresses others see. Asks the routing table; nothing is sent."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from skippipe.errors import UserError

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
        return joined(own_address(host_of(coordinator)), int(asked))
    host = host_of(asked)
    if address is None and host in ("0.0.0.0", "::", "*"):
        raise UserError(f"--listen {asked}: others cannot reach {host}; say with --address where they reach this node")
    return asked


def host_of(address: str) -> str:
    host, colon, _ = address.rpartition(":")
    if not colon:
        raise UserError(f"{address}: expected host:port, such as 127.0.0.1:5555")
    return host.removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str) -> int:
    """Another process could take it in between; then whoever wanted it says so."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
