"""What a relay forwards, on one core, beside a direct connection: encrypted 8 MiB messages over loopback.

python -m benchmarks.relay [--rounds 5]

Two mailboxes in processes of their own, under CURVE with a fast path: connected directly, and both only calling out, so
that they meet at a relay in a third process. The relay is one thread on one core, and what counts is how many bytes it
forwards for each second of its CPU time: that does not depend on what else the machine does. Goal: 500 MB/s. In the
second column, seconds are those of a clock, with both ends encrypting on the same machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from skippipe.codecs import EncodedTensor
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import OUT_ONLY, Mailbox, QueueFull
from skippipe.transport.message import Hop, Message
from skippipe.transport.relay import CALLEE, CALLER, Relay
from skippipe.transport.token_gate import token_of

SIZE = 2**23
COUNT = 60
DEADLINE_S = 60.0
fork = multiprocessing.get_context("fork")  # this process itself never opens a socket of ZeroMQ


@dataclass
class End:
    """A mailbox, and the pipe to the process that plays the coordinator."""

    box: Mailbox
    pipe: Connection

    def turn(self, wait_s: float) -> int:
        """Pass requests on, and do what is to be done for those of the other side; gives the messages that came."""
        for request in self.box.call_requests():
            self.pipe.send(("call", request.token))
        while self.pipe.poll():
            address, token, callback = self.pipe.recv()
            self.box.meet([address], token, callback)
        return len(self.box.receive(wait_s))


def opened(name: str, pipe: Connection, *, relayed: bool) -> End:
    keys = KeyPair.new()
    box = Mailbox(name, keys, listen=OUT_ONLY if relayed else "127.0.0.1:0", largest_bytes=SIZE, depth=4)
    pipe.send((name, box.address, keys.public))
    peer, address, public = pipe.recv()
    box.allow(peer, public)
    box.connect(peer, address, public)
    return End(box, pipe)


def receive(pipe: Connection, relayed: bool) -> None:
    end, count = opened("receiver", pipe, relayed=relayed), 0
    began, deadline = 0.0, time.monotonic() + DEADLINE_S
    while count < COUNT + 1 and time.monotonic() < deadline:
        count += end.turn(0.01)
        began = began or (time.perf_counter() if count else 0.0)
    pipe.send(("done", (count - 1) * SIZE / (time.perf_counter() - began) if count > COUNT else 0.0))
    end.box.close()


def send(pipe: Connection, relayed: bool) -> None:
    end, deadline = opened("sender", pipe, relayed=relayed), time.monotonic() + DEADLINE_S
    message = Message(Hop(0, 0, 0, 0), EncodedTensor("fp32", (SIZE // 4,), secrets.token_bytes(SIZE)))
    end.box.send("receiver", message)
    while not end.box.on_fast_path and time.monotonic() < deadline:
        end.turn(0.01)
    for _ in range(COUNT):
        while time.monotonic() < deadline:
            try:
                end.box.send("receiver", message)
                break
            except QueueFull:
                end.turn(0.05)
    end.box.close(linger_s=DEADLINE_S)


def relay(pipe: Connection) -> None:
    """On one core, if the machine lets us choose."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    open_relay = Relay("127.0.0.1:0")
    pipe.send(open_relay.address)
    while (secret := pipe.recv()) is not None:
        open_relay.grant("sender", "receiver", secret)
    pipe.send((open_relay.load.forwarded_bytes, time.process_time()))
    open_relay.close()


def measure(*, relayed: bool) -> tuple[float, float]:
    """Bytes a second from end to end, and bytes that the relay forwards in a second of its CPU time."""
    at_relay, ours = fork.Pipe()
    ends = {each: fork.Pipe() for each in ("receiver", "sender")}
    started: list[Any] = [
        fork.Process(target=relay, args=(at_relay,)),
        fork.Process(target=receive, args=(ends["receiver"][1], relayed)),
        fork.Process(target=send, args=(ends["sender"][1], relayed)),
    ]
    for process in started:
        process.start()
    try:
        address, found = ours.recv(), 0.0
        pipes = {name: pair[0] for name, pair in ends.items()}
        told = {name: pipe.recv() for name, pipe in pipes.items()}
        pipes["receiver"].send(told["sender"])
        pipes["sender"].send(told["receiver"])
        deadline = time.monotonic() + DEADLINE_S
        while not found and time.monotonic() < deadline:
            for name, other in (("receiver", "sender"), ("sender", "receiver")):
                if not pipes[name].poll(0.002):
                    continue
                kind, value = pipes[name].recv()
                if kind == "done":
                    found = value or -1.0
                    break
                secret = secrets.token_bytes(32)
                ours.send(secret)
                pipes[name].send((address, token_of(secret, CALLER).hex(), ""))
                pipes[other].send((address, token_of(secret, CALLEE).hex(), value))
        if found <= 0:
            raise TimeoutError(f"no result after {DEADLINE_S:g} s")
        ours.send(None)
        forwarded, cpu_s = ours.recv()
        return found, forwarded / cpu_s
    finally:
        for process in started:
            process.join(2.0)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    direct, through = [], []
    for _ in range(options.rounds):  # in turn, so that both see the same weather
        direct.append(measure(relayed=False)[0])
        through.append(measure(relayed=True))
    print(f"{'':24}{'MB/s':>8}{'ratio':>8}{'MB/CPU s of the relay':>24}   rounds, MB/s")
    rounds = " ".join(f"{each / 1e6:.0f}" for each in direct)
    print(f"{'directly':24}{statistics.median(direct) / 1e6:8.0f}{'':8}{'':24}   {rounds}")
    rates = [rate for rate, _ in through]
    ratio = statistics.median(own / other for own, other in zip(rates, direct, strict=True))
    per_cpu = statistics.median(each for _, each in through)
    rounds = " ".join(f"{each / 1e6:.0f}" for each in rates)
    print(f"{'through a relay':24}{statistics.median(rates) / 1e6:8.0f}{ratio:8.3f}{per_cpu / 1e6:24.0f}   {rounds}")


if __name__ == "__main__":
    main()
