"""Links that fail, and an attacker between two ends of a fast path who may do with ZeroMQ's frames as they like."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from skippipe.transport.addresses import split_address
from skippipe.transport.fast_path import FastPathMessage, FastPathReceiver, FastPathVerb

GREETING_BYTES = 64  # of ZMTP 3 (rfc.zeromq.org/spec/23); then frames: flags, length in 1 or 8 bytes, body
LONG, COMMAND = 2, 4
DEADLINE_S = 60.0
EACH_TIMES_S = 0.002  # that a slow link holds up a block of bytes, for every time that it is slower
BLOCK_BYTES = 65536

Tamper = Callable[[int, bytes, bytes], Iterable[bytes]]
"""From the number of a frame, its flags with its length, and its body to what is passed on instead."""


class Relay:
    """For each fast path that is offered, another port that leads to it."""

    def __init__(self, tamper: Tamper = lambda number, head, body: [head + body]) -> None:
        self._tamper = tamper
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.offers: list[FastPathMessage] = []
        """What was said under CURVE."""

    def offer(self, path: FastPathReceiver) -> FastPathMessage:
        """Instead of LaneIn.offer."""
        self.offers.append(FastPathMessage(FastPathVerb.OFFER, path.path_id, path.port, path.token))
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(DEADLINE_S)
        self._start(partial(self._serve, path.port), server)
        return FastPathMessage(FastPathVerb.OFFER, path.path_id, server.getsockname()[1], path.token)

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


class Wire:
    """A relay from one mailbox to another that can be cut, mended and slowed down."""

    def __init__(self, target: Callable[[], str]) -> None:
        """`target` says where it leads, whenever somebody connects."""
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.times = 1.0
        self._swallows = False
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._serve()

    def cut(self, *, silent: bool = False) -> None:
        """Who is connected is hung up on, and nobody answers any more. Silently: all goes on, and nothing arrives."""
        self._swallows = silent
        if not silent:
            self._hang_up(self._server)

    def mend(self) -> None:
        if self._swallows:
            self._hang_up()  # something is missing in what these connections have carried
            self._swallows = False
            return
        self._server = socket.create_server(("127.0.0.1", split_address(self.address)[1]))
        self._serve()

    def _hang_up(self, *servers: socket.socket) -> None:
        with self._lock:
            _hang_up(*servers, *self._ends)
            self._ends.clear()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                try:
                    far = socket.create_connection(split_address(self._target()), 5.0)
                except OSError:
                    _hang_up(near)
                    continue
                far.settimeout(None)
                with self._lock:
                    self._ends += [near, far]
                threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    block = key.fileobj.recv(BLOCK_BYTES)  # type: ignore[union-attr]
                    if not block:
                        raise OSError
                    if self.times > 1:
                        time.sleep(EACH_TIMES_S * self.times)
                    if not self._swallows:
                        key.data.sendall(block)
        _hang_up(near, far)


def _hang_up(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
