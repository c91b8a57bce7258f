"""Addresses of this machine and of others, and what all sockets have in common.

An address is host:port, an IPv6 one [host]:port. Wherever one is taken, several may be given with commas between them,
of both kinds: a node listens at all of its own, and others try them side by side. Which of its addresses others see,
the routing table tells; nothing is sent. Sockets share how a connection that has
vanished is noticed, how they are closed, and what their monitors report.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

import zmq

from skippipe.errors import UserError

OUT_ONLY = "none"
"""In the place of an address: this node cannot be called, it calls others."""
CALLBACK_PORTS = (1000, 2000)  # so far from a mailbox's own port
SERVER_PORTS = range(10_000, 32_768)  # Linux gives 32768 and up to outgoing connections, others 49152 and up
FREE_PORT_TRIES = 20
ANY_PORT = 9  # connecting a datagram socket sends nothing, but wants a port
ANYWHERE = ("192.0.2.1", "2001:db8::1")  # addresses of each kind that nobody has: the way there is the way to all
MOST_ADDRESSES = 8  # of one node

Place: TypeAlias = tuple[str, int]
"""Host and port."""


def own_address(towards: str) -> str:
    """The address of this machine from which packets to that host would leave."""
    failure: OSError | None = None
    try:
        for family, kind, _, _, where in socket.getaddrinfo(towards, ANY_PORT, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
            except OSError as error:
                failure = failure or error
    except OSError as error:
        failure = error
    reason = (failure and failure.strerror) or failure
    raise UserError(f"'{towards}': no way there: {reason}; check the name or address")


def own_addresses(towards: Iterable[str]) -> list[str]:
    """The addresses of this machine on its way to these hosts, at which it can listen; unless that is itself, the one
    of the other kind (IPv4, IPv6) as well, if it has one for the internet. UserError if there is no way to any."""
    found: list[str] = []
    failure: UserError | None = None
    for host in towards:
        try:
            found.append(own_address(host))
        except UserError as error:
            failure = failure or error
    if not found and failure is not None:
        raise failure
    if all(map(is_loopback, found)):
        return list(dict.fromkeys(found))
    for host in ANYWHERE:
        with suppress(UserError):
            found.append(own_address(host))
    kinds: dict[bool, str] = {}
    for each in found:
        if not ip_address(each).is_link_local and _can_listen(each):
            kinds.setdefault(":" in each, each)
    return list(kinds.values()) or found[:1]


def _can_listen(host: str) -> bool:
    with suppress(OSError), tcp_server(host, 0):
        return not is_loopback(host)
    return False


def listen_address(listen: str, coordinator: str, address: str | None) -> str:
    """host:port, several with commas, for a node whose `--listen` has them, or only a port; 'none' for one that listens
    nowhere."""
    if listen == OUT_ONLY:
        return listen
    if listen.isascii() and listen.isdigit():
        hosts = own_addresses(host for host, _ in split_all(coordinator))
        return ",".join(join_address(host, int(listen)) for host in hosts)
    for host, _ in split_all(listen):
        if address is None and host in ("0.0.0.0", "::", "*"):
            raise UserError(
                f"--listen {listen}: others cannot reach {host}; say with --address where they reach this node"
            )
    return listen


def family_of(host: str) -> socket.AddressFamily:
    """The address family of a numeric address, or of a name at which this machine is to listen."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def tcp_server(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens; '::' is every address of both kinds, or of those that this machine has."""
    host = _wildcard(without_brackets(host))
    return socket.create_server((host, port), family=family_of(host), backlog=backlog, dualstack_ipv6=host == "::")


def listening_socket(
    host: str, port: int, backlog: int | None = None, hint: str = "choose another port, or 0 for any"
) -> socket.socket:
    """As `tcp_server`; UserError, with this hint, if this machine cannot listen there."""
    try:
        return tcp_server(host, port, backlog)
    except OSError as error:
        where, why = join_address(host, port), error.strerror or error
        raise UserError(f"{where}: cannot listen there: {why}; {hint}") from None


def _wildcard(host: str) -> str:
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host


def free_port(host: str) -> int:
    """A port to listen on later. It lies below those that systems give to outgoing connections, so that none of these
    takes it in between; another server could, and then listening fails with a message."""
    for port in (*random.Random(os.urandom(8)).sample(SERVER_PORTS, FREE_PORT_TRIES), 0):
        with suppress(OSError), tcp_server(host, port) as server:
            return int(server.getsockname()[1])
    raise UserError(f"'{host}': no port is free there; check the address")


def without_brackets(host: str) -> str:
    """A host that people may have written as in an address with its port."""
    return host.removeprefix("[").removesuffix("]")


