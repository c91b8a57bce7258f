"""A home router: machines behind it share one address of the network outside, and can only call out.

It translates addresses in this process, since a kernel need not be able to: `ip rule` has what comes from home, and
what comes for the shared address, routed to a TUN device; what this program writes there is routed on.

    python -m tests.helpers.home_router 10.0.0.9      # within the router's network; until its input ends
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import struct
import sys

DEVICE = "tun0"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TCP = 6
FIRST_PORT = 40_000
ADDRESSES = struct.Struct("!4s4s")  # of a packet, at SOURCE_AT
PORTS = struct.Struct("!HH")
CHECKSUM = struct.Struct("!H")
IP_CHECKSUM_AT, SOURCE_AT, TCP_CHECKSUM_AT = 10, 12, 16


class HomeRouter:
    """Translates TCP over IPv4; drops all else, and whatever nobody at home has called for."""

    def __init__(self, public: str) -> None:
        self._public = socket.inet_aton(public)
        self._outside: dict[tuple[bytes, int], int] = {}
        """Address and port at home → port outside."""
        self._inside: dict[int, tuple[bytes, int]] = {}

    def translated(self, packet: bytearray) -> bool:
        """Change a packet's source or target; False if it is to be dropped."""
        start = 4 * (packet[0] & 15)
        if packet[0] >> 4 != 4 or packet[9] != TCP or len(packet) < start + 20:
            return False
        source, target = ADDRESSES.unpack_from(packet, SOURCE_AT)
        from_port, to_port = PORTS.unpack_from(packet, start)
        if target != self._public:  # on its way out
            if (source, from_port) not in self._outside:
                port = FIRST_PORT + len(self._outside)
                self._outside[source, from_port], self._inside[port] = port, (source, from_port)
            self._rewrite(packet, start, (self._public, target), (self._outside[source, from_port], to_port))
            return True
        if to_port not in self._inside:
            return False
        back, port = self._inside[to_port]
        self._rewrite(packet, start, (source, back), (from_port, port))
        return True

    def _rewrite(self, packet: bytearray, start: int, hosts: tuple[bytes, bytes], ports: tuple[int, int]) -> None:
        old = bytes(packet[SOURCE_AT : SOURCE_AT + 8]), bytes(packet[start : start + 4])
        new = b"".join(hosts), PORTS.pack(*ports)
        packet[SOURCE_AT : SOURCE_AT + 8], packet[start : start + 4] = new
        _adjust(packet, IP_CHECKSUM_AT, old[0], new[0])
        _adjust(packet, start + TCP_CHECKSUM_AT, b"".join(old), b"".join(new))


def _adjust(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    """The checksum after a change (RFC 1624)."""
    words = struct.Struct(f"!{len(old) // 2}H")
    total = ~CHECKSUM.unpack_from(packet, at)[0] & 0xFFFF
    total += sum(~each & 0xFFFF for each in words.unpack(old)) + sum(words.unpack(new))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    CHECKSUM.pack_into(packet, at, ~total & 0xFFFF)


def set_up(public: str) -> int:
    """The TUN device of this network, with `lan` towards home and `wan` outside."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for line in (
        f"ip link set {DEVICE} up",
        f"ip route add {public} dev {DEVICE}",
        f"ip neigh add proxy {public} dev wan",
        "ip rule add iif lan lookup 100",
        f"ip route add default dev {DEVICE} table 100",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0",
        f"sysctl -qw net.ipv4.conf.{DEVICE}.rp_filter=0 net.ipv4.conf.wan.rp_filter=0 net.ipv4.conf.lan.rp_filter=0",
    ):
        if os.spawnvp(os.P_WAIT, line.split()[0], line.split()):
            raise SystemExit(f"failed: {line}")
    return device


def main(public: str) -> None:
    device, router = set_up(public), HomeRouter(public)
    print("routes", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(device, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj == device for key, _ in selector.select()):
            packet = bytearray(os.read(device, 2**16))
            if router.translated(packet):
                os.write(device, packet)


if __name__ == "__main__":
    main(*sys.argv[1:])
