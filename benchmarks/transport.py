"""What a mailbox makes of this machine's loopback, beside a plain TCP socket: 8 MiB messages, two processes.

python -m benchmarks.transport

Goals: half of TCP without encryption, 0.15 of it with CURVE, 0.9 of the bandwidth of an emulated link.
Under CURVE the fast path seals with AES-256-GCM; without it ZeroMQ encrypts with XSalsa20-Poly1305. Either cipher's
speed on one core is the ceiling of its row, and other work on the machine shows. The last column does not depend on
it: bytes for each CPU second of the receiver.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from skippipe.codecs import EncodedTensor
from skippipe.transport.keys import KeyPair
from skippipe.transport.link_emulation import DelayQueue, EmulatedLink, LinkEmulator
from skippipe.transport.mailbox import Mailbox, QueueFull, Security
from skippipe.transport.message import Hop, Message

SIZE = 2**23
DEADLINE_S = 30.0
ROUNDS = 5
SHAPED_ROUNDS = 2
LINK = EmulatedLink(latency_s=0.02, bandwidth_bytes_per_s=100e6)

Speed: TypeAlias = tuple[float, float]  # bytes a second, bytes for each second of CPU time

fork = multiprocessing.get_context("fork")  # this process itself never opens a socket of ZeroMQ


def speed(count: int, took_s: float, busy_s: float) -> Speed:
    return (count - 1) * SIZE / took_s, (count - 1) * SIZE / busy_s


def tcp_receiver(pipe: Connection, count: int) -> Speed:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        pipe.send(server.getsockname())
        connection, _ = server.accept()
    connection.settimeout(DEADLINE_S)
    buffer = memoryview(bytearray(SIZE))
    began = busy_s = 0.0
    with connection:
        for index in range(count):
            taken = 0
            while taken < SIZE:
                taken += (got := connection.recv_into(buffer[taken:]))
                if not got:
                    raise ConnectionError("the sender is gone")
            if not index:
                began, busy_s = time.perf_counter(), time.process_time()
    return speed(count, time.perf_counter() - began, time.process_time() - busy_s)


def tcp_sender(pipe: Connection, count: int) -> None:
    payload = bytes(SIZE)
    with socket.create_connection(pipe.recv(), timeout=DEADLINE_S) as connection:
        for _ in range(count):
            connection.sendall(payload)


def mailbox_receiver(pipe: Connection, count: int, security: Security, fast_path: bool) -> Speed:
    """From the second message to the last, each delivered when it is due; with the first there is no fast path yet."""
    box, held = opened("receiver", pipe, security, fast_path), DelayQueue()
    arrivals: list[tuple[float, float]] = []
    deadline = time.perf_counter() + DEADLINE_S
    while len(arrivals) < count + 1 and time.perf_counter() < deadline:
        next_ns = held.next_due_ns()
        wait_s = 1.0 if next_ns is None else max(0.0, (next_ns - time.monotonic_ns()) / 1e9)
        for received in box.receive(wait_s):
            held.put(received)
        arrivals += [(time.perf_counter(), time.process_time()) for _ in held.ready(time.monotonic_ns())]
    box.close()
    (began, busy_s), (ended, busy_until_s) = arrivals[1], arrivals[-1]
    return speed(count, ended - began, busy_until_s - busy_s)


def mailbox_sender(
    pipe: Connection, count: int, security: Security, fast_path: bool, link: EmulatedLink | None
) -> None:
    box = opened("sender", pipe, security, fast_path)
    shaper = LinkEmulator({"receiver": link} if link else {}, lambda *_: None, time.monotonic_ns)
    message = Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (SIZE // 4,), bytes(SIZE)))
    deadline = time.perf_counter() + DEADLINE_S
    box.send("receiver", message)
    while fast_path and not box.on_fast_path and time.perf_counter() < deadline:
        box.receive(0.01)
    for _ in range(count):
        due_ns = shaper.due_ns("receiver", SIZE)
        while time.perf_counter() < deadline:
            try:
                box.send("receiver", message, due_ns)
                break
            except QueueFull:
                box.receive(1.0)  # returns when there is room
    box.close(linger_s=DEADLINE_S)


def opened(name: str, pipe: Connection, security: Security, fast_path: bool) -> Mailbox:
    """A mailbox that knows the one at the other end of the pipe."""
    keys = KeyPair.new()
    box = Mailbox(name, keys, security=security, largest_bytes=SIZE, depth=4, fast_path=fast_path)
    pipe.send((name, box.address, keys.public))
    peer, address, public = pipe.recv()
    box.allow(peer, public)
    box.connect(peer, address, public)
    return box


def measure(receiver: Callable[..., Speed], sender: Callable[..., None], count: int, *more: Any) -> Speed:
    """Run both in processes of their own."""
    ours, theirs = fork.Pipe()
    answer, result = fork.Pipe()
    options = more[:2]

    def receive() -> None:
        result.send(receiver(ours, count, *options))

    processes = [fork.Process(target=receive), fork.Process(target=sender, args=(theirs, count, *more))]
    for process in processes:
        process.start()
    try:
        if not answer.poll(DEADLINE_S):
            raise TimeoutError(f"no result from {receiver.__name__} after {DEADLINE_S:g} s")
        took: Speed = answer.recv()
        return took
    finally:
        for process in processes:
            process.join(DEADLINE_S)
            process.kill()


def main() -> None:
    def mailbox(count: int, *options: Any) -> Callable[[], Speed]:
        return lambda: measure(mailbox_receiver, mailbox_sender, count, *options)

    runs: dict[str, Callable[[], Speed]] = {
        "plain TCP": lambda: measure(tcp_receiver, tcp_sender, 60),
        "mailbox, security none": mailbox(60, "none", False, None),
        "mailbox, curve with fast path": mailbox(60, "curve", True, None),
        "mailbox, curve alone": mailbox(30, "curve", False, None),
    }
    shaped: dict[str, Callable[[], Speed]] = {
        "emulated link, security none": mailbox(20, "none", False, LINK),
        "emulated link, security curve": mailbox(20, "curve", True, LINK),
    }
    found: dict[str, list[Speed]] = {name: [] for name in runs | shaped}
    for _ in range(ROUNDS):  # in turn, so that all of them see the same weather
        for name, run in runs.items():
            found[name].append(run())
    for _ in range(SHAPED_ROUNDS):
        for name, run in shaped.items():
            found[name].append(run())

    print(f"{'':32}{'MB/s':>8}{'ratio':>8}{'MB/CPU s':>11}   rounds, MB/s")
    for name, speeds in found.items():
        rates = [rate for rate, _ in speeds]
        against = (
            [LINK.bandwidth_bytes_per_s] * len(rates) if name in shaped else [rate for rate, _ in found["plain TCP"]]
        )
        ratio = statistics.median(own / other for own, other in zip(rates, against, strict=True))
        per_cpu = statistics.median(bytes_per_cpu_s for _, bytes_per_cpu_s in speeds)
        rounds = " ".join(f"{rate / 1e6:.0f}" for rate in rates)
        print(f"{name:32}{statistics.median(rates) / 1e6:8.0f}{ratio:8.3f}{per_cpu / 1e6:11.0f}   {rounds}")
    print(
        f"Ratios: to plain TCP in the same round; emulated links to their {LINK.bandwidth_bytes_per_s / 1e6:.0f} MB/s."
    )


if __name__ == "__main__":
    main()