def join_address(host: str, port: int | str) -> str:
    host = without_brackets(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


HANDSHAKE_S = 30.0
HANDSHAKE_BEGUN_S = 24.0
"""Time for the side that connects. It gives up first: a handshake that the other side ends was then refused there."""
UNFINISHED_HANDSHAKE = -1
"""An event beside those of libzmq: nobody has ended the handshake, the time for it is over."""
LEAST_LINGER_S = 0.1
"""The least time for what is queued when a socket is closed. With none, a message of several parts may be cut off
between them, and libzmq ends the process (session_base.cpp, clean_pipes: "Resource temporarily unavailable") if the
connection breaks at that moment."""
CONNECT_S = 5.0  # for an attempt to connect; then the next: TCP alone would wait longer with each attempt
SLOW_HANDSHAKE_S = 10.0  # for a handshake on a slow link: it takes the way there and back four times
RECONNECT_MS = 100  # before the first attempt to reconnect
KEEPALIVE_S = (2, 1, 3)  # silence before the first probe, between probes; and how many go unanswered
UNANSWERED_S = 10  # for what was sent, and on Linux for probes, until the other side's machine confirms it
EVENT = struct.Struct("=HI")
CONNECTION_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""Events of a socket's monitor that tell the fate of a connection."""

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"


def split_address(address: str) -> Place:
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UserError(f"{address}: expected host:port, such as 127.0.0.1:5555")
    if ":" in host and not bracketed:
        raise UserError(f"{address}: an IPv6 address has brackets, so that the port is seen, as in [::1]:5555")
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def split_all(addresses: str) -> list[Place]:
    """Host and port of each of several addresses with commas between them, none twice."""
    found = [split_address(each.strip()) for each in addresses.split(",")]
    if len(found) > MOST_ADDRESSES:
        raise UserError(f"{addresses[:40]}…: {len(found)} addresses; at most {MOST_ADDRESSES} are tried")
    return list(dict.fromkeys(found))


def is_numeric(host: str) -> bool:
    """An address, not a name that may stand for several."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def callback_ports(port: int) -> tuple[int, ...]:
    """Ports at which a mailbox that listens at this one takes streams of nodes that only call out; the first that is
    free."""
    return tuple(each if each < 2**16 else each - 2 * far for far in CALLBACK_PORTS for each in (port + far,))


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://{join_address(host, port)}"


def site_of(host: str) -> str:
    """What the addresses of one site have in common, as others see them: behind a router all of it (IPv4), or the
    network (IPv6, its first 64 bits); empty for loopback, where tunnels end, and for what is no address."""
    try:
        found = ip_address(host)
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    if found.is_loopback:
        return ""
    return str(IPv6Network((int(found) >> 64 << 64, 64))) if isinstance(found, IPv6Address) else str(found)


def is_loopback(host: str) -> bool:
    """A name or address, without a port."""
    try:
        return ip_address(without_brackets(host)).is_loopback
    except ValueError:
        return host == "localhost"


def keep_alive(socket: Socket) -> None:
    """TCP's keepalive finds a peer that has vanished without closing its connections.

    ZeroMQ's own heartbeat is not used here: its answer waits behind messages of many megabytes, and a healthy slow
    link would count as dead. Where a link must be known to be cut sooner, `sender.LinkHeartbeat` probes it.
    """
    idle_s, interval_s, count = KEEPALIVE_S
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)
    socket.setsockopt(zmq.TCP_MAXRT, UNANSWERED_S * 1000)


def push_socket(context: Context, host: str, most_queued: int, reconnect_most_ms: int = 0) -> Socket:
    """A socket to send with; it reconnects at intervals up to the given one, or never (0)."""
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    push.setsockopt(zmq.SNDHWM, most_queued)
    push.setsockopt(zmq.IPV6, int(":" in host))
    push.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_BEGUN_S * 1000))
    push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS if reconnect_most_ms else -1)
    if reconnect_most_ms:
        push.setsockopt(zmq.RECONNECT_IVL_MAX, reconnect_most_ms)
        push.setsockopt(zmq.CONNECT_TIMEOUT, round(CONNECT_S * 1000))
    return push


def pull_socket(context: Context, largest_frame: int, most_queued: int) -> Socket:
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.RCVHWM, most_queued)
    pull.setsockopt(zmq.MAXMSGSIZE, largest_frame)
    pull.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    keep_alive(pull)
    return pull


def bind(socket: Socket, host: str, port: int = 0, rather: int = 0) -> Place:
    """Listen at an address as well; at any port for 0, rather at the one that is named then. Gives the place."""
    host = _wildcard(host)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    try:
        socket.bind(endpoint(host, port or rather or "*"))
    except zmq.ZMQError:
        if port or not rather:
            raise
        socket.bind(endpoint(host, "*"))
    return split_address(socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"))


def monitor_events(monitor: Socket) -> Iterator[int]:
    """The events that a socket's monitor has reported since the last call."""
    while True:
        try:
            event, value = EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        closed = value in (errno.EPIPE, errno.ECONNRESET)  # else the last error before libzmq's timer
        yield UNFINISHED_HANDSHAKE if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not closed else event


def close_sending(socket: Socket, monitor: Socket, linger_s: float) -> None:
    """Close a socket that sends; what is queued gets that long to leave, and never less than LEAST_LINGER_S."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(max(linger_s, LEAST_LINGER_S) * 1000))
