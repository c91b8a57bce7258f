"""Addresses of this machine and of others, and what all sockets have in common.

Which of its addresses others see, the routing table tells; nothing is sent. Sockets share how a connection that has
vanished is noticed, how they are closed, and what their monitors report.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import TypeAlias

import zmq

from skippipe.errors import UserError

OUT_ONLY = "none"
"""In the place of an address: this node cannot be called, it calls others."""
CALLBACK_PORTS = (1000, 2000)  # so far from a mailbox's own port
SERVER_PORTS = range(10_000, 32_768)  # Linux gives 32768 and up to outgoing connections, others 49152 and up
FREE_PORT_TRIES = 20
ANY_PORT = 9  # connecting a datagram socket sends nothing, but wants a port


def own_address(towards: str) -> str:
    """The address of this machine from which packets to that host would leave."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET  # names are looked up as the transport does: IPv4
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"'{towards}': no way there: {error.strerror or error}; check the name or address") from None


def listen_address(listen: str, coordinator: str, address: str | None) -> str:
    """host:port for a node whose `--listen` has one, or only a port; 'none' for one that listens nowhere."""
    if listen == OUT_ONLY:
        return listen
    if listen.isascii() and listen.isdigit():
        return join_address(own_address(split_address(coordinator)[0]), int(listen))
    host, _ = split_address(listen)
    if address is None and host in ("0.0.0.0", "::", "*"):
        raise UserError(f"--listen {listen}: others cannot reach {host}; say with --address where they reach this node")
    return listen


def free_port(host: str) -> int:
    """A port to listen on later. It lies below those that systems give to outgoing connections, so that none of these
    takes it in between; another server could, and then listening fails with a message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*random.Random(os.urandom(8)).sample(SERVER_PORTS, FREE_PORT_TRIES), 0):
        with suppress(OSError), socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    raise UserError(f"'{host}': no port is free there; check the address")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


HANDSHAKE_S = 30.0
LEAST_LINGER_S = 0.1
"""The least time for what is queued when a socket is closed. With none, a message of several parts may be cut off
between them, and libzmq ends the process (session_base.cpp, clean_pipes: "Resource temporarily unavailable") if the
connection breaks at that moment."""
CONNECT_S = 5.0  # for an attempt to connect; then the next: TCP alone would wait longer with each attempt
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


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UserError(f"{address}: expected host:port, such as 127.0.0.1:5555")
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def callback_ports(port: int) -> tuple[int, ...]:
    """Ports at which a mailbox that listens at this one takes streams of nodes that only call out; the first that is
    free."""
    return tuple(each if each < 2**16 else each - 2 * far for far in CALLBACK_PORTS for each in (port + far,))


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """A name or address, without a port."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def keep_alive(socket: Socket) -> None:
    """TCP's keepalive finds a peer that has vanished without closing its connections.

    ZeroMQ's own heartbeat is not used here: its answer waits behind messages of many megabytes, and a healthy slow
    link would count as dead. Where a link must be known to be cut sooner, `link_keepalive` has a connection of its own.
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
    push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS if reconnect_most_ms else -1)
    if reconnect_most_ms:
        push.setsockopt(zmq.RECONNECT_IVL_MAX, reconnect_most_ms)
        push.setsockopt(zmq.CONNECT_TIMEOUT, round(CONNECT_S * 1000))
    return push


def pull_socket(context: Context, host: str, largest_frame: int, most_queued: int) -> Socket:
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.RCVHWM, most_queued)
    pull.setsockopt(zmq.MAXMSGSIZE, largest_frame)
    pull.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    pull.setsockopt(zmq.IPV6, int(":" in host))
    keep_alive(pull)
    return pull


def monitor_events(monitor: Socket) -> Iterator[int]:
    """The events that a socket's monitor has reported since the last call."""
    while True:
        try:
            event, _ = EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        yield event


def close_sending(socket: Socket, monitor: Socket, linger_s: float) -> None:
    """Close a socket that sends; what is queued gets that long to leave, and never less than LEAST_LINGER_S."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(max(linger_s, LEAST_LINGER_S) * 1000))
