"""Somebody on the wire between two ends of a fast lane, who sees ZeroMQ's frames and may do with them as they like."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from skippipe.transport.lanes import LaneIn, Verb, Word

GREETING_BYTES = 64  # of ZMTP 3 (rfc.zeromq.org/spec/23); then frames: flags, length in 1 or 8 bytes, body
LONG, COMMAND = 2, 4
DEADLINE_S = 10.0

Tamper = Callable[[int, bytes, bytes], Iterable[bytes]]
"""From the number of a frame, its flags with its length, and its body to what is passed on instead."""


class Relay:
    """For each lane that is offered, another port that leads to it."""

    def __init__(self, tamper: Tamper = lambda number, head, body: [head + body]) -> None:
        self._tamper = tamper
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.offers: list[Word] = []
        """What was said under CURVE."""

    def offer(self, lane: LaneIn) -> Word:
        """Instead of LaneIn.offer."""
        self.offers.append(Word(Verb.OFFER, lane.name, lane.port, lane.token))
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(DEADLINE_S)
        self._start(partial(self._serve, lane.port), server)
        return Word(Verb.OFFER, lane.name, server.getsockname()[1], lane.token)

    def cut(self) -> None:
        self._hang_up(*self._sockets)

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for each in self._sockets:
            each.close()

    def _hang_up(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *sockets: socket.socket) -> None:
        """In a thread; when it ends, the sockets are of no use any more."""
        self._sockets += sockets

        def run() -> None:
            with suppress(OSError):
                work(*sockets)
            self._hang_up(*sockets)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _serve(self, port: int, server: socket.socket) -> None:
        sender, _ = server.accept()
        receiver = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        receiver.settimeout(None)
        self._start(self._forth, sender, receiver)
        self._start(self._back, sender, receiver)

    def _back(self, sender: socket.socket, receiver: socket.socket) -> None:
        while data := receiver.recv(65536):
            sender.sendall(data)

    def _forth(self, sender: socket.socket, receiver: socket.socket) -> None:
        stream, number = sender.makefile("rb"), 0
        left = GREETING_BYTES
        while left and (part := stream.read1(left)):  # each side answers the other's beginning with the rest
            receiver.sendall(part)
            left -= len(part)
        while flags := stream.read(1):
            length = stream.read(8 if flags[0] & LONG else 1)
            body = stream.read(int.from_bytes(length, "big"))
            if flags[0] & COMMAND:
                receiver.sendall(flags + length + body)
                continue
            for each in self._tamper(number, flags + length, body):
                receiver.sendall(each)
            number += 1
